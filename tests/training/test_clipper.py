"""Clipped gradients, compared with torch's own clipping of each gradient after the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from explain import HookError
from explain.training import GradientClipper
from tests.conftest import Made

inf = float("inf")
nan = float("nan")


def test_the_gradient_of_each_parameter_is_clipped_until_the_block_ends() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        return [p.grad for p in model.parameters()]

    plain = gradients()
    sizes = sorted(gradient.norm().item() for gradient in plain)
    limit = (sizes[1] + sizes[2]) / 2
    with GradientClipper(model, norm=limit) as clipper:
        clipped = gradients()
    assert_close(clipped, [g * min(1.0, limit / g.norm()) for g in plain])
    assert len(clipper.clipped) == 2
    assert_close(gradients(), plain, rtol=0, atol=0)


NO_LIMIT = [
    {},
    {"value": 1.0, "norm": 1.0},
    {"value": 0.0},
    {"norm": -1.0},
    {"norm": "1"},
    {"norm": nan},
]


@pytest.mark.parametrize("options", [*NO_LIMIT, {"norm": 1.0, "scaler": 3}])
def test_a_clipper_needs_one_positive_limit_and_a_scaler(options: Any) -> None:
    with pytest.raises(HookError, match=r"exactly one of|must be positive|scaler must"):
        GradientClipper(nn.Linear(2, 2), **options)


def by_torch(gradient: torch.Tensor, limit: dict[str, float]) -> torch.Tensor:
    """What torch's own functions make of one gradient."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    if "norm" in limit:
        torch.nn.utils.clip_grad_norm_([parameter], limit["norm"])
    else:
        torch.nn.utils.clip_grad_value_([parameter], limit["value"])
    return parameter.grad


def weight(size: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """One parameter; its gradient is whatever it is multiplied by."""
    parameter = nn.Parameter(torch.zeros(size, dtype=dtype))
    return Made(lambda model, gradient: (model.weight * gradient).sum(), weight=parameter)


LIMITS = [{"value": 0.5}, {"norm": 0.5}]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_scaler_still_sees_infinite_gradients_and_skips_the_step(limit: dict[str, float]) -> None:
    model = weight(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    solver = torch.optim.SGD(model.parameters(), lr=1.0)
    with GradientClipper(model, **limit, scaler=scaler) as clipper:
        scaler.scale(model(torch.tensor([1.0, inf, 2.0]))).backward()
    scaler.step(solver)
    scaler.update()
    assert torch.equal(model.weight, torch.zeros(3))
    assert scaler.get_scale() == 4.0
    assert (clipper.clipped, clipper.nonfinite) == ({}, {"weight": 1})


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    "elements", [(1.0, inf), (-inf, inf, 2.0), (nan, 1.0), (nan, inf, 0.1), (0.0, 3.0), (0.0, 0.0)]
)
def test_gradients_that_are_not_finite_become_what_torch_makes_of_them(
    limit: dict[str, float], elements: tuple[float, ...]
) -> None:
    gradient = torch.tensor(elements)
    model = weight(len(elements))
    with GradientClipper(model, **limit) as clipper:
        model(gradient).backward()
    expected = by_torch(gradient, limit)
    assert_close(model.weight.grad, expected, equal_nan=True, rtol=1e-5, atol=0)
    assert clipper.nonfinite == ({} if gradient.isfinite().all() else {"weight": 1})


@pytest.mark.parametrize(
    ("size", "dtype"), [(3e30, torch.float32), (1e-30, torch.float32), (6e4, torch.float16)]
)
def test_norms_that_would_overflow_or_vanish_are_exact(size: float, dtype: torch.dtype) -> None:
    model = weight(3, dtype=dtype)
    direction = torch.tensor([2.0, -2.0, 1.0], dtype=torch.float64) / 3
    with GradientClipper(model, norm=size / 100):
        model((direction * size).to(dtype)).backward()
    expected = (direction * size / 100).to(dtype)
    rtol = 2e-3 if dtype == torch.float16 else 1e-6
    assert_close(model.weight.grad, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("enabled", [True, False])
def test_limits_hold_for_gradients_without_the_scalers_scale(
    limit: dict[str, float], enabled: bool
) -> None:
    model = weight(3)
    gradient = torch.tensor([2.0, -0.3, 0.1])
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=enabled)
    with GradientClipper(model, **limit, scaler=scaler):
        scaler.scale(model(gradient)).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert_close(-model.weight.detach(), by_torch(gradient, limit))
