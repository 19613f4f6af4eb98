"""Gradients clipped during training, as they flow."""

from __future__ import annotations

import torch
from torch import nn

from explain._utils.errors import HookError
from explain.training.parameters import OnParameters, Scaler, checked, factor, merged, values_of, with_values


class GradientClipper(OnParameters):
    """Clips the gradient of every parameter before it is accumulated; use it in ``with``, or `remove` it.

    Each gradient is clipped on its own, in each backward pass, and in each process before processes exchange theirs.
    Sparse gradients, such as those of embeddings, are clipped as if they were dense, and stay sparse.

    Gradients with infinite or NaN elements give what torch's ``clip_grad_norm_`` and ``clip_grad_value_`` give: by
    ``norm``, an infinity becomes NaN and the rest of that gradient zero, and one NaN makes all of it NaN; by ``value``,
    infinities are clamped and NaN stays. With a ``scaler``, infinities are not clamped: the scaler must see them to
    skip the step.

    Args:
        model: its parameters that require gradients are clipped.
        value: clamp every element to [-value, value], or
        norm: scale each gradient whose norm is larger down to this norm.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does. Limits hold for gradients without its
            scale, as its ``unscale_`` or ``step`` leaves them.
        error_if_nonfinite: raise for a gradient with infinite or NaN elements.

    Attributes:
        clipped: how often the finite gradient of a parameter exceeded the limit.
        nonfinite: how often it had infinite or NaN elements.

    Raises:
        HookError: not exactly one of ``value`` and ``norm`` is given, it is not positive, ``scaler`` is not a scaler,
            or ``value`` is used with a complex parameter. During backward: a gradient is not finite
            (``error_if_nonfinite``), or has a layout that is neither dense nor sparse in coordinates.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with GradientClipper(model, value=0.5) as clipper:
    ...     model(torch.tensor([[3.0, 0.1]])).sum().backward()
    >>> model.weight.grad, clipper.clipped
    (tensor([[0.5000, 0.1000]]), {'weight': 1})
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value: float | None = None,
        norm: float | None = None,
        scaler: Scaler | None = None,
        error_if_nonfinite: bool = False,
    ) -> None:
        self._limit, self._by_norm = _limit(value, norm), value is None
        self._scaler, self._strict = checked(scaler), error_if_nonfinite
        self.clipped: dict[str, int] = {}
        self.nonfinite: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            if not self._by_norm and parameter.requires_grad and parameter.is_complex():
                raise HookError(f"value= must be used with real parameters, but {name!r} is complex; use norm=")
        super().__init__(model, self._clip)

    def _clip(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        gradient = merged(name, gradient)
        values = values_of(gradient)
        if not values.numel():
            return None
        largest = values.detach().abs().amax()
        if not largest.isfinite():
            return self._clip_nonfinite(name, gradient, largest)
        limit = self._limit * factor(self._scaler)
        if not _exceeds(values, largest, limit, self._by_norm):
            return None
        self.clipped[name] = self.clipped.get(name, 0) + 1
        return with_values(gradient, lambda g: _scaled_down(g, largest, limit) if self._by_norm else _clamped(g, limit))

    def _clip_nonfinite(self, name: str, gradient: torch.Tensor, largest: torch.Tensor) -> torch.Tensor | None:
        self.nonfinite[name] = self.nonfinite.get(name, 0) + 1
        if self._strict:
            values = values_of(gradient)
            count = int((~values.isfinite()).sum())
            raise HookError(
                f"the gradient of {name!r} must be finite, got {count} of {values.numel()} elements that are infinite "
                "or NaN; lower the learning rate, or pass error_if_nonfinite=False"
            )
        if self._by_norm:
            return with_values(gradient, lambda g: g * (self._limit / largest))
        return None if self._scaler is not None else with_values(gradient, lambda g: _clamped(g, self._limit))


def _exceeds(values: torch.Tensor, largest: torch.Tensor, limit: float, by_norm: bool) -> bool:
    if not by_norm:
        return largest.item() > limit
    if largest.item() * values.numel() ** 0.5 <= limit:  # no norm can be larger than that
        return False
    return _shares(values.detach(), largest)[1].item() * largest.item() > limit


def _shares(values: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in shares of the largest, and the norm of these: it cannot overflow or vanish."""
    wide = torch.promote_types(values.dtype, torch.float32)
    shares = values.to(wide) / largest.to(wide)
    return shares, torch.linalg.vector_norm(shares)


def _scaled_down(values: torch.Tensor, largest: torch.Tensor, limit: float) -> torch.Tensor:
    shares, norm = _shares(values, largest)
    return (shares * (limit / norm)).to(values.dtype)


def _clamped(values: torch.Tensor, limit: float) -> torch.Tensor:
    limit = min(limit, torch.finfo(values.dtype).max)
    return values.clamp(-limit, limit)


def _limit(value: float | None, norm: float | None) -> float:
    if (value is None) == (norm is None):
        raise HookError("GradientClipper must be given exactly one of value= and norm=")
    limit, name = (norm, "norm") if value is None else (value, "value")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise HookError(f"{name} must be positive, got {limit!r}; give a number above zero")
    return float(limit)
