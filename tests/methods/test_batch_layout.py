"""What relevance loses is told for each image, wherever a network has its images: in windows, or
behind the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import LRP
from tests.conftest import Made, settled

Layout = Callable[[Any, Tensor], Tensor]
LAYOUTS: dict[str, Layout] = {
    "in one row": lambda net, y: (y.reshape(1, -1, 6, 6) + 1).tanh().view(len(y), 4, -1).sum(2),
    "twice": lambda net, y: (torch.cat([y, y.flip(3)]) + 1).tanh().view(2, -1, 4, 36).sum((0, 3)),
    "last": lambda net, y: (y.flatten(1).mT + 1).tanh().mT.view(len(y), 4, -1).sum(2),
    "behind channels": lambda net, y: (
        net.norm(y.permute(2, 3, 1, 0).reshape(-1, 4, len(y))).tanh().mean(0).T
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_each_image_loses_is_known_however_images_are_laid_out(name: str) -> None:
    """What stands between a convolution and a head has a bias."""
    parts = {"first": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 3)}
    between = LAYOUTS[name]
    model = settled(Made(lambda net, x: net.head(between(net, net.first(x))), **parts)).double()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    together = explain.attribute(model, x, LRP("Epsilon"), target=1)
    alone = [explain.attribute(model, one[None], LRP("Epsilon"), target=1) for one in x]
    assert together.coverage.taken
    for cause, taken in together.coverage.taken.items():
        # an image that loses nothing by a cause does not name it
        none = torch.zeros(1, dtype=taken.dtype)
        expected = torch.cat([a.coverage.taken.get(cause, none) for a in alone])
        assert_close(taken, expected, rtol=1e-8, atol=1e-10, msg=cause)
    assert together.delta.abs().max() <= 1e-8
    assert_close(together.values, torch.cat([a.values for a in alone]), rtol=1e-8, atol=1e-10)


def attended(net: Any, tokens: Tensor) -> Tensor:
    rows = tokens.transpose(0, 1)
    return net.attention(rows, rows, rows, need_weights=False)[0].transpose(0, 1)


TOKENS: dict[str, Layout] = {
    "tokens": lambda net, t: net.dense(t) + 0.3,
    "rows": lambda net, t: net.dense(t.reshape(-1, 4)).reshape(t.shape),
    "behind tokens": lambda net, t: (net.dense(t.transpose(0, 1)) + net.shift).transpose(0, 1),
    "last": lambda net, t: (t.permute(1, 2, 0) + net.shift[:, None]).permute(2, 0, 1),
    "one by one": lambda net, t: torch.stack([net.dense(one) for one in t]),
    "attention": attended,
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", TOKENS)
def test_as_many_images_as_tokens_are_no_tokens(name: str, count: int) -> None:
    """A patch of each image is a token, of which there are four."""
    between = TOKENS[name]

    def forward(net: Any, x: Tensor) -> Tensor:
        tokens = net.patches(x).flatten(2).transpose(1, 2)
        return net.head(between(net, tokens).relu().mean(1))

    parts = {
        "patches": nn.Conv2d(3, 4, 2, 2),
        "attention": nn.MultiheadAttention(4, 2),
        "dense": nn.Linear(4, 4),
        "shift": nn.Parameter(torch.zeros(4)),
        "head": nn.Linear(4, 3),
    }
    model = settled(Made(forward, **parts)).double().eval()
    x = torch.randn(count, 3, 4, 4, dtype=torch.float64)
    methods = ["fullgrad", "lrp", "deeplift"]
    together = explain.attribute(model, x, methods, target=1)
    alone = [explain.attribute(model, one[None], methods, target=1) for one in x]
    for method, a in together.items():
        expected = torch.cat([of_one[method].values for of_one in alone])
        assert_close(a.values, expected, rtol=1e-8, atol=1e-12, msg=method)
        deltas = torch.cat([of_one[method].delta for of_one in alone])
        assert_close(a.delta, deltas, rtol=1e-8, atol=1e-12, msg=method)
