"""Operators that libraries register with torch: those of torchvision have rules, all others are
named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import ops

import explain
from explain import ExplainWarning, ModelError
from explain.methods import LRP
from explain.relevance import COMPOSITES, Composite, Epsilon, When
from explain.relevance.table import LINEAR
from tests.conftest import settled
from tests.relevance.test_relevance import random

# Convolutions that read elsewhere


class Moved(nn.Module):
    """A deformed convolution whose offsets and mask are computed from what it is given, or a
    product in its place."""

    def __init__(self, groups: int, of_offsets: int, *, mask: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.offset = nn.Conv2d(4, 18 * of_offsets, 1)
        self.amount = nn.Conv2d(4, 9 * of_offsets, 1)
        self.moved = ops.DeformConv2d(4, 6, 3, padding=1, groups=groups)
        self.head = nn.Linear(6, 3)
        self.masked = mask
        self.matrix = torch.empty(0)
        settled(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if not self.matrix.numel():
            h = self.moved(h, self.offset(h), self.amount(h).sigmoid() if self.masked else None)
        else:
            bias = self.moved.bias[:, None, None].expand(6, *h.shape[2:]).flatten()
            h = F.linear(h.flatten(1), self.matrix, bias).reshape(len(h), 6, *h.shape[2:])
        return self.head(h.relu().mean((2, 3)))

    def as_product(self, x: Tensor) -> Tensor:
        """The matrix of the deformed convolution for one photo: its columns are what it makes of
        each unit."""
        with torch.no_grad():
            h = self.first(x).relu()
            offset = self.offset(h)
            mask = self.amount(h).sigmoid() if self.masked else None
            units = torch.eye(h.numel(), dtype=h.dtype).reshape(-1, *h.shape[1:])
            weight = self.moved.weight
            padding = self.moved.padding
            columns = [
                ops.deform_conv2d(u[None], offset, weight, None, padding=padding, mask=mask)
                for u in units
            ]
            return torch.cat(columns).flatten(1).T.contiguous()


absolute = Composite(
    "absolute", ((When(LINEAR), Epsilon(1e-2, absolute=True)), *COMPOSITES["Epsilon"].rules)
)


@pytest.mark.parametrize("composite", ["Gradient", absolute], ids=["Gradient", "Epsilon"])
@pytest.mark.parametrize(
    ("groups", "of_offsets", "mask"), [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, False)]
)
@pytest.mark.filterwarnings("ignore:.*to the epsilon of its rules")
def test_where_a_deformed_convolution_reads_is_constant(
    composite: str | Composite, groups: int, of_offsets: int, mask: bool
) -> None:
    """It is a linear map: the matrix that its offsets and mask make of it."""
    model = Moved(groups, of_offsets, mask=mask).double()
    x = random(1, 1, 3, 5, 4)
    found = explain.attribute(model, x, LRP(composite), target=1)
    score = model(x)
    model.matrix = model.as_product(x)
    assert torch.allclose(model(x), score)
    expected = explain.attribute(model, x, LRP(composite), target=1)
    assert torch.allclose(found.values, expected.values, rtol=1e-9, atol=1e-12)
    assert found.values.any()
    assert found.coverage.missed == {}


# What reads a map at places


class Boxed(nn.Module):
    """Maps cut out by boxes, of which one photo has three and the other one; the boxes may move
    with the photo."""

    boxes = torch.tensor(
        [[0, 0.3, 0.2, 4, 4], [1, 1, 1.2, 6, 6], [0, 2, 2, 7, 7], [0, 0, 0, 3.5, 6.2]]
    ).double()

    def __init__(self, operator: Callable[..., Tensor], *, moving: bool) -> None:
        super().__init__()
        self.operator = operator
        self.moving = moving
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.move = nn.Linear(4, 4)
        self.head = nn.Linear(5, 3)
        self.second = nn.Conv2d(1 if operator.__name__.startswith("ps") else 4, 5, 1)
        settled(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        numbers = self.boxes[:, 0].long()
        places = self.boxes[:, 1:] + (self.move(h.mean((2, 3)))[numbers] if self.moving else 0)
        cut = self.operator(h, torch.cat([self.boxes[:, :1], places], 1), (2, 2))
        rows = self.second(cut).relu().mean((2, 3))
        return self.head(torch.stack([rows[numbers == i].sum(0) for i in range(len(x))]))


@pytest.mark.parametrize("composite", ["EpsilonPlusFlat", "AttnLRP"])
@pytest.mark.parametrize(
    ("operator", "moving"),
    [
        (ops.roi_align, True),
        *(
            (each, False)
            for each in (ops.roi_align, ops.roi_pool, ops.ps_roi_align, ops.ps_roi_pool)
        ),
    ],
)
def test_boxes_are_constant_and_lose_nothing(
    operator: Callable[..., Tensor], moving: bool, composite: str
) -> None:
    """Relevance and what was taken of it add up to each photo's score."""
    model = Boxed(operator, moving=moving).double()
    x = random(2, 2, 3, 8, 8)
    a = explain.attribute(model, x, LRP(composite), target=1)
    whole = a.values.flatten(1).sum(1) + sum(a.coverage.taken.values())
    assert torch.allclose(whole, model(x)[:, 1], rtol=1e-9, atol=1e-11)
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


OPERATORS: dict[str, tuple[str, int, Callable[[Tensor], Tensor]]] = {
    "a custom operator": ("shifted", 1, shifted),
    "several results": ("several", 1, lambda h: sum(several(h))),
    "attention": ("attended", 1, lambda h: attended(h, h.flip(1), h)),
    "named as a function of torch": ("relu", 1, registered.relu),
    "in place": ("grow_", 1, lambda h: registered.grow_(h * 1)),
    "in place, a part": ("grow_", 1, lambda h: grown_in_part(h * 1)),
    "a view": ("rows", 1, lambda h: registered.rows(h).reshape(h.shape)),
}


class Operated(nn.Module):
    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)
        settled(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.operator(self.first(x).relu())).relu().mean((2, 3)))


@pytest.mark.parametrize("form", OPERATORS)
def test_an_operator_without_a_rule_is_named_by_every_method_that_needs_one(form: str) -> None:
    name, count, operator = OPERATORS[form]
    model = Operated(operator).double()
    x = random(3, 2, 3, 8, 8)
    asked = ["lrp", "attnlrp", "fullgrad", "guidedbackprop", "deconvnet"]
    with pytest.warns(ExplainWarning) as warned:
        together = explain.attribute(model, x, asked, target=1)
    for method in asked:
        said = [str(each.message) for each in warned if str(each.message).startswith(f"{method} ")]
        assert sum(f"{count} x explain_tests::{name}" in each for each in said) == 1
    with pytest.warns(ExplainWarning, match=f"{count} x explain_tests::{name}"):
        alone = explain.attribute(model, x, "guidedbackprop", target=1)
    for found in (*together.values(), alone):
        assert found.coverage.missed == {f"explain_tests::{name}": count}
        assert torch.allclose(found.score, model(x)[:, 1])


@torch.library.custom_op("explain_tests::without_derivative", mutates_args=())
def without_derivative(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("method", ["lrp", "fullgrad", "saliency"])
def test_an_operator_without_a_derivative_is_refused(method: str) -> None:
    with pytest.raises(ModelError, match="register_autograd"):
        explain.attribute(
            Operated(without_derivative).double(), random(3, 2, 3, 8, 8), method, target=1
        )


def test_a_mask_that_takes_away_has_no_rule() -> None:
    """The signs of weights are not those of contributions then."""

    class Negative(Moved):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            return self.head(self.moved(h, self.offset(h), self.amount(h)).relu().mean((2, 3)))

    model = Negative(1, 1, mask=True).double()
    x = random(1, 2, 3, 5, 4)
    with pytest.warns(ExplainWarning, match="torchvision::deform_conv2d"):
        a = explain.attribute(model, x, LRP("EpsilonPlus"), target=1)
    assert a.coverage.missed == {"torchvision::deform_conv2d": 1}
    assert a.delta.abs().max() <= 1e-10
