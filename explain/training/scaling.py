"""The factor by which a ``GradScaler`` has enlarged the gradients that hooks see."""

from __future__ import annotations

from typing import Protocol

from explain.errors import HookError


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
