"""DeepLIFT and gradients at random points: against plain calculations, and by what their values add
up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import DeepLIFT, GradientSHAP
from tests.conftest import Made, TinyNet, settled
from tests.relevance.test_relevance import Everything, random


def test_rescale_is_its_formula() -> None:
    """Two layers by hand: m = W2 * (relu(z) - relu(z0)) / (z - z0) * W1."""
    model = settled(
        nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 2))
    ).double()
    x = random(0, 3, 3, 2, 2)
    b = random(1, 3, 2, 2)
    z = model[1](x.flatten(1))
    z0 = model[1](b.flatten())
    slope = (z.sigmoid() - z0.sigmoid()) / (z - z0)
    multipliers = (model[3].weight[1] * slope) @ model[1].weight
    expected = (multipliers.reshape(x.shape) * (x - b)).detach()
    found = explain.attribute(model, x, DeepLIFT(b), target=1)
    assert torch.allclose(found.values, expected, rtol=1e-10)
    assert found.delta.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("baseline", "bias"),
    [(0.3, True), ("mean", False), (random(9, 3, 8, 8), True)],
    ids=["number", "mean", "tensor"],
)
def test_differences_add_up_through_every_operation(baseline: Any, bias: bool) -> None:
    model = settled(Everything(bias)).double().eval()
    x = random(3, 2, 3, 8, 8)
    a = explain.attribute(model, x, DeepLIFT(baseline), target=1)
    assert a.delta.abs().max() <= 1e-7 * a.values.abs().sum()
    alone = explain.attribute(model, x[1:], DeepLIFT(baseline), target=1)
    assert torch.allclose(a.values[1:], alone.values, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [1, (2, 3), (-1, 1), (1, 2, 3)])
def test_differences_add_up_through_maxima_over_dimensions(dim: Any, keepdim: bool) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(net.conv(x))
        y = torch.amax(y, dim, keepdim=True) if keepdim else y.amax(dim=dim)
        return y.reshape(len(x), -1).sum(1, keepdim=True)

    x = random(5, 3, 3, 5, 6)
    model = settled(Made(forward, conv=nn.Conv2d(3, 4, 3))).double()
    a = explain.attribute(model, x, DeepLIFT(random(6, 3, 5, 6)), target=0)
    assert a.delta.abs().max() <= 1e-9 * a.values.abs().sum()


POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool1d": lambda y: F.max_pool1d(y.flatten(-2), 3, 2),
    "max_pool2d": lambda y: F.max_pool2d(y, 2),
    "max_pool3d": lambda y: F.max_pool3d(y.unsqueeze(-4), 2, 1),
    "adaptive_max_pool2d": lambda y: F.adaptive_max_pool2d(y, (2, 3)),
}


@pytest.mark.parametrize("pooled", POOLINGS.values(), ids=POOLINGS)
def test_images_that_are_pooled_one_by_one_are_those_of_a_batch(
    pooled: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def one_by_one(net: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([pooled(y) for y in net.conv(x).tanh()]).flatten(1).cumsum(1)[:, -1:]

    def together(net: Any, x: torch.Tensor) -> torch.Tensor:
        return pooled(net.conv(x).tanh()).flatten(1).cumsum(1)[:, -1:]

    x = random(5, 2, 3, 6, 6)
    values = []
    for forward in (one_by_one, together):
        model = settled(Made(forward, conv=nn.Conv2d(3, 4, 3))).double()
        a = explain.attribute(model, x, DeepLIFT(random(6, 3, 6, 6)), target=0)
        assert a.delta.abs().max() <= 1e-9 * a.values.abs().sum()
        values.append(a.values)
    assert torch.allclose(*values, rtol=1e-9, atol=1e-12)


OF_SIGNALS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "y / z": lambda y, z: y / (2 + z),
    "1 / z": lambda y, z: 1 / (2 + z),
    "y * z": lambda y, z: y * z,
    "y @ z": lambda y, z: y @ z.mT,
    "largest": lambda y, z: y.amax((2, 3)),
    "least": lambda y, z: y.amin((2, 3)),
}


@pytest.mark.parametrize("function", OF_SIGNALS.values(), ids=OF_SIGNALS)
def test_differences_add_up_through_operations_of_two_signals(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        y, z = net.conv(x).tanh().chunk(2, 1)
        return function(y, z).flatten(1).cumsum(1)[:, -1:]

    model = settled(Made(forward, conv=nn.Conv2d(3, 4, 3))).double()
    a = explain.attribute(model, random(5, 2, 3, 6, 6), DeepLIFT(random(6, 3, 6, 6)), target=0)
    assert a.values.any()
    assert a.delta.abs().max() <= 1e-9 * a.values.abs().sum()


def test_two_signals_share_a_quotient_as_they_share_the_product_with_the_inverse() -> None:
    """By hand: y / z - y0 / z0 is (y - y0) times the mean of 1 / z and 1 / z0, and
    (1 / z - 1 / z0) times the mean of y and y0."""
    model = Made(lambda net, x: (x[:, :1] / (2 + x[:, 1:])).flatten(1)).double()
    x = random(5, 3, 2, 1, 1)
    reference = random(6, 2, 1, 1)
    y, z = x.flatten(1).mT
    y0, z0 = reference.flatten()
    of_y = (y - y0) * (1 / (2 + z) + 1 / (2 + z0)) / 2
    of_z = (1 / (2 + z) - 1 / (2 + z0)) * (y + y0) / 2
    values = explain.attribute(model, x, DeepLIFT(reference), target=0).values
    assert torch.allclose(values.flatten(1), torch.stack([of_y, of_z], 1), rtol=1e-12)


COMPLEX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "1j * y": lambda y: (1j * y).imag,
    "y * (0.5 + 2j)": lambda y: (y * (0.5 + 2j)).abs(),
    "y / 2j": lambda y: (y / 2j).imag,
    "y + 1j": lambda y: (y + 1j).abs().square(),
}


@pytest.mark.parametrize("function", COMPLEX.values(), ids=COMPLEX)
def test_differences_add_up_through_complex_numbers(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return function(net.conv(x).tanh()).flatten(1).cumsum(1)[:, -1:]

    model = settled(Made(forward, conv=nn.Conv2d(3, 4, 3))).double()
    a = explain.attribute(model, random(5, 2, 3, 6, 6), DeepLIFT(), target=0)
    assert a.values.any()
    assert a.delta.abs().max() <= 1e-9 * a.values.abs().sum()


def test_gradients_at_random_points_are_their_formula() -> None:
    model = settled(TinyNet()).double().eval()
    x = random(0, 2, 3, 12, 10)
    baselines = random(1, 4, 3, 12, 10)
    method = GradientSHAP(3, baselines, 0.1, seed=5)
    points = next(iter(method.needs)).perturbation  # type: ignore[attr-defined]
    values = explain.attribute(model, x, method, target=2).values
    for i in range(2):
        total = torch.zeros_like(x[0])
        for sample in range(3):
            start, end, share = points.drawing(x)(i, sample)
            point = (start + share * (end - start)).requires_grad_()
            total += torch.autograd.grad(model(point[None])[0, 2], point)[0] * (end - start) / 3
        assert torch.allclose(values[i], total, rtol=1e-9, atol=1e-12)
