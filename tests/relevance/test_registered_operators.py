"""Operators that libraries register with torch: those of torchvision have rules, all others are
named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import ops

import explain
from explain import ExplainWarning, ModelError
from explain.methods import LRP, FullGrad
from explain.relevance import COMPOSITES, Composite, Epsilon, When
from explain.relevance.steps import LINEAR
from tests.conftest import Made, settled
from tests.methods import plain_relevance as plain
from tests.relevance.test_relevance import random

Function = Callable[[Tensor], Tensor]


def network(forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> Any:
    return settled(Made(forward, first=nn.Conv2d(3, 4, 3, padding=1), **parts)).double().eval()


# Convolutions that read elsewhere


def moved(groups: int, of_offsets: int, amount: Function | None) -> Any:
    """A deformed convolution whose offsets and mask are computed from what it is given."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).relu()
        return net.head(net.moved(h, net.offset(h), net.mask(h)).relu().mean((2, 3)))

    model = network(
        forward,
        offset=nn.Conv2d(4, 18 * of_offsets, 1),
        amount=nn.Conv2d(4, 9 * of_offsets, 1),
        moved=ops.DeformConv2d(4, 6, 3, padding=1, groups=groups),
        head=nn.Linear(6, 3),
    )
    model.mask = lambda h: None if amount is None else amount(model.amount(h))
    return model


absolute = Composite(
    "absolute", ((When(LINEAR), Epsilon(1e-2, absolute=True)), *COMPOSITES["Epsilon"].rules)
)


@pytest.mark.parametrize("composite", ["Gradient", absolute], ids=["Gradient", "Epsilon"])
@pytest.mark.parametrize(
    ("groups", "of_offsets", "amount"),
    [(1, 1, None), (2, 1, torch.sigmoid), (1, 2, torch.sigmoid), (2, 2, None)],
)
@pytest.mark.filterwarnings("ignore:.*to the epsilon of its rules")
def test_where_a_deformed_convolution_reads_is_constant(
    composite: str | Composite, groups: int, of_offsets: int, amount: Function | None
) -> None:
    """It is a linear map: the matrix that its offsets and mask make of it."""
    model = moved(groups, of_offsets, amount)
    x = random(1, 1, 3, 5, 4)
    a = explain.attribute(model, x, LRP(composite), target=1)
    assert a.coverage.missed == {}
    with torch.no_grad():
        h = model.first(x).relu()
        offset = model.offset(h)
        mask = model.mask(h)
        matrix, bias = plain.matrix(lambda unit: model.moved(unit, offset, mask), h.shape[1:])
    dense = nn.Linear(80, 120).double()
    dense.load_state_dict({"weight": matrix, "bias": bias})
    head = [nn.ReLU(), nn.Unflatten(1, (6, 20)), Made(lambda net, x: x.mean(2)), model.head]
    twin = nn.Sequential(model.first, nn.ReLU(), nn.Flatten(), dense, *head)
    expected = explain.attribute(twin, x, LRP(composite), target=1)
    assert torch.allclose(a.score, expected.score)
    assert torch.allclose(a.values, expected.values, rtol=1e-9, atol=1e-12)
    assert a.values.any()


def test_what_follows_a_deformed_convolution_channel_by_channel_is_part_of_it() -> None:
    torch.manual_seed(2)
    model = moved(2, 1, torch.sigmoid)
    norm = settled(nn.BatchNorm2d(6)).double().eval()
    factor = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
    shift = torch.randn(6, 1, 1).double()
    folded = copy.deepcopy(model)
    bias = folded.moved.bias + shift.flatten()
    folded.moved.bias.data = norm.bias + factor * (bias - norm.running_mean)
    folded.moved.weight.data *= factor[:, None, None, None]
    deformed = model.moved
    model.moved = Made(lambda net, *args: norm(deformed(*args) + shift))
    x = random(1, 1, 3, 5, 4)
    alone = explain.attribute(folded, x, LRP("EpsilonPlus"), target=1)
    together = explain.attribute(model, x, LRP("EpsilonPlus"), target=1)
    assert torch.allclose(alone.score, together.score)
    assert torch.allclose(alone.values, together.values, rtol=1e-9, atol=1e-12)
    assert alone.values.any()


def test_a_mask_that_takes_away_has_no_rule() -> None:
    """The signs of weights are not those of contributions then."""
    model = moved(1, 1, lambda amount: amount)
    with pytest.warns(ExplainWarning, match="torchvision::deform_conv2d"):
        a = explain.attribute(model, random(1, 2, 3, 5, 4), LRP("EpsilonPlus"), target=1)
    assert a.coverage.missed == {"torchvision::deform_conv2d": 1}
    assert a.delta.abs().max() <= 1e-10


# What reads a map at places


BOXES = torch.tensor(
    [[0, 0.3, 0.2, 4, 4], [1, 1, 1.2, 6, 6], [0, 2, 2, 7, 7], [0, 0, 0, 3.5, 6.2]]
).double()
"""The image of each, one has three and the other one; and the corners."""


@pytest.mark.parametrize("composite", ["EpsilonPlusFlat", "AttnLRP"])
@pytest.mark.parametrize(
    ("operator", "moving"),
    [
        (ops.roi_align, True),
        (ops.roi_align, False),
        (ops.roi_pool, False),
        (ops.ps_roi_align, False),
        (ops.ps_roi_pool, False),
    ],
)
def test_boxes_are_constant_and_lose_nothing(
    operator: Callable[..., Tensor], moving: bool, composite: str
) -> None:
    """Relevance and what was taken of it add up to each photo's score, even if boxes move with the
    photo."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).relu()
        numbers = BOXES[:, 0].long()
        corners = BOXES[:, 1:] + (net.move(h.mean((2, 3)))[numbers] if moving else 0)
        cut = operator(h, torch.cat([BOXES[:, :1], corners], 1), (2, 2))
        rows = net.second(cut).relu().mean((2, 3))
        return net.head(torch.stack([rows[numbers == i].sum(0) for i in range(len(x))]))

    channels = 1 if operator.__name__.startswith("ps") else 4
    parts = {"move": nn.Linear(4, 4), "second": nn.Conv2d(channels, 5, 1), "head": nn.Linear(5, 3)}
    a = explain.attribute(
        network(forward, **parts), random(2, 2, 3, 8, 8), LRP(composite), target=1
    )
    whole = a.values.flatten(1).sum(1) + sum(a.coverage.taken.values())
    assert torch.allclose(whole, a.score, rtol=1e-9, atol=1e-11)
    assert a.values.flatten(1).any(1).all()
    assert a.coverage.missed == {}


# Operators that nothing is known of


@torch.library.custom_op("explain_tests::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x * 2 + 0.3


@torch.library.custom_op("explain_tests::several", mutates_args=())
def several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x * 3


@torch.library.custom_op("explain_tests::attended", mutates_args=())
def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def attended_backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:
    given = [tensor.detach().requires_grad_() for tensor in context.saved_tensors]
    query, key, value = given
    with torch.enable_grad():
        return torch.autograd.grad((query @ key.mT).softmax(-1) @ value, given, gradient)


def keep(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:  # torch gives these names
    ctx.save_for_backward(*inputs)


shifted.register_autograd(lambda context, gradient: gradient * 2)
several.register_autograd(
    lambda context, g, h: g * context.saved_tensors[0].cos() + h * 3, setup_context=keep
)
attended.register_autograd(attended_backward, setup_context=keep)
library = torch.library.Library("explain_tests", "FRAGMENT")
for schema, function in {
    "relu(Tensor x) -> Tensor": lambda x: torch.where(x > 0.1, x, 0.2 * x).clamp(min=-0.1),
    "pair(Tensor x) -> (Tensor, Tensor)": lambda x: (x.sin(), x.exp()),
    "grow_(Tensor(a!) x) -> Tensor(a!)": lambda x: x.mul_(2).add_(0.5),
    "grow_all(Tensor(a!) x) -> ()": lambda x: (x.mul_(2).add_(0.5), None)[1],
    "rows(Tensor(a) x) -> Tensor(a)": lambda x: x.flatten(2),
}.items():
    library.define(schema)
    library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
registered = torch.ops.explain_tests


def grown_in_part(x: Tensor) -> Tensor:
    registered.grow_(x[:, :2])
    return x


OPERATORS: dict[str, tuple[str, Function]] = {
    "a custom operator": ("shifted", shifted),
    "several results": ("several", lambda h: sum(several(h))),
    "attention": ("attended", lambda h: attended(h, h.flip(1), h)),
}
COMPOSED: dict[str, Function] = {
    "named as a function of torch": registered.relu,
    "in place": lambda h: registered.grow_(h * 1),
    "in place, a part": lambda h: grown_in_part(h * 1),
    "a view": lambda h: registered.rows(h).reshape(h.shape),
}


def operated(operator: Function) -> nn.Module:
    return network(
        lambda net, x: net.head(net.second(operator(net.first(x).relu())).relu().mean((2, 3))),
        second=nn.Conv2d(4, 4, 3),
        head=nn.Linear(4, 3),
    )


@pytest.mark.parametrize(("name", "operator"), OPERATORS.values(), ids=OPERATORS)
def test_an_operator_without_a_rule_is_named_by_every_method_that_needs_one(
    name: str, operator: Function
) -> None:
    model = operated(operator)
    x = random(3, 2, 3, 8, 8)
    methods = ["lrp", "attnlrp", "fullgrad", "guidedbackprop", "deconvnet"]
    with pytest.warns(ExplainWarning) as caught:
        together = explain.attribute(model, x, methods, target=1)
    said = [str(warning.message) for warning in caught]
    naming = [words.partition(" ")[0] for words in said if f"1 x explain_tests::{name}" in words]
    assert sorted(naming) == sorted(methods)
    with pytest.warns(ExplainWarning, match=f"1 x explain_tests::{name}"):
        alone = explain.attribute(model, x, "guidedbackprop", target=1)
    for a in (*together.values(), alone):
        assert a.coverage.missed == {f"explain_tests::{name}": 1}
        assert torch.allclose(a.score, model(x)[:, 1])


@pytest.mark.parametrize("operator", COMPOSED.values(), ids=COMPOSED)
def test_an_operator_that_is_composed_of_others_is_these_others(operator: Function) -> None:
    model = operated(operator)
    x = random(3, 2, 3, 8, 8)
    for method in (LRP("Epsilon"), FullGrad(rescale=False), "guidedbackprop"):
        a = explain.attribute(model, x, method, target=1)
        assert a.coverage.missed == {}
        assert a.delta is None or a.delta.abs().max() <= 1e-9


@torch.library.custom_op("explain_tests::without_derivative", mutates_args=())
def without_derivative(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("method", ["lrp", "fullgrad", "saliency"])
def test_an_operator_without_a_derivative_is_refused(method: str) -> None:
    with pytest.raises(ModelError, match="register_autograd"):
        explain.attribute(operated(without_derivative), random(3, 2, 3, 8, 8), method, target=1)
