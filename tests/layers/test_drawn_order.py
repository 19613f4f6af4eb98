"""Tokens that a network puts in a random order in each pass, as ViLT does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import LayerError, MethodError
from tests.conftest import Made, settled
from tests.methods.plain_transformer import AttentionBlock

BLOCK = "blocks.0"


def read(model: nn.Module, x: Tensor) -> Tensor:
    """The class token's scores after two blocks; patches have positions, and any order."""
    tokens = model.patches(x).flatten(2).mT + model.places
    tokens = tokens + model.noise * torch.randn(1)
    if model.shuffles:
        order = torch.stack([torch.multinomial(torch.ones(16), 16) for _ in x])
        tokens = tokens[torch.arange(len(x))[:, None], order]
    model.order = order if model.shuffles else torch.arange(16).expand(len(x), -1)
    tokens = torch.cat([model.token.expand(len(x), -1, -1), tokens], 1)
    return model.head(model.blocks(tokens)[:, 0])


def network(*, shuffles: bool) -> nn.Module:
    parts = {
        "patches": nn.Conv2d(3, 8, 8, 8),
        "places": nn.Parameter(torch.randn(1, 16, 8)),
        "token": nn.Parameter(torch.randn(1, 1, 8)),
        "blocks": nn.Sequential(*(AttentionBlock(8, 2, fused=False) for _ in range(2))),
        "head": nn.Linear(8, 5),
    }
    return settled(Made(read, **parts, shuffles=shuffles, noise=0.0)).double().eval()


def photos(count: int) -> Tensor:
    return torch.rand(count, 3, 32, 32, dtype=torch.float64)


def products(model: nn.Module, x: Tensor, layer: nn.Module) -> Tensor:
    """What each value of a layer adds to the score, by plain autograd."""
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, out: kept.append(out))
    score = model(x)[:, 3].sum()
    handle.remove()
    (gradient,) = torch.autograd.grad(score, kept)
    return (kept[0] * gradient).detach()


def expected_map(model: nn.Module, x: Tensor) -> Tensor:
    """HiResCAM of the first block, with each token where its patch is."""
    of_tokens = products(model, x, model.blocks[0]).sum(2)[:, 1:]
    laid_out = torch.zeros_like(of_tokens).scatter_(1, model.order, of_tokens)
    return laid_out.reshape(-1, 4, 4)


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_in_a_random_order_are_no_map(count: int) -> None:
    model = network(shuffles=True)
    x = photos(count)
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(LayerError, match="any order"):
            explain.attribute(model, x, "hirescam", target=3, layer=BLOCK)
        for method in ("rollout", "gradeclip"):
            with pytest.raises(MethodError, match=f"{method} must"):
                explain.attribute(model, x, method, target=3)
        chosen = explain.attribute(model, x, "hirescam", target=3)
        assert chosen.layer == "patches"
        torch.manual_seed(seed)
        assert_close(chosen.values, products(model, x, model.patches).sum(1))


def test_random_numbers_that_leave_the_order_alone_change_nothing() -> None:
    model = network(shuffles=False)
    x = photos(2)
    for seed in range(2):
        torch.manual_seed(seed)
        found = explain.attribute(model, x, "hirescam", target=3, layer=BLOCK)
        assert_close(found.values, expected_map(model, x))
