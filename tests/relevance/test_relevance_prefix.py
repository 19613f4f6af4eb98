"""What is done to the photo before the first layer: rules at the input find the pixels again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import LRP
from explain.relevance import Composite, Flat, When, WSquare, ZBox
from tests.conftest import Made, settled
from tests.methods import plain_relevance as plain
from tests.relevance.test_relevance import Then, assert_near, random

Function = Callable[[torch.Tensor], torch.Tensor]
COMPOSITES = ["automatic", "Epsilon"]


def behind(net: nn.Module, function: Function) -> nn.Module:
    """A network that is given what a function makes of the photo."""
    return Made(lambda outer, x: outer.net(function(x)), net=net)


def convolutional() -> nn.Module:
    layers = [
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.ReLU(),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    return settled(nn.Sequential(*layers, *head)).double().eval()


def lrp(model: nn.Module, x: torch.Tensor, **options: Any) -> explain.Attribution:
    return explain.attribute(model, x, LRP(**options), target=1)


def pulled_back(function: Function, x: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """Relevance of what an interpolation gives, by its weights, which add up to one for each
    value."""
    return torch.autograd.functional.vjp(function, x, relevance)[1]


def zoomed(x: torch.Tensor) -> torch.Tensor:
    grid = F.affine_grid(
        x.new_tensor([[0.5, 0, 0.2], [0, 0.6, 0]]).expand(len(x), 2, 3), [*x.shape[:2], 6, 5], False
    )
    return F.grid_sample(x, grid, align_corners=False)


def with_colours_exchanged_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0], y[:, 2] = x[:, 2], x[:, 0]
    return y


MOVED: dict[str, Function] = {
    "flipped": lambda x: x.flip(-1),
    "rolled": lambda x: x.roll((2, -1), (-2, -1)),
    "cropped": lambda x: x[..., 1:-1, 2:],
    "images exchanged": lambda x: x.flip(0),
    "picked by numbers in a tensor": lambda x: x[..., torch.arange(x.shape[-1] - 1, 0, -1)],
    "colours exchanged in place": with_colours_exchanged_in_place,
    "colours taken apart": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "mirrored at the edge": lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"),
    "enlarged bilinearly": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "made smaller": lambda x: F.interpolate(x, size=(6, 5), mode="bilinear", antialias=True),
    "zoomed into by a grid": zoomed,
    "single precision in between": lambda x: x.float().flip(-1).double(),
}


@pytest.mark.filterwarnings("ignore:lrp misses the score")  # that of each image lies in the other
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("name", MOVED)
def test_relevance_lies_where_the_pixels_lay(name: str, composite: str) -> None:
    """With ``net`` behind a function, the relevance is that of ``net``, pulled back by the
    function's weights."""
    net = convolutional()
    function = MOVED[name]
    x = random(4, 2, 3, 10, 8)
    x = x.float().double()
    found = lrp(behind(net, function), x, composite=composite).values
    if composite == "Epsilon":  # shares by what each pixel adds: value times gradient
        y = function(x)
        weights = lrp(net, y, composite=composite).values / y
        expected = x * pulled_back(function, x, weights)
    else:
        expected = pulled_back(function, x, lrp(net, function(x), composite=composite).values)
    tolerance = 1e-6 if name.startswith("single") else 1e-11
    assert_near(found, expected, tolerance)


IN_PLACE: dict[str, Function] = {
    "normalised": lambda x: (x - x.new_tensor([0.4, 0.5, 0.6])[:, None, None]) / 0.2,
    "turned dark to light": lambda x: 1 - x,
    "standardised": lambda x: (
        (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
    ),
    "by layer normalisation": lambda x: F.layer_norm(x, x.shape[1:]),
    "by batch normalisation": lambda x: F.batch_norm(
        x, x.new_tensor([0.1, 0.2, 0.3]), x.new_tensor([1.0, 2.0, 0.5])
    ),
    "cut off": lambda x: x.clamp(-0.5, 1.0),
    "gamma-corrected": lambda x: x.abs() ** 2.2,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_changes_pixels_in_their_places_leaves_relevance_there(name: str) -> None:
    net = convolutional()
    function = IN_PLACE[name]
    x = random(4, 2, 3, 10, 8)
    expected = lrp(net, function(x)).values
    for way in (function, lambda x: function(x.flip(-1)).flip(-1)):
        found = lrp(behind(net, way), x).values
        assert_near(found, expected, 1e-11)


def grey(x: torch.Tensor) -> torch.Tensor:
    return (0.3 * x[:, :1] + 0.6 * x[:, 1:2] + 0.1 * x[:, 2:]).expand(-1, 3, -1, -1)


def blurred(x: torch.Tensor) -> torch.Tensor:
    return 0.25 * x + 0.75 * F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


@pytest.mark.parametrize("function", [grey, blurred])
def test_pixels_that_were_mixed_share_by_their_weights(function: Function) -> None:
    """As a plain matrix of the mixing's weights says."""
    net = convolutional()
    x = random(4, 1, 3, 6, 5)
    weights, zeros = plain.matrix(function, x.shape[1:])
    inner = lrp(net, function(x)).values.flatten()
    values = lrp(behind(net, function), x).values.flatten()
    assert_near(values, plain.shared(weights, zeros, inner, 0), 1e-11)


class Turned(torch.autograd.Function):
    """A function written by hand, which nobody can look into."""

    forward = staticmethod(lambda ctx, x: x.flip(-1))
    backward = staticmethod(lambda ctx, gradient: gradient.flip(-1))


@pytest.mark.filterwarnings("ignore:lrp has no rule for some operations")
def test_a_function_written_by_hand_is_passed_by_value_times_gradient() -> None:
    net = convolutional()
    x = random(4, 2, 3, 6, 6).sigmoid()
    values = lrp(behind(net, Turned.apply), x).values
    assert torch.allclose(values, lrp(net, x.flip(-1)).values.flip(-1), rtol=1e-9, atol=1e-12)


# The range of the input

MEAN = torch.tensor([0.4, 0.5, 0.6])[:, None, None].double()
STD = torch.tensor([0.2, 0.1, 0.4])[:, None, None].double()
LINEAR: dict[str, Function] = {
    "normalised": lambda x: (x - MEAN) / STD,
    "colours exchanged": lambda x: x[:, [2, 0, 1]],
    "padded": lambda x: F.pad(x, (1, 0, 0, 1)),
    "dark to light": lambda x: 1 - x,
    "made smaller": lambda x: F.interpolate(x, size=(3, 4), mode="bilinear"),
}


@pytest.mark.parametrize("function", LINEAR.values(), ids=LINEAR)
def test_the_range_of_the_input_is_that_of_the_photo(function: Function) -> None:
    """The formula of z^B, with what the photo's least and largest values become."""
    low = (0.0, -0.5, 0.1)
    high = (1.0, 1.5, 2.0)
    x = random(1, 1, 3, 5, 6).sigmoid()
    bottom, top = (torch.tensor(end).double().repeat_interleave(30) for end in (low, high))
    weights, added = plain.matrix(function, x.shape[1:])
    above = weights.clamp(min=0)
    below = weights.clamp(max=0)
    least = added + above @ bottom + below @ top
    most = added + above @ top + below @ bottom
    layer = settled(nn.Conv2d(3, 4, 3, padding=1), seed=3).double()
    y = function(x)
    w, b = plain.matrix(layer, y.shape[1:])
    head = random(2, len(b))
    inner = plain.zbox(w, b, y.flatten(), head * (w @ y.flatten() + b), least, most)
    expected = plain.shared(weights.abs(), torch.zeros(len(weights)), inner, 0)
    method = LRP(Composite("box", ((When(first=True), ZBox(low, high)),)))
    model = behind(Then(layer, head), function)
    values = explain.attribute(model, x, method, target=0).values.flatten()
    assert_near(values, expected, 1e-9)


@pytest.mark.parametrize(
    "rule", [ZBox(), ZBox((-3.0, -4.0, -5.0), (4.0, 3.0, 5.0)), Flat(), WSquare()], ids=str
)
def test_rules_at_the_input_of_convolutions_without_a_batch(rule: Any) -> None:
    layer = settled(nn.Conv2d(3, 4, 3), seed=3).double()
    one_by_one = Made(lambda net, x: torch.stack([net.layer(image) for image in x]), layer=layer)
    x = random(1, 2, 3, 5, 6)
    head = random(2, 4 * 3 * 4)
    method = LRP(Composite("one rule", ((When(("convolution",)), rule),)))
    batched, single = (
        explain.attribute(Then(convolution, head), x, method, target=0).values
        for convolution in (layer, one_by_one)
    )
    assert torch.allclose(single, batched, rtol=1e-11, atol=1e-13)
