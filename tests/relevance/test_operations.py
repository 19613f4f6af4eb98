"""What operations of a forward pass are taken for: rectifiers in whatever words, and what is added
to the score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import explain
from explain import ExplainWarning
from explain.methods import FullGrad
from tests.conftest import GuidedFunction, settled

RULES = ["guidedbackprop", "deconvnet"]
Function = Callable[[torch.Tensor], torch.Tensor]


class Network(nn.Module):
    """Two convolutions and a linear layer, and behind each convolution whatever is to be looked
    at."""

    def __init__(self, *between: Function) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)
        self.between = between if len(between) == 2 else between * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.between
        return self.head(two(self.second(one(self.first(x)))).mean((2, 3)))


def network(*between: Function) -> nn.Module:
    return settled(Network(*between)).double().eval()


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


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


RELUS: dict[str, Function] = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "method in place": lambda x: x.relu_(),
    "threshold": lambda x: F.threshold(x, 0, 0),
    "clamp": lambda x: x.clamp(0),
    "clamp in place": lambda x: x.clamp_(min=0),
    "clamp at a tensor": lambda x: x.clamp(min=zero(x)),
    "clamp_min": lambda x: x.clamp_min(0),
    "clip": lambda x: x.clip(0),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "maximum by keyword": lambda x: torch.maximum(input=x, other=zero(x)),
    "fmax": lambda x: torch.fmax(x, zero(x)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "where turned round": lambda x: torch.where(x < 0, 0.0, x),
    "where with zero first": lambda x: torch.where(torch.lt(zero(x), x), x, torch.zeros_like(x)),
    "where by keyword": lambda x: torch.where(condition=x > 0, input=x, other=zero(x)),
    "where as a method by keyword": lambda x: x.where(condition=x.detach() > 0, other=zero(x)),
    "times its mask": lambda x: x * (x > 0),
    "times ones and zeros": lambda x: x * (x > 0).to(x.dtype),
    "times the mask of its relu": lambda x: x * (x.detach().relu() > 0),
    "mul in place": lambda x: x.mul_(x > 0),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0),
    "set item": set_item,
    "minimum, negated": lambda x: -torch.minimum(-x, zero(x)),
    "clamp_max, negated": lambda x: -(-x).clamp_max(0),
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
def of_relu(image: torch.Tensor) -> dict[str, explain.Attribution]:
    return explain.attribute(network(F.relu), image, RULES, target=1)


@pytest.mark.parametrize("spelling", RELUS)
def test_a_relu_follows_the_rule_in_whatever_words(
    spelling: str, image: torch.Tensor, of_relu: dict[str, explain.Attribution]
) -> None:
    maps = explain.attribute(network(RELUS[spelling]), image, RULES, target=1)
    for method, found in maps.items():
        torch.testing.assert_close(found.values, of_relu[method].values, rtol=0, atol=1e-15)
        assert sum(found.coverage.covered.values()) == (4 if spelling.endswith("views") else 2)
        assert not found.coverage.missed


@pytest.mark.parametrize("spelling", ALIKE)
def test_a_relative_of_relu_follows_the_rule_in_whatever_words(
    spelling: str, image: torch.Tensor
) -> None:
    by_words, by_name = ALIKE[spelling]
    maps = explain.attribute(network(by_words), image, [*RULES, "inputxgradient"], target=1)
    expected = explain.attribute(network(by_name), image, RULES, target=1)
    for method in RULES:
        found = maps[method].values
        torch.testing.assert_close(found, expected[method].values, rtol=0, atol=1e-15)
        assert not torch.allclose(found * image, maps["inputxgradient"].values)


def test_the_reference_is_the_rule_written_as_a_function(image: torch.Tensor) -> None:
    """So that the networks above do not merely agree with each other."""
    net = network(GuidedFunction.apply)
    x = image.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net(x)[:, 1].sum(), x)
    found = explain.attribute(network(F.relu), image, "guidedbackprop", target=1)
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-15)


def standardised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean((2, 3), keepdim=True)) / x.var((2, 3), keepdim=True).clamp(min=1e-6).sqrt()


def of_tokens(x: torch.Tensor) -> torch.Tensor:
    """Weights of attention are zero just where the mask is, and so positive just where it is
    not."""
    mask = (torch.arange(x.shape[-1]) - 2 > 0).expand_as(x)
    return x.masked_fill(~mask, float("-inf")).softmax(-1) * mask


FILLING = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
NO_RECTIFIERS: dict[str, Function] = {
    "a lower bound in a normalisation": standardised,
    "a mask of attention": of_tokens,
    "a mask that happens to agree": lambda x: x.exp() * torch.ones_like(x, dtype=torch.bool),
    "a mask by something else": lambda x: x * (x.flip(3) > 0),
    "the larger of two maps": lambda x: torch.maximum(x, x.flip(3)),
    "one of two maps": lambda x: torch.where(x > 0, x, FILLING),
    "a lower bound below zero": lambda x: x.clamp(min=-0.1, max=1),
}


@pytest.mark.parametrize("what", NO_RECTIFIERS)
def test_what_is_no_rectifier_is_not_taken_for_one(what: str, image: torch.Tensor) -> None:
    model = network(NO_RECTIFIERS[what], F.relu)
    found = explain.attribute(model, image, "guidedbackprop", target=1)
    x = image.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        network(NO_RECTIFIERS[what], GuidedFunction.apply)(x)[:, 1].sum(), x
    )
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-15)
    assert found.coverage.covered == {"relu": 1}


class Hidden(torch.autograd.Function):
    """A rectifier that nobody can look into."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (ctx.saved_tensors[0] > 0)


@pytest.mark.parametrize("method", RULES)
def test_what_cannot_be_looked_into_is_counted_and_named(method: str, image: torch.Tensor) -> None:
    with pytest.warns(
        ExplainWarning, match=rf"{method} cannot look into functions .*\(1 x Hidden\)"
    ):
        found = explain.attribute(network(F.relu, Hidden.apply), image, method, target=1)
    assert found.coverage.covered == {"relu": 1}
    assert found.coverage.missed == {"Hidden": 1}


# What is added


class Modules(nn.Module):
    """Every kind of bias, added by modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.up = nn.ConvTranspose2d(4, 4, 2)
        self.batch = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.batch(self.conv(x)))
        x = F.relu_(self.up(x))
        x = F.relu(self.linear(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class Functions(Modules):
    """The same, by functions, operators and matrix products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = self.batch
        x = F.conv2d(x, self.conv.weight, bias=self.conv.bias)
        scale = batch.weight * (batch.running_var + batch.eps).rsqrt()
        x = x * scale.view(1, -1, 1, 1) + (batch.bias - batch.running_mean * scale).view(
            1, -1, 1, 1
        )
        x = F.conv_transpose2d(x.relu(), self.up.weight)
        x += self.up.bias[:, None, None]
        x = F.relu(
            F.linear(x.relu().permute(0, 2, 3, 1), self.linear.weight, self.linear.bias)
        ).permute(0, 3, 1, 2)
        return torch.addmm(self.head.bias, x.mean((2, 3)), self.head.weight.mT)


def weight_norm(model: Modules) -> nn.Module:
    parametrizations.weight_norm(model.conv)
    nn.utils.parametrize.register_parametrization(model.linear, "bias", nn.Identity())
    return model


SAME: dict[str, Callable[[], nn.Module]] = {
    "functions": Functions,
    "parametrised modules": lambda: weight_norm(settled(Modules()).double()),
}


@pytest.mark.parametrize(("rescale", "frozen"), [(False, True), (True, False)])
@pytest.mark.parametrize("form", SAME)
def test_fullgrad_counts_what_is_added_in_whatever_words(
    form: str, rescale: bool, frozen: bool, image: torch.Tensor
) -> None:
    model = settled(Modules()).double().eval()
    other = SAME[form]().double().eval()
    if form != "parametrised modules":
        other.load_state_dict(model.state_dict())
    found = [
        explain.attribute(m.requires_grad_(not frozen), image, FullGrad(rescale=rescale), target=1)
        for m in (model, other)
    ]
    for each in found:
        assert each.delta.abs().max() < 1e-12
    torch.testing.assert_close(found[1].values, found[0].values, rtol=1e-12, atol=1e-13)


class Adds(nn.Module):
    """Adds a parameter, a buffer, a part of one and a number to what it computes."""

    def __init__(self, add: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 3)
        self.add = add
        self.table = nn.Parameter(torch.zeros(1, 4, 9, 9))
        self.register_buffer("mean", torch.zeros(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.add(self, self.conv(x)).relu().mean((2, 3)))


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
    "complex numbers": lambda net, x: (
        torch.fft.ifft2(torch.fft.fft2(x) + (0.5 + 0.2j) * (net.mean + 1)).real
    ),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ADDITIONS)
def test_fullgrad_counts_parameters_buffers_and_numbers_that_are_added(
    how: str, frozen: bool, image: torch.Tensor
) -> None:
    model = settled(Adds(ADDITIONS[how])).double().eval().requires_grad_(not frozen)
    found = explain.attribute(model, image, FullGrad(rescale=False), target=1)
    assert found.delta.abs().max() < 1e-12
    x = image.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    # something was there to be counted
    assert not torch.allclose((gradient * x).flatten(1).sum(1), found.score)


def test_what_is_added_to_scores_of_attention_is_no_map(image: torch.Tensor) -> None:
    """A bias for each pair of positions has the shape of a map; infinity, where a mask says so,
    adds nothing."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3, 8, 8))
            self.head = nn.Linear(3, 2)
            self.register_buffer(
                "mask", torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, -torch.inf)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((((x @ x.mT + self.bias) + self.mask).softmax(-1) @ x).mean((2, 3)))

    model = Attends().double()
    torch.nn.init.normal_(model.bias)
    found, plain = (
        explain.attribute(model, image, method, target=1).values
        for method in (FullGrad(rescale=False), "inputxgradient")
    )
    torch.testing.assert_close(found, plain.abs().sum(1))


def test_fullgrad_counts_the_biases_inside_of_an_attention(image: torch.Tensor) -> None:
    """Attention to a single token is linear, so that the terms add up to the score."""

    class OneToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, (8, 7))
            self.head = nn.Linear(4, 3)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            token = self.conv(x).flatten(2).transpose(1, 2)
            return self.head(self.attention(token, token, token)[0][:, 0])

    model = settled(OneToken()).double().eval()
    torch.nn.init.normal_(model.attention.in_proj_bias)
    found = explain.attribute(model, image, FullGrad(rescale=False), target=1)
    assert found.delta.abs().max() < 1e-12
