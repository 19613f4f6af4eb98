"""Where values lie in a photo, against plain perturbation: the mean of the pixels that a value
changes with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from explain.layers.positions import EVERYWHERE, NOWHERE, positions_of
from explain.recording import record

SIZE = (8, 12)
g = torch.Generator().manual_seed(0)
KERNEL = torch.rand(5, 2, 4, 4, generator=g, dtype=torch.float64)
SMALL = torch.rand(5, 2, 3, 3, generator=g, dtype=torch.float64)
WEIGHT = torch.rand(6, 32, generator=g, dtype=torch.float64)
TINY = torch.rand(5, 2, 2, 2, generator=g, dtype=torch.float64)
MERGE = torch.rand(6, 20, generator=g, dtype=torch.float64)
TOKEN = torch.rand(1, 2, 5, generator=g, dtype=torch.float64)


class Function(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def patches(x: Tensor) -> Tensor:
    return torch.conv2d(x, KERNEL, stride=4).flatten(2).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """Four neighbours become one token (Swin)."""
    maps = torch.conv2d(x, TINY, stride=2).permute(0, 2, 3, 1)
    parts = [maps[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return F.linear(torch.cat(parts, -1), MERGE).flatten(1, 2)


def in_windows(x: Tensor) -> Tensor:
    """Rolled, cut into windows, changed there, and put together again."""
    maps = torch.conv2d(x, SMALL, stride=2, padding=1).permute(0, 2, 3, 1)
    maps = F.pad(maps, (0, 0, 0, 2)).roll((1, 1), (1, 2))
    windows = maps.view(len(x), 2, 2, 4, 2, 5).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 5) * 2
    maps = windows.view(len(x), 2, 4, 2, 2, 5).permute(0, 1, 3, 2, 4, 5).reshape(len(x), 4, 8, 5)
    return maps.roll((-1, -1), (1, 2))[:, :, :6]


def written(x: Tensor) -> Tensor:
    tokens = torch.zeros(len(x), 8, 5, dtype=x.dtype)
    tokens[:, 1:7] = patches(x)
    tokens[:, :1] += TOKEN[:, :1]
    return tokens


def among_words(x: Tensor) -> Tensor:
    words = torch.ones(len(x), 9, 5, dtype=x.dtype)
    is_photo = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    return words.masked_scatter(is_photo[None, :, None].expand(words.shape), patches(x))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a convolution of windows that overlap, with padding": lambda x: torch.conv2d(
        x, SMALL, stride=2, padding=1
    ),
    "a convolution after padding": lambda x: torch.conv2d(
        F.pad(x, (2, 1, 3, 0), value=1.0), SMALL, stride=2
    ),
    "a pooled map": lambda x: F.avg_pool2d(torch.conv2d(x, TINY, stride=2), 2),
    "patches": patches,
    "other tokens at both ends": lambda x: torch.cat([TOKEN, patches(x), TOKEN], 1),
    "tokens first": lambda x: torch.cat([TOKEN[:, :1], patches(x)], 1).transpose(0, 1),
    "patches that are cut by hand": lambda x: F.linear(F.unfold(x, 4, stride=4).mT, WEIGHT),
    "patches that are cut by strides": lambda x: (
        x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).sum((1, 4))
    ),
    "a product of letters": lambda x: torch.einsum("ncl,kc->nlk", F.unfold(x, 4, stride=4), WEIGHT),
    "merged tokens": merged,
    "windows that are rolled and padded": in_windows,
    "tokens that are written into others": written,
    "tokens among those of a text": among_words,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_lie_where_the_pixels_are_that_they_change_with(name: str) -> None:
    """At the mean of their positions, or at 0 where there are none."""
    function = FUNCTIONS[name]
    x = torch.rand(1, 2, *SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    recording = record(Function(function), x)
    positions = positions_of(recording.steps, recording.inputs[0])[recording.outputs[()]]
    assert isinstance(positions, tuple)
    result = recording.output
    changes = torch.autograd.functional.jacobian(function, x)[..., 0, :, :, :].any(-3)
    count = changes.sum((-2, -1)).clamp(min=1)
    row, column = torch.meshgrid(*[(torch.arange(n) + 0.5) / n for n in SIZE], indexing="ij")
    for position, place in zip(positions, (row, column), strict=True):
        expected = (changes * place).sum((-2, -1)) / count
        assert_close(position.expand(result.shape).float(), expected, rtol=1e-5, atol=1e-6)


def test_rows_of_an_attention_lie_where_their_queries_do() -> None:
    x = torch.rand(1, 2, *SIZE, dtype=torch.float64)

    def attend(x: Tensor) -> dict[str, Tensor]:
        tokens = patches(x)
        latents = TOKEN[:, :1].expand(1, 6, 5) * 1.0  # as many as there are patches
        return {
            "tokens": tokens,
            "of tokens": (tokens @ tokens.mT).softmax(-1) @ tokens,
            "of latents": latents + (latents @ tokens.mT).softmax(-1) @ tokens,
            "fused": F.scaled_dot_product_attention(latents, tokens, tokens),
            "mixed": torch.matmul(torch.ones(6, 6, dtype=x.dtype), tokens),
            "constant": torch.ones(1),
        }

    recording = record(Function(attend), x)
    states = positions_of(recording.steps, recording.inputs[0])
    of = {path[0]: states.get(value, NOWHERE) for path, value in recording.outputs.items()}
    for row, expected in zip(of["of tokens"], of["tokens"], strict=True):
        assert torch.equal(row, expected)
    assert of["of latents"] is of["fused"] is of["constant"] is NOWHERE
    assert of["mixed"] is EVERYWHERE
