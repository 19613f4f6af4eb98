"""Relevance and differences under mixed precision, inside the network or around the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain.methods import LRP, DeepLIFT
from explain.relevance.composites import transformer_attribution
from tests.conftest import Made, settled
from tests.relevance.test_relevance import assert_near

HALVES = [torch.bfloat16, torch.float16]


def autocast(net: nn.Module, half: torch.dtype) -> nn.Module:
    """A network that switches mixed precision on itself, as face networks do."""

    def forward(outer: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", half):
            return outer.net(x).float()

    return Made(forward, net=net).eval()


def transformer(attend: str) -> nn.Module:
    """Tokens that attend to each other, by PyTorch's module, its function, or step by step."""

    def forward(net: Any, x: Tensor) -> Tensor:
        tokens = net.embed(x).flatten(2).transpose(1, 2)
        h = net.norm(tokens)
        q, k, v = net.qkv(h).chunk(3, -1)
        if attend == "module":
            mixed = net.attention(h, h, h, need_weights=False)[0]
        elif attend == "function":
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(1, 2) / 3).softmax(-1) @ v
        tokens = tokens + mixed
        return net.head((tokens + net.block(tokens)).mean(1))

    block = [nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)]
    return Made(
        forward,
        embed=nn.Conv2d(3, 8, 4, 4),
        norm=nn.LayerNorm(8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        qkv=nn.Linear(8, 24),
        head=nn.Linear(8, 3),
        block=nn.Sequential(*block),
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.ConvTranspose2d(8, 8, 2, 2, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutional,
    "attention by module": lambda: transformer("module"),
    "attention by function": lambda: transformer("function"),
    "attention by steps": lambda: transformer("steps"),
}
X = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(2))
METHODS = [LRP("Epsilon"), LRP("EpsilonGammaBox"), LRP("AttnLRP"), DeepLIFT(0.3)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.filterwarnings("ignore:.*composite that needs the range", "ignore:deeplift misses")
def test_values_are_those_of_single_precision_but_for_rounding(network: str) -> None:
    """Whether the network switches mixed precision on or the caller does."""
    net = settled(NETWORKS[network]()).eval()
    for method in METHODS:
        expected = explain.attribute(net, X, method, target=1).values
        for half in HALVES:
            values = explain.attribute(autocast(net, half), X, method, target=1).values
            assert_near(values, expected, 0.05)
        with torch.autocast("cpu", HALVES[0]):
            assert_near(explain.attribute(net, X, method, target=1).values, expected, 0.05)


@pytest.mark.parametrize("half", HALVES)
def test_rules_of_the_first_transformer_attribution_run_in_mixed_precision(
    half: torch.dtype,
) -> None:
    """Their quotients have no bound: only what they keep of the score can be compared."""
    model = autocast(settled(transformer("steps")), half)
    a = explain.attribute(model, X, LRP(transformer_attribution()), target=1)
    whole = a.values.flatten(1).sum(1) + sum(a.coverage.taken.values())
    assert torch.allclose(whole, a.score, rtol=0.05)
