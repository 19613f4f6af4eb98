"""Paths other than a straight line, and several baselines: what values add up to, and whom they do
not depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain.baselines import Blur
from explain.baselines.replacements import get_baseline
from explain.methods import (
    IDGI,
    DeepLIFT,
    DeepLIFTSHAP,
    ExpectedGradients,
    GradientSHAP,
    IntegratedGradients,
)
from tests.conftest import TinyNet, settled
from tests.relevance.test_relevance import random

PHOTOS = random(7, 4, 3, 12, 10)


def net() -> nn.Module:
    return settled(TinyNet()).double().eval()


def test_a_change_without_a_gradient_is_nobodys() -> None:
    """All units are off at the baseline: the first step changes the score, and no direction says
    why."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (1.0, -1.0, 2.0, 0.5), strict=True):
            parameter.fill_(value)
    x = torch.ones(1, 3, 1, 1).double()
    a = explain.attribute(model, x, IDGI(IntegratedGradients(2)), target=0)
    assert torch.allclose(a.values.flatten(), torch.full((3,), (4.0 - 1.0) / 3).double())
    assert float(a.delta) == pytest.approx(-1)  # half of the way takes the score from 0 to 1


def test_deepliftshap_is_the_mean_of_deeplift() -> None:
    model = net()
    x = random(0, 2, 3, 12, 10)
    found = explain.attribute(model, x, DeepLIFTSHAP(PHOTOS), target=1)
    each = [explain.attribute(model, x, DeepLIFT(photo), target=1).values for photo in PHOTOS]
    assert_close(found.values, torch.stack(each).mean(0), rtol=1e-9, atol=1e-12)
    assert found.delta.abs().max() < 1e-10
    several = explain.attribute(model, x, DeepLIFTSHAP(PHOTOS), targets=[1, 2])
    assert_close(several[0].values, found.values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "method", [IntegratedGradients, GradientSHAP, ExpectedGradients, DeepLIFTSHAP]
)
@pytest.mark.parametrize("baseline", ["least", "most", "mean", Blur(sigma=1.0), 0.25])
def test_values_of_a_linear_model_are_those_of_the_difference_from_a_baseline(
    method: Any, baseline: Any
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 5, 2)).double()
    x = random(0, 2, 3, 6, 5)
    ends = {"least": x.amin((2, 3), keepdim=True), "most": x.amax((2, 3), keepdim=True)}
    start = ends.get(baseline)
    if start is None:
        start = get_baseline(baseline)(x, x.new_zeros(1, 1, 6, 5))
    values = explain.attribute(model, x, method(baseline=baseline), target=1).values
    weight = model[1].weight[1].reshape(3, 6, 5)
    assert_close(values, weight * (x - start), rtol=1e-10, atol=1e-12)


def test_a_blurred_baseline_is_the_photo_behind_a_gaussian() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 5, 2)).double()
    x = random(0, 2, 3, 6, 5)
    values = explain.attribute(model, x, IntegratedGradients(2, "blur"), target=1).values
    side = torch.tensor([math.exp(-2.0), 1.0, math.exp(-2.0)], dtype=torch.float64)
    kernel = torch.outer(side, side) / side.sum() ** 2
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
    start = nn.functional.conv2d(padded, kernel.expand(3, 1, 3, 3), groups=3)
    weight = model[1].weight[1].reshape(3, 6, 5)
    assert_close(values, weight * (x - start), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(4, 3, 6, 5), (2, 2)])
def test_baselines_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 5, 2)).double()
    with pytest.raises(explain.MethodError, match="baseline must be"):
        method = IntegratedGradients(2, torch.zeros(shape))
        explain.attribute(model, random(0, 2, 3, 6, 5), method, target=1)
