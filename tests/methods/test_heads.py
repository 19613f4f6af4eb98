"""`cam` reads a head that averages and is linear, in either order, and refuses every other one at
any scale."""

from __future__ import annotations

from collections.abc import Callable

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


def network(scale: float, head: Callable[[], list[nn.Module]]) -> nn.Module:
    """A convolution whose maps are of the given magnitude, and a head."""
    maps = Made(lambda net, x: net.conv(x).relu() * scale, conv=nn.Conv2d(3, 6, 3))
    return settled(nn.Sequential(maps, *head())).double()


def average() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def maximum() -> list[nn.Module]:
    return [nn.AdaptiveMaxPool2d(1), nn.Flatten()]


HEADS = {
    "linear": lambda: [*average(), nn.Linear(6, 4)],
    "convolution behind the average": lambda: [
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(6, 4, 1),
        nn.Flatten(),
    ],
    "convolution before the average": lambda: [nn.Conv2d(6, 4, 1), *average()],
    "linear on every position": lambda: [
        Made(lambda net, x: net.fc(x.permute(0, 2, 3, 1)).mean((1, 2)), fc=nn.Linear(6, 4)),
    ],
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head", HEADS)
def test_a_linear_head_is_read_wherever_the_average_is(head: str, scale: float) -> None:
    """The weights are those of the gradient: the map is HiResCAM's times the number of
    positions."""
    model = network(scale, HEADS[head])
    found = explain.attribute(model, X, "cam", target=2, layer="0")
    hires = explain.attribute(model, X, HiResCAM(), target=2, layer="0").values
    assert_close(found.values, hires * hires[0].numel(), rtol=1e-4, atol=1e-6 * scale)


REFUSED = {
    "maximum": lambda: [*maximum(), nn.Linear(6, 4)],
    "maximum of classes": maximum,
    "rectified classes": lambda: [nn.Conv2d(6, 4, 1), nn.ReLU(True), *average()],
    "wide convolution": lambda: [nn.Conv2d(6, 4, 3, padding=1), *average()],
    "two linear layers": lambda: [*average(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)],
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head", REFUSED)
def test_any_other_head_is_refused_at_any_scale(head: str, scale: float) -> None:
    model = network(scale, REFUSED[head])
    with pytest.raises(LayerError, match="followed"):
        explain.attribute(model, X, "cam", target=2, layer="0")


@pytest.mark.parametrize("scale", SCALES)
def test_maps_that_are_those_of_the_classes_are_the_answer(scale: float) -> None:
    model = network(scale, average)
    values = explain.attribute(model, X, "cam", target=2, layer="0").values
    assert_close(values, model[0](X)[:, 2].detach())
