"""What surrounds every hook: it must fit its place, may not edit gradients, and is named when it fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from explain._utils.errors import ExplainError, HookError, raised
from explain._utils.signals import came_by_signal

# What gives access to a tensor's memory without autograd's counter.
_UNCOUNTED = frozenset(
    {
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    }
)


class EditDetector(TorchFunctionMode):
    """Watches gradients for as long as a block lasts.

    >>> gradient = torch.ones(2)
    >>> with EditDetector([gradient]) as edits:
    ...     _ = gradient.data.mul_(3)
    >>> edits.any()
    True
    """

    def __init__(self, gradients: Sequence[Any]) -> None:
        super().__init__()
        self._tensors = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        self._before: list[torch.Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self._before is None and func in _UNCOUNTED and any(_share_memory(args[0], g) for g in self._tensors):
            self._before = [tensor.detach().clone() for tensor in self._tensors]
        return func(*args, **(kwargs or {}))

    def any(self) -> bool:
        """Whether one of the gradients has changed."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            return True
        return self._before is not None and not all(map(_same, self._tensors, self._before))


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or a.layout != torch.strided or b.layout != torch.strided:
        return a is b
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    if now.layout != torch.strided:
        return True  # sparse: only edits that autograd counts are known
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())


class Site:
    """Where a hook sits: its own name, the layer, tensor or Node that it is on, and the direction of its pass.

    ``fired`` says whether it has been called yet. A hook of this package is ``trusted``: what it does to gradients is
    not checked, and there is no warning if it never fires. On a module, ``layer`` is its name; ``of_input`` says that
    its input is meant, and ``call`` which of its calls.
    """

    __slots__ = ("call", "direction", "fired", "hook", "layer", "of_input", "trusted", "where")

    def __init__(self, hook: str, where: str, direction: str, trusted: bool = False) -> None:
        self.layer, self.of_input = "", False
        self.call: int | None = None
        self.hook, self.where, self.direction = hook, where, direction
        self.trusted, self.fired = trusted, False

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
    if site.trusted or _plainly_takes(fn, len(takes)):
        return site
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-ins have no signature
        return site
    try:
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


def _plainly_takes(fn: Any, count: int) -> bool:
    """Whether ``fn`` is a plain function of exactly so many arguments; looking at its signature takes 10 µs."""
    if type(fn) is not FunctionType or fn.__dict__:
        return False
    code = fn.__code__
    return code.co_argcount == count and not code.co_kwonlyargcount


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
        raise HookError(
            f"{site} edited its gradient in place; gradients may be shared (in e = c + d both branches get the same "
            "tensor), so the edit would reach further than meant: return a new tensor instead"
        )
    return None if isinstance(result, Nothing) else result


def one_gradient(site: Site, given: torch.Tensor, returned: Any) -> torch.Tensor | None:
    """Check what a hook returned instead of one gradient."""
    if returned is None:
        return None
    if not isinstance(returned, torch.Tensor):
        raise HookError(f"{site} must return a gradient or None, got {type(returned).__name__}")
    if returned.shape != given.shape:
        shapes = f"{tuple(given.shape)}, got {tuple(returned.shape)}"
        raise HookError(f"{site} must return a gradient of the shape that it was given, {shapes}")
    return returned


def several_gradients(site: Site, given: Sequence[torch.Tensor | None], returned: Any) -> tuple[Any, ...] | None:
    """Check what a hook returned instead of several gradients; a single one may come without its tuple."""
    if returned is None:
        return None
    if isinstance(returned, torch.Tensor):
        returned = (returned,)
    if not isinstance(returned, (tuple, list)):
        raise HookError(f"{site} must return a tuple of gradients or None, got {type(returned).__name__}")
    if len(returned) != len(given):
        raise HookError(f"{site} must return as many gradients as it was given, {len(given)}, got {len(returned)}")
    for old, new in zip(given, returned, strict=True):
        if old is None and new is not None:
            raise HookError(f"{site} must return None where it was given None, got {type(new).__name__}")
        if old is not None and new is not None:
            one_gradient(site, old, new)
    return tuple(returned)


def guarded(site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a hook on gradients, of a tensor, a Node or a module: what it returns replaces the first of them."""

    def watched(*given: Any) -> Any:
        passed = [each for each in given if not isinstance(each, nn.Module)]
        flat = [each for part in passed for each in (part if isinstance(part, (tuple, list)) else (part,))]
        returned = call(site, fn, *given, gradients=flat)
        check = one_gradient if isinstance(passed[0], torch.Tensor) else several_gradients
        return check(site, passed[0], returned)

    watched.site = site  # type: ignore[attr-defined]  # for whoever inspects the hooks of a module
    return watched
