"""NanoDet-g, a detector: a backbone of four stages, a neck that mixes three resolutions, and a head
for each of them.

The weights come with batch normalisation folded into the convolutions, so that there is none here.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from explain.models.small_networks import resized
from explain.targets import detections, detector_outputs

STAGES = ((32, 1, 1), (64, 2, 2), (128, 2, 2), (256, 3, 2))  # channels, blocks, stride
STRIDES = (8, 16, 32)  # pixels between the cells of each head
BINS = 11  # a side of a box lies 0 to 10 strides from the centre of its cell


class ConvActivation(nn.Sequential):
    """A 3x3 convolution and a leaky ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        """Build a 3 x 3 convolution and a leaky ReLU; names are keys of the weights file."""
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.activation = nn.LeakyReLU(0.1)


class Block(nn.Module):
    """Two convolutions to half the channels each, and the outputs of both, concatenated."""

    def __init__(self, width: int) -> None:
        """Build two convolutions of half the width each; names are keys of the weights file."""
        super().__init__()
        self.conv1 = ConvActivation(width, width // 2)
        self.conv2 = ConvActivation(width // 2, width // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        return torch.cat([self.conv2(x), x], 1)


class Stage(nn.Module):
    """A cross-stage partial block: blocks between two convolutions, concatenated with what goes
    around them."""

    def __init__(self, inputs: int, width: int, blocks: int, stride: int) -> None:
        """Build a stage of NanoDet's backbone, with ``blocks`` blocks between its first and last
        convolution. Names are keys of the weights file."""
        super().__init__()
        self.first = ConvActivation(inputs, width, stride)
        self.blocks = nn.Sequential()
        for _ in range(blocks):
            self.blocks.append(Block(width))
        self.last = ConvActivation(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.cat([self.last(self.blocks(x)), x], 1)


class Backbone(nn.Module):
    """Takes ``(N, 3, H, W)``, gives the maps of the last three stages, of 1/8, 1/16 and 1/32 of the
    input's size."""

    def __init__(self) -> None:
        """Build the stem and the stages of NanoDet's backbone, those of the table `STAGES`; names
        are keys of the weights file."""
        super().__init__()
        inputs = 32
        self.stem = nn.Sequential(ConvActivation(3, inputs, 2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        for width, blocks, stride in STAGES:
            self.stages.append(Stage(inputs, width, blocks, stride))
            inputs = 2 * width  # a stage concatenates two maps of this width

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The maps of the last three stages of NanoDet's backbone, fine to coarse, of photos ``(N,
        3, H, W)``."""
        maps = [self.stem(x)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return maps[-len(STRIDES) :]


class Neck(nn.Module):
    """A path aggregation network: maps reduced to one width, then added from the coarsest to the
    finest and back."""

    def __init__(self, width: int) -> None:
        """Build a 1 x 1 convolution to ``width`` channels for each of the backbone's maps."""
        super().__init__()
        self.reduce = nn.ModuleList()
        for channels, _, _ in STAGES[-len(STRIDES) :]:
            self.reduce.append(nn.Conv2d(2 * channels, width, 1))  # a stage's output, twice as wide

    def forward(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Mix the backbone's maps, fine to coarse, and return as many of ``width`` channels: coarse
        maps are added to finer ones, then fine ones to coarser.
        """
        mixed = [reduce(x) for reduce, x in zip(self.reduce, maps, strict=True)]
        last = len(mixed) - 1
        for i in reversed(range(last)):
            mixed[i] = mixed[i] + resized(mixed[i + 1], mixed[i])
        for i in range(last):
            mixed[i + 1] = mixed[i + 1] + resized(mixed[i], mixed[i + 1])
        return mixed


class Head(nn.Sequential):
    """For each cell of a map, a logit for each class and ``BINS`` logits for each of the four sides
    of its box."""

    def __init__(self, width: int, classes: int) -> None:
        """Build the head of one map; its channels are the classes, then `BINS` for each side of a
        box, as `decode_heads` reads them.
        """
        super().__init__()
        self.hidden = ConvActivation(width, width)
        self.output = nn.Conv2d(width, classes + 4 * BINS, 1)


class NanoDet(nn.Module):
    """NanoDet-g, from images in RGB ``(N, 3, H, W)``, H and W multiples of 32, to what
    `decode_heads` gives. It leaves out non-maximum suppression, which is in `detect`."""

    def __init__(self, classes: int = 80, width: int = 128) -> None:
        """Build the detector NanoDet: backbone, neck and a head for each of `STRIDES`; names are
        keys of the weights file."""
        super().__init__()
        self.backbone = Backbone()
        self.neck = Neck(width)
        self.heads = nn.ModuleDict({f"stride{stride}": Head(width, classes) for stride in STRIDES})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        # cells of stride 8, then 16, then 32, each in reading order
        levels = zip(self.heads.values(), self.neck(self.backbone(x)), strict=True)
        return decode_heads([head(level) for head, level in levels])


def decode_heads(
    maps: Sequence[torch.Tensor], strides: Sequence[int] = STRIDES
) -> dict[str, torch.Tensor]:
    """From each head's map ``(N, classes + 4 * BINS, h, w)``: "logits" and "scores" (sigmoids)
    ``(N, cells, classes)``, and "boxes" ``(N, cells, 4)`` in pixels, which are not clipped."""
    logits, boxes = detector_outputs.read_bins(maps, strides, BINS, maps[0].shape[1] - 4 * BINS)
    return {"logits": logits, "scores": logits.sigmoid(), "boxes": boxes}


def detect(
    output: Mapping[str, torch.Tensor],
    threshold: float = 0.35,
    iou: float = 0.6,
    candidates: int = 1000,
) -> list[dict[str, torch.Tensor]]:
    """For each image, the cells above ``threshold`` after non-maximum suppression in each class,
    best first, with gradients: "boxes" ``(Q, 4)``, "labels", "scores" and "cells" ``(Q,)``."""
    detected = []
    for scores, boxes in zip(output["scores"], output["boxes"], strict=True):
        # as numbers of a cell and a class, by which scores and boxes keep their gradients below
        hits = detections.suppressed(
            scores.detach(), boxes.detach(), threshold, iou=iou, most=candidates
        )
        # (0, 2) without any hit
        pairs = torch.tensor(hits, dtype=torch.long, device=boxes.device).reshape(-1, 2)
        cells, labels = pairs.unbind(1)
        detected.append(
            {
                "boxes": boxes[cells],
                "labels": labels,
                "scores": scores[cells, labels],
                "cells": cells,
            }
        )
    return detected
