"""Relevance and differences under mixed precision, inside the network or around the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain.methods import LRP, DeepLIFT
from explain.relevance.composites import transformer_attribution
from tests.conftest import settled
from tests.relevance.test_relevance import assert_near

HALVES = [torch.bfloat16, torch.float16]


class Autocast(nn.Module):
    """A network that switches mixed precision on itself, as face networks do."""

    def __init__(self, inside: nn.Module, half: torch.dtype) -> None:
        super().__init__()
        self.inside = inside
        self.half = half

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.half):
            return self.inside(x).float()  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Tokens that attend to each other, by PyTorch's module, its function, or step by step."""

    def __init__(self, attend: str) -> None:
        super().__init__()
        self.attend = attend
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        h = self.norm(tokens)
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, -1)
        mixed = {
            "module": lambda: self.inner(h, h, h, need_weights=False)[0],
            "function": lambda: F.scaled_dot_product_attention(q, k, v),
            "steps": lambda: (q @ k.transpose(1, 2) / 3).softmax(-1) @ v,
        }[self.attend]()
        tokens = tokens + mixed
        return self.head((tokens + self.block(tokens)).mean(1))


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
    **{
        f"attention by {attend}": lambda attend=attend: Transformer(attend)
        for attend in ("module", "function", "steps")
    },
}
METHODS = [LRP("Epsilon"), LRP("EpsilonGammaBox"), LRP("AttnLRP"), DeepLIFT(0.3)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.filterwarnings("ignore:.*composite that needs the range", "ignore:deeplift misses")
def test_values_are_those_of_single_precision_but_for_rounding(network: str) -> None:
    """Whether the network switches mixed precision on or the caller does."""
    net = settled(NETWORKS[network]()).eval()
    x = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    for method in METHODS:
        expected = explain.attribute(net, x, method, target=1).values
        halves = [
            explain.attribute(Autocast(net, half).eval(), x, method, target=1).values
            for half in HALVES
        ]
        with torch.autocast("cpu", HALVES[0]):
            halves.append(explain.attribute(net, x, method, target=1).values)
        for values in halves:
            assert_near(values, expected, 0.05)


@pytest.mark.parametrize("half", HALVES)
def test_rules_of_the_first_transformer_attribution_run_in_mixed_precision(
    half: torch.dtype,
) -> None:
    """Their quotients have no bound: only what they keep of the score can be compared."""
    model = Autocast(settled(Transformer("steps")), half).eval()
    x = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    a = explain.attribute(model, x, LRP(transformer_attribution()), target=1)
    whole = a.values.flatten(1).sum(1) + sum(a.coverage.taken.values())
    assert torch.allclose(whole, a.score, rtol=0.05)
