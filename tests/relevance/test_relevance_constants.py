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
from explain.relevance.linear_rules import AlphaBeta, Epsilon, Gamma, ZPlus
from tests.conftest import Made, settled
from tests.relevance.test_relevance import random


def network(function: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A convolution, and a function of the module, the input and what the convolution gives."""
    parts = {"first": nn.Conv2d(3, 4, 1), "layer": nn.Linear(5, 5), "narrow": nn.Linear(3, 5)}
    weights = {"weight": (4, 5), "other": (5, 4), "pixel": (1, 4, 1, 1)}
    parts |= {name: nn.Parameter(torch.zeros(shape)) for name, shape in weights.items()}
    parts["words"] = nn.Embedding(10, 5)
    model = Made(lambda net, x: function(net, x, net.first(x).relu()), **parts)
    return settled(model).double().eval()


def pooled(y: torch.Tensor) -> torch.Tensor:
    return y.mean((2, 3))


def added_to(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = (net.pixel * 2).expand_as(y).clone()
    whole += y
    whole.sub_(y.flip(2), alpha=0.5)
    return pooled(whole) @ net.weight


def of_the_signal(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = y.clone()
    whole += net.pixel
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
    "a sum in place of the signal": of_the_signal,
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
@pytest.mark.filterwarnings("ignore:.*not the derivative")
def test_what_no_gradient_leads_from_is_a_constant_whether_it_is_trained_or_not(
    name: str, method: Method | str
) -> None:
    x = random(3, 2, 3, 4, 4)
    model = network(CONSTANTS[name])
    a = explain.attribute(model, x, method, target=1)
    assert a.delta.abs().max() <= 1e-12
    if method != "fullgrad":  # which needs the gradients in the biases of layers
        frozen = explain.attribute(model.requires_grad_(False), x, method, target=1)
        assert torch.allclose(a.values, frozen.values, rtol=1e-9, atol=1e-12)
        assert a.coverage.taken.keys() == frozen.coverage.taken.keys()


def test_a_normalisation_of_images_by_running_statistics_is_one_of_batches() -> None:
    head = nn.Linear(48, 3)
    x = random(1, 2, 3, 4, 4)
    norms = nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.BatchNorm2d(3)
    for norm in norms:
        norm.running_mean = torch.tensor([0.1, 0.2, 0.3])
        norm.running_var = torch.tensor([0.5, 0.6, 0.7])
    models = [nn.Sequential(norm, nn.Flatten(), head).double().eval() for norm in norms]
    for method in (LRP("Epsilon"), LRP("EpsilonPlusFlat"), "attnlrp", DeepLIFT(), "fullgrad"):
        a, expected = (explain.attribute(model, x, method, target=1) for model in models)
        assert torch.allclose(a.values, expected.values, rtol=1e-12, atol=1e-15)
        assert a.delta.abs().max() <= 1e-12


@pytest.mark.parametrize(
    "used", [lambda h, c: h, lambda h, c: c, lambda h, c: h - c], ids=["output", "state", "both"]
)
def test_the_results_of_one_operation_are_handed_what_is_their_own(
    used: Callable[..., torch.Tensor],
) -> None:
    """An LSTM's output is made of its state: what arrives at the one must not count at the
    other."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        state = net.cell(pooled(x))
        return net.head(used(*net.cell(pooled(x.flip(1)), state)))

    model = settled(Made(forward, cell=nn.LSTMCell(3, 5), head=nn.Linear(5, 3))).double()
    a = explain.attribute(model, random(0, 2, 3, 4, 4), LRP("Epsilon"), target=1)
    assert a.delta.abs().max() <= 1e-12
    assert a.coverage.missed == {}


REFUSED: dict[str, Callable[[], Any]] = {
    "epsilon of epsilon must": lambda: Epsilon(-1),
    "gamma of gamma must": lambda: Gamma(float("nan")),
    "epsilon of gamma must": lambda: Gamma(epsilon=True),
    "bias of alphabeta must": lambda: ZPlus(bias=1),  # type: ignore[arg-type]
    "alpha - beta of AlphaBeta must": lambda: AlphaBeta(2, 2),
    "kinds of When must": lambda: When(3),  # type: ignore[arg-type]
    "did you mean 'convolution'": lambda: When(("convolutions",)),
    "module of When must": lambda: When(module=3),  # type: ignore[arg-type]
    "rules of composite must": lambda: Composite("a", ((When(), Epsilon),)),  # type: ignore[arg-type]
    "must be a list, each item": lambda: Composite("b", Epsilon()),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("reason", REFUSED)
def test_rules_and_composites_that_cannot_be_meant_are_refused(reason: str) -> None:
    with pytest.raises(MethodError, match=reason):
        REFUSED[reason]()


@pytest.mark.parametrize("joined", [torch.cat, torch.stack])
def test_constants_that_are_joined_take_their_weight_times_their_value(joined: Any) -> None:
    """In a linear model of the photo's pixels and of constants that are joined with them."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        pixels = x.flatten(1) * 2
        return net.head(joined([net.constants.expand(pixels.shape), pixels], 1).flatten(1))

    constants = torch.linspace(-2, 3, 12, dtype=torch.float64)
    model = Made(forward, constants=constants, head=nn.Linear(24, 2, bias=False).double())
    a = explain.attribute(model, random(0, 2, 3, 2, 2), LRP("Gradient"), target=1)
    taken = model.head.weight[1, :12].detach() @ constants
    torch.testing.assert_close(a.coverage.taken["biases"], taken.expand(2))


@pytest.mark.parametrize("trained", [True, False])
def test_fullgrad_of_a_score_that_no_gradient_leads_from_to_the_image_is_refused(
    trained: bool,
) -> None:
    layers = {"first": nn.Conv2d(3, 4, 1), "head": nn.Linear(4, 5)}
    model = Made(lambda net, x: net.head(pooled(net.first(x.detach()))), **layers)
    model = settled(model).double().eval().requires_grad_(trained)
    with pytest.raises(explain.ExplainError, match="depend"):
        explain.attribute(model, random(3, 2, 3, 4, 4), "fullgrad", target=1)
