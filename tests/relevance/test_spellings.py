"""The same function has the same values, however it is written: by modules, functions, operators of
ATen, in place, in a loop, or by its definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import LRP
from tests.conftest import Made, settled
from tests.relevance.test_relevance import random

aten = torch.ops.aten
Function = Callable[[Any, Tensor], Tensor]
METHODS: list[Any] = [
    LRP("Epsilon"),
    LRP("EpsilonPlusFlat"),
    LRP("EpsilonAlpha2Beta1Box"),
    "attnlrp",
    "deeplift",
    "fullgrad",
    "guidedbackprop",
    "deconvnet",
    "saliency",
]


def in_place(change: Callable[[Tensor], Any]) -> Function:
    """A function that overwrites a copy."""

    def run(net: Any, h: Tensor) -> Tensor:
        copy = h.clone()
        change(copy)
        return copy

    return run


def convolved(net: Any, h: Tensor) -> Tensor:
    """A convolution by its definition: a product with unfolded windows."""
    windows = F.unfold(h, 3, padding=1)
    y = net.conv.weight.flatten(1) @ windows + net.conv.bias[:, None]
    return y.unflatten(2, h.shape[2:])


def by_groups(net: Any, h: Tensor) -> Tensor:
    weights = net.grouped.weight.chunk(2)
    biases = net.grouped.bias.chunk(2)
    parts = zip(h.chunk(2, 1), weights, biases, strict=True)
    return torch.cat([F.conv2d(part, w, b, padding=1) for part, w, b in parts], 1)


def batch_normalised(net: Any, h: Tensor) -> Tensor:
    y = net.conv(h)
    return F.batch_norm(
        y, net.norm.running_mean, net.norm.running_var, net.norm.weight, net.norm.bias
    )


def one_by_one(net: Any, h: Tensor) -> Tensor:
    return torch.cat([net.conv(image[None]) for image in h])


def written_into(net: Any, h: Tensor) -> Tensor:
    y = net.conv(h)
    result = torch.empty_like(y)
    result[:, :2] = y[:, :2]
    result[:, 2:] = y[:, 2:]
    return result


def constant(net: Any, h: Tensor) -> Tensor:
    """The bias of each image, to write into."""
    return net.point.bias.repeat(len(h), 1)


def tokens(h: Tensor) -> Tensor:
    return h.flatten(2).mT


def attended(net: Any, t: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
    return softmax(t @ t.mT / 2) @ t


def heads_one_by_one(net: Any, t: Tensor) -> Tensor:
    parts = t.chunk(2, -1)
    return torch.cat([(p @ p.mT / math.sqrt(2)).softmax(-1) @ p for p in parts], -1)


def heads_at_once(net: Any, t: Tensor) -> Tensor:
    p = t.unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(p, p, p).transpose(1, 2).flatten(2)


PAIRS: dict[str, tuple[Function, Function]] = {
    # convolutions and linear layers
    "conv2d": (lambda n, h: n.conv(h), lambda n, h: F.conv2d(h, n.conv.weight, n.conv.bias, 1, 1)),
    "conv2d by keywords": (
        lambda n, h: n.conv(h),
        lambda n, h: F.conv2d(padding=1, bias=n.conv.bias, weight=n.conv.weight, input=h),
    ),
    "aten.convolution": (
        lambda n, h: n.conv(h),
        lambda n, h: aten.convolution(
            h, n.conv.weight, n.conv.bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        ),
    ),
    "a bias added": (
        lambda n, h: n.conv(h),
        lambda n, h: F.conv2d(h, n.conv.weight, None, 1, 1) + n.conv.bias[:, None, None],
    ),
    "a bias added in place": (
        lambda n, h: n.conv(h),
        lambda n, h: F.conv2d(h, n.conv.weight, None, 1, 1).add_(n.conv.bias[:, None, None]),
    ),
    "padded before": (
        lambda n, h: n.conv(h),
        lambda n, h: F.conv2d(F.pad(h, (1, 1, 1, 1)), n.conv.weight, n.conv.bias),
    ),
    "same padding": (
        lambda n, h: n.conv(h),
        lambda n, h: F.conv2d(h, n.conv.weight, n.conv.bias, padding="same"),
    ),
    "channels last": (
        lambda n, h: n.conv(h),
        lambda n, h: n.conv(h.to(memory_format=torch.channels_last)),
    ),
    "groups": (lambda n, h: n.grouped(h), by_groups),
    "images one by one": (lambda n, h: n.conv(h), one_by_one),
    "written into memory": (lambda n, h: n.conv(h), written_into),
    "a point": (
        lambda n, h: F.conv2d(h, n.point.weight[..., None, None], n.point.bias),
        lambda n, h: n.point(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    ),
    "linear": (
        lambda n, h: n.point(tokens(h)),
        lambda n, h: tokens(h) @ n.point.weight.T + n.point.bias,
    ),
    "linear of rows": (
        lambda n, h: n.point(tokens(h)),
        lambda n, h: n.point(tokens(h).flatten(0, 1)).unflatten(0, (len(h), -1)),
    ),
    "linear of tokens first": (
        lambda n, h: n.point(tokens(h)),
        lambda n, h: n.point(tokens(h).transpose(0, 1)).transpose(0, 1),
    ),
    "addmm": (
        lambda n, h: n.point(tokens(h)),
        lambda n, h: torch.addmm(n.point.bias, tokens(h).reshape(-1, 4), n.point.weight.T).reshape(
            len(h), -1, 4
        ),
    ),
    "addmm in place": (
        lambda n, h: n.point(h.mean((2, 3))),
        lambda n, h: constant(n, h).addmm_(h.mean((2, 3)), n.point.weight.T),
    ),
    "baddbmm in place": (
        lambda n, h: n.point(h.mean((2, 3))),
        lambda n, h: constant(n, h)[None].baddbmm_(h.mean((2, 3))[None], n.point.weight.T[None])[0],
    ),
    "addmv in place": (
        lambda n, h: n.point(h.mean((2, 3))),
        lambda n, h: torch.stack(
            [n.point.bias.clone().addmv_(n.point.weight, image) for image in h.mean((2, 3))]
        ),
    ),
    "einsum": (
        lambda n, h: F.linear(tokens(h), n.point.weight),
        lambda n, h: torch.einsum("ntc,kc->ntk", tokens(h), n.point.weight),
    ),
    "tensordot": (
        lambda n, h: F.linear(tokens(h), n.point.weight),
        lambda n, h: torch.tensordot(tokens(h), n.point.weight, dims=([2], [1])),
    ),
    "a product and a sum": (
        lambda n, h: F.linear(h.mean((2, 3)), n.point.weight),
        lambda n, h: (h.mean((2, 3))[:, None] * n.point.weight).sum(-1),
    ),
    # normalisations
    "batch norm": (lambda n, h: n.norm(n.conv(h)), batch_normalised),
    "layer norm": (
        lambda n, h: n.rows(tokens(h)),
        lambda n, h: F.layer_norm(tokens(h), (4,), n.rows.weight, n.rows.bias),
    ),
    # activations
    "relu in place": (lambda n, h: F.relu(n.conv(h)), lambda n, h: n.conv(h).relu_()),
    "relu by clamp": (lambda n, h: F.relu(n.conv(h)), lambda n, h: n.conv(h).clamp(min=0)),
    "aten.relu": (lambda n, h: F.relu(n.conv(h)), lambda n, h: aten.relu(n.conv(h))),
    "silu": (lambda n, h: F.silu(h), in_place(lambda c: F.silu(c, inplace=True))),
    "relu6": (lambda n, h: F.relu6(h), lambda n, h: F.hardtanh(h, 0, 6)),
    "tanh": (lambda n, h: h.tanh(), in_place(lambda c: c.tanh_())),
    "sigmoid": (lambda n, h: h.sigmoid(), lambda n, h: torch.special.expit(h)),
    "square": (lambda n, h: h.square(), lambda n, h: h**2),
    "abs": (lambda n, h: h.abs(), lambda n, h: torch.absolute(h)),
    # sums and products
    "add": (lambda n, h: h + h.tanh(), lambda n, h: torch.add(h.tanh(), h)),
    "add in place": (lambda n, h: h + h.tanh(), in_place(lambda c: c.add_(c.tanh()))),
    "sub": (lambda n, h: h - 0.3, lambda n, h: h + (-0.3)),
    "rsub": (lambda n, h: 1 - h, lambda n, h: -h + 1),
    "div": (lambda n, h: h / 4, lambda n, h: h * 0.25),
    "mul": (lambda n, h: h * h.tanh(), lambda n, h: torch.mul(h.tanh(), h)),
    "a gate": (
        lambda n, h: h * h.mean((2, 3), keepdim=True).sigmoid(),
        lambda n, h: h * h.mean((2, 3)).sigmoid()[..., None, None],
    ),
    # pooling and moves
    "mean": (lambda n, h: F.adaptive_avg_pool2d(h, 1), lambda n, h: h.mean((2, 3), keepdim=True)),
    "average pooling": (
        lambda n, h: F.avg_pool2d(h, 2),
        lambda n, h: h.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean((3, 5)),
    ),
    "flip": (lambda n, h: n.conv(h.flip(3)), lambda n, h: n.conv(h[..., torch.arange(3, -1, -1)])),
    "cat": (
        lambda n, h: torch.cat([h, h.tanh()], 1)[:, :4],
        lambda n, h: torch.stack([h, h.tanh()], 1).flatten(1, 2)[:, :4],
    ),
    "split": (
        lambda n, h: torch.cat(h.split(2, 1)[::-1], 1),
        lambda n, h: torch.cat([h[:, 2:], h[:, :2]], 1),
    ),
    # attention
    "attention": (
        lambda n, h: attended(n, tokens(h), lambda s: s.softmax(-1)),
        lambda n, h: F.scaled_dot_product_attention(*[tokens(h)[:, None]] * 3)[:, 0],
    ),
    "attention by bmm": (
        lambda n, h: attended(n, tokens(h), lambda s: s.softmax(-1)),
        lambda n, h: torch.bmm(F.softmax(torch.bmm(tokens(h), h.flatten(2)) / 2, dim=2), tokens(h)),
    ),
    "attention by einsum": (
        lambda n, h: attended(n, tokens(h), lambda s: s.softmax(-1)),
        lambda n, h: torch.einsum(
            "nqk,nkc->nqc",
            (torch.einsum("nqc,nkc->nqk", tokens(h), tokens(h)) / 2).softmax(-1),
            tokens(h),
        ),
    ),
    "heads": (
        lambda n, h: heads_at_once(n, tokens(h)),
        lambda n, h: heads_one_by_one(n, tokens(h)),
    ),
    "an LSTM's tokens first": (
        lambda n, h: n.memory(tokens(h))[0],
        lambda n, h: n.memory(tokens(h).transpose(0, 1).transpose(0, 1))[0],
    ),
}


def network(function: Function) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = function(net, net.first(x))
        y = F.relu(y)
        return net.head(y.mean((2, 3)) if y.ndim == 4 else y.mean(1) if y.ndim == 3 else y)

    parts = {
        "first": nn.Conv2d(3, 4, 3),
        "conv": nn.Conv2d(4, 4, 3, padding=1),
        "grouped": nn.Conv2d(4, 4, 3, padding=1, groups=2),
        "norm": nn.BatchNorm2d(4),
        "rows": nn.LayerNorm(4),
        "point": nn.Linear(4, 4),
        "memory": nn.LSTM(4, 4, batch_first=True),
        "head": nn.Linear(4, 3),
    }
    return settled(Made(forward, **parts)).double().eval()


OTHER_TERMS = {"groups", "images one by one"}
"""FullGrad rescales the map of each constant by itself, so its map depends on how many there are."""

BY_KIND = {"a point"}
"""Composites have one rule for convolutions and another for linear layers."""


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.filterwarnings("ignore:.*composite that needs the range", "ignore:.* zero everywhere")
def test_a_function_has_the_same_values_in_whatever_words(pair: str) -> None:
    x = random(4, 2, 3, 6, 6)
    one, two = (network(function) for function in PAIRS[pair])
    with torch.no_grad():
        assert_close(one(x), two(x))
    for method in METHODS:
        if method == "fullgrad" and pair in OTHER_TERMS:
            continue
        if isinstance(method, LRP) and method.composite != "Epsilon" and pair in BY_KIND:
            continue
        a, expected = (explain.attribute(net, x, method, target=1) for net in (two, one))
        # the stabiliser of a rule is a millionth of the mean of what one operation gives
        is_stabilised = isinstance(method, LRP) or method == "attnlrp"
        off = (a.values - expected.values).abs().max() / expected.values.abs().max()
        assert off <= (1e-4 if is_stabilised else 1e-9), method
