"""`cam` reads a head that averages and is linear, in either order, and refuses every other one at
any scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain import LayerError
from explain.methods import HiResCAM
from tests.conftest import Made, settled

SCALES = [1e-8, 1e4]
X = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def network(scale: float, *head: nn.Module, least: float = 0.0) -> nn.Module:
    """A convolution whose maps are of the given magnitude, above ``least``, and a head."""
    maps = Made(lambda net, x: net.conv(x).relu() * scale + least, conv=nn.Conv2d(3, 6, 3))
    return settled(nn.Sequential(maps, *head)).double().eval()


def pooled(pool: nn.Module) -> list[nn.Module]:
    return [pool, nn.Flatten(), nn.Linear(6, 4)]


HEADS = {
    "linear": lambda: pooled(nn.AdaptiveAvgPool2d(1)),
    "convolution behind the average": lambda: [
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(6, 4, 1),
        nn.Flatten(),
    ],
    "convolution before the average": lambda: [
        nn.Conv2d(6, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ],
    "linear on every position": lambda: [
        Made(lambda net, x: x.permute(0, 2, 3, 1)),
        nn.Linear(6, 4),
        Made(lambda net, x: x.mean((1, 2))),
    ],
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head", HEADS)
def test_a_linear_head_is_read_wherever_the_average_is(head: str, scale: float) -> None:
    """The weights are those of the gradient: the map is HiResCAM's times the number of
    positions."""
    model = network(scale, *HEADS[head]())
    found = explain.attribute(model, X, "cam", target=2, layer="0")
    hires = explain.attribute(model, X, HiResCAM(), target=2, layer="0").values
    assert_close(found.values, hires * hires[0].numel(), rtol=1e-4, atol=1e-6 * scale)


REFUSED = {
    "maximum": lambda: pooled(nn.AdaptiveMaxPool2d(1)),
    "rectified classes": lambda: [
        nn.Conv2d(6, 4, 1),
        nn.ReLU(True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ],
    "wide convolution": lambda: [
        nn.Conv2d(6, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ],
    "two linear layers": lambda: [
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 6),
        nn.ReLU(),
        nn.Linear(6, 4),
    ],
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head", REFUSED)
def test_any_other_head_is_refused_at_any_scale(head: str, scale: float) -> None:
    model = network(scale, *REFUSED[head]())
    with pytest.raises(LayerError, match="followed"):
        explain.attribute(model, X, "cam", target=2, layer="0")


@pytest.mark.parametrize("scale", SCALES)
def test_maps_that_are_those_of_the_classes_are_the_answer(scale: float) -> None:
    mean, most = (
        network(scale, p, nn.Flatten()) for p in (nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1))
    )
    found = explain.attribute(mean, X, "cam", target=2, layer="0").values
    assert_close(found, mean[0](X)[:, 2].detach())
    with pytest.raises(LayerError, match="followed"):
        explain.attribute(most, X, "cam", target=2, layer="0")
