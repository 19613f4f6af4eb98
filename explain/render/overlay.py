"""Attributions drawn on the photo they explain, at the photo's own resolution.

A map is laid over the part of the photo that the model saw. What lies outside was never looked at: it is shown darker,
and gets no colour.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw

from explain.errors import ExplainError
from explain.render.colors import HEAT, SIGNED, colorize, lookup_table

UNSEEN = 0.45  # brightness of what the model did not see
Array = np.ndarray[Any, Any]


class Region(Protocol):
    """The part of a photo that a map covers, in the photo's pixels."""

    @property
    def left(self) -> float: ...
    @property
    def top(self) -> float: ...
    @property
    def right(self) -> float: ...
    @property
    def bottom(self) -> float: ...


def heat(photo: Image.Image, values: Array, region: Region, *, colormap: str = HEAT, alpha: float = 0.6) -> Image.Image:
    """Lay a heatmap ``(H, W)`` in [0, 1] over a photo: the hotter, the more colour and the less photo.

    Raises:
        ExplainError: an unknown colour map, or an opacity outside [0, 1].

    >>> from explain.images import Box
    >>> heat(Image.new("RGB", (8, 4)), np.ones((2, 2)), Box(0, 0, 8, 4)).size
    (8, 4)
    """
    check(colormap, alpha)
    table = lookup_table(colormap)
    placed = place(values, photo.size, region)
    colors = Image.fromarray(table[placed])
    # Opacity rises quickly and then levels off, so that a weak map is seen and a strong one does not hide the photo.
    opacity = (255 * alpha * np.sqrt(np.arange(256) / 255)).round().astype(np.uint8)
    blended = Image.composite(colors, photo, Image.fromarray(opacity[placed]))
    return mark_unseen(blended, region)


def check(colormap: str | None = None, alpha: float = 1.0) -> None:
    """Refuse an unknown colour map and an opacity outside [0, 1]."""
    if not 0 <= alpha <= 1:
        raise ExplainError(f"alpha must be an opacity from 0 to 1, got {alpha}")
    if colormap is not None:
        lookup_table(colormap)


def intensity(photo: Image.Image, values: Array, region: Region, *, colormap: str = HEAT) -> Image.Image:
    """Draw magnitudes ``(H, W)`` in [0, 1] as brightness; the top half per cent is cut off, so that the rest shows."""
    placed = place(_stretch(values), photo.size, region)
    return mark_unseen(Image.fromarray(lookup_table(colormap)[placed]), region)


def signed(photo: Image.Image, values: Array, region: Region, *, colormap: str = SIGNED) -> Image.Image:
    """Draw values ``(H, W)`` in [-1, 1] over the photo in grey: one colour speaks for the target, one against it."""
    spread = np.sign(values) * _stretch(np.abs(values))
    magnitude = place(np.sqrt(np.abs(spread)), photo.size, region)
    side = place(spread / 2 + 0.5, photo.size, region, outside=128)
    faded = photo.convert("L").point([round(255 - (255 - v) * 0.4) for v in range(256)]).convert("RGB")
    drawn = Image.composite(Image.fromarray(lookup_table(colormap)[side]), faded, Image.fromarray(magnitude))
    return mark_unseen(drawn, region)


def color(photo: Image.Image, values: Array, region: Region) -> Image.Image:
    """Draw values ``(C, H, W)`` as a colour picture in which grey is zero."""
    channels = (
        values if values.shape[0] == 3 else np.broadcast_to(values.mean(0, keepdims=True), (3, *values.shape[1:]))
    )
    peak = np.quantile(np.abs(channels), 0.995) or np.abs(channels).max() or 1.0
    scaled = np.clip(channels / (2 * peak) + 0.5, 0, 1)
    drawn = Image.merge("RGB", [Image.fromarray(place(c, photo.size, region, outside=128)) for c in scaled])
    return mark_unseen(drawn, region)


def swatch(colormap: str, size: tuple[int, int]) -> Image.Image:
    """Return a horizontal colour bar of ``size`` (width, height)."""
    ramp = np.broadcast_to(np.linspace(0, 1, size[0]), (size[1], size[0]))
    return Image.fromarray(colorize(ramp, colormap))


def place(values: Array, size: tuple[int, int], region: Region, outside: int = 0) -> Array:
    """Resample a map in [0, 1] onto the pixels of a photo of ``size`` (width, height), as uint8 ``(height, width)``.

    ``outside`` fills what the region does not cover.
    """
    import cv2

    left, top = round(region.left), round(region.top)
    width, height = max(1, round(region.right) - left), max(1, round(region.bottom) - top)
    how = cv2.INTER_LINEAR if width >= values.shape[1] else cv2.INTER_AREA
    try:
        covered = cv2.resize(values.astype(np.float32), (width, height), interpolation=how)
    except cv2.error as error:
        if error.code != cv2.Error.StsNoMem:
            raise
        raise MemoryError(error.err) from None
    placed = np.full((size[1], size[0]), outside, np.uint8)
    inside = covered[max(0, -top) : size[1] - top, max(0, -left) : size[0] - left]
    y, x = max(0, top), max(0, left)
    np.rint(np.multiply(inside, 255, out=inside), out=inside)  # in place, which on a large photo is gigabytes less
    placed[y : y + inside.shape[0], x : x + inside.shape[1]] = np.clip(inside, 0, 255, out=inside)
    return placed


def _pixels(region: Region, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the edges of a region in whole pixels of the photo; however thin it is, it has one of them."""
    left, top = max(0, round(region.left)), max(0, round(region.top))
    right, bottom = min(size[0], round(region.right)), min(size[1], round(region.bottom))
    return left, top, max(left + 1, right), max(top + 1, bottom)


def mark_unseen(picture: Image.Image, region: Region) -> Image.Image:
    """Darken what lies outside the region, and draw a line around it."""
    left, top, right, bottom = _pixels(region, picture.size)
    if (left, top) == (0, 0) and (right, bottom) == picture.size:
        return picture
    dark = picture.point([round(v * UNSEEN) for v in range(256)] * 3)
    dark.paste(picture.crop((left, top, right, bottom)), (left, top))
    line = max(1, round(min(right - left, bottom - top, max(picture.size) / 4) / 125))
    ImageDraw.Draw(dark).rectangle((left, top, right - 1, bottom - 1), outline=(255, 255, 255), width=line)
    return dark


def _stretch(values: Array) -> Array:
    """Scale magnitudes so that their 99.5th percentile becomes 1."""
    peak = float(np.quantile(values, 0.995)) or float(values.max()) or 1.0
    return np.clip(values / peak, 0, 1)
