"""Gradients clipped during training, as they flow."""

from __future__ import annotations

import torch
from torch import nn

from explain.errors import HookError
from explain.training.parameters import OnParameters


class GradientClipper(OnParameters):
    """Clips the gradient of every parameter before it is accumulated; use it in ``with``, or `remove` it.

    Args:
        model: its parameters that require gradients are clipped.
        value: clamp every element to [-value, value], or
        norm: scale each gradient whose norm is larger down to this norm.

    Raises:
        HookError: not exactly one of ``value`` and ``norm`` is given, or it is not positive.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with GradientClipper(model, value=0.5) as clipper:
    ...     model(torch.tensor([[3.0, 0.1]])).sum().backward()
    >>> model.weight.grad, clipper.clipped
    (tensor([[0.5000, 0.1000]]), {'weight': 1})
    """

    def __init__(self, model: nn.Module, *, value: float | None = None, norm: float | None = None) -> None:
        if (value is None) == (norm is None):
            raise HookError("GradientClipper must be given exactly one of value= and norm=")
        limit = value if value is not None else norm
        assert limit is not None
        if not limit > 0:
            raise HookError(f"{'norm' if value is None else 'value'} must be positive, got {limit}")
        self.clipped: dict[str, int] = {}
        self._limit, self._by_norm = limit, value is None
        super().__init__(model, self._clip)

    def _clip(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if self._by_norm:
            size = gradient.norm()
            changed = gradient * (self._limit / size) if size > self._limit else gradient
        else:
            changed = gradient.clamp(-self._limit, self._limit)
        if not torch.equal(changed, gradient):
            self.clipped[name] = self.clipped.get(name, 0) + 1
        return changed
