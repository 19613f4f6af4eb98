"""How a photo becomes a model's input: which part of it the model sees, at which size and in which
colours."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from statistics import fmean
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from explain._utils.errors import (
    ModelError,
    check_choice,
    check_whole_number,
    option_name,
    python_or_command,
    shown,
)
from explain.data.boxes import Box, Preprocess

Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


Side: TypeAlias = int | tuple[int, int]
"""The height and width of an input in pixels, or one number for both."""


def checked_side(size: Any) -> Side:
    """Return a caller's ``size`` of an input, whose height and width are one number if they are
    equal; refuse what is no size."""
    sides = list(size) if isinstance(size, (list, tuple)) else [size, size]
    are_whole = [isinstance(side, Integral) and not isinstance(side, bool) for side in sides]
    if len(sides) != 2 or not all(are_whole) or min(sides) < 1:
        two = python_or_command("(height, width)", "HEIGHTxWIDTH")
        raise ModelError(
            f"{option_name('size')} must be a whole number of pixels from 1, or {two}, got "
            f"{shown(size)}; leave it out"
        )
    height, width = map(int, sides)
    return height if height == width else (height, width)


def sides_of(side: Side) -> tuple[int, int]:
    """The height and width of an input."""
    return side if isinstance(side, tuple) else (side, side)


@dataclass(frozen=True)
class CenterCrop:
    """Cut out the central square of a photo, scale it to ``side`` pixels and normalise each
    channel.

    ``side`` may also be a height and a width, for a rectangle of these proportions. ``crop`` is the
    share of the photo's shorter side (of the largest such rectangle) that is cut out. Cutting and
    scaling are one antialiased operation, with "bilinear" or "bicubic" ``interpolation``. With one
    mean and one standard deviation, the photo is in grey.

    >>> CenterCrop(side=8)(Image.new("RGB", (40, 30))).shape
    torch.Size([3, 8, 8])
    """

    side: Side = 224
    crop: float = 0.875
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "side", checked_side(self.side))

    def box(self, size: tuple[int, int]) -> Box:
        """Return the part that is cut out of a photo of ``size`` (width, height), in pixels of the
        photo; overlays lie there."""
        photo_width, photo_height = size
        height, width = sides_of(self.side)
        # pixels of the photo in half a pixel of the input
        half = min(photo_width / width, photo_height / height) * self.crop / 2
        x = photo_width / 2
        y = photo_height / 2
        return Box(x - half * width, y - half * height, x + half * width, y + half * height)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.cut(image, self.box(image.size))

    def cut(self, image: Image.Image, box: Box) -> torch.Tensor:
        """Cut ``box``, in pixels of the photo, out of a photo, scale it to the size of the input
        and normalise it: ``(C, height, width)``."""
        corners = (box.left, box.top, box.right, box.bottom)
        height, width = sides_of(self.side)
        return _scaled(self, image, (width, height), corners)


Crop: TypeAlias = Literal["center", "whole"]
CropLike: TypeAlias = Crop | float
"""A name, or the share of the photo's shorter side that a central square takes."""
LONGEST = 4  # times the shorter side: longer photos are made smaller


@dataclass(frozen=True)
class WholePhoto:
    """Show the model the whole photo, scaled with its proportions kept.

    With ``pad``, the longer side becomes ``side`` pixels, and the rest of the square is filled with
    the mean colour. Without, the shorter side does, and the input is as long as the photo is: for
    networks that take any size. ``side`` may also be a height and a width: the photo is then as
    large as fits into these, or without ``pad`` as large as covers them.

    >>> (
    ...     WholePhoto(8)(Image.new("RGB", (30, 20))).shape,
    ...     WholePhoto(8, pad=False)(Image.new("RGB", (30, 20))).shape,
    ... )
    (torch.Size([3, 8, 8]), torch.Size([3, 8, 12]))
    """

    side: Side = 224
    mean: tuple[float, ...] = CenterCrop.mean
    std: tuple[float, ...] = CenterCrop.std
    interpolation: Interpolation = "bilinear"
    pad: bool = True

    fill: ClassVar[float] = 0.0
    """What the rest of the square is filled with, in the values of the input."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "side", checked_side(self.side))

    def box(self, size: tuple[int, int]) -> Box:
        """Return the part of a photo of ``size`` (width, height) that the input shows, in pixels of
        the photo; padding lies outside of the photo, so edges may be negative."""
        if not self.pad:
            return Box.whole(size)
        width, height = self._scaled_size(size)
        full_height, full_width = sides_of(self.side)
        left = (full_width - width) // 2
        top = (full_height - height) // 2
        photo_width, photo_height = size
        across = photo_width / width  # pixels of the photo in one of the input
        down = photo_height / height
        right = (full_width - left) * across
        return Box(-left * across, -top * down, right, (full_height - top) * down)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Scale the photo, normalise it, and pad it to a square with zeros (the mean colour) if
        ``pad``: ``(C, height, width)``."""
        width, height = self._scaled_size(image.size)
        x = _scaled(self, image, (width, height))
        if not self.pad:
            return x
        full_height, full_width = sides_of(self.side)
        left = (full_width - width) // 2
        top = (full_height - height) // 2
        right = full_width - width - left
        bottom = full_height - height - top
        return F.pad(x, (left, right, top, bottom), value=self.fill)

    def _scaled_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """The width and height in pixels of a photo of ``size`` (width, height) after scaling,
        without padding. `box` and `__call__` must agree, so both ask here."""
        photo_width, photo_height = size
        full_height, full_width = sides_of(self.side)
        scales = (full_width / photo_width, full_height / photo_height)
        scale = min(scales)  # as large as fits
        if not self.pad:  # as large as covers, but for very long photos
            scale = min(max(scales), LONGEST * scale)
        return max(1, round(photo_width * scale)), max(1, round(photo_height * scale))


@dataclass(frozen=True)
class StretchedPhoto(WholePhoto):
    """Show the model the whole photo, stretched to a square."""

    def _scaled_size(self, size: tuple[int, int]) -> tuple[int, int]:
        height, width = sides_of(self.side)
        return width, height


def _scaled(
    how: CenterCrop | WholePhoto, image: Image.Image, size: tuple[int, int], part: Any = None
) -> torch.Tensor:
    """The ``part`` (left, top, right, bottom) of a photo at ``size`` (width, height), normalised:
    floats ``(C, height, width)``, in grey where ``how`` has one mean; all bands of other images."""
    resampling = Image.Resampling[how.interpolation.upper()]
    bands = getattr(image, "bands", None)
    if bands is None:
        colors = image.convert("RGB" if len(how.mean) == 3 else "L")
        small = np.array(colors.resize(size, resampling, box=part))
        pixels = torch.from_numpy(np.atleast_3d(small)).permute(2, 0, 1).float() / 255
        pixels = pixels.expand(len(how.mean), -1, -1)  # each channel has the grey
    else:  # bands hold floats in the values that are 0 to 1 for photos
        planes = [Image.fromarray(band).resize(size, resampling, box=part) for band in bands]
        pixels = torch.from_numpy(np.stack([np.array(plane) for plane in planes]))
    mean = torch.tensor(how.mean).view(-1, 1, 1)
    std = torch.tensor(how.std).view(-1, 1, 1)
    return (pixels - mean) / std


def cropped(preprocess: Preprocess, crop: CropLike, model: nn.Module) -> Preprocess:
    """Return a preprocessing that shows another part of a photo, as the option ``crop`` names it:
    the centre (unchanged), the whole, or a central square of some share.
    """
    is_share = isinstance(crop, (int, float)) and not isinstance(crop, bool) and 0 < crop <= 1
    if not is_share and crop not in get_args(Crop):
        raise ModelError(
            f"{option_name('crop')} must be 'center', 'whole', or a share above 0 and up to 1, "
            f"got {shown(crop)}; leave it out"
        )
    if crop == "center":
        return preprocess
    plain = as_plain(preprocess, f"{option_name('crop')} {crop!r}")
    if isinstance(crop, (int, float)):
        return CenterCrop(
            plain.side,
            crop=float(crop),
            mean=plain.mean,
            std=plain.std,
            interpolation=plain.interpolation,
        )
    if isinstance(plain, WholePhoto):  # which shows the whole already
        return preprocess
    return WholePhoto(
        plain.side, plain.mean, plain.std, plain.interpolation, pad=not takes_any_size(model)
    )


def takes_any_size(model: nn.Module) -> bool:
    """Whether a network works on photos that are no squares: it averages its last maps, and has no
    embeddings of positions. Guessed from names of parameters and classes of modules."""
    for name, _ in model.named_parameters():
        if "position" in name or "pos" in name.split(".")[-1].split("_"):
            return False
    for module in model.modules():
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
            return True
    return False


def as_plain(preprocess: Any, wanted: str) -> CenterCrop | WholePhoto:
    """A preprocessing as one of this module's, whose values can be changed, also from
    torchvision's, timm's and transformers'; else refused, as ``wanted`` cannot change it.
    """
    if isinstance(preprocess, (CenterCrop, WholePhoto)):
        return preprocess
    if hasattr(preprocess, "as_plain") and (plain := preprocess.as_plain()) is not None:
        return plain
    # torchvision's transforms scale the shorter side to the resize_size, then cut the crop_size out
    interpolation: Any = getattr(getattr(preprocess, "interpolation", None), "value", None)
    if hasattr(preprocess, "crop_size") and interpolation in get_args(Interpolation):
        side = preprocess.crop_size[0]  # torchvision has both sizes as lists of one number
        shorter = max(side, preprocess.resize_size[0])
        return CenterCrop(
            side,
            crop=side / shorter,
            mean=tuple(preprocess.mean),
            std=tuple(preprocess.std),
            interpolation=interpolation,
        )
    remedy = python_or_command(
        "pass preprocess=explain.models.CenterCrop(...) with the model's values", "leave it out"
    )
    got = type(preprocess).__name__
    raise ModelError(
        f"{wanted} needs a preprocessing that cuts out the centre, got {got}; {remedy}"
    )


Values = float | Sequence[float] | None


def adjusted(
    preprocess: Preprocess,
    *,
    size: Side | None = None,
    channels: int | None = None,
    mean: Values = None,
    std: Values = None,
    interpolation: Interpolation | None = None,
) -> Preprocess:
    """A centre crop or a whole photo with another ``size`` (pixels), ``channels``, ``mean``,
    ``std`` (of pixels from 0 to 1; a number for all) or ``interpolation``; None leaves a value."""
    values = {
        "size": size,
        "channels": channels,
        "mean": mean,
        "std": std,
        "interpolation": interpolation,
    }
    names = [option_name(name) for name, value in values.items() if value is not None]
    if not names:
        return preprocess
    check_whole_number(option_name("channels"), channels, 1, error=ModelError)
    if interpolation is not None:
        kinds = get_args(Interpolation)
        check_choice(option_name("interpolation"), interpolation, kinds, error=ModelError)
    channel_values = std if mean is None else mean
    if channels is None and isinstance(channel_values, (list, tuple)):
        channels = 1 if len(channel_values) == 1 else None  # a list of one asks for grey
    # a transform of timm or transformers, which has three channels
    changes_itself = channels in (None, 3) and hasattr(preprocess, "with_values")
    base: Any = preprocess
    if not changes_itself:
        base = as_plain(preprocess, " and ".join(names))
        channels = channels or len(base.mean)
        if channels != len(base.mean):
            base = replace(
                base, mean=(fmean(base.mean),) * channels, std=(fmean(base.std),) * channels
            )
    changes: dict[str, Any] = {"side": size, "interpolation": interpolation}
    for name, value in (("mean", mean), ("std", std)):
        if value is not None:
            changes[name] = _of_channels(value, name, channels or 3)
    changes = {name: value for name, value in changes.items() if value is not None}
    return base.with_values(changes) if changes_itself else replace(base, **changes)


def _of_channels(values: Any, name: str, channels: int) -> tuple[float, ...]:
    """Check an option's ``values``, and return one for each of ``channels`` channels: a number
    stands for all. ``name`` is "mean", from 0 to 1, or "std", above 0.
    """
    numbers = list(values) if isinstance(values, (list, tuple)) else [values] * channels
    is_mean = name == "mean"
    least = 0 if is_mean else 1e-6
    most = 1 if is_mean else sys.float_info.max  # infinity is above it, NaN neither
    fits = len(numbers) == channels
    for number in numbers:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        fits = fits and is_number and least <= number <= most
    if not fits:
        wanted = "from 0 to 1" if is_mean else "above 0"
        raise ModelError(
            f"{option_name(name)} must be a number {wanted}, or one for each channel ({channels}), "
            f"got {shown(values)}; divide by 255 what was computed from pixels from 0 to 255"
        )
    return tuple(map(float, numbers))
