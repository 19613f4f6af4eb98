"""Handles of hooks, and hooks as PyTorch stores them: for one thread, and absent from copies of a
model."""

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from explain._utils.signals import deferring_signals


class Acting(threading.local):
    """How many hooks of groups are running in this thread: whoever follows the calls of a model
    leaves out those that are made meanwhile."""

    depth = 0
    are_off = False
    """Whether none of them run: a call is only looked at, and made again."""


def called_as_hook(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook's function; `acting` counts it meanwhile."""
    depth = acting.depth
    try:
        acting.depth = depth + 1
        return fn(*arguments)
    finally:
        acting.depth = depth


acting = Acting()

_does_nothing = nullcontext().__exit__
"""A function that does nothing with its arguments. It is Python's own, so that pickles can be read
without this package."""


class Registered:
    """A function that PyTorch calls as a hook, for calls of one thread (None: of all). It leaves
    copies of the model, and does nothing in a pickle, where nobody could remove it."""

    # so that PyTorch does not warn that pickled tensors lose their hooks, which are ours
    __torch_unserializable__ = True

    handle: Any = None

    def __init__(
        self, fn: Any, register: Callable[[Any], Any], thread: int | None, hooks: Sequence[Any] = ()
    ) -> None:
        """Register this object with PyTorch's function ``register``. It calls ``fn`` in calls of
        ``thread`` (None for all); ``hooks`` are the caller's hooks that ``fn`` calls."""
        self.fn = fn
        self.thread = thread
        self.hooks = hooks
        self.handle = register(self)

    def __call__(self, *arguments: Any) -> Any:
        """Call the hook's function, unless another thread runs the model."""
        if acting.are_off or self.thread not in (None, threading.get_ident()):
            return None
        depth = acting.depth
        try:  # as `called_as_hook`, without one more call for each hook
            acting.depth = depth + 1
            return self.fn(*arguments)
        finally:
            acting.depth = depth

    def __repr__(self) -> str:
        return f"<{', '.join(map(str, self.hooks)) or 'hook of explain'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a function that does nothing for a copy of the model, and remove it from there
        once the copy is complete."""
        if not isinstance(self.handle, RemovableHandle):  # another thread is just registering it
            return _does_nothing
        number = self.handle.id
        hooks = self.handle.hooks_dict_ref()
        if id(hooks) in memo:  # the module's dictionary of hooks is being copied
            copied_hooks = memo[id(hooks)]
            # It gets an entry for this hook when this function has returned. The token is freed
            # with the memo, when the copy is complete, and then takes that entry away. Any object
            # that can be referred to weakly would do.
            token = set[int]()
            weakref.finalize(token, copied_hooks.pop, number, None)
            memo[id(token)] = token
        # PyTorch notes in other dictionaries of the module, by the hook's number, how it is called
        for reference in self.handle.extra_dict_ref:
            flags = reference()
            # these are copied later than the hooks: `deepcopy` takes what the memo has by then, a
            # copy without this hook and those of this package that were met before it
            copied_flags = memo.setdefault(id(flags), copy.copy(flags))
            copied_flags.pop(number, None)
        return _does_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class BeforeEvery:
    """Registers a hook before every module that runs, which is called with keyword arguments
    too."""

    def __init__(self, hook: Registered) -> None:
        """Register ``hook``, as PyTorch's functions do."""
        # PyTorch passes keyword arguments only to hooks that are noted in the module, even if the
        # hook is for every module. So a first hook makes the note in the module that is about to
        # run, and the hook itself, by `_call`, takes it away.
        self._fn = hook.fn
        self._thread = hook.thread
        hook.fn = self._call
        self._noting = global_hooks.register_module_forward_pre_hook(self._note)
        self._calling = global_hooks.register_module_forward_pre_hook(hook)
        self.id = self._calling.id

    def _note(self, module: nn.Module, args: Any) -> None:
        if self._thread == threading.get_ident():
            module._forward_pre_hooks_with_kwargs[self.id] = True

    def _call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        module._forward_pre_hooks_with_kwargs.pop(self.id, None)
        return self._fn(module, args, kwargs)

    def remove(self) -> None:
        """Remove both hooks."""
        self._calling.remove()
        self._noting.remove()


def unless_in_hook(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A hook on every module that ignores the calls which a hook on modules makes in this thread,
    its own ones included."""
    return lambda *arguments: fn(*arguments) if acting.depth == 1 else None


class Handle:
    """One hook of a group, on one or more places. As PyTorch's handles, it has an ``id``, its key
    in the module's dictionary of hooks, and ``with`` removes it."""

    def __init__(self, hooks: Sequence[Any], owner: "dict[Handle, None]") -> None:
        """Make a handle of checked ``hooks`` that are registered nowhere yet, one for each place,
        and add it to ``owner``, the open handles of its group."""
        self.id = id(self)  # until `place` gives it PyTorch's number
        self.hooks = hooks
        """The hook for each place; empty where the function is of this package."""
        self.undo: list[Callable[[], None]] = []
        """What removes it from its places."""
        self._owner = owner
        owner[self] = None

    def place(
        self,
        register: Callable[[Any], Any],
        fn: Callable[..., Any],
        thread: int | None = None,
        hooks: Sequence[Any] = (),
    ) -> None:
        """Register a hook's function on one place with PyTorch's function ``register``, and note
        how to remove it. The first place gives the handle its ``id``."""
        handle = Registered(fn, register, thread, hooks).handle
        if not self.undo:
            self.id = getattr(handle, "id", self.id)
        self.undo.append(handle.remove)

    @property
    def fired(self) -> bool:
        """Whether the hook has been called yet, on any of its places."""
        return any(hook.fired for hook in self.hooks)

    @property
    def removed(self) -> bool:
        """Whether the hook is gone, alone or together with its group."""
        return self not in self._owner

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    @deferring_signals
    def remove(self) -> None:
        """Remove this hook from all its places; calling it again does nothing."""
        while self.undo:
            self.undo.pop()()
        self._owner.pop(self, None)

    def __repr__(self) -> str:
        """The hook's function, places and direction, and whether it has fired or been removed."""
        if not self.hooks:
            return "hook of explain"
        first = self.hooks[0]
        more_places = len(self.hooks) - 1
        more = f" and {more_places} more" if more_places else ""
        words = [f"hook {first.name!r} on {first.where}{more} ({first.direction})"]
        if self.fired:
            words.append("fired")
        if self.removed:
            words.append("removed")
        return ", ".join(words)
