"""Handles of hooks, and hooks as PyTorch stores them: for one thread, and absent from copies of a model."""

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from explain._utils.errors import HookError
from explain._utils.signals import unsplit

Hook = Callable[..., Any]


@dataclass(slots=True, eq=False)
class Site:
    """Where a hook sits: its own name, the layer, tensor or Node that it is on, and the direction of its pass.

    ``fired`` says whether it has been called yet. A hook of this package is ``trusted``: what it does to gradients is
    not checked, and there is no warning if it never fires. ``code`` tells hooks of one function from others. On a
    module, ``layer`` is its name; ``part`` says which part of it is meant, if not its output, and ``call`` which of its
    calls.
    """

    hook: str
    where: str
    direction: str
    trusted: bool = False
    code: Any = None
    layer: str = ""
    part: str = ""
    call: int | None = None
    fired: bool = False

    def __str__(self) -> str:
        return f"hook {self.hook!r} on {self.where} ({self.direction})"


class CallCounter(threading.local):
    """Counts the calls of a module from 0 in each call of its model, and says whether the one that is meant runs."""

    def __init__(self, number: int, where: str) -> None:
        self._number = number
        self._where = where
        self._running = -1

    def begin(self, *arguments: Any) -> None:
        self._running += 1

    def restart(self, *arguments: Any) -> None:
        self._running = -1

    def is_meant(self) -> bool:
        if torch._C._current_graph_task_id() != -1:
            raise HookError(f"hook on {self._where} must be outside checkpoints, which run it again; hook all calls")
        return self._running == self._number


class Acting(threading.local):
    """How many hooks of groups this thread is in: what is called now, the model may not have called."""

    depth = 0


acting = Acting()

_does_nothing = nullcontext().__exit__
"""Takes what it is called with, and returns None: known to every Python, so that pickles need no package of ours."""


class Registered:
    """A function that PyTorch calls as a hook, for calls of one thread; of all threads if ``thread`` is None.

    With ``counter``, it acts for one of its module's calls alone. ``sites`` are those of the user's hooks that it
    calls. A model that is copied or pickled takes the hooks on it along, and nothing would ever remove those of a copy.
    So this one leaves a copy as soon as the copy is complete, and in a pickle a function that does nothing takes its
    place. PyTorch's warning that pickled tensors lose their hooks is not for ours.
    """

    __torch_unserializable__ = True

    def __init__(
        self,
        fn: Hook,
        sites: Sequence[Site] = (),
        thread: int | None = None,
        counter: CallCounter | None = None,
    ) -> None:
        self.fn = fn
        self.sites = sites
        self.thread = thread
        self.counter = counter
        self.handle: Any = None

    def placed(self, register: Callable[[Any], Any]) -> Callable[[], None]:
        """Register it with PyTorch; return what removes it."""
        self.handle = register(self)
        return self.handle.remove  # type: ignore[no-any-return]

    def __call__(self, *arguments: Any) -> Any:
        if self.thread not in (None, threading.get_ident()):
            return None
        if self.counter is not None and not self.counter.is_meant():
            return None
        depth = acting.depth
        try:
            acting.depth = depth + 1
            return self.fn(*arguments)
        finally:
            acting.depth = depth

    def __repr__(self) -> str:
        return f"<{', '.join(map(str, self.sites)) or 'hook of explain'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        if not isinstance(self.handle, RemovableHandle):  # another thread is just registering it
            return _does_nothing
        number = self.handle.id
        hooks = self.handle.hooks_dict_ref()
        if id(hooks) in memo:
            token = set[int]()  # dropped together with the memo, when the copy is complete
            weakref.finalize(token, memo[id(hooks)].pop, number, None)
            memo[id(token)] = token
        for reference in self.handle.extra_dict_ref:
            flags = reference()
            # A copy of these is made later than that of the hooks that they tell of.
            memo.setdefault(id(flags), copy.copy(flags)).pop(number, None)
        return _does_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Handle:
    """One hook of a group, on one or more places. As PyTorch's handles, it has an ``id``, and ``with`` removes it.

    The ``id`` is the key of the hook in the dictionary of its module; of several modules, in that of the first.

    >>> from torch import nn
    >>> from explain.hooks import HookGroup
    >>> with HookGroup(nn.Sequential(nn.ReLU(), nn.ReLU())) as group:
    ...     handle = group.forward(nn.ReLU, lambda module, args, output: None)
    ...     print(handle)
    ...     handle.remove()
    ...     print(handle)
    hook '<lambda>' on layer '0' and 1 more (forward)
    hook '<lambda>' on layer '0' and 1 more (forward), removed
    """

    def __init__(self, sites: Sequence[Site], owner: "dict[Handle, None]") -> None:
        self.id = id(self)
        self.sites = sites
        self.undo: list[Callable[[], None]] = []
        self._owner = owner
        owner[self] = None

    def place(self, register: Callable[[Any], Any], hook: Registered) -> None:
        """Register a hook on one of its places."""
        is_first = not self.undo
        self.undo.append(hook.placed(register))
        if is_first:
            self.id = getattr(hook.handle, "id", self.id)

    @property
    def fired(self) -> bool:
        """Whether the hook has been called yet, on any of its places."""
        return any(site.fired for site in self.sites)

    @property
    def removed(self) -> bool:
        """Whether the hook is gone, alone or together with its group."""
        return self not in self._owner

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def take_away(self) -> None:
        """Remove this hook from all its places; calling it again does nothing."""
        while self.undo:
            self.undo[-1]()
            self.undo.pop()
        self._owner.pop(self, None)

    remove = unsplit(take_away)

    def __repr__(self) -> str:
        first = self.sites[0]
        others = len(self.sites) - 1
        more = f" and {others} more" if others else ""
        words = [f"hook {first.hook!r} on {first.where}{more} ({first.direction})"]
        words += [word for word in ("fired", "removed") if getattr(self, word)]
        return ", ".join(words)
