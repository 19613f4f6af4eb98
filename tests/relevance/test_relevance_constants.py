"""What no gradient leads from to the input is a constant, however a network makes it, and whether
it is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import MethodError
from explain.methods import LRP, DeepLIFT, Method
from explain.relevance.composites import Composite, When
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Gamma
from tests.conftest import settled
from tests.relevance.test_relevance import random


class Net(nn.Module):
    """A convolution, and a function of the module, the input and what the convolution gives."""

    def __init__(self, function: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(3, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 5))
        self.other = nn.Parameter(torch.randn(5, 4))
        self.pixel = nn.Parameter(torch.randn(1, 4, 1, 1))
        self.layer = nn.Linear(5, 5)
        self.narrow = nn.Linear(3, 5)
        self.words = nn.Embedding(10, 5)
        settled(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, self.first(x).relu())


def pooled(y: torch.Tensor) -> torch.Tensor:
    return y.mean((2, 3))


def added_to(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = (net.pixel * 2).expand_as(y).clone()
    whole += y
    whole.sub_(y.flip(2), alpha=0.5)
    return pooled(whole) @ net.weight


def added_to_a_part(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = (net.pixel * 2).expand_as(y).clone()
    whole[:, 1:3] += y[:, :2]
    whole[:, 2:, 1:].sub_(y[:, 2:, 1:])
    return pooled(whole) @ net.weight


CONSTANTS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "normalised weights, transposed": lambda net, x, y: pooled(y) @ F.normalize(net.other, dim=1).T,
    "a constant that stands where the input does": lambda net, x, y: (
        pooled(y) @ net.weight + net.layer(torch.ones(1, 5).to(x))
    ),
    "a constant in the shape of a signal": lambda net, x, y: (
        pooled(y + (net.pixel * 2).expand_as(y)) @ net.weight
    ),
    "what an index of the signal finds": lambda net, x, y: (
        pooled(y) @ net.weight + net.words((x.mean((1, 2, 3)).abs() * 9).long().clamp(max=9))
    ),
    "a branch that is cut off": lambda net, x, y: (
        pooled(y) @ net.weight + net.narrow(pooled(x.detach()))
    ),
    "a mask of the signal": lambda net, x, y: (
        pooled(torch.where(y > 0.3, 1, 0).to(y) * net.pixel + y) @ net.weight
    ),
    "a sum in place of the constant": added_to,
    "a sum in place of a part of the constant": added_to_a_part,
}


OF_THE_IMAGE = {
    "what an index of the signal finds",
    "a branch that is cut off",
    "a mask of the signal",
    "a sum in place of a part of the constant",
}
"""What FullGrad does not take for a bias, and ``delta`` tells."""


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, LRP("EpsilonPlus")) for name in CONSTANTS),
        *((name, "fullgrad") for name in CONSTANTS if name not in OF_THE_IMAGE),
    ],
    ids=str,
)
def test_what_no_gradient_leads_from_is_a_constant_whether_it_is_trained_or_not(
    name: str, method: Method | str
) -> None:
    trained = Net(CONSTANTS[name]).double().eval()
    x = random(3, 2, 3, 4, 4)
    frozen = Net(CONSTANTS[name]).double().eval().requires_grad_(False)
    frozen.load_state_dict(trained.state_dict())
    a, expected = (explain.attribute(model, x, method, target=1) for model in (trained, frozen))
    assert a.delta.abs().max() <= 1e-12
    if method != "fullgrad":  # which needs the gradients in the biases of layers
        assert torch.allclose(a.values, expected.values, rtol=1e-9, atol=1e-12)
        assert a.coverage.taken.keys() == expected.coverage.taken.keys()


def test_a_normalisation_of_images_by_running_statistics_is_one_of_batches() -> None:
    one = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    other = nn.BatchNorm2d(3)
    one.running_mean = torch.rand(3)
    one.running_var = torch.rand(3) + 0.1
    other.load_state_dict(one.state_dict())
    head = nn.Linear(48, 3)
    x = random(1, 2, 3, 4, 4)
    for method in (LRP("Epsilon"), LRP("EpsilonPlusFlat"), "attnlrp", DeepLIFT(), "fullgrad"):
        found = [
            explain.attribute(
                nn.Sequential(first, nn.Flatten(), head).double().eval(), x, method, target=1
            )
            for first in (one, other)
        ]
        assert torch.equal(found[0].values, found[1].values)
        assert found[0].delta.abs().max() <= 1e-12


@pytest.mark.filterwarnings("ignore:lrp has no rule for some operations")
@pytest.mark.parametrize(
    "used", [lambda h, c: h, lambda h, c: c, lambda h, c: h - c], ids=["output", "state", "both"]
)
def test_the_results_of_one_operation_are_handed_what_is_their_own(
    used: Callable[..., torch.Tensor],
) -> None:
    """An LSTM's output is made of its state: what arrives at the one must not count at the
    other."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(3, 5)
            self.head = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, c = self.cell(pooled(x))
            h, c = self.cell(pooled(x.flip(1)), (h, c))
            return self.head(used(h, c))

    a = explain.attribute(settled(Cell()).double(), random(0, 2, 3, 4, 4), LRP("Epsilon"), target=1)
    assert a.delta.abs().max() <= 1e-12
    assert set(a.coverage.missed) == {"lstm_cell"}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Epsilon(-1), "epsilon of epsilon must"),
        (lambda: Gamma(float("nan")), "gamma of gamma must"),
        (lambda: AlphaBeta(2, 2), "alpha - beta of AlphaBeta must"),
        (lambda: When("dense"), "kinds of When must"),
        (lambda: When(("convolutions",)), "did you mean 'convolution'"),
        (lambda: When(module=3), "module of When must"),
        (lambda: Composite("c", ((When(), "rule"),)), "rules of composite 'c' must"),
        (lambda: Composite("c", ((When(), Epsilon),)), "rules of composite 'c' must"),
        (lambda: Composite("c", Epsilon()), "rules of composite 'c' must"),
    ],
)
def test_rules_and_composites_that_cannot_be_meant_are_refused(
    made: Callable[[], Any], said: str
) -> None:
    with pytest.raises(MethodError, match=said):
        made()


class Joins(nn.Module):
    """A linear model of the photo's pixels and of constants that are joined with them."""

    def __init__(self, *, stacks: bool) -> None:
        super().__init__()
        self.stacks = stacks
        self.constants = torch.linspace(-2, 3, 12, dtype=torch.float64)
        self.head = nn.Linear(24, 2, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        constants = self.constants.expand(len(x), 12)
        pixels = x.flatten(1) * 2
        if self.stacks:
            return self.head(torch.stack([constants, pixels], 1).flatten(1))
        return self.head(torch.cat([constants, pixels], 1))


@pytest.mark.parametrize("stacks", [False, True], ids=["cat", "stack"])
def test_constants_that_are_joined_take_their_weight_times_their_value(stacks: bool) -> None:
    torch.manual_seed(0)
    model = Joins(stacks=stacks)
    x = torch.rand(2, 3, 2, 2, dtype=torch.float64)
    a = explain.attribute(model, x, "lrp(composite='EpsilonPlus')", target=1)
    weight = model.head.weight[1].detach()
    taken = sum(float(w) * float(c) for w, c in zip(weight[:12], model.constants, strict=True))
    # The stabiliser of the dense layer, 1e-6, takes a part too.
    expected = x.new_full((2,), taken)
    torch.testing.assert_close(a.coverage.taken["biases"], expected, rtol=2e-6, atol=0)
