"""What surrounds every hook: it must fit its place, may not edit gradients, and is named when it fails.

And how PyTorch stores it: for its own thread and model, and absent from copies of a model.
"""

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from explain._utils import nested
from explain._utils.errors import ExplainError, HookError, raised
from explain._utils.signals import came_by_signal
from explain.hooks.tracer import Tracer, running_modules

# What gives access to a tensor's memory without autograd's counter.
_METHODS = ("numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage")
_DATA: Any = torch.Tensor.data
_UNCOUNTED = frozenset([_DATA.__get__, _DATA.__set__, *(getattr(torch.Tensor, name) for name in _METHODS)])


class EditDetector(Tracer):
    """Watches gradients for as long as a block lasts.

    >>> gradient = torch.ones(2)
    >>> with EditDetector([gradient]) as edits:
    ...     _ = gradient.data.mul_(3)
    >>> edits.any()
    True
    """

    opens = False

    def __init__(self, gradients: Sequence[Any]) -> None:
        self._tensors = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        self._before: list[torch.Tensor] | None = None

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._before is None and func in _UNCOUNTED and any(_share_memory(args[0], g) for g in self._tensors):
            self._before = [tensor.detach().clone() for tensor in self._tensors]
        return func(*args, **kwargs)

    def any(self) -> bool:
        """Whether one of the gradients has changed."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            return True
        pairs = zip(self._tensors, self._before or (), strict=False)
        return any(not _same(now, before) for now, before in pairs if now.layout == torch.strided)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or a.layout != torch.strided or b.layout != torch.strided:
        return a is b
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    alike = now.shape == before.shape and now.dtype == before.dtype
    return alike and bool(((now == before) | ((now != now) & (before != before))).all())


@dataclass(slots=True, eq=False)
class Site:
    """Where a hook sits: its own name, the layer, tensor or Node that it is on, and the direction of its pass.

    ``fired`` says whether it has been called yet. A hook of this package is ``trusted``: what it does to gradients is
    not checked, and there is no warning if it never fires. On a module, ``layer`` is its name; ``part`` says which
    part of it is meant, if not its output, and ``call`` which of its calls.
    """

    hook: str
    where: str
    direction: str
    trusted: bool = False
    layer: str = ""
    part: str = ""
    call: int | None = None
    fired: bool = False

    def __str__(self) -> str:
        return f"hook {self.hook!r} on {self.where} ({self.direction})"


class Nothing:
    """What counts as None when a hook returns it: a hook that registers another one may return its handle."""

    __slots__ = ()


def site_of(fn: Callable[..., Any], where: str, direction: str, takes: Sequence[str]) -> Site:
    """Check that ``fn`` can be called with the arguments named, and return its site.

    Raises:
        HookError: it is not callable, or takes another number of arguments.
    """
    site = Site(name_of_function(fn), where, direction, trusted=is_ours(fn))
    if not callable(fn):
        raise HookError(f"{site} must be callable, got {fn!r}; pass the function itself")
    signature = None
    with suppress(TypeError, ValueError):  # some built-ins have no signature
        signature = None if site.trusted else inspect.signature(fn)
    try:
        if signature is not None:
            signature.bind(*takes)
    except TypeError:
        raise HookError(f"{site} must take ({', '.join(takes)}), but its signature is {signature}; change it") from None
    return site


def name_of_function(fn: Any) -> str:
    """The name of a hook as people know it: of the function that they wrote.

    >>> name_of_function(functools.partial(max, 1))
    'max'
    """
    function = _inside(fn)
    return str(getattr(function, "__name__", type(function).__name__))


def is_ours(fn: Any) -> bool:
    """Whether a hook is part of this package."""
    return str(getattr(_inside(fn), "__module__", "")).startswith("explain.")


def _inside(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def call(site: Site, fn: Callable[..., Any], *arguments: Any, gradients: Sequence[Any] = ()) -> Any:
    """Call a hook; name it when it raises, and refuse what it did if it edited one of ``gradients`` in place.

    Raises:
        HookError: see above. Errors of this package come through as they are.
    """
    site.fired = True
    try:
        if site.trusted or not gradients:
            result, edited = fn(*arguments), False
        else:
            with EditDetector(gradients) as edits:
                result = fn(*arguments)
            edited = edits.any()
    except ExplainError:
        raise
    except Exception as error:
        if came_by_signal(error):
            raise
        raise HookError(f"{site} {raised(error)}") from error
    if edited:
        raise HookError(f"{site} edited its gradient in place, which other branches may share; return a new tensor")
    return None if isinstance(result, Nothing) else result


def _checked(site: Site, given: Any, returned: Any) -> Any:
    """Check what a hook returned instead of one gradient, or of several; a single one may come without its tuple."""
    if isinstance(given, (tuple, list)) and isinstance(returned, torch.Tensor):
        returned = (returned,)
    expected, found = _layout(given), _layout(returned)
    fits = found in (None, expected)
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        fits = all(new in (None, old) for old, new in zip(expected, found, strict=True))
    if not fits:
        raise HookError(f"{site} must return None or gradients of the shape that it was given, {expected}, got {found}")
    return tuple(returned) if isinstance(returned, list) else returned


def _layout(gradients: Any) -> Any:
    """The shapes of gradients; of anything else, its type."""
    if isinstance(gradients, torch.Tensor):
        return tuple(gradients.shape)
    if isinstance(gradients, (tuple, list)):
        return [_layout(each) for each in gradients]
    return None if gradients is None else type(gradients).__name__


def guarded(site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a hook on gradients, of a tensor, a Node or a module: what it returns replaces the first of them."""

    def watched(*given: Any) -> Any:
        passed = [each for each in given if not isinstance(each, nn.Module)]
        flat = [each for part in passed for each in (part if isinstance(part, (tuple, list)) else (part,))]
        return _checked(site, passed[0], call(site, fn, *given, gradients=flat))

    watched.site = site  # type: ignore[attr-defined]  # for whoever inspects the hooks of a module
    return watched


def answered(site: Site, fn: Callable[..., Any], *given: Any) -> Any:
    """Call a hook; copy those of its own tensors that it returns to a forward pass, which may overwrite them."""
    made = call(site, fn, *given)
    if made is None or site.trusted or not site.direction.startswith("forward"):
        return made
    known = {id(tensor) for _, tensor in nested.paths(given)}
    change = nested.edit if any(made is each for each in given) else nested.replace
    return change(made, lambda path, tensor: tensor if id(tensor) in known else tensor.clone())


# How PyTorch stores hooks: those of this package are for one thread and model, and absent from copies. A model that is
# copied or pickled takes the hooks registered on it along, and nothing would ever remove those of a copy. So ours leave
# a copy as soon as it is complete; in a pickle, a function that does nothing takes their place, one that every Python
# knows, so that what is written does not depend on this package.

_does_nothing = nullcontext().__exit__  # takes whatever it is given, and returns None


class Acting(threading.local):
    """How many hooks of groups this thread is in: what is called now, the model may not have called."""

    depth = 0


acting = Acting()


class Registered:
    """A function that PyTorch calls as a hook, and that copies and pickles leave behind.

    Calls of other threads than ``thread`` pass through untouched, of none if it is None. With ``calls``, it acts for
    one of its module's calls alone, with ``scope`` for the modules in that. ``site`` is the user's hook, if it is one;
    ``handle`` what PyTorch returned. PyTorch's warning that pickled tensors lose their hooks is not for ours.
    """

    __torch_unserializable__ = True

    def __init__(
        self, fn: Callable[..., Any], site: Site | None = None, thread: int | None = None, calls: "Calls | None" = None,
        scope: "Scope | None" = None,
    ) -> None:  # fmt: skip
        self.fn, self.site, self.thread, self.calls, self.scope = fn, site, thread, calls, scope
        self.handle: Any = None

    def placed(self, register: Callable[[Any], Any]) -> Callable[[], None]:
        """Register it with PyTorch; return what removes it."""
        self.handle = register(self)
        return self.handle.remove  # type: ignore[no-any-return]

    def acts_for(self, module: Any) -> bool:
        """Whether a call of this module, in this thread, is one that the hook was made for."""
        return self.thread in (None, threading.get_ident()) and (self.scope is None or module in self.scope)

    def __call__(self, *given: Any) -> Any:
        if not self.acts_for(given[0] if given else None) or (self.calls is not None and not self.calls.is_meant()):
            return None
        depth = acting.depth
        try:
            acting.depth = depth + 1
            return self.fn(*given)
        finally:
            acting.depth = depth

    def sites(self) -> list[Site]:
        """The user's hooks that act here: several where it is a gate for those on gradients."""
        if self.site is not None:
            return [self.site]
        gates = getattr(self.fn, "__self__", None)
        return [hook.site for hook in (*getattr(gates, "pre_hooks", ()), *getattr(gates, "hooks", ()))]

    def __repr__(self) -> str:
        return f"<{', '.join(map(str, self.sites())) or 'hook of explain'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        if not isinstance(self.handle, RemovableHandle):  # another thread is just registering it
            return _does_nothing
        _leave_copy(memo, self.handle.hooks_dict_ref(), self.handle.id)
        for flags in (reference() for reference in self.handle.extra_dict_ref):
            # A copy of these is made later than that of the hooks that they are about.
            memo.setdefault(id(flags), copy.copy(flags)).pop(self.handle.id, None)
        return _does_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Flag:
    """A true value that leaves copies as hooks do: ``flags[number]`` of a hook on every module."""

    def __init__(self, flags: dict[int, Any], number: int) -> None:
        self._flags, self._number = flags, number
        flags[number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        _leave_copy(memo, self._flags, self._number)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (True,)


def _leave_copy(memo: dict[int, Any], hooks: Any, number: int) -> None:
    """Let a hook go from the copy of ``hooks`` that is being made, as soon as it is complete."""
    if id(hooks) in memo:
        token = set[int]()  # dropped together with the memo of the copying
        weakref.finalize(token, memo[id(hooks)].pop, number, None)
        memo[id(token)] = token


class Calls(threading.local):
    """Counts the calls of a module from 0 in each call of its model, and says whether the one that is meant runs."""

    def __init__(self, number: int, where: str) -> None:
        self._number, self._where, self._running = number, where, -1

    def begin(self, *given: Any) -> None:
        self._running += 1

    def restart(self, *given: Any) -> None:
        self._running = -1

    def is_meant(self) -> bool:
        if torch._C._current_graph_task_id() != -1:
            raise HookError(f"hook on {self._where} must be outside checkpoints, which run it again; hook all calls")
        return self._running == self._number


class Scope:
    """The modules of a model, and all modules that run inside its call; without a model, all modules."""

    def __init__(self, model: nn.Module | None) -> None:
        self._own = None if model is None else set(model.modules())

    def __contains__(self, module: object) -> bool:
        if self._own is None or module in self._own:
            return True
        # If one of the calls that led here is one of the model's, it made the module itself. The calls are read from
        # Python's stack: a count kept by hooks would be wrong after a call that was broken off.
        return any(caller in self._own for caller in running_modules(sys._getframe(1)))
