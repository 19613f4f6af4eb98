"""MediaPipe's selfie segmenter: a trunk like MobileNetV3, and a decoder that adds what finer maps say.

The weights come with batch normalisation folded into the convolutions, so that there is none here.
"""

import torch
import torch.nn.functional as F
from torch import nn

from explain.models.small_networks import SameConv2d

SIXTH = 0.166626  # in half precision, which the published network computes with


class Hardswish(nn.Hardswish):
    """``x * relu6(x + 3)`` times a sixth, as the published network rounds it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 6 * SIXTH * super().forward(x)


BLOCKS: tuple[tuple[int, int, int, int, int | None, type[nn.Module]], ...] = (
    # expanded channels, channels, kernel, stride, channels in the gate, activation
    (16, 16, 3, 2, 8, nn.ReLU),
    (72, 24, 3, 2, None, nn.ReLU),
    (88, 24, 3, 1, None, nn.ReLU),
    (96, 32, 5, 2, 24, Hardswish),
    (128, 32, 5, 1, 32, Hardswish),
    (128, 32, 5, 1, 32, Hardswish),
    (96, 32, 5, 1, 24, Hardswish),
    (96, 32, 5, 1, 24, Hardswish),
)
STEM, CONTEXT = 16, 128  # channels before and after the blocks
FINER = (2, 0)  # the blocks whose maps the decoder adds; the stem's come last


class Gate(nn.Sequential):
    """A factor from 0 to 1 for each channel, from the means of all channels: ``(N, C, H, W)`` to ``(N, C', 1, 1)``."""

    def __init__(self, inputs: int, outputs: int, hidden: int | None = None) -> None:
        between = [] if hidden is None else [nn.Conv2d(inputs, hidden, 1), nn.ReLU()]
        last = nn.Conv2d(hidden or inputs, outputs, 1)
        super().__init__(nn.AdaptiveAvgPool2d(1), *between, last, nn.Sigmoid())


class InvertedResidual(nn.Module):
    """Expand, filter each channel on its own, weight the channels, project; with a shortcut if shapes allow."""

    def __init__(
        self, inputs: int, width: int, outputs: int, kernel: int, stride: int, gate: int | None, kind: type[nn.Module]
    ) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(inputs, width, 1), kind())
        self.filter = nn.Sequential(SameConv2d(width, width, kernel, stride, groups=width), kind())
        self.gate = None if gate is None else Gate(width, width, gate)
        self.project = nn.Conv2d(width, outputs, 1)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.filter(self.expand(x))
        out: torch.Tensor = self.project(y if self.gate is None else y * self.gate(y))
        return out + x if self.shortcut else out


class DecoderStep(nn.Module):
    """Enlarge a map to the size of a finer one, weight the channels of that, and add them."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(inputs, width, 1)
        self.gate = Gate(width, width, width)
        self.mix = nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU())
        self.filter = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU())

    def forward(self, x: torch.Tensor, finer: torch.Tensor) -> torch.Tensor:
        x = self.reduce(F.interpolate(x, size=finer.shape[-2:], mode="bilinear", align_corners=False))
        x = self.mix(finer * self.gate(finer + x) + x)
        return x + self.filter(x)


class PersonSegmenter(nn.Module):
    """A logit for each pixel: whether it is part of a person.

    Takes ``(N, 3, H, W)`` in RGB from 0 to 1, where H and W are multiples of 32 (256 in training), and gives logits
    ``(N, 1, H, W)``; their sigmoids are the probabilities that MediaPipe's network ends with.

    >>> PersonSegmenter().eval()(torch.zeros(1, 3, 64, 96)).shape
    torch.Size([1, 1, 64, 96])
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(SameConv2d(3, STEM, 3, 2), Hardswish())
        channels = [STEM, *(block[1] for block in BLOCKS)]
        blocks = [InvertedResidual(inputs, *block) for inputs, block in zip(channels, BLOCKS, strict=False)]
        self.blocks = nn.ModuleList(blocks)
        self.context = nn.Sequential(nn.Conv2d(channels[-1], CONTEXT, 1), nn.ReLU())
        self.context_gate = Gate(channels[-1], CONTEXT)
        widths = [*(BLOCKS[i][1] for i in FINER), STEM]
        self.decoder = nn.ModuleList(map(DecoderStep, [CONTEXT, *widths], widths))
        self.output = nn.ConvTranspose2d(STEM, 1, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.stem(x)]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        x = self.context(maps[-1]) * self.context_gate(maps[-1])
        for step, i in zip(self.decoder, (*FINER, -1), strict=True):
            x = step(x, maps[i + 1])
        return self.output(x)
