"""Which part of a photo a model sees, and a preprocessing with another mean, standard deviation or interpolation."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from explain._utils.errors import ModelError, either, option, shown, warn
from explain._utils.spelling import close_to
from explain.data.images import Box, Preprocess
from explain.models.classifier import CenterCrop, Classifier, Interpolation, normalised

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
        close = close_to(crop, get_args(Crop), 1) if isinstance(crop, str) else []
        remedy = f"did you mean {close[0]!r}?" if close else "use 'center'"
        raise ModelError(
            f"{option('crop')} must be one of {names}, or a share above 0 and up to 1, got {shown(crop)}; {remedy}"
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


Values = float | Sequence[float] | None


def adjusted(
    preprocess: Preprocess, *, mean: Values = None, std: Values = None, interpolation: Interpolation | None = None
) -> Preprocess:
    """Return a preprocessing with other values; None leaves one as it is.

    Args:
        preprocess: one that cuts out the centre.
        mean: of each channel of the training data, of pixels from 0 to 1; a number stands for all channels.
        std: its standard deviation.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ModelError: a value cannot be meant, or the preprocessing is one that cannot be changed.

    >>> adjusted(CenterCrop(8), mean=0.5, std=(0.2, 0.3, 0.4))
    CenterCrop(side=8, crop=0.875, mean=(0.5, 0.5, 0.5), std=(0.2, 0.3, 0.4), interpolation='bilinear')
    """
    if mean is None and std is None and interpolation is None:
        return preprocess
    if interpolation is not None and interpolation not in get_args(Interpolation):
        known = " or ".join(map(repr, get_args(Interpolation)))
        raise ModelError(f"{option('interpolation')} must be {known}, got {shown(interpolation)}; use 'bilinear'")
    center = as_center(preprocess)
    if center is None:
        raise ModelError(
            f"{option('mean')}, {option('std')} and {option('interpolation')} cannot be changed for "
            f"{type(preprocess).__name__}; "
            f"{either('pass preprocess=', 'leave them out, and set them there')}"
        )
    given: dict[str, Any] = {} if interpolation is None else {"interpolation": interpolation}
    if mean is not None:
        given["mean"] = _three(mean, "mean", 0.0, 1.0)
    if std is not None:
        given["std"] = _three(std, "std", 1e-6, math.inf)
    return replace(center, **given)


def _three(values: Any, name: str, least: float, most: float) -> tuple[float, ...]:
    """A number for each channel."""
    several = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values] * 3
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in several)
    if len(several) != 3 or not numbers or not all(math.isfinite(value) for value in several):
        raise ModelError(f"{option(name)} must be a number, or one for each of the three channels, got {shown(values)}")
    if not all(least <= value <= most for value in several):
        wanted = "from 0 to 1" if most == 1 else "above 0"
        raise ModelError(
            f"{option(name)} must be {wanted} for pixels from 0 to 1, got {shown(values)}; divide by 255 what was "
            "measured on pixels from 0 to 255"
        )
    return tuple(map(float, several))


def seen(
    found: Classifier,
    own: Preprocess | None = None,
    *,
    size: int | None = None,
    crop: CropLike = "center",
    mean: Values = None,
    std: Values = None,
    interpolation: Interpolation | None = None,
) -> Preprocess:
    """Return how a classifier's photos become its inputs, with the caller's ``own`` preprocessing or values.

    What is assumed, since neither the model nor the caller says it, is warned of.

    Raises:
        ModelError: the preprocessing is one that cannot be changed in this way.
    """
    preprocess = found.preprocess if own is None else own
    if own is None and found.assumed is not None:
        values = {"size": size, "mean": mean, "std": std}
        known = [name for name, value in values.items() if value is not None]
        told: str | None = found.assumed
        if isinstance(preprocess, CenterCrop) and (mean is not None or std is not None):
            told = what_is_assumed(found.name, preprocess, known)
        if told is not None:
            warn(told)
    preprocess = adjusted(preprocess, mean=mean, std=std, interpolation=interpolation)
    return cropped(preprocess, crop, found.model)


def what_is_assumed(name: str, center: CenterCrop, known: Collection[str] = ()) -> str | None:
    """Say what is assumed of the preprocessing of a model that says nothing, but for what is ``known``.

    >>> what_is_assumed("Net", CenterCrop(32), {"mean"}).split("; ")[1]
    "assumed: a centre crop of 32 pixels, ImageNet's standard deviation"
    >>> what_is_assumed("Net", CenterCrop(32), {"size", "mean", "std"})
    """
    words = [word for option, word in (("mean", "mean"), ("std", "standard deviation")) if option not in known]
    if not words and "size" in known:
        return None
    assumed = [f"a centre crop of {center.side} pixels", *([f"ImageNet's {' and '.join(words)}"] if words else [])]
    return not_known(name, ", ".join(assumed))


def not_known(name: str, assumed: str) -> str:
    """Say that a model says nothing of its preprocessing, what is assumed, and how to tell it."""
    remedy = either(
        "pass preprocess=, or give the model an attribute preprocess",
        "give --size, --mean and --std, or give the model an attribute preprocess",
    )
    return f"preprocess is not known for model {name!r}; assumed: {assumed}; {remedy}"
