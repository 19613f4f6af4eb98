"""Which part of a photo a model's input shows: what a preprocessing does, as a `Box`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ExplainError, ImageError, shown, warn

Array: TypeAlias = np.ndarray[Any, Any]
Preprocess: TypeAlias = Callable[[Image.Image], torch.Tensor]
Corners: TypeAlias = tuple[float, float, float, float]
"""The edges of a box: x0 y0 x1 y1."""

SMALLEST = 8  # pixels along an axis of the photo, below which it does not matter which are kept


def as_input(x: Any) -> torch.Tensor:
    """Check what a preprocessing made of one photo, and return it: a tensor ``(C, H, W)``, or ``(T,
    C, H, W)`` of T tiles.
    """
    if not isinstance(x, torch.Tensor) or x.ndim not in (3, 4):
        raise ImageError(
            "preprocess must return a tensor (C, H, W), or (T, C, H, W) of tiles, got "
            f"{shown(x)}; leave out the batch dimension"
        )
    return x


@dataclass(frozen=True)
class Box:
    """The part of a photo that a model's input shows, in the photo's pixels; it may reach past the
    edges."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def whole(cls, size: tuple[int, int]) -> "Box":
        """All of a photo of this (width, height)."""
        return cls(0.0, 0.0, float(size[0]), float(size[1]))

    def moved(self, across: float, down: float) -> "Box":
        """This box so many pixels further to the right and further down."""
        return Box(self.left + across, self.top + down, self.right + across, self.bottom + down)

    def to_photo(self, corners: Sequence[float], size: Sequence[int]) -> Corners:
        """A box (left, top, right, bottom) in pixels of the photo, from pixels of the input with
        ``size`` (..., height, width), which shows this part of the photo.

        >>> Box(10, 10, 50, 50).to_photo((0, 0, 2, 4), (4, 4))
        (10.0, 10.0, 30.0, 50.0)
        """
        left, top, right, bottom = corners
        across = self.width / size[-1]
        down = self.height / size[-2]
        return (
            self.left + left * across,
            self.top + top * down,
            self.left + right * across,
            self.top + bottom * down,
        )

    def to_input(self, corners: Sequence[Any], size: Sequence[int]) -> tuple[Any, ...]:
        """Bring a point (x, y), the x and y of many, or a box (x0, y0, x1, y1) from pixels of the
        photo to pixels of the input, whose ``size`` ends in (height, width): the reverse of
        `to_photo`.

        >>> Box(10, 10, 50, 50).to_input((10, 10, 30, 50), (4, 4))
        (0.0, 0.0, 2.0, 4.0)
        """
        scales = (size[-1] / self.width, size[-2] / self.height)
        starts = (self.left, self.top)
        return tuple((edge - starts[i % 2]) * scales[i % 2] for i, edge in enumerate(corners))

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top


def connected_parts(mask: Array) -> tuple[Array, Array]:
    """The connected parts (each with its 8 neighbours) of a mask ``(H, W)``: their numbers from 1
    at each pixel, 0 elsewhere, and their boxes ``(k, 4)``, x0 y0 x1 y1 with exclusive ends.

    >>> connected_parts(np.eye(3, 5) > 0)[1].tolist()
    [[0, 0, 3, 3]]
    """
    import cv2

    _, numbers, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    starts = stats[1:, :2]
    return numbers, np.hstack([starts, starts + stats[1:, 2:4]])


def locate(preprocess: Preprocess, size: tuple[int, int]) -> Box:
    """The part of a photo of ``size`` (width, height) that a preprocessing keeps, without padding:
    by its ``box(size)`` or tried on ramps; all of it, with a warning, if what comes is no line.

    >>> locate(lambda image: torch.zeros(3, 8, 8), (2, 2))
    Box(left=0.0, top=0.0, right=2.0, bottom=2.0)
    """
    box_of: Callable[[tuple[int, int]], Box] | None = getattr(preprocess, "box", None)
    if callable(box_of):
        return box_of(size)
    return locate_tiles(lambda image: preprocess(image)[None], size, 1)[0]


def input_of_slices(preprocess: Preprocess, photo: Any) -> torch.Tensor:
    """The input ``(C, D, H, W)`` of a picture whose ``cells`` are the slices of a volume."""
    slices = [as_input(preprocess(photo.crop(cell))) for cell in photo.cells.values()]
    return torch.stack(slices, 1)


def boxes_of_slices(preprocess: Preprocess, photo: Any) -> tuple[Box, ...]:
    """Which part of such a picture each slice of the input shows."""
    cells = list(photo.cells.values())
    left, top, right, bottom = cells[0]
    box = locate(preprocess, (right - left, bottom - top))
    return tuple(box.moved(cell[0], cell[1]) for cell in cells)


def locate_tiles(preprocess: Preprocess, size: tuple[int, int], count: int) -> list[Box]:
    """Find which part of a photo of ``size`` (width, height) each tile shows, for a preprocessing
    that makes ``count`` tiles ``(T, C, H, W)`` of a photo."""
    width, height = size

    def seen(levels: Array) -> Array:
        """What the preprocessing makes of a grey picture, ``(T, C, H, W)``."""
        grey = np.broadcast_to(levels.round(), (height, width)).astype(np.uint8)
        return preprocess(Image.fromarray(grey).convert("RGB")).double().numpy()

    # where each tile begins and ends; None where that is not found out
    across: list[Any] = [None] * count
    down: list[Any] = [None] * count
    try:
        # a picture whose level rises to the right tells each pixel of the input where it comes from
        black = seen(np.zeros((1, 1)))
        contrast = seen(np.full((1, 1), 255)) - black
        rightwards = seen(rising_levels(width)[None]) - black
        downwards = seen(rising_levels(height)[:, None]) - black
        for number in range(count):
            across[number] = _extent(rightwards[number], contrast[number], axis=1, length=width)
            down[number] = _extent(downwards[number], contrast[number], axis=0, length=height)
    except ExplainError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it does not take such pictures
        pass
    boxes = []
    for columns, rows in zip(across, down, strict=True):
        if (columns is None and width >= SMALLEST) or (rows is None and height >= SMALLEST):
            warn(
                "preprocess must keep a rectangle of the photo for overlays, but which one is not "
                "clear; the overlay assumes the whole photo. Give preprocess a method box(size) "
                "-> Box"
            )
        left, right = columns or (0.0, float(width))
        top, bottom = rows or (0.0, float(height))
        boxes.append(Box(left, top, right, bottom))
    return boxes


LOWEST = 16
HIGHEST = 240  # resampling would clip at black and white


def rising_levels(length: int) -> Array:
    """Grey levels that rise along so many pixels."""
    return np.linspace(LOWEST, HIGHEST, length)


def along_ramp(level: Any, length: int) -> Any:
    """Where on a ramp along so many pixels a level lies, in pixels from its beginning."""
    return (level - LOWEST) / (HIGHEST - LOWEST) * (length - 1) + 0.5


def _extent(
    change: Array, contrast: Array, *, axis: int, length: int
) -> tuple[float, float] | None:
    """Where on the photo the input's first and last edge lie along ``axis``, which has ``length``
    pixels, by how a picture of rising levels, and a white one, differ from black; None if not
    linear.
    """
    if length < SMALLEST:
        return None
    shows_photo = np.abs(contrast) > 0.5 * np.abs(contrast).max()  # and no padding
    photo_levels = np.where(shows_photo, change / np.where(shows_photo, contrast, 1) * 255, np.nan)
    # of each row or column of the input, the levels of all its pixels in all channels
    lines = np.moveaxis(photo_levels, axis + 1, 0).reshape(photo_levels.shape[axis + 1], -1)
    filled = np.flatnonzero(np.isfinite(lines).any(1))  # lines that are not all padding
    if len(filled) < 2:
        return None
    position = along_ramp(np.nanmean(lines[filled], axis=1), length)
    slope, start = np.polyfit(filled + 0.5, position, 1)
    error = np.abs(slope * (filled + 0.5) + start - position).max()
    # levels are rounded to whole numbers, so that positions are not exact
    fits = slope > 0 and error <= max(2.0, 0.03 * length)
    return (float(start), float(start + slope * len(lines))) if fits else None
