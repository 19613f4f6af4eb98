"""What operations of a forward pass are taken for: rectifiers in whatever words, and what is added
to the score."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import explain
from explain import ExplainWarning
from explain.methods import FullGrad
from tests.conftest import GuidedFunction, Made, settled

RULES = ["guidedbackprop", "deconvnet"]
Function = Callable[[torch.Tensor], torch.Tensor]


def network(*between: Function) -> nn.Module:
    """Two convolutions and a linear layer, and behind each convolution whatever is to be looked
    at."""
    one, two = between if len(between) == 2 else between * 2
    model = Made(
        lambda net, x: net.head(two(net.second(one(net.first(x)))).mean((2, 3))),
        first=nn.Conv2d(3, 4, 3),
        second=nn.Conv2d(4, 4, 3),
        head=nn.Linear(4, 3),
    )
    return settled(model).double().eval()


X = torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
EXACT = {"rtol": 0, "atol": 1e-15}


def zero(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=x.dtype)


def on_views(in_place: Callable[[torch.Tensor], Any]) -> Function:
    """Overwrite a tensor by two of its views."""

    def run(x: torch.Tensor) -> torch.Tensor:
        whole = x * 1
        in_place(whole[:, :2])
        in_place(whole[:, 2:])
        return whole

    return run


def set_item(x: torch.Tensor) -> torch.Tensor:
    x[x < 0] = 0
    return x


def operator_in_place(x: torch.Tensor) -> torch.Tensor:
    x *= x > 0
    return x


def plus_in_place(x: torch.Tensor) -> torch.Tensor:
    x += F.relu(-x)
    return x


RELUS: dict[str, Function] = {
    "module in place": nn.ReLU(inplace=True),
    "threshold": lambda x: F.threshold(x, 0, 0),
    "clamp": lambda x: x.clamp(0),
    "clamp at a tensor": lambda x: x.clamp(min=zero(x)),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "maximum by keyword": lambda x: torch.maximum(input=x, other=zero(x)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "where with zero first": lambda x: torch.where(torch.lt(zero(x), x), x, torch.zeros_like(x)),
    "where by keyword": lambda x: torch.where(condition=x > 0, input=x, other=zero(x)),
    "where as a method by keyword": lambda x: x.where(condition=x.detach() > 0, other=zero(x)),
    "times its mask": lambda x: x * (x > 0),
    "times the mask of its relu": lambda x: x * (x.detach().relu() > 0),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0),
    "set item": set_item,
    "minimum, negated": lambda x: -torch.minimum(-x, zero(x)),
    "clamp_max, negated": lambda x: -(-x).clamp_max(0),
    "less its negative part": lambda x: x - x.clamp(max=0),
    "less its minimum, a negative part": lambda x: torch.sub(x, torch.minimum(x, zero(x))),
    "minus and plus its negative part": lambda x: -x.clamp_max(0) + x,
    "plus the relu of its negative part": lambda x: x + F.relu(-x),
    "in place, plus the relu of its negative part": plus_in_place,
    "relu on views": on_views(lambda x: x.relu_()),
    "mul on views": on_views(operator_in_place),
    "set item on views": on_views(set_item),
}
ALIKE: dict[str, tuple[Function, Function]] = {
    "relu6 by clamp": (lambda x: x.clamp(0, 0.5), lambda x: F.hardtanh(x, 0, 0.5)),
    "leaky by where": (lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: F.leaky_relu(x, 0.1)),
    "leaky by maximum and minimum": (
        lambda x: x.clamp(min=0) + 0.1 * torch.minimum(x, zero(x)),
        lambda x: F.relu(x) - 0.1 * F.relu(-x),
    ),
}


@pytest.fixture(scope="module")
def of_relu() -> dict[str, explain.Attribution]:
    return explain.attribute(network(F.relu), X, RULES, target=1)


def plain_gradient(model: nn.Module) -> torch.Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(model(x)[:, 1].sum(), x)[0]


@pytest.mark.parametrize("spelling", RELUS)
def test_a_relu_follows_the_rule_in_whatever_words(
    spelling: str, of_relu: dict[str, explain.Attribution]
) -> None:
    for method, a in explain.attribute(network(RELUS[spelling]), X, RULES, target=1).items():
        torch.testing.assert_close(a.values, of_relu[method].values, **EXACT)
        is_double = spelling.endswith(("views", "negative part"))
        assert sum(a.coverage.covered.values()) == (4 if is_double else 2)
        assert not a.coverage.missed


def test_half_of_a_value_and_its_magnitude_follow_the_rule(
    of_relu: dict[str, explain.Attribution],
) -> None:
    model = network(lambda x: (x + x.abs()) / 2, F.relu)
    a = explain.attribute(model, X, "guidedbackprop", target=1)
    torch.testing.assert_close(a.values, of_relu["guidedbackprop"].values, **EXACT)


@pytest.mark.parametrize("spelling", ALIKE)
def test_a_relative_of_relu_follows_the_rule_in_whatever_words(spelling: str) -> None:
    by_words, by_name = ALIKE[spelling]
    expected = explain.attribute(network(by_name), X, RULES, target=1)
    gradient = plain_gradient(network(by_words))
    for method, a in explain.attribute(network(by_words), X, RULES, target=1).items():
        torch.testing.assert_close(a.values, expected[method].values, **EXACT)
        assert not torch.allclose(a.values, gradient)


def test_the_reference_is_the_rule_written_as_a_function(
    of_relu: dict[str, explain.Attribution],
) -> None:
    """So that the networks above do not merely agree with each other."""
    expected = plain_gradient(network(GuidedFunction.apply))
    torch.testing.assert_close(of_relu["guidedbackprop"].values, expected, **EXACT)


def standardised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean((2, 3), keepdim=True)) / x.var((2, 3), keepdim=True).clamp(min=1e-6).sqrt()


def of_tokens(x: torch.Tensor) -> torch.Tensor:
    """Weights of attention are zero just where the mask is, and so positive just where it is
    not."""
    mask = (torch.arange(x.shape[-1]) - 2 > 0).expand_as(x)
    return x.masked_fill(~mask, float("-inf")).softmax(-1) * mask


FILLING = torch.full((4, 1, 1), 0.3, dtype=torch.float64)
NO_RECTIFIERS: dict[str, Function] = {
    "a lower bound in a normalisation": standardised,
    "a mask of attention": of_tokens,
    "a mask that happens to agree": lambda x: x.exp() * torch.ones_like(x, dtype=torch.bool),
    "a mask by something else": lambda x: x * (x.flip(3) > 0),
    "the larger of two maps": lambda x: torch.maximum(x, x.flip(3)),
    "one of two maps": lambda x: torch.where(x > 0, x, FILLING),
    "a branch of zeros": lambda x: x.square() + 0 * x,
    "a lower bound below zero": lambda x: x.clamp(min=-0.1, max=1),
}


@pytest.mark.parametrize("function", NO_RECTIFIERS.values(), ids=NO_RECTIFIERS)
def test_what_is_no_rectifier_is_not_taken_for_one(function: Function) -> None:
    a = explain.attribute(network(function, F.relu), X, "guidedbackprop", target=1)
    expected = plain_gradient(network(function, GuidedFunction.apply))
    torch.testing.assert_close(a.values, expected, **EXACT)
    assert a.coverage.covered == {"relu": 1}


@pytest.mark.parametrize("method", RULES)
@pytest.mark.filterwarnings("ignore:.*not the derivative")
def test_what_cannot_be_looked_into_is_counted_and_named(method: str) -> None:
    said = rf"{method} cannot look into functions .*\(1 x GuidedFunction\)"
    with pytest.warns(ExplainWarning, match=said):
        a = explain.attribute(network(F.relu, GuidedFunction.apply), X, method, target=1)
    assert a.coverage.covered == {"relu": 1}
    assert a.coverage.missed == {"GuidedFunction": 1}


# What is added


PARTS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "up": lambda: nn.ConvTranspose2d(4, 4, 2),
    "batch": lambda: nn.BatchNorm2d(4),
    "linear": lambda: nn.Linear(4, 4),
    "head": lambda: nn.Linear(4, 3),
}


def by_modules(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(net.batch(net.conv(x)))
    x = F.relu_(net.up(x))
    x = F.relu(net.linear(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return net.head(x.mean((2, 3)))


def by_functions(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The same, by functions, operators and matrix products."""
    x = F.conv2d(x, net.conv.weight, bias=net.conv.bias)
    scale = net.batch.weight * (net.batch.running_var + net.batch.eps).rsqrt()
    shift = net.batch.bias - net.batch.running_mean * scale
    x = x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)
    x = F.conv_transpose2d(x.relu(), net.up.weight)
    x += net.up.bias[:, None, None]
    x = F.linear(x.relu().permute(0, 2, 3, 1), net.linear.weight, net.linear.bias)
    x = F.relu(x).permute(0, 3, 1, 2)
    return torch.addmm(net.head.bias, x.mean((2, 3)), net.head.weight.mT)


def biased(forward: Callable[[Any, torch.Tensor], torch.Tensor] = by_modules) -> Any:
    """A network with every kind of bias."""
    parts = {name: build() for name, build in PARTS.items()}
    return settled(Made(forward, **parts)).double().eval()


def parametrised() -> nn.Module:
    model = biased()
    parametrizations.weight_norm(model.conv)
    nn.utils.parametrize.register_parametrization(model.linear, "bias", nn.Identity())
    return model


@pytest.mark.parametrize(("rescale", "frozen"), [(False, True), (True, False)])
@pytest.mark.parametrize("build", [lambda: biased(by_functions), parametrised])
def test_fullgrad_counts_what_is_added_in_whatever_words(
    build: Callable[[], nn.Module], rescale: bool, frozen: bool
) -> None:
    a, expected = (
        explain.attribute(m.requires_grad_(not frozen), X, FullGrad(rescale=rescale), target=1)
        for m in (build(), biased())
    )
    assert a.delta.abs().max() < 1e-12
    assert expected.delta.abs().max() < 1e-12
    torch.testing.assert_close(a.values, expected.values, rtol=1e-12, atol=1e-13)


def subtract_in_place(net: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, :2] -= net.mean[:2]
    x.sub_(net.mean, alpha=0.5)
    return x


def part(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.table[:, :, : x.shape[2], : x.shape[3]]


def filled(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Adds what was made of a constant, parts of which were overwritten by what depends on the
    input."""
    whole = torch.zeros(x.shape, dtype=x.dtype)
    half = torch.full(x.shape, 0.3, dtype=x.dtype)
    whole[:, :2] = x[:, :2] * 2
    half[:, :2].copy_(x[:, :2])
    own = torch.zeros(x.shape, dtype=x.dtype)
    own[:, 1:] = net.mean[1:]
    return x + whole + half[:, :2].repeat(1, 2, 1, 1) + own


ADDITIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a part of a parameter": lambda net, x: x + part(net, x),
    "a parameter less it": lambda net, x: part(net, x) - x,
    "rsub": lambda net, x: torch.rsub(x, part(net, x), alpha=0.3),
    "a buffer taken away in place, also from a view": subtract_in_place,
    "addcmul": lambda net, x: torch.addcmul(net.mean, x, net.mean + 1),
    "constants that something is written into": filled,
    "of its shape": lambda net, x: x + torch.full_like(x, 0.3) - x.new_ones(x.shape),
    "numbers": lambda net, x: 1 - (x * 2 - 1) + 0.25,
    "channels beside its own": lambda net, x: torch.cat(
        [x[:, 1:3], part(net, x)[:, :2].expand(len(x), -1, -1, -1)], 1
    ),
    "another choice of a mask": lambda net, x: torch.where(net.mean > 0, x, part(net, x)),
    "complex numbers": lambda net, x: (
        torch.fft.ifft2(torch.fft.fft2(x) + (0.5 + 0.2j) * (net.mean + 1)).real
    ),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ADDITIONS)
def test_fullgrad_counts_parameters_buffers_and_numbers_that_are_added(
    how: str, frozen: bool
) -> None:
    """A parameter, a buffer, a part of one and a number are added to what a network computes."""
    add = ADDITIONS[how]
    parts = {"conv": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 3)}
    model = Made(lambda net, x: net.head(add(net, net.conv(x)).relu().mean((2, 3))), **parts)
    model.table = nn.Parameter(torch.zeros(1, 4, 9, 9))
    model.register_buffer("mean", torch.zeros(4, 1, 1))
    settled(model).double().requires_grad_(not frozen)
    a = explain.attribute(model, X, FullGrad(rescale=False), target=1)
    assert a.delta.abs().max() < 1e-12
    # something was there to be counted
    assert not torch.allclose((plain_gradient(model) * X).flatten(1).sum(1), a.score)


def test_what_is_added_to_scores_of_attention_is_no_map() -> None:
    """A bias for each pair of positions has the shape of a map; infinity, where a mask says so,
    adds nothing."""
    mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, -torch.inf)
    model = Made(
        lambda net, x: ((x @ x.mT + net.bias + mask).softmax(-1) @ x).mean((2, 3)),
        bias=nn.Parameter(torch.randn(3, 8, 8)),
    ).double()
    a = explain.attribute(model, X, FullGrad(rescale=False), target=1)
    torch.testing.assert_close(a.values, (plain_gradient(model) * X).abs().sum(1))


def test_fullgrad_counts_the_biases_of_a_class_token() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        places = net.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([net.token.expand(len(x), -1, -1), places], 1)
        return net.head(net.layer(tokens).relu().mean(1))

    parts = {"patches": nn.Conv2d(3, 4, 2, 2), "layer": nn.Linear(4, 5), "head": nn.Linear(5, 3)}
    model = settled(Made(forward, token=nn.Parameter(torch.zeros(1, 1, 4)), **parts)).double()
    a = explain.attribute(model, X, FullGrad(), target=1)
    assert a.delta.abs().max() < 1e-12


@pytest.mark.parametrize("batch_first", [False, True])
def test_fullgrad_lays_the_biases_inside_of_an_attention_where_they_are(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(9, 1, batch_first=batch_first)

    def in_torch(net: Any, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens if batch_first else tokens.transpose(0, 1)
        mixed = net.attention(tokens, tokens, tokens)[0]
        return mixed if batch_first else mixed.transpose(0, 1)

    def in_full(net: Any, tokens: torch.Tensor) -> torch.Tensor:
        projected = F.linear(tokens, net.attention.in_proj_weight, net.attention.in_proj_bias)
        q, k, v = projected.chunk(3, -1)
        return net.attention.out_proj((q @ k.mT / 3).softmax(-1) @ v)

    def forward(net: Any, x: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        mixed = attend(net, net.patches(x).flatten(2).transpose(1, 2))
        return net.head(mixed.square().mean(1))

    parts = {"patches": nn.Conv2d(3, 9, 2, 2), "attention": attention, "head": nn.Linear(9, 3)}
    model = settled(Made(forward, **parts)).double().eval()
    results = []
    for attend in (in_torch, in_full):
        network = copy.deepcopy(model)
        network.function = partial(forward, attend=attend)
        results.append(explain.attribute(network, X, FullGrad(), target=1))
    torch.testing.assert_close(results[0].values, results[1].values)
    torch.testing.assert_close(results[0].delta, results[1].delta)


def test_fullgrad_counts_the_biases_inside_of_an_attention() -> None:
    """Attention to a single token is linear, so that the terms add up to the score."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        token = net.conv(x).flatten(2).transpose(1, 2)
        return net.head(net.attention(token, token, token)[0][:, 0])

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    parts = {"conv": nn.Conv2d(3, 4, (8, 7)), "head": nn.Linear(4, 3), "attention": attention}
    model = settled(Made(forward, **parts)).double().eval()
    a = explain.attribute(model, X, FullGrad(rescale=False), target=1)
    assert a.delta.abs().max() < 1e-12
