"""Where a map lies on a photo."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class Region(Protocol):
    """A part of a photo, in the photo's pixels; it may reach past the edges."""

    @property
    def left(self) -> float: ...
    @property
    def top(self) -> float: ...
    @property
    def right(self) -> float: ...
    @property
    def bottom(self) -> float: ...


def place(values: Array, size: tuple[int, int], region: Region, outside: int = 0) -> Array:
    """Resample a map in [0, 1] onto the pixels of a photo of ``size`` (width, height), as uint8 ``(height, width)``.

    ``outside`` fills what the region does not cover.
    """
    placed = np.full((size[1], size[0]), outside, np.uint8)
    inside, (y, x) = _resampled(values, size, region)
    np.rint(np.multiply(inside, 255, out=inside), out=inside)  # in place, which on a large photo is gigabytes less
    placed[y : y + inside.shape[0], x : x + inside.shape[1]] = np.clip(inside, 0, 255, out=inside)
    return placed


def area(values: Array, threshold: float, size: tuple[int, int], region: Region) -> Array:
    """Return where on a photo of ``size`` (width, height) a map is at least ``threshold``: bool ``(height, width)``."""
    placed = np.zeros((size[1], size[0]), bool)
    inside, (y, x) = _resampled(values, size, region)
    placed[y : y + inside.shape[0], x : x + inside.shape[1]] = inside >= threshold
    return placed


def on_photo(values: Array, size: tuple[int, int], region: Region) -> Array:
    """Return the part of a map that lies on a photo of ``size`` (width, height): padding around a photo does not."""
    parts = []
    for cells, start, end, length in (
        (values.shape[0], region.top, region.bottom, size[1]),
        (values.shape[1], region.left, region.right, size[0]),
    ):
        first, last = (round((edge - start) / (end - start) * cells) for edge in (0, length))
        first = min(max(first, 0), cells - 1)
        parts.append(slice(first, max(first + 1, last)))
    return values[parts[0], parts[1]]


def edges(region: Region, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a region in whole pixels of a photo; however thin, it has one of them."""
    left, top = (
        min(max(0, round(start)), length - 1) for start, length in zip((region.left, region.top), size, strict=True)
    )
    right, bottom = min(size[0], round(region.right)), min(size[1], round(region.bottom))
    return left, top, max(left + 1, right), max(top + 1, bottom)


def _resampled(values: Array, size: tuple[int, int], region: Region) -> tuple[Array, tuple[int, int]]:
    """Return a map at the photo's resolution, as far as it lies on the photo, and its first row and column there."""
    import cv2

    left, top = round(region.left), round(region.top)
    width, height = max(1, round(region.right) - left), max(1, round(region.bottom) - top)
    how = cv2.INTER_LINEAR if width >= values.shape[1] else cv2.INTER_AREA
    try:
        covered: Array = cv2.resize(values.astype(np.float32), (width, height), interpolation=how)
    except cv2.error as error:
        if error.code != cv2.Error.StsNoMem:
            raise
        raise MemoryError(error.err) from None
    return covered[max(0, -top) : size[1] - top, max(0, -left) : size[0] - left], (max(0, top), max(0, left))
