"""What values should add up to is judged by the scores: what is missed is said, however large the
values are that cancel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain.methods import LRP, BlurIntegratedGradients, DeepLIFT, IntegratedGradients
from tests.conftest import Made, settled
from tests.relevance.test_relevance import random


def normalised(depth: int) -> nn.Module:
    """Convolutions with instance normalisations, whose deviations for a black photo are tiny."""
    torch.manual_seed(1)
    blocks: list[nn.Module] = []
    for number in range(depth):
        blocks += [nn.Conv2d(8 if number else 3, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 16 * 16, 4)).eval()


def messages(model: nn.Module, x: Tensor, method: Any) -> tuple[explain.Attribution, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a = explain.attribute(model, x, method, target=1)
    return a, [str(warning.message) for warning in caught]


def test_huge_values_do_not_excuse_what_is_missed() -> None:
    """In double precision the same values add up, and nothing is said."""
    model = normalised(5)
    x = random(0, 2, 3, 16, 16).sigmoid().float()
    exact, said = messages(model.double(), x.double(), DeepLIFT())
    difference = (model(x.double()) - model(torch.zeros_like(x.double())))[:, 1].detach()
    assert torch.allclose(exact.values.flatten(1).sum(1), difference, atol=1e-4)
    assert not said
    a, said = messages(model.float(), x, DeepLIFT())
    missed = a.values.double().flatten(1).sum(1) - difference
    assert (missed.abs() > 0.5 * difference.abs()).any()
    assert len(said) == 1
    assert "misses the difference of the scores" in said[0]


@pytest.mark.parametrize("method", [IntegratedGradients(), BlurIntegratedGradients()], ids=str)
def test_a_path_whose_points_miss_the_change_of_the_score_says_so(method: Any) -> None:
    """The score jumps between two points; nearly all of its change is in no gradient."""
    model = Made(lambda net, x: torch.cat([x.mean((1, 2, 3))[:, None]] * 2, 1) + jump(x))

    def jump(x: Tensor) -> Tensor:
        return 9.0 * (x.amax((1, 2, 3)) > 0.9).to(x)[:, None]

    x = random(1, 2, 3, 12, 12).sigmoid() * 0.5
    x[1, :, 5, 5] = 1.0
    a, said = messages(model, x, method)
    assert a.delta[1] < -8
    assert len(said) == 1
    assert f"{a.method} misses" in said[0]
    assert "image 1:" in said[0]
    smooth = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(400, 2)))
    assert messages(smooth.double(), x, method)[1] == []


INNER: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


def descended(net: Any, x: Tensor) -> Tensor:
    """What a step along the gradient of an energy makes of feature maps."""
    y = net.first(x).relu()
    with torch.enable_grad():
        y = y if y.requires_grad else y.requires_grad_()
        energy = net.function_of(net.second(y)).sum()
        (slope,) = torch.autograd.grad(energy, y, create_graph=True)
    return net.head((y - 0.5 * slope).mean((2, 3)))


@pytest.mark.parametrize("name", INNER)
def test_a_gradient_that_the_model_itself_takes_is_named(name: str) -> None:
    parts = {"first": nn.Conv2d(3, 4, 3), "second": nn.Conv2d(4, 4, 3), "head": nn.Linear(4, 3)}
    model = settled(Made(descended, **parts)).double().eval()
    model.function_of = INNER[name]
    a, said = messages(model, random(2, 2, 3, 8, 8), "guidedbackprop")
    assert a.coverage.missed["convolution_backward"] == 1
    assert any("guidedbackprop " in text and "1 x convolution_backward" in text for text in said)


@pytest.mark.parametrize("name", INNER)
def test_relevance_passes_through_a_gradient_that_the_model_itself_takes(name: str) -> None:
    """All that it loses is lost at operations that are named."""
    parts = {"first": nn.Conv2d(3, 4, 3), "second": nn.Conv2d(4, 4, 3), "head": nn.Linear(4, 3)}
    model = settled(Made(descended, **parts)).double().eval()
    model.function_of = INNER[name]
    a, said = messages(model, random(2, 2, 3, 8, 8), LRP("Gradient"))
    assert a.delta.abs().max() <= 1e-9
    assert all(any(missed in message for message in said) for missed in a.coverage.missed)


def test_what_a_hook_of_the_models_own_does_to_gradients_does_nothing_to_relevance() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.first(x).relu()
        if y.requires_grad and net.halves:
            y.register_hook(lambda gradient: gradient / 2)
        return net.head(y.mean((2, 3)))

    model = settled(Made(forward, first=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 3))).double()
    values = []
    for halves in (False, True):
        model.halves = halves
        values.append(explain.attribute(model, random(3, 2, 3, 8, 8), "lrp", target=1).values)
    assert torch.equal(*values)


class StandardisedConv(nn.Conv2d):
    """A convolution whose weights have the mean 0 and the variance 1, as in BiT."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        weight = (self.weight - mean) * (variance + 1e-8).rsqrt()
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


def in_groups(seed: int, depth: int, shift: float) -> nn.Module:
    """Residual blocks of group normalisations and standardised convolutions, as in BiT; those of a
    black photo are of zeros where no ``shift`` is added."""
    torch.manual_seed(seed)

    def add(net: Any, x: Tensor) -> Tensor:
        return x + net.conv(net.norm(x).relu())

    def block() -> nn.Module:
        norm = nn.GroupNorm(2, 6)
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias, std=shift)
        return Made(add, norm=norm, conv=StandardisedConv(6, 6, 3, padding=1))

    blocks = [block() for _ in range(depth)]
    head = [nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)]
    return nn.Sequential(StandardisedConv(3, 6, 3, padding=1, bias=False), *blocks, *head).eval()


@pytest.mark.parametrize("method", [DeepLIFT(), IntegratedGradients()], ids=str)
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_single_precision_gives_the_map_of_double_precision_or_says_so(
    method: Any, shift: float
) -> None:
    for seed in range(3):
        model = in_groups(seed, 1 + seed, shift)
        x = random(seed, 1, 3, 8, 8)
        exact, _ = messages(model.double(), x, method)
        scores = model(torch.cat([x, torch.zeros_like(x)]))[:, 1].detach()
        difference = (scores[0] - scores[1]).abs()
        a, said = messages(model.float(), x.float(), method)
        off = (a.values - exact.values).abs().max() / exact.values.abs().max()
        missed = (a.values.double().sum() - exact.values.sum()).abs()
        if said:
            assert any("misses the difference of the scores" in message for message in said)
        else:
            assert off < 1e-3
            assert missed < max(0.05 * difference, 0.01 * (difference + scores[0].abs()))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_sequences_with_time_first_add_up_as_those_with_the_images_first(kind: Any) -> None:
    def read(net: Any, x: Tensor) -> Tensor:
        tokens = net.patches(x).flatten(2).mT
        if net.rnn.batch_first:
            return net.head(net.rnn(tokens)[0].mean(1))
        return net.head(net.rnn(tokens.transpose(0, 1))[0].mean(0))

    x = random(3, 2, 3, 16, 12)
    found = []
    for first in (True, False):
        parts = {"patches": nn.Conv2d(3, 6, 4, 4), "rnn": kind(6, 5, batch_first=first)}
        model = settled(Made(read, **parts, head=nn.Linear(5, 4))).double().eval()
        found.append(messages(model, x, LRP())[0])
    by_images, by_time = found
    torch.testing.assert_close(by_time.values, by_images.values)
    torch.testing.assert_close(by_time.delta, by_images.delta, rtol=0, atol=1e-12)
