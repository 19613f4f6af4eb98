"""Relevance propagation: each rule against its formula, and what must be conserved on networks of
every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import ExplainWarning, LayerError, MethodError
from explain.methods import LRP
from explain.relevance import Composite, When
from explain.relevance.linear_rules import (
    AlphaBeta,
    Epsilon,
    Flat,
    Gamma,
    Gradient,
    WSquare,
    ZBox,
    ZPlus,
)
from explain.relevance.nonlinear_rules import Balanced, ConstantTerms, ElementwisePassThrough
from tests.conftest import Made, settled
from tests.methods import plain_relevance as plain

LINEAR = ("convolution", "dense", "matrixproduct", "batchnorm")
SHAPE = (4, 5, 6)


def everywhere(rule: Any) -> LRP:
    return LRP(Composite("one rule", ((When(LINEAR), rule),)))


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_near(found: torch.Tensor, expected: torch.Tensor, share: float = 1e-8) -> None:
    """Nothing is off by more than a share of the largest expected value."""
    assert (found - expected).abs().max() <= share * expected.abs().max()


# Each rule against its formula


class Positive1d(nn.BatchNorm1d, nn.BatchNorm2d):
    """A normalisation of rows; `settled` gives it a positive variance as it does those of maps."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "stride and padding": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "groups": lambda: nn.Conv2d(4, 4, 3, groups=2, padding=1),
    "depthwise without bias": lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
    "normalised": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)),
    "normalised dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(120, 5), Positive1d(5)),
    "a lone normalisation": lambda: nn.BatchNorm2d(4),
}
RULES: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "gradient": (Gradient(), plain.gradient),
    "epsilon": (Epsilon(0.01), lambda *a, **how: plain.epsilon(*a, eps=0.01, **how)),
    "z plus": (ZPlus(), plain.alphabeta),
    "z plus without biases": (ZPlus(bias=False), plain.zplus_without_bias),
    "alpha 2 beta 1": (AlphaBeta(2, 1), lambda *a: plain.alphabeta(*a, alpha=2, beta=1)),
    "gamma": (Gamma(0.25), plain.gamma),
    "gamma 10": (Gamma(10), lambda *a, **how: plain.gamma(*a, g=10, **how)),
    "w square": (WSquare(), plain.wsquare),
}


Rule = tuple[Any, Callable[..., torch.Tensor]]


def box(low: Any, high: Any, *, by_channel: bool = False) -> Callable[..., torch.Tensor]:
    """The formula of z^B, with the numbers given or, of each channel or of all, the photo's own."""

    def formula(
        w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, relevance: torch.Tensor
    ) -> torch.Tensor:
        rows = x.reshape(4 if by_channel else 1, -1)
        least = torch.tensor(low) if low else rows.amin(1)
        most = torch.tensor(high) if high else rows.amax(1)
        count = len(x) // len(rows)
        ends = (end.repeat_interleave(count) for end in (least, most))
        return plain.zbox(w, b, x, relevance, *ends)

    return formula


FLAT: Rule = (Flat(), lambda w, b, x, r: plain.flat(w, b, x, r, (w != 0).double()))
BOX: Rule = (ZBox((-3.0,), (4.0,)), box([-3.0], [4.0]))
OWN_BOX: Rule = (ZBox(), box(None, None))
OWN_BOX_BY_CHANNEL: Rule = (ZBox(), box(None, None, by_channel=True))
OF_ROWS = ("normalised dense", "a lone normalisation")
FORMULAS: list[tuple[str, Rule, bool]] = [
    *(
        ("stride and padding", rule, absolute)
        for rule in RULES.values()
        for absolute in (False, True)
    ),
    *((kind, RULES["alpha 2 beta 1"], False) for kind in list(CONVOLUTIONS)[1:]),
    *((kind, rule, False) for kind in CONVOLUTIONS for rule in (FLAT, BOX)),
    *((kind, OWN_BOX if kind in OF_ROWS else OWN_BOX_BY_CHANNEL, False) for kind in CONVOLUTIONS),
]
"""All rules on one layer, and those for the input and one other on all layers."""


@pytest.mark.parametrize(("kind", "rule", "absolute"), FORMULAS)
# one of 0.01 takes more than a hundredth of some scores
@pytest.mark.filterwarnings("ignore:.*epsilon")
def test_each_rule_is_its_formula(
    kind: str, rule: Rule, absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = settled(CONVOLUTIONS[kind](), seed=3).double().eval()
    x = random(1, *SHAPE)
    w, b = plain.matrix(layer, SHAPE)
    head = random(2, len(b))
    relevance = head * (w @ x.flatten() + b)
    used, formula = rule
    if absolute and used != Gradient():
        used = replace(used, absolute=True)
    monkeypatch.setattr(plain, "ABSOLUTE", absolute)
    a = explain.attribute(Then(layer, head), x[None], everywhere(used), target=0)
    assert_near(a.values[0], formula(w, b, x.flatten(), relevance).reshape(SHAPE))


class Then(nn.Module):
    """A layer, and a weighted sum of what it gives, written so that no rule for linear maps covers
    it."""

    def __init__(self, layer: nn.Module, head: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("head", head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).flatten(1) * self.head).cumsum(1)[:, -1:]


# What is conserved


class Everything(nn.Module):
    """Most kinds of operations: functions, in place, called twice, joined, added, multiplied,
    attended."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1, bias=bias, groups=2)
        self.gate = nn.Conv2d(6, 6, 1, bias=bias)
        self.deviation = nn.LayerNorm(6, bias=bias)
        self.groups = nn.GroupNorm(2, 6, affine=bias)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, bias=bias)
        self.head = nn.Linear(12, 4, bias=bias)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) if self.bias else self.first(x)
        x = F.relu_(x)
        y = F.leaky_relu(self.twice(x), 0.2)
        y += x
        y = F.silu(self.twice(y)) * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = torch.cat([y[:, :3], F.gelu(self.groups(x))[:, 3:]], 1)
        t = F.max_pool2d(y, 2).flatten(2).transpose(1, 2)
        t = self.deviation(t) + (0.5 if self.bias else 0)
        t = t + self.attention(t, t, t, need_weights=False)[0]
        q = (t @ t.transpose(1, 2) * 0.3).softmax(-1)
        t = torch.cat([(q @ t).mean(1), F.rms_norm(t * t, (6,)).mean(1)], 1)
        return self.head(F.hardswish(t, inplace=True))


ALL_RULES = [
    "Gradient",
    "Epsilon",
    "EpsilonPlusFlat",
    "EpsilonAlpha2Beta1Box",
    "EpsilonGammaBox",
    "CPLRP",
    "ExcitationBackprop",
    "DeepTaylor",
]
"""Composites that have all rules which conserve; the others join the same rules otherwise."""


@pytest.mark.parametrize("composite", ALL_RULES)
@pytest.mark.parametrize("bias", [False, True], ids=["without biases", "with biases"])
def test_relevance_and_what_was_taken_are_the_score(bias: bool, composite: str) -> None:
    model = settled(Everything(bias)).double().eval()
    x = random(3, 2, 3, 8, 8)
    a = explain.attribute(model, x, LRP(composite), target=1)
    scale = a.values.abs().sum() + sum(t.abs().sum() for t in a.coverage.taken.values())
    assert a.delta.abs().max() <= 1e-9 * scale
    assert a.values.any()
    alone = explain.attribute(model, x[:1], LRP(composite), target=1)
    torch.testing.assert_close(a.values[:1], alone.values, rtol=1e-9, atol=1e-12)
    for cause, taken in alone.coverage.taken.items():
        torch.testing.assert_close(a[0].coverage.taken[cause], taken, rtol=1e-9, atol=1e-12)
    if not bias:
        assert a.coverage.taken.get("biases", torch.zeros(2)).abs().max() <= 1e-12


def half(factor: torch.Tensor) -> torch.Tensor:
    """A factor of a product, which gets half of what arrives."""
    return (factor + factor.detach()) / 2


ATTENTION: dict[str, Callable[..., torch.Tensor]] = {
    "as it is": lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v,
    "fused": F.scaled_dot_product_attention,
    # halves for each of a product's factors, the softmax by its derivative
    "AttnLRP": lambda q, k, v: half((half(q) @ half(k).mT / 2).softmax(-1)) @ half(v),
    # where it looks is constant
    "CPLRP": lambda q, k, v: (q @ k.mT / 2).softmax(-1).detach() @ v,
}


@pytest.mark.parametrize("composite", ["AttnLRP", "CPLRP"])
@pytest.mark.parametrize("form", ["fused", "as it is"])
def test_attention_follows_its_papers(form: str, composite: str) -> None:
    """Value times gradient, as the composite's rules change it."""

    def attended(form: str, x: torch.Tensor) -> torch.Tensor:
        t = x.reshape(-1, 1, 3, 8)
        parts = (t[..., :4] * 2, t[..., 4:] * 1.5, t[..., 2:6] * 0.7)
        return ATTENTION[form](*parts).sum((1, 2, 3))[:, None]

    x = random(7, 1, 3, 2, 4)
    model = Made(lambda net, x: attended(form, x))
    values = explain.attribute(model, x, LRP(composite), target=0).values
    (gradient,) = torch.autograd.grad(attended(composite, x.requires_grad_()), x)
    assert_near(values, x.detach() * gradient)


@pytest.mark.parametrize(
    "function", ["silu", "gelu", "hardswish", "elu", "mish", "relu6", "tanh", "sigmoid", "softplus"]
)
def test_an_activation_hands_on_all_but_what_it_makes_of_zero(function: str) -> None:
    act = getattr(F, function, None) or getattr(torch, function)
    x = random(8, 2, 3, 2, 2)
    model = Made(lambda net, x: act(x).flatten(1).sum(1, keepdim=True))
    a = explain.attribute(model, x, LRP("Epsilon"), target=0)
    zero = act(torch.zeros(1, dtype=x.dtype))
    assert torch.allclose(a.values, act(x) - zero, rtol=1e-12)
    assert torch.allclose(a.values.flatten(1).sum(1) + 12 * zero, a.score)


# The network is left alone; batches; targets; layers


def test_the_relevance_of_a_layer_is_its_value_times_what_comes_back(
    net: nn.Module, x: torch.Tensor
) -> None:
    a = explain.attribute(net, x, LRP("Gradient"), layer="relu", target=1)
    values: list[torch.Tensor] = []
    with net.relu.register_forward_hook(lambda m, i, o: values.append(o * 1) or values[-1]):
        score = net(x)[:, 1].sum()
    expected = (values[0] * torch.autograd.grad(score, values)[0]).detach()
    torch.testing.assert_close(a.values, expected.sum(1), rtol=1e-9, atol=1e-12)
    of_channels = expected.sum((2, 3)).sort(dim=1, descending=True)
    assert torch.equal(a[1:].channels.indices, of_channels.indices[1:])
    torch.testing.assert_close(a.channels.values, of_channels.values)


@pytest.mark.parametrize("composite", ["Epsilon", "EpsilonGammaBox"])
def test_concepts_add_up_to_the_whole(net: nn.Module, x: torch.Tensor, composite: str) -> None:
    """All relevance goes through the layer, so its channels' parts are all there is."""
    whole = explain.attribute(net, x, LRP(composite), target=2).values
    for layer, channels in (("relu", 6), ("avgpool", 8)):
        parts = [
            explain.attribute(net, x, LRP(composite, (layer, (c,))), target=2).values
            for c in range(channels)
        ]
        assert torch.allclose(sum(parts), whole, rtol=1e-8, atol=1e-10)
        both = explain.attribute(net, x, LRP(composite, (layer, (0, 3))), target=2).values
        assert torch.allclose(both, parts[0] + parts[3], rtol=1e-8, atol=1e-10)


def test_coverage_names_the_operations_of_each_rule(net: nn.Module, x: torch.Tensor) -> None:
    coverage = explain.attribute(net, x, LRP("EpsilonPlusFlat")).coverage
    assert coverage.by_rule == {
        "flat": {"convolution": 1},
        "zplus": {"convolution": 3},
        "epsilon": {"dense": 1},
        "gradient": {"rectifier": 4, "sum": 1, "average": 1},
    }
    assert coverage.composite == "EpsilonPlusFlat"
    assert str(coverage).startswith("flat: 1 x convolution; zplus: 3 x convolution")


def test_the_composite_suits_the_network(net: nn.Module, x: torch.Tensor) -> None:
    dense = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    attending = Everything(True).double().eval()
    for model, image, composite in (
        (net, x, "EpsilonPlusFlat"),
        (dense, x[:, :, :2, :2], "Epsilon"),
        (attending, x[..., :8, :8], "AttnLRP"),
    ):
        assert explain.attribute(model, image, "lrp").coverage.composite == composite


@pytest.mark.parametrize(
    "concept", [("layer1", ()), "layer1", (3, (1,)), ("layer1", (-1,)), ("layer1", (True,)), {}]
)
def test_a_concept_that_is_no_layer_and_channels_is_refused(concept: Any) -> None:
    with pytest.raises(MethodError, match="concept of lrp must"):
        LRP(concept=concept)


def test_what_does_not_fit_is_refused(net: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(MethodError, match="composite of lrp must"):
        LRP("epsilonplus")
    with pytest.raises(MethodError, match="concept must"):
        explain.attribute(net, x, LRP(concept=("relu", (6,))))
    with pytest.raises(LayerError, match="unused"):
        explain.attribute(net, x, LRP(concept=("unused", (1,))))


# Rules that hand relevance on as it comes


def test_what_is_passed_on_keeps_its_place_whatever_made_it() -> None:
    """Activations, a normalisation of each photo and a softmax: R of the input is R of the result,
    place by place."""

    model = Made(lambda net, x: F.layer_norm(F.gelu(x.flatten(1)), (6,)).softmax(-1).sigmoid())
    x = random(0, 2, 1, 2, 3)
    kinds = ("activation", "deviation", "softmax")
    passed = LRP(Composite("passed", ((When(kinds), ElementwisePassThrough()),)))
    a = explain.attribute(model, x, passed, target=4)
    expected = torch.zeros(2, 6).double()
    expected[:, 4] = a.score
    torch.testing.assert_close(a.values.flatten(1), expected, rtol=1e-9, atol=1e-12)
    assert a.coverage.by_rule["pass"] == {"activation": 2, "deviation": 1, "softmax": 1}


def test_what_zeros_cannot_be_given_is_named() -> None:
    """The sigmoid of zero has relevance, and no value times gradient of zero is any."""
    model = Made(lambda net, x: x.flatten(1).sigmoid())
    x = torch.tensor([[[[0.0, 2.0]]], [[[1.0, 0.0]]]]).double()
    passed = LRP(Composite("passed", ((When(("activation",)), ElementwisePassThrough()),)))
    with pytest.warns(ExplainWarning, match="zero everywhere for image 0"):
        a = explain.attribute(model, x, passed, target=0)
    assert a.values.flatten(1).tolist() == [[0, 0], [pytest.approx(float(a.score[1])), 0]]
    assert a.coverage.taken["zero inputs"].tolist() == [0.5, 0]
    assert a.delta.abs().max() < 1e-12


def test_the_norm_rule_shares_out_by_what_each_adds() -> None:
    model = Made(lambda net, x: x.flatten(1)[:, :3] * 3 + x.flatten(1)[:, 3:] + 2.0)
    x = random(0, 2, 1, 2, 3)
    norm = LRP(Composite("norm", ((When(("sum",)), ConstantTerms()),)))
    a = explain.attribute(model, x, norm, target=1)
    weights = torch.tensor([0.0, 3.0, 0.0, 0.0, 1.0, 0.0]).double()
    torch.testing.assert_close(a.values.flatten(1), weights * x.flatten(1))
    torch.testing.assert_close(a.coverage.taken["biases"], torch.full((2,), 2.0).double())
    assert a.delta.abs().max() < 1e-10


def test_balanced_sums_keep_relevance_where_shares_would_cancel() -> None:
    """Shares of 6 and -2 of 4 become 3 and 1: what arrived, by the magnitudes of the two sums."""
    model = Made(lambda net, x: (x[:, 0, 0] + x[:, 0, 1]).sum(1, keepdim=True))
    x = torch.tensor([[[[4.0, 2.0], [-3.0, 1.0]]]]).double()
    balanced = LRP(Composite("balanced", ((When(("sum",)), Balanced()),)))
    a = explain.attribute(model, x, balanced, target=0)
    assert torch.allclose(a.values.flatten(), torch.tensor([2.0, 1.0, 1.5, -0.5]).double())
    assert float(a.values.sum()) == pytest.approx(float(a.score))


@dataclass(frozen=True)
class Looking(Epsilon):
    """A rule whose author prints what it is given."""

    seen: list[str] = field(default_factory=list, compare=False)

    def back(self, step: Any, gradient: torch.Tensor, flow: Any) -> torch.Tensor:
        self.seen.append(f"{step!r} {flow!r}")
        return super().back(step, gradient, flow)


@pytest.mark.long
def test_what_a_rule_is_given_can_be_printed_of_a_deep_network() -> None:
    rule = Looking(0.0)
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(4, 4, bias=False) for _ in range(300)))
    for layer in model[1:]:
        nn.init.orthogonal_(layer.weight)
    explain.attribute(model.double(), random(0, 1, 1, 2, 2), everywhere(rule), target=1)
    assert len(rule.seen) == 300
    assert all("RelevanceFlow(count=1" in text for text in rule.seen)
