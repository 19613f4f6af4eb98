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
from explain.methods import (
    IDGI,
    DeepLIFT,
    DeepLIFTSHAP,
    ExpectedGradients,
    GradientSHAP,
    GuidedIntegratedGradients,
    IntegratedGradients,
)
from tests.conftest import Made, TinyNet, settled
from tests.relevance.test_relevance import random

PHOTOS = random(7, 4, 3, 12, 10)


def net() -> nn.Module:
    return settled(TinyNet()).double().eval()


def test_a_change_without_a_gradient_is_nobodys() -> None:
    """All units are off at the baseline: the first step changes the score, and no direction says
    why."""
    model = Made(lambda net, x: 2 * (x.sum((1, 2, 3)) - 1).relu()[:, None] + 0.5)
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
@pytest.mark.parametrize("baseline", ["least", "most", "mean", "blur", 0.25])
def test_values_of_a_linear_model_are_those_of_the_difference_from_a_baseline(
    method: Any, baseline: Any
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 5, 2)).double()
    x = random(0, 2, 3, 6, 5)
    side = torch.tensor([math.exp(-2.0), 1.0, math.exp(-2.0)], dtype=torch.float64)
    gaussian = torch.outer(side, side) / side.sum() ** 2
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
    starts = {
        "least": x.amin((2, 3), keepdim=True),
        "most": x.amax((2, 3), keepdim=True),
        "mean": x.mean((2, 3), keepdim=True),
        "blur": nn.functional.conv2d(padded, gaussian.expand(3, 1, 3, 3), groups=3),
    }
    values = explain.attribute(model, x, method(baseline=baseline), target=1).values
    weight = model[1].weight[1].reshape(3, 6, 5)
    expected = weight * (x - starts.get(baseline, 0.25))
    assert_close(values, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(4, 3, 6, 5), (2, 2)])
def test_baselines_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 5, 2)).double()
    with pytest.raises(explain.MethodError, match="baseline must be"):
        method = IntegratedGradients(2, torch.zeros(shape))
        explain.attribute(model, random(0, 2, 3, 6, 5), method, target=1)


class RoundsInBatches(torch.autograd.Function):
    """The identity, whose gradient has other rounding errors where several images run at once, as
    other kernels make them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        if len(gradient) == 1:
            return gradient
        generator = torch.Generator().manual_seed(0)
        errors = torch.randn(gradient.shape, generator=generator)
        return gradient + 1e-6 * gradient.abs().amax() * errors


@pytest.mark.parametrize("batch_size", [None, 1, 2])
@pytest.mark.parametrize(
    "along", [GuidedIntegratedGradients(30), IDGI(GuidedIntegratedGradients(30))]
)
def test_rounding_errors_of_batches_do_not_choose_the_path(
    along: Any, batch_size: int | None
) -> None:
    """Many values have the same gradient in networks with rectifiers, and none of them is next."""
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), pooled]
    torch.manual_seed(0)
    convolutions = settled(nn.Sequential(*layers)).eval()
    model = Made(lambda net, x: net.layers(RoundsInBatches.apply(x)), layers=convolutions).eval()
    x = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    together = explain.attribute(model, x, along, target=1, batch_size=batch_size)
    for i, image in enumerate(x):
        alone = explain.attribute(model, image[None], along, target=1)
        largest = float(alone.values.abs().max())
        assert_close(together.values[[i]], alone.values, rtol=0, atol=1e-5 * largest)
        assert_close(together.delta[[i]], alone.delta, rtol=0, atol=1e-5)
