"""What relevance loses is told for each image, wherever a network has its images: in windows, or behind the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import explain
from explain.methods import LRP


class Windows(nn.Module):
    """Attention with two heads within windows, which lie in the batch's dimension, each image's one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x)
        count = len(y)
        windows = y.view(count, 8, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(count * 4, 4, 8)
        q, k, v = self.qkv(windows).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1)).softmax(-1)
        mixed = (attention @ v).transpose(1, 2).reshape(count, 16, 8)
        return self.head(torch.nn.functional.gelu(mixed).mean(1))


class TokensFirst(nn.Module):
    """PyTorch's own attention, which has the tokens before the images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 5)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.patches(x).flatten(2).permute(2, 0, 1)).mean(0))


class ImagesBetween(nn.Module):
    """Images in the middle: tokens, images and channels, joined to rows and taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.mix, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).permute(2, 0, 1)
        tokens, count, channels = y.shape
        y = torch.nn.functional.silu(self.mix(y.reshape(tokens * count, channels)))
        return self.head(y.view(tokens, count, channels)[1:-1].sigmoid().sum(0))


@pytest.mark.parametrize("composite", ["Epsilon", "AttnLRP", "EpsilonAlpha2Beta1Flat", "ExcitationBackprop"])
@pytest.mark.parametrize("count", [2, 4])  # as many as there are heads, and as there are windows
@pytest.mark.parametrize("build", [Windows, TokensFirst, ImagesBetween])
def test_what_is_lost_in_a_batch_is_what_each_image_loses_alone(
    build: Callable[[], nn.Module], count: int, composite: str
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = build().double().eval(), torch.randn(count, 3, 8, 8, dtype=torch.float64)
    together = explain.attribute(model, x, LRP(composite), target=1)
    alone = [explain.attribute(model, one[None], LRP(composite), target=1) for one in x]
    assert together.coverage is not None
    assert together.coverage.taken
    for cause, taken in together.coverage.taken.items():
        expected = torch.cat([a.coverage.taken[cause] for a in alone if a.coverage is not None])
        torch.testing.assert_close(taken, expected, rtol=1e-8, atol=1e-10, msg=cause)
    assert together.delta is not None
    assert together.delta.abs().max() <= 1e-8
    torch.testing.assert_close(together.values, torch.cat([a.values for a in alone]), rtol=1e-8, atol=1e-10)
