"""Relevance at the edges: through a layer alone, behind steps in place, of what is not registered,
of odd values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import LRP, DeepLIFT, FullGrad
from tests.conftest import settled
from tests.methods import plain_relevance as plain
from tests.relevance.test_relevance import Then, assert_near, random


class Residual(nn.Module):
    """Two ways side by side: by a convolution and a normalisation, and by another convolution; and
    one past both."""

    def __init__(self, *, past: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 1)
        self.one = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.other = nn.Conv2d(3, 3, 1)
        self.beside = nn.Conv2d(2, 3, 3, padding=1)
        self.head = nn.Linear(48, 2)
        self.unused = nn.Conv2d(2, 1, 1)
        self.past = past
        settled(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        y = self.stem(x).relu()
        y = (self.norm(self.one(y)).relu() + self.other(y)).relu()
        return self.head((y + self.beside(x).relu() if self.past else y).flatten(1))


@torch.no_grad()
def test_what_goes_through_a_layer_in_a_residual_block_is_what_a_plain_calculation_says() -> None:
    """Each channel of one branch, by LRP-epsilon, matrix by matrix."""
    model = Residual(past=True).double().eval()
    x = random(1, 1, 2, 4, 4)
    y = model.stem(x).relu()
    u = model.norm(model.one(y)).relu()
    z = u + model.other(y)
    a = z.relu()
    b = model.beside(x).relu()
    score = model.head((a + b).flatten(1))[0] * torch.tensor([0.0, 1.0])
    of_sum = plain.epsilon(model.head.weight, model.head.bias, (a + b).flatten(), score)
    of_a = (
        of_sum
        * a.flatten()
        / (a + b).flatten().where((a + b).flatten() != 0, torch.tensor(1.0).double())
    )
    of_u = of_a * u.flatten() / z.flatten()  # the norm rule at the sum
    both = plain.matrix(lambda t: model.norm(model.one(t)), (3, 4, 4))
    stem = plain.matrix(model.stem, (2, 4, 4))
    for channel in range(3):
        kept = torch.zeros(1, 3, 4, 4, dtype=torch.float64)
        kept[:, channel] = 1
        of_y = plain.epsilon(*both, y.flatten(), of_u * kept.flatten(), rectified=True)
        expected = plain.epsilon(*stem, x.flatten(), of_y, rectified=True).reshape(x.shape)
        found = explain.attribute(model, x, LRP("Epsilon", ("norm", (channel,))), target=1).values
        assert_near(found, expected, 1e-9)


# A normalisation behind steps in place


class InBetween(nn.Module):
    """A convolution, something done to its result in place, and a normalisation."""

    def __init__(self, step: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.step = step
        settled(self, seed=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.step(y)
        return self.norm(y)


@pytest.mark.parametrize("rule", ["epsilon", "alphabeta", "gamma"])
@pytest.mark.parametrize(
    "step",
    [lambda y: y.neg_(), lambda y: y.transpose_(-1, -2), lambda y: y.mul_(-2)],
    ids=["neg_", "transpose_", "mul_"],
)
def test_a_convolution_and_a_normalisation_are_one_map_only_if_nothing_lies_between(
    step: Callable[[torch.Tensor], Any], rule: str
) -> None:
    """The same network with the step out of place has the same relevance."""

    class Apart(InBetween):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x) * 1
            self.step(y)
            return self.norm(y * 1)

    composite = {
        "epsilon": "Epsilon",
        "alphabeta": "EpsilonAlpha2Beta1",
        "gamma": "EpsilonGammaBox",
    }[rule]
    x = random(1, 2, 3, 6, 6)
    head = random(2, 64)
    found, expected = (
        explain.attribute(
            Then(made(step).double().eval(), head), x, LRP(composite), target=lambda o: o[:, 0]
        ).values
        for made in (InBetween, Apart)
    )
    assert_near(found, expected, 1e-12)


# Weights that no module has registered


@pytest.mark.parametrize("method", [LRP("EpsilonPlusFlat"), DeepLIFT()], ids=str)
@pytest.mark.parametrize("kind", ["layer", "group", "convolution", "linear", "parameter"])
def test_weights_in_a_plain_list_are_weights(kind: str, method: Any) -> None:
    """A list of modules and a ``ModuleList`` of the same are explained alike."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = {
                "layer": lambda: nn.LayerNorm([4, 5, 5]),
                "group": lambda: nn.GroupNorm(2, 4),
                "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
                "linear": lambda: nn.Linear(5, 5),
                "parameter": lambda: nn.ParameterList([torch.rand(5) + 1]),
            }[kind]
            self.stem = nn.Conv2d(3, 4, 1)
            self.head = nn.Linear(100, 3)
            self.blocks: Any = nn.ModuleList([made()])
            settled(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x)
            block = self.blocks[0]
            return self.head((y * block[0] if kind == "parameter" else block(y)).relu().flatten(1))

    model = Listed().double().eval()
    x = random(1, 2, 3, 5, 5)
    expected = explain.attribute(model, x, method, target=1)
    inner = [*model.blocks]
    del model.blocks
    model.blocks = inner
    assert len([*model.parameters()]) == 4
    found = explain.attribute(model, x, method, target=1)
    assert torch.allclose(found.values, expected.values, rtol=1e-10, atol=1e-12)
    assert found.delta.abs().max() <= 1e-9
    if isinstance(method, LRP):
        assert found.coverage.by_rule == expected.coverage.by_rule


# Complex numbers, and values without a dimension


class Spectral(nn.Module):
    """A product of complex numbers with weights: a linear map, after which a real part is taken."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 3)
        self.function = function
        self.weight = nn.Parameter(torch.complex(random(1, 4, 4), random(2, 4, 4)))
        settled(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(self.first(x).relu().to(torch.complex128), self.weight)
        return self.head(y.real.mean((2, 3)))


@pytest.mark.parametrize("composite", ["Epsilon", "EpsilonGammaBox"])
@pytest.mark.parametrize(
    "function",
    [
        lambda y, w: torch.einsum("nchw,cd->ndhw", y, w),
        lambda y, w: (y.movedim(1, -1) @ w).movedim(-1, 1),
        lambda y, w: torch.fft.ifft2(torch.fft.fft2(y) * w[0][:, None, None] + 0.5j),
        lambda y, w: torch.cat([y[:, :2] - 1j, 2j * y[:, 2:]], 1),
    ],
    ids=["einsum", "matmul", "spectrum", "sums and joins"],
)
def test_complex_numbers_pass_relevance_in_proportion(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], composite: str
) -> None:
    """A linear map without a rule: the relevance of the real map that it is, by LRP-0; constants
    take their share."""
    model = Spectral(function).double().eval()
    x = random(3, 1, 3, 4, 4)
    a = explain.attribute(model, x, LRP(composite), target=1)
    assert a.delta.abs().max() <= 1e-10
    if composite == "Epsilon":
        y = model.first(x).relu().detach()
        with torch.no_grad():
            w, b = plain.matrix(
                lambda t: model.function(t.to(torch.complex128), model.weight).real, y.shape[1:]
            )
            first = plain.matrix(model.first, x.shape[1:])
            head = plain.matrix(lambda t: model.head(t.mean((2, 3))), y.shape[1:])
        z = w @ y.flatten() + b
        of_z = plain.epsilon(
            *head, z, (head[0] @ z + head[1]) * torch.eye(3, dtype=torch.float64)[1]
        )
        of_y = plain.gradient(w, b, y.flatten(), of_z)
        expected = plain.epsilon(*first, x.flatten(), of_y, rectified=True).reshape(x.shape)
        assert_near(a.values, expected)


@pytest.mark.parametrize(
    "function",
    [
        torch.sigmoid,
        torch.tanh,
        F.softplus,
        F.gelu,
        F.silu,
        torch.exp,
        lambda y: F.silu(y * 1, inplace=True),
        F.relu,
        lambda y: y + 0.3,
        lambda y: torch.where(y > 9, y, 0.5),
        lambda y: 2 - y,
        lambda y: y / 3,
    ],
    ids=[
        *("sigmoid", "tanh", "softplus", "gelu", "silu", "exp", "silu in place", "relu"),
        *("sum", "choice", "difference", "quotient"),
    ],
)
def test_values_without_a_dimension_have_relevance(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """What a network makes of one number in all is what it makes of a row of one."""

    class Single(nn.Module):
        def __init__(self, *, row: bool) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)
            self.head = nn.Linear(4, 3)
            self.row = row
            settled(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).relu()
            one = function(y.mean((0, 1, 2, 3), keepdim=self.row) if self.row else y.mean())
            return self.head(y.mean((2, 3))) * one.flatten()[0] + one.flatten()[0]

    x = random(3, 1, 3, 4, 4)
    found, expected = (
        explain.attribute(Single(row=row).double().eval(), x, LRP("EpsilonGammaBox"), target=1)
        for row in (False, True)
    )
    assert torch.allclose(found.values, expected.values, rtol=1e-10, atol=1e-13)
    assert found.delta.abs().max() <= 1e-10


class Routed(nn.Module):
    """Tokens of all images go to one of two experts, which write their results in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.gate = nn.Linear(4, 2)
        nn.init.normal_(self.gate.weight, std=3)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(x).relu().flatten(2).transpose(1, 2)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            mixed[here] = expert(tokens[here]).relu() * weight[here].unsqueeze(-1)
        return self.head(mixed.mean(1))


def test_what_rules_miss_is_counted_for_the_image_whose_token_it_was() -> None:
    """Experts see the tokens of several images in one tensor; each image has its own delta."""
    torch.manual_seed(0)
    model = Routed().double().eval()
    x = random(3, 3, 2, 4, 4)
    together = explain.attribute(model, x, "lrp", target=1)
    alone = [explain.attribute(model, image[None], "lrp", target=1) for image in x]
    assert together.delta is not None
    torch.testing.assert_close(together.delta, torch.cat([a.delta for a in alone]))
    torch.testing.assert_close(together.values, torch.cat([a.values for a in alone]))


def test_a_baseline_whose_tokens_go_to_other_experts_is_refused_by_differences() -> None:
    torch.manual_seed(0)
    model = Routed().double().eval()
    with pytest.raises(explain.ExplainError):
        explain.attribute(model, random(3, 1, 2, 4, 4), DeepLIFT(), target=1)


class Mirrored(nn.Module):
    """The mean of the scores of each image and of its mirror image, which run in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.body(torch.cat([x, x.flip(-1)]))
        return scores.unflatten(0, (2, len(x))).mean(0)


def test_fullgrad_counts_what_is_added_to_each_image_where_a_network_doubles_its_batch() -> None:
    torch.manual_seed(0)
    a = explain.attribute(
        Mirrored().double().eval(), random(3, 3, 2, 4, 4), FullGrad(rescale=False), target=1
    )
    torch.testing.assert_close(a.delta, torch.zeros(3, dtype=torch.float64))


class ByAddmm(nn.Module):
    """A linear head, as a module or as a product of matrices that a bias is added to."""

    def __init__(self, *, module: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(12, 2)
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).relu().flatten(1)
        return self.head(y) if self.module else torch.addmm(self.head.bias, y, self.head.weight.T)


def test_a_product_that_a_bias_is_added_to_is_a_linear_map() -> None:
    torch.manual_seed(0)
    model = ByAddmm(module=True).double().eval()
    x = random(3, 2, 2, 4, 4)
    expected = explain.attribute(model, x, "lrp", target=1)
    model.module = False
    found = explain.attribute(model, x, "lrp", target=1)
    torch.testing.assert_close(found.values, expected.values)
    torch.testing.assert_close(found.delta, expected.delta)
