"""Extremal perturbations: against a plain ascent, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.baselines import Zero
from explain.methods import ExtremalPerturbation
from explain.methods.extremal import SmoothMasks
from tests.conftest import Made
from tests.methods import plain_extremal
from tests.methods.test_masking import photos

EXACT = {"rtol": 1e-8, "atol": 1e-10}
SIZE = (6, 5)


@pytest.mark.parametrize(("step", "sigma"), [(2, 4.0), (2, 3.0), (3, 2.0), (1, 2.5)])
def test_each_pixel_of_a_mask_is_the_smooth_maximum_of_the_points_around(
    step: int, sigma: float
) -> None:
    masks = SmoothMasks(SIZE, step, sigma, torch.zeros(1, dtype=torch.float64))
    values = torch.rand(2, 1, *masks.lattice, dtype=torch.float64)
    full = masks.full(values.requires_grad_())
    leaf = values[1, 0].detach().clone().requires_grad_()
    expected = plain_extremal.smooth_mask(leaf, step, sigma)
    assert_close(full[1, 0], expected, **EXACT)
    assert masks.cropped(full).shape == (2, 1, *SIZE)
    up = torch.randn_like(full)
    (slope,) = torch.autograd.grad(expected, leaf, up[1, 0])
    assert_close(torch.autograd.grad(full, values, up)[0][1, 0], slope, **EXACT)


def test_the_mask_is_what_a_plain_ascent_finds(net: nn.Module) -> None:
    method = ExtremalPerturbation((0.2, 0.5), steps=4, baseline=Zero(), step=2, sigma=3.0)
    found = explain.attribute(net, photos(2), method, target=[1, 2])
    for values, x, target in zip(found.values, photos(2), (1, 2), strict=True):
        score: Any = lambda seen: net(seen[None])[0, target]  # noqa: B023, E731
        masks = [plain_extremal.extremal(score, x, area, 4, 2, 3.0) for area in (0.2, 0.5)]
        assert_close(values, (masks[0] + masks[1]) / 2, **EXACT)
    assert found.samples == 8
    assert found.finished.all()


def corner(net: Any, x: Tensor) -> Tensor:
    """How much is seen of the upper left corner, and of all."""
    return 20 * torch.stack([x[:, :, :4, :4].mean((1, 2, 3)), x.mean((1, 2, 3))], 1)


@pytest.mark.parametrize(("keeps", "area"), [(0.0, 0.2), (None, 0.6), (1.0, 0.9)])
def test_the_smallest_area_that_keeps_the_score_is_taken(keeps: float | None, area: float) -> None:
    model = Made(corner)
    x = torch.ones(2, 3, 8, 8)

    def mask(size: Any, **more: Any) -> Tensor:
        method = ExtremalPerturbation(size, steps=2, baseline="zero", step=2, sigma=2.0, **more)
        return explain.attribute(model, x, method, target=1).values

    shares = [float(corner(model, x * mask(size)[:, None])[0, 1] / 20) for size in (0.2, 0.6, 0.9)]
    assert shares == sorted(shares)
    if keeps is None:
        keeps = (shares[0] + shares[1]) / 2
    assert_close(mask((0.6, 0.2, 0.9), keeps=keeps), mask(area))
