"""Networks that several rooms test with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    """Attention and two linear layers, each behind a normalisation and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm1(tokens)
        tokens = tokens + self.attention(x, x, x, need_weights=False)[0]
        return tokens + self.mlp(self.norm2(tokens))


class Before(nn.Module):
    """A network of patches, behind a change of the photo."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.net = nn.Conv2d(3, 4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.change(x)).mean((2, 3))
