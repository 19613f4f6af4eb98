"""The small transformer: convolutions that look at 19 x 19 pixels, then a plain vision transformer on 8 x 8 tokens."""

from __future__ import annotations

import torch
from torch import nn

from explain.models.small_resnet import Bottleneck


class EncoderBlock(nn.Module):
    """Self-attention and a two-layer network, each after a normalisation and around a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class SmallTransformer(nn.Module):
    """A vision transformer for pictures of 64 x 64 pixels: a class token and one token for each 8 x 8 pixels.

    Takes ``(N, 3, 64, 64)``, gives logits ``(N, classes)``. The stem's parts are named as in `SmallResNet`, the rest as
    in torchvision's ``VisionTransformer``. Other sizes are multiples of 8, given as ``side``.

    >>> SmallTransformer(classes=5, depth=1).eval()(torch.zeros(1, 3, 64, 64)).shape
    torch.Size([1, 5])
    """

    def __init__(
        self,
        classes: int = 200,
        side: int = 64,
        stem: tuple[int, int, int] = (32, 128, 256),
        width: int = 128,
        heads: int = 4,
        depth: int = 5,
    ) -> None:
        super().__init__()
        first, second, third = stem
        self.conv1 = nn.Conv2d(3, first, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Bottleneck(first, second, 1), Bottleneck(second, second, 1))
        self.layer2 = nn.Sequential(Bottleneck(second, third, 2))
        self.avgpool = nn.AvgPool2d(2)
        self.conv_proj = nn.Conv2d(third, width, 1)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.empty(1, 1 + (side // 8) ** 2, width).normal_(std=0.02))
        self.layers = nn.Sequential(*(EncoderBlock(width, heads, 4 * width) for _ in range(depth)))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the stem's convolutions say of each 8 x 8 pixels: ``(N, C, H / 8, W / 8)``."""
        x = self.relu(self.bn1(self.conv1(x)))
        out: torch.Tensor = self.avgpool(self.layer2(self.layer1(x)))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.conv_proj(self.features(x)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1) + self.pos_embedding
        logits: torch.Tensor = self.head(self.ln(self.layers(x))[:, 0])
        return logits
