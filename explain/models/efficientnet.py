"""EfficientNet-Lite0: the network of the default model, its parts named as in torchvision's EfficientNet.

The blocks are laid out as torchvision's are, but defined here: importing torchvision would take longer than all the
rest, and the default model should work even if torchvision does not fit the installed torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

STAGES = (  # expansion, kernel, stride, channels, blocks
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
EPSILON = 1e-3  # of the normalisations, as in TensorFlow


class SameConv2d(nn.Conv2d):
    """A convolution that pads as TensorFlow's "same" does: by the input's size, the odd pixel on the right and below.

    The output has 1/stride of the input's size, rounded up.

    >>> SameConv2d(3, 4, 3, stride=2)(torch.zeros(1, 3, 7, 10)).shape
    torch.Size([1, 4, 4, 5])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = (
            max((-(-x.shape[i] // self.stride[i]) - 1) * self.stride[i] + self.kernel_size[i] - x.shape[i], 0)
            for i in (-2, -1)
        )
        padded = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return F.conv2d(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class ConvNormActivation(nn.Sequential):
    """A convolution without bias, a batch normalisation, and a ReLU6 if wanted."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, *, activation: bool = True
    ) -> None:
        # Without a stride, the padding is the same on all sides and for all sizes.
        kind, padding = (SameConv2d, 0) if stride > 1 else (nn.Conv2d, kernel // 2)
        convolution = kind(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        layers: list[nn.Module] = [convolution, nn.BatchNorm2d(outputs, eps=EPSILON)]
        super().__init__(*layers, *([nn.ReLU6()] if activation else []))


class MBConv(nn.Module):
    """An inverted residual block: expand, filter each channel on its own, project; with a shortcut if shapes allow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        layers = [ConvNormActivation(inputs, width)] if expansion > 1 else []
        layers.append(ConvNormActivation(width, width, kernel, stride, groups=width))
        layers.append(ConvNormActivation(width, outputs, activation=False))
        self.block = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out + x if self.shortcut else out


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0: no squeeze-and-excitation, ReLU6 throughout; any input size works.

    Takes ``(N, 3, H, W)``, gives logits ``(N, classes)``. The last feature map has 1/32 of the input's size.

    >>> EfficientNetLite0(classes=5).eval()(torch.zeros(1, 3, 64, 40)).shape
    torch.Size([1, 5])
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        inputs = 32
        features: list[nn.Module] = [ConvNormActivation(3, inputs, 3, 2)]
        for expansion, kernel, stride, outputs, count in STAGES:
            blocks = []
            for block in range(count):
                blocks.append(MBConv(inputs, outputs, expansion, kernel, stride if block == 0 else 1))
                inputs = outputs
            features.append(nn.Sequential(*blocks))
        features.append(ConvNormActivation(inputs, 1280))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return out
