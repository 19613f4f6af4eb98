"""Where a map lies on a photo, which parts the model did not see, and where most of the evidence lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from explain.data.images import Box

Array = np.ndarray[Any, Any]


def place(values: Array, size: tuple[int, int], region: Box, outside: int = 0) -> Array:
    """Resample a map in [0, 1] onto the pixels of a photo of ``size`` (width, height), as uint8 ``(height, width)``.

    ``outside`` fills what the region does not cover.
    """
    placed = np.full((size[1], size[0]), outside, np.uint8)
    inside, (y, x) = _resampled(values, size, region)
    np.rint(np.multiply(inside, 255, out=inside), out=inside)  # in place, which on a large photo is gigabytes less
    placed[y : y + inside.shape[0], x : x + inside.shape[1]] = np.clip(inside, 0, 255, out=inside)
    return placed


def area(values: Array, threshold: float, size: tuple[int, int], region: Box) -> Array:
    """Return where on a photo of ``size`` (width, height) a map is at least ``threshold``: bool ``(height, width)``."""
    placed = np.zeros((size[1], size[0]), bool)
    inside, (y, x) = _resampled(values, size, region)
    placed[y : y + inside.shape[0], x : x + inside.shape[1]] = inside >= threshold
    return placed


def on_photo(values: Array, size: tuple[int, int], region: Box) -> Array:
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


def edges(region: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a region in whole pixels of a photo; however thin, it has one of them."""
    left = min(max(0, round(region.left)), size[0] - 1)
    top = min(max(0, round(region.top)), size[1] - 1)
    right, bottom = min(size[0], round(region.right)), min(size[1], round(region.bottom))
    return left, top, max(left + 1, right), max(top + 1, bottom)


def _resampled(values: Array, size: tuple[int, int], region: Box) -> tuple[Array, tuple[int, int]]:
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


PALE, HATCH = (203, 205, 210), (128, 131, 138)
CONTRAST = 0.35  # of the photo's contrast


def mark_unseen(picture: Image.Image, photo: Image.Image, seen: Sequence[Box]) -> Image.Image:
    """Return a picture of a photo in which what lies in no seen part is pale and hatched, with a line between.

    >>> white = Image.new("RGB", (40, 20), "white")
    >>> mark_unseen(white, white, [Box(0, 0, 40, 20)]) is white
    True
    """
    parts = [edges(part, photo.size) for part in seen]
    if any(part == (0, 0, *photo.size) for part in parts):
        return picture
    seen_mask = Image.new("L", photo.size, 0)
    draw = ImageDraw.Draw(seen_mask)
    for left, top, right, bottom in parts:
        draw.rectangle((left, top, right - 1, bottom - 1), fill=255)
    if seen_mask.getextrema() == (255, 255):
        return picture
    extent = min(min(right - left, bottom - top) for left, top, right, bottom in parts)
    line = max(1, round(min(extent, max(photo.size) / 4) / 125))
    ground = Image.blend(Image.new("RGB", photo.size, PALE), photo.convert("L").convert("RGB"), CONTRAST)
    ground.paste(HATCH, mask=_stripes(photo.size))
    drawn = Image.composite(picture, ground, seen_mask)
    drawn.paste((255, 255, 255), mask=_rim(seen_mask, line))
    return drawn


def _stripes(size: tuple[int, int]) -> Image.Image:
    """Return a mask of diagonal lines, forty or so along the longer side."""
    period = max(6, round(max(size) / 40))
    steps = np.arange(period, dtype=np.int32)
    away = np.abs((steps[:, None] + steps) % period - period / 2)  # from the middle of a line, in pixels along a row
    tile = (120 * np.clip(period / 10 + 0.5 - away, 0, 1)).astype(np.uint8)
    across, down = -(-size[0] // period), -(-size[1] // period)
    return Image.fromarray(np.ascontiguousarray(np.tile(tile, (down, across))[: size[1], : size[0]]))


def _rim(seen_mask: Image.Image, line: int) -> Image.Image:
    """Return a mask of the seen side of the border between seen and unseen; the photo's own edge is no border."""
    import cv2

    inside: Array = np.asarray(seen_mask)
    core = cv2.erode(inside, np.ones((2 * line + 1, 2 * line + 1), np.uint8), borderValue=255)
    return Image.fromarray(np.ascontiguousarray(inside - core))


FINE = 100  # cells along the longer side
SPREAD = 0.03  # of the longer side
ROUNDED = 0.45  # of a cell


def thresholds(values: Array, shares: Sequence[float]) -> list[float]:
    """Return for each share the largest threshold such that values from it on add up to that share of the total.

    A map of zeros has no evidence: all thresholds are infinite.

    >>> thresholds(np.array([[4.0, 3.0], [2.0, 1.0]]), [0.4, 0.75])
    [4.0, 2.0]
    """
    falling = np.sort(values, axis=None)[::-1].astype(np.float64)
    total = np.cumsum(falling)
    if not total[-1] > 0:
        return [np.inf] * len(shares)
    reached = np.searchsorted(total, np.asarray(shares) * total[-1] * (1 - 1e-12))
    return [float(falling[place]) for place in np.minimum(reached, len(falling) - 1)]


def fine(values: Array) -> Array:
    """Return a coarse map enlarged, linearly between its cells and without edges there, so that its areas are round.

    >>> fine(np.ones((7, 7))).shape
    (105, 105)
    """
    import cv2

    times = -(-FINE // max(values.shape))
    if times == 1:
        return values
    large = cv2.resize(values.astype(np.float32), None, fx=times, fy=times)
    rounded: Array = cv2.GaussianBlur(large, (0, 0), ROUNDED * times, borderType=cv2.BORDER_REPLICATE)
    return rounded


def smoothed(values: Array) -> Array:
    """Blur a map ``(H, W)`` of single pixels by 3 % of its longer side, so that it has areas; its largest becomes 1.

    >>> float(smoothed(np.eye(50)).max())
    1.0
    """
    import cv2

    width = SPREAD * max(values.shape)
    blurred: Array = cv2.GaussianBlur(values.astype(np.float32), (0, 0), max(width, 0.3), borderType=cv2.BORDER_REFLECT)
    peak = np.abs(blurred).max()
    return blurred / peak if peak > 0 else blurred
