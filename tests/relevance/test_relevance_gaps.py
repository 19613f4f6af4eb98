"""What no rule covers is told by name, with what it took; or it is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import ExplainWarning, MethodError
from explain.methods import LRP, DeepLIFT
from tests.conftest import settled
from tests.relevance.test_relevance import random


class Net(nn.Module):
    """A dense layer, a function of what it gives, and a head of whatever size that takes."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(12, 6)
        self.head = nn.Linear(function(torch.zeros(1, 6).double()).shape[1], 3)
        settled(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.function(self.first(x.flatten(1))))


def with_a_view_overwritten(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z[:, 1:4].tan_()
    return z


def with_values_set(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z[:, 2] = 0.7
    return z


def with_signals_set(y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(y)
    z[:, :2], z[:, 2:] = y[:, 4:], y[:, :4]
    return z


LOSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log_softmax": lambda y: F.log_softmax(y, 1),
    "prod": lambda y: y.prod(1, keepdim=True),
    "var": lambda y: y.var(1, keepdim=True),
    "maximum": lambda y: torch.maximum(y, torch.full_like(y, 0.2)),
    "pad": lambda y: F.pad(y, (0, 2), value=0.7),
    "bilinear": lambda y: F.bilinear(y, y, torch.arange(72.0).reshape(2, 6, 6).to(y) / 9),
    "baddbmm": lambda y: torch.baddbmm(y[:, :, None], y[:, :, None], y[:, None, :1]).flatten(1),
    "log": lambda y: y.abs().log_(),
    "setitem": with_values_set,
    "pow": lambda y: torch.pow(2.0, y),
    "addcmul": lambda y: torch.addcmul(y, y, y, value=0.5),
    "rdiv": lambda y: 1 / y.abs(),
    "fill": lambda y: torch.cat([y[:, :2] * 2, (y[:, 2:] * 2).fill_(0.4)], 1),
    "tan": with_a_view_overwritten,
}
CONSERVING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fft": lambda y: torch.cat([torch.fft.rfft(y).real, torch.fft.rfft(y).imag.relu()], 1),
    "topk": lambda y: y.topk(3, 1)[0] + y.sort(1)[0][:, :3],
    "normalize": lambda y: F.normalize(y, dim=1),
    "cummax": lambda y: y.cummax(1)[0],
    "signals": lambda y: torch.maximum(y, y.flip(1)) - torch.minimum(y, 2 * y),
    "pad": lambda y: F.pad(y, (0, 2)),
    "set": with_signals_set,
    "strided": lambda y: y.as_strided((len(y), 3), (6, 2)),
}


@pytest.mark.parametrize("name", LOSING)
def test_what_is_lost_is_what_its_formula_says(name: str) -> None:
    """Value times gradient of what an operation gave, less that of what it was given, for LRP-0."""
    model = Net(LOSING[name]).double()
    x = random(1, 2, 3, 2, 2)
    with pytest.warns(ExplainWarning):
        a = explain.attribute(model, x, LRP("Gradient"), target=1)
    given = model.first(x.flatten(1)).detach().requires_grad_()
    made = model.function(given)
    of_made, of_given = torch.autograd.grad(model.head(made)[:, 1].sum(), [made, given])
    expected = (of_made * made).sum(1) - (of_given * given).sum(1)
    assert torch.allclose(a.coverage.taken[name], expected.detach(), rtol=1e-9, atol=1e-12)
    assert a.coverage.missed == {name: 1}
    assert a.delta.abs().max() <= 1e-9


@pytest.mark.parametrize("name", CONSERVING)
def test_what_loses_nothing_without_a_rule_is_not_named(name: str) -> None:
    model = Net(CONSERVING[name]).double()
    x = random(1, 2, 3, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ExplainWarning)
        a = explain.attribute(model, x, LRP("Epsilon"), target=1)
    assert a.coverage.missed == {}
    assert set(a.coverage.taken) <= {"biases", "stabiliser", "activations"}
    assert a.delta.abs().max() <= 1e-9 * a.values.abs().sum()


def test_steps_inside_a_transform_are_refused() -> None:
    model = Net(lambda y: torch.vmap(lambda row: row.exp())(y)).double()
    for method in (LRP("Epsilon"), LRP("AttnLRP"), DeepLIFT()):
        with pytest.raises(MethodError, match="'model'"):
            explain.attribute(model, random(1, 2, 3, 2, 2), method, target=1)


@pytest.mark.parametrize("equation", ["nk,nk->nk", "nk,nj->nkj"])
def test_differences_of_products_without_a_rule_are_told(equation: str) -> None:
    model = Net(lambda y: torch.einsum(equation, y, y.tanh()).flatten(1)).double()
    with pytest.warns(ExplainWarning, match="deeplift misses the"):
        a = explain.attribute(model, random(1, 2, 3, 2, 2), DeepLIFT(0.25), target=1)
    missed = a.values.flatten(1).sum(1) - (
        a.score - model(torch.full((2, 3, 2, 2), 0.25).double())[:, 1]
    )
    assert torch.allclose(a.delta, missed, rtol=1e-9, atol=1e-12)
    assert a.delta.abs().max() > 1e-3


def test_a_softmax_that_is_no_factor_is_accounted_for_where_it_is_held_constant() -> None:
    model = Net(lambda y: y.softmax(1) + y).double()
    x = random(1, 2, 3, 2, 2)
    a = explain.attribute(model, x, LRP("Epsilon"), target=1)
    weights = model.first(x.flatten(1)).softmax(1)
    assert torch.allclose(
        a.coverage.taken["softmax"], (weights * model.head.weight[1]).sum(1).detach(), atol=1e-5
    )
    assert a.delta.abs().max() <= 1e-12


def test_differences_pass_a_softmax_whose_scores_are_far_apart() -> None:
    model = Net(lambda y: (y * 1000).softmax(1) + y).double()
    x = random(1, 2, 3, 2, 2)
    a = explain.attribute(model, x, DeepLIFT(), target=1)
    assert a.values.isfinite().all()
    assert a.delta.abs().max() <= 1e-12


def test_the_shares_of_a_softmax_are_logarithmic_means() -> None:
    """Of each difference of x - log(sum(exp(x))), the logarithmic mean; of the logarithm, in
    proportion to these."""
    model = Net(lambda y: y.softmax(1)).double()
    x = random(1, 2, 3, 2, 2)
    a = explain.attribute(model, x, DeepLIFT(), target=1)
    weight = model.first.weight.detach()
    head = model.head.weight[1].tolist()
    for image, values in zip(x.flatten(1), a.values.flatten(1), strict=True):
        y, y0 = (
            (weight @ each + model.first.bias).detach()
            for each in (image, torch.zeros(12).double())
        )
        s, s0 = (each.exp() / each.exp().sum() for each in (y, y0))
        means = [
            (p - q) / (math.log(p) - math.log(q))
            for p, q in zip(s.tolist(), s0.tolist(), strict=True)
        ]
        mixed = sum(h * m for h, m in zip(head, means, strict=True))
        multipliers = torch.tensor(
            [h * m - m / sum(means) * mixed for h, m in zip(head, means, strict=True)]
        ).double()
        assert torch.allclose(values, (multipliers @ weight) * image, rtol=1e-6, atol=1e-9)


def test_a_baseline_without_finite_scores_is_named() -> None:
    class Standardised(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward((x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True))

    model = Standardised(nn.Flatten(), nn.Linear(12, 3)).double()
    with pytest.raises(MethodError, match="baseline must"):
        explain.attribute(model, random(1, 2, 3, 2, 2), DeepLIFT(), target=1)


def test_the_range_of_the_input_is_one_for_all_or_for_each_channel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    x = torch.rand(1, 3, 8, 8)
    with pytest.raises(MethodError, match="channels"):
        explain.attribute(model, x, LRP("EpsilonBox", low=(0.0, 0.0), high=(1.0, 1.0)), target=0)


class Caching(nn.Module):
    """Adds a bias that it computes once, and keeps with its graph, as LeViT does in evaluation
    mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 6)
        self.bias = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 3)
        self.kept: torch.Tensor | None = None
        settled(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.bias[torch.tensor([0, 0, 1, 1, 2, 2])] * 2
        return self.head((self.first(x.flatten(1)) + self.kept).relu())


@pytest.mark.parametrize("method", ["lrp", "deeplift", "fullgrad"])
def test_what_a_model_has_computed_of_its_weights_and_kept_is_a_constant(method: str) -> None:
    model = Caching().double()
    x = random(1, 2, 3, 2, 2)
    first, second = (explain.attribute(model, x, method, target=1) for _ in range(2))
    assert torch.equal(first.values, second.values)
    for a in (first, second):
        assert a.delta.abs().max() <= 1e-9
