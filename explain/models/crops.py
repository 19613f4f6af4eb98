"""Which part of a photo a model sees: its centre, the whole of it, or five crops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from explain.errors import ModelError, close_to, either, option, shown
from explain.images import Box, Preprocess
from explain.models.classifier import CenterCrop, normalised

Crop: TypeAlias = Literal["center", "whole", "five"]
CropLike: TypeAlias = Crop | float
"""A name, or the share of the photo's shorter side that a central square takes."""
LONGEST = 4  # times the shorter side: longer photos are made smaller


@dataclass(frozen=True)
class WholePhoto:
    """Show the model the whole photo, scaled with its proportions kept.

    With ``pad``, the longer side becomes ``side`` pixels, and the rest of the square is filled with the mean colour.
    Without, the shorter side does, and the input is as long as the photo is: for networks that take any size.

    >>> WholePhoto(8)(Image.new("RGB", (30, 20))).shape, WholePhoto(8, pad=False)(Image.new("RGB", (30, 20))).shape
    (torch.Size([3, 8, 8]), torch.Size([3, 8, 12]))
    """

    side: int = 224
    mean: tuple[float, ...] = CenterCrop.mean
    std: tuple[float, ...] = CenterCrop.std
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    pad: bool = True

    def box(self, size: tuple[int, int]) -> Box:
        """Return what the input shows of a photo of ``size`` (width, height); padding lies outside of the photo."""
        if not self.pad:
            return Box(0.0, 0.0, float(size[0]), float(size[1]))
        edges = []
        for length, scaled in zip(size, self._scaled(size), strict=True):
            before = (self.side - scaled) // 2
            edges.append((-before * length / scaled, (self.side - before) * length / scaled))
        (left, right), (top, bottom) = edges
        return Box(left, top, right, bottom)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        width, height = self._scaled(image.size)
        small = image.convert("RGB").resize((width, height), Image.Resampling[self.interpolation.upper()])
        x = normalised(small, self.mean, self.std)
        if not self.pad:
            return x
        left, top = (self.side - width) // 2, (self.side - height) // 2
        return F.pad(x, (left, self.side - width - left, top, self.side - height - top))

    def _scaled(self, size: tuple[int, int]) -> tuple[int, int]:
        scale = self.side / max(size) if self.pad else min(self.side / min(size), LONGEST * self.side / max(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@dataclass(frozen=True)
class FiveCrops:
    """Show the model the four corners and the centre of a photo, each a square like that of ``center``.

    Called with a photo, it gives the central one; ``parts`` gives all five.

    >>> FiveCrops(CenterCrop(8)).parts(Image.new("RGB", (30, 20))).shape
    torch.Size([5, 3, 8, 8])
    """

    center: CenterCrop

    def box(self, size: tuple[int, int]) -> Box:
        """Return the central square; see `boxes` for all of them."""
        return self.center.box(size)

    def boxes(self, size: tuple[int, int]) -> list[Box]:
        """Return the squares in a photo of ``size`` (width, height): corners from left to right, then the centre."""
        middle = self.center.box(size)
        right, bottom = size[0] - middle.width, size[1] - middle.height
        corners = [(x, y) for y in (0.0, bottom) for x in (0.0, right)]
        width, height = middle.width, middle.height
        return [*(Box(x, y, min(x + width, size[0]), min(y + height, size[1])) for x, y in corners), middle]

    def parts(self, image: Image.Image) -> torch.Tensor:
        """Return all five crops ``(5, 3, side, side)``."""
        return torch.stack([self.center.cut(image, box) for box in self.boxes(image.size)])

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.center(image)


def cropped(preprocess: Preprocess, crop: CropLike, model: nn.Module) -> Preprocess:
    """Return a preprocessing that shows another part of a photo.

    Raises:
        ModelError: there is no such crop, or the preprocessing is one that cannot be changed.
    """
    share = isinstance(crop, (int, float)) and not isinstance(crop, bool) and 0 < crop <= 1
    if not share and crop not in get_args(Crop):
        names = ", ".join(map(repr, get_args(Crop)))
        raise ModelError(
            f"{option('crop')} must be one of {names}, or a share above 0 and up to 1, got {shown(crop)}; "
            f"{_nearest(crop)}"
        )
    if crop == "center":
        return preprocess
    center = as_center(preprocess)
    if center is None:
        remedy = either(
            "pass preprocess=explain.models.CenterCrop(...) with the model's size, mean and standard deviation",
            "use --crop center",
        )
        raise ModelError(
            f"crop {crop!r} needs a preprocessing that cuts out the centre, got {type(preprocess).__name__}; {remedy}"
        )
    if isinstance(crop, (int, float)):
        return replace(center, crop=float(crop))
    if crop == "five":
        return FiveCrops(center)
    return WholePhoto(center.side, center.mean, center.std, center.interpolation, pad=not takes_any_size(model))


def _nearest(crop: object) -> str:
    close = close_to(crop, get_args(Crop), 1) if isinstance(crop, str) else []
    return f"did you mean {close[0]!r}?" if close else "use 'center'"


def takes_any_size(model: nn.Module) -> bool:
    """Whether a network averages its last maps and has nothing that belongs to a fixed size."""
    averages = any(
        isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)) for module in model.modules()
    )
    fixed = any("pos" in name.split(".")[-1].split("_") or "position" in name for name, _ in model.named_parameters())
    return averages and not fixed


def as_center(preprocess: Any) -> CenterCrop | None:
    """Return the centre crop that a preprocessing is, or torchvision's published transforms amount to; else None."""
    if isinstance(preprocess, CenterCrop):
        return preprocess
    names = ("crop_size", "resize_size", "mean", "std", "interpolation")
    if not all(hasattr(preprocess, name) for name in names):
        return None
    side, shorter = preprocess.crop_size[0], preprocess.resize_size[0]
    how: Any = preprocess.interpolation.value
    if how not in ("bilinear", "bicubic"):
        return None
    return CenterCrop(side, side / max(side, shorter), tuple(preprocess.mean), tuple(preprocess.std), how)
