"""What surrounds every hook: it must fit its place, may not edit gradients, and is named when it fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from explain.errors import ExplainError, HookError, raised
from explain.interrupts import came_by_signal


@dataclass(frozen=True)
class Site:
    """Where a hook sits: its own name, the layer, tensor or Node that it is on, and the direction of its pass."""

    hook: str
    where: str
    direction: str

    def __str__(self) -> str:
        return f"hook {self.hook!r} on {self.where} ({self.direction})"


def site_of(fn: Callable[..., Any], where: str, direction: str, takes: Sequence[str]) -> Site:
    """Check that ``fn`` can be called with the arguments named, and return its site.

    Raises:
        HookError: it is not callable, or takes another number of arguments.
    """
    site = Site(str(getattr(fn, "__name__", type(fn).__name__)), where, direction)
    if not callable(fn):
        raise HookError(f"{site} must be callable, got {fn!r}; pass the function itself")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-ins have none to look at
        return site
    try:
        signature.bind(*takes)
    except TypeError:
        raise HookError(f"{site} must take ({', '.join(takes)}), but its signature is {signature}; change it") from None
    return site


def call(site: Site, fn: Callable[..., Any], *arguments: Any, gradients: Sequence[Any] = ()) -> Any:
    """Call a hook; name it when it raises, and refuse what it did if it edited one of ``gradients`` in place.

    Raises:
        HookError: see above. Errors of this package come through as they are.
    """
    tensors = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    try:
        result = fn(*arguments)
    except ExplainError:
        raise
    except Exception as error:
        if came_by_signal(error):
            raise
        raise HookError(f"{site} {raised(error)}") from error
    if [tensor._version for tensor in tensors] != versions:
        raise HookError(
            f"{site} edited its gradient in place; gradients may be shared (in e = c + d both branches get the same "
            "tensor), so the edit would reach further than meant: return a new tensor instead"
        )
    return result


def one_gradient(site: Site, given: torch.Tensor, returned: Any) -> torch.Tensor | None:
    """Check what a hook returned in the place of one gradient."""
    if returned is None:
        return None
    if not isinstance(returned, torch.Tensor):
        raise HookError(f"{site} must return a gradient or None, got {type(returned).__name__}")
    if returned.shape != given.shape:
        shapes = f"{tuple(given.shape)}, got {tuple(returned.shape)}"
        raise HookError(f"{site} must return a gradient of the shape that it was given, {shapes}")
    return returned


def several_gradients(site: Site, given: Sequence[torch.Tensor | None], returned: Any) -> tuple[Any, ...] | None:
    """Check what a hook returned in the place of several gradients; one alone may come without its tuple."""
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
