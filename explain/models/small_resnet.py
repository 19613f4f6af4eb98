"""The bundled network: a small residual network of bottleneck blocks, its parts named as in torchvision's ResNet."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut, which a strided block averages instead of skipping pixels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 4
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            pool = nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
            self.downsample = nn.Sequential(pool, nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        out: torch.Tensor = self.relu(x)
        return out


class SmallResNet(nn.Module):
    """A residual network for small pictures: a map of 1/8 of the input's size, averaged, and one linear layer.

    Takes ``(N, 3, H, W)``, gives logits ``(N, classes)``. At 64 pixels the last feature map is 8x8.

    >>> SmallResNet(classes=5).eval()(torch.zeros(1, 3, 64, 64)).shape
    torch.Size([1, 5])
    """

    def __init__(
        self,
        classes: int = 200,
        stem: int = 32,
        widths: tuple[int, ...] = (128, 256, 512),
        depths: tuple[int, ...] = (2, 3, 4),
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU(inplace=True)
        inputs = stem
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(inputs, width, stride=2 if stage > 1 and block == 0 else 1))
                inputs = width
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.stages = len(widths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        out: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return out
