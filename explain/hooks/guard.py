"""What surrounds every hook: it must fit its place, may not edit gradients, and is named when it fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from explain.errors import ExplainError, HookError, raised
from explain.hooks.edits import Edits
from explain.interrupts import came_by_signal


class Site:
    """Where a hook sits: its own name, the layer, tensor or Node that it is on, and the direction of its pass.

    ``fired`` says whether it has been called yet. A hook of this package is ``trusted``: what it does to gradients is
    not checked, and there is no warning if it never fires. On a module, ``layer`` is its name; ``of_input`` says that
    its input is meant, and ``call`` which of its calls.
    """

    __slots__ = ("call", "direction", "fired", "hook", "layer", "of_input", "trusted", "where")

    def __init__(self, hook: str, where: str, direction: str, *, trusted: bool = False) -> None:
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
            with Edits(gradients) as edits:
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


def guarded_one(site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a hook on the gradient of one tensor."""

    def one(gradient: torch.Tensor) -> torch.Tensor | None:
        return one_gradient(site, gradient, call(site, fn, gradient, gradients=(gradient,)))

    return _named(site, one)


def guarded_pre(site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a hook that is called before the backward of a module."""

    def pre(module: nn.Module, grad_output: Any) -> Any:
        return several_gradients(site, grad_output, call(site, fn, module, grad_output, gradients=grad_output))

    return _named(site, pre)


def guarded_full(site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a hook that is called after the backward of a module."""

    def full(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        found = call(site, fn, module, grad_input, grad_output, gradients=(*grad_input, *grad_output))
        return several_gradients(site, grad_input, found)

    return _named(site, full)


def _named(site: Site, guarded: Callable[..., Any]) -> Callable[..., Any]:
    guarded.site = site  # type: ignore[attr-defined]  # for those who look at the hooks of a module
    return guarded
