"""Hooks on the gradient of every parameter, scaled and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import nn

from explain._utils.errors import HookError
from explain._utils.signals import SignalSafe
from explain.hooks.group import HookGroup


def merged(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in which each element occurs once: rows of a sparse one may come in several parts.

    Raises:
        HookError: its layout is neither dense nor sparse in coordinates.
    """
    if gradient.layout == torch.sparse_coo:
        return gradient.coalesce()
    if gradient.layout != torch.strided:
        raise HookError(
            f"the gradient of {name!r} must be dense or sparse_coo, got {str(gradient.layout).removeprefix('torch.')}; "
            "leave this parameter frozen, or convert the gradient in a hook of your own"
        )
    return gradient


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements that a `merged` gradient holds; those that a sparse one leaves out are zero."""
    return gradient.values() if gradient.is_sparse else gradient


def with_values(gradient: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a `merged` gradient of the same layout whose elements have been changed."""
    if not gradient.is_sparse:
        return change(gradient)
    return torch.sparse_coo_tensor(
        gradient.indices(), change(gradient.values()), gradient.shape, check_invariants=False, is_coalesced=True
    )


class Scaler(Protocol):
    """What is used of ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


def checked(scaler: Scaler | None) -> Scaler | None:
    """Return the scaler, or None where it is switched off; refuse what is not a scaler.

    Raises:
        HookError: it has no ``get_scale``.
    """
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise HookError(
            f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}; pass the one that scales the loss"
        )
    return scaler if getattr(scaler, "is_enabled", lambda: True)() else None


def factor(scaler: Scaler | None) -> float:
    """Return by what the gradients of the running backward pass are too large."""
    return 1.0 if scaler is None else float(scaler.get_scale())


class OnParameters(SignalSafe[Any]):
    """A hook on the gradient of every parameter, in place until the block ends."""

    def __init__(self, model: nn.Module, hook: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        self._group = HookGroup(model)
        try:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self._group.leaf(parameter, lambda gradient, name=name: hook(name, gradient))
        except BaseException:  # an interrupt, for one: nothing else could remove this group
            self._group.remove()
            raise

    def begin(self) -> Self:
        return self

    def end(self, error: BaseException | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks away."""
        self._group.remove()
