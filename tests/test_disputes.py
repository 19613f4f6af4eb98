"""What other packages' users disputed about metrics and methods, and what happens here.
docs/coming-from.md has the links."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import DeepLIFT
from tests.conftest import Made, settled
from tests.relevance.test_relevance import random


def shared(kind: str) -> nn.Module:
    """A network whose rectifiers and maxima are used twice, made while it runs, or no modules at
    all."""
    relu = nn.ReLU(inplace=kind == "in place")
    pool = nn.MaxPool2d(2)
    others: dict[str, Any] = {"functions": F.relu, "made as it runs": lambda x: nn.ReLU()(x)}
    rectified = others.get(kind, relu)
    pooled = (lambda x: F.max_pool2d(x, 2)) if kind == "functions" else pool

    def forward(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer in (made.one, made.two):
            x = pooled(rectified(layer(x)))
        return made.four(rectified(made.three(x.flatten(1))))

    one = nn.Conv2d(3, 4, 3, padding=1)
    two = nn.Conv2d(4, 5, 3, padding=1)
    head = {"three": nn.Linear(20, 6), "four": nn.Linear(6, 3)}
    return settled(Made(forward, one=one, two=two, relu=relu, pool=pool, **head)).double()


@pytest.mark.parametrize("kind", ["made as it runs", "used twice", "in place"])
def test_deeplift_adds_up_whatever_is_shared_or_a_function(kind: str) -> None:
    """Captum 199, 200, 578 and 1082: errors, or other values, where modules are shared or
    rectifiers are new ones."""
    model = shared(kind)
    x = random(0, 2, 3, 8, 8)
    b = random(1, 3, 8, 8)
    values = explain.attribute(model, x, DeepLIFT(b), target=1).values
    gain = (model(x) - model(b[None]))[:, 1].detach()
    torch.testing.assert_close(values.sum((1, 2, 3)), gain, rtol=1e-9, atol=1e-12)
    same = explain.attribute(shared("functions"), x, DeepLIFT(b), target=1).values
    torch.testing.assert_close(values, same, rtol=1e-9, atol=1e-12)


def test_deeplift_warns_where_an_operation_has_no_rule() -> None:
    model = Made(lambda made, x: torch.cumprod(x.flatten(1), 1))
    x = random(6, 1, 1, 2, 2)
    b = random(7, 1, 2, 2)
    with pytest.warns(explain.ExplainWarning, match="deeplift"):
        attribution = explain.attribute(model, x, DeepLIFT(b), target=3)
    off = attribution.values.sum() - (model(x) - model(b[None]))[0, 3]
    assert abs(attribution.delta.item()) == pytest.approx(abs(off.item()))
    assert off.abs() > 1e-3


def linear_attention(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Attention without a matrix of tokens by tokens: products by `einsum`, heads by reshaping and
    transposing."""
    n, _, h, w = x.shape
    q, k, v = made.to_qkv(x).reshape(n, 3, 2, 2, h * w).unbind(1)
    share = made.share
    context = torch.einsum("bhdn,bhen->bhde", share(k.softmax(-1)), share(v))
    out = torch.einsum("bhde,bhdn->bhen", share(context), share(q.softmax(-2)))
    tokens = out.transpose(2, 3).reshape(n, 2, h * w, 2).transpose(2, 3)
    return made.head(made.to_out(tokens.reshape(n, 4, h, w)).mean((2, 3)))


def test_relevance_reaches_the_photo_through_linear_attention() -> None:
    """zennit 169: einsum, softmax and rearranged tokens. All other operations are linear: gradient
    times input."""
    to_qkv = nn.Conv2d(4, 12, 1, bias=False)
    to_out = nn.Conv2d(4, 4, 1, bias=False)
    head = nn.Linear(4, 3, bias=False)
    parts = {"to_qkv": to_qkv, "to_out": to_out, "head": head, "share": nn.Identity()}
    model = settled(Made(linear_attention, **parts)).double()
    x = random(8, 2, 4, 3, 3).requires_grad_()
    values = explain.attribute(model, x.detach(), "attnlrp", target=1).values
    # half of the gradient: each factor of a product has half of its relevance
    model.share = Made(lambda made, x: x / 2 + (x / 2).detach())
    (gradient,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    expected = (x * gradient).detach()
    assert (values - expected).abs().max() <= 1e-4 * expected.abs().max()  # stabilisers
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("name", ["gradcam", "gradcam++", "xgradcam", "scorecam"])
@pytest.mark.parametrize("dead", ["score", "layer"])
def test_a_cam_that_shows_nothing_is_zero_and_says_why(name: str, dead: str) -> None:
    """torch-cam 186 and 208: NaN, from a division by a gradient or a maximum of zero."""
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = settled(nn.Sequential(*layers, nn.Linear(16, 3)))
    nn.init.zeros_(model[0 if dead == "layer" else 4].weight)
    nn.init.constant_(model[0].bias, -1 if dead == "layer" else 1)
    x = torch.rand(1, 3, 8, 8)
    # which has a softmax over scores: equal weights
    shows = dead == "score" and name == "scorecam"
    with nullcontext() if shows else pytest.warns(explain.ExplainWarning, match="zero everywhere"):
        attribution = explain.attribute(model, x, name, target=0, layer="1")
    assert attribution.heatmap.isfinite().all()
    assert bool(attribution.values.any()) == shows
