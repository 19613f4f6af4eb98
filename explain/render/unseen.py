"""What a model did not see of a photo: grey, paler, and hatched, whatever the rest looks like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from explain.render.placing import Array, Region, edges

PALE, HATCH = (203, 205, 210), (128, 131, 138)
KEPT = 0.35  # of the photo's contrast


def mark_unseen(picture: Image.Image, photo: Image.Image, seen: Sequence[Region]) -> Image.Image:
    """Return a picture of a photo in which what lies in no seen part is pale and hatched, with a line between.

    >>> from explain.images import Box
    >>> white = Image.new("RGB", (40, 20), "white")
    >>> mark_unseen(white, white, [Box(0, 0, 40, 20)]) is white
    True
    """
    parts = [edges(part, photo.size) for part in seen]
    if any(part == (0, 0, *photo.size) for part in parts):
        return picture
    looked = Image.new("L", photo.size, 0)
    draw = ImageDraw.Draw(looked)
    for left, top, right, bottom in parts:
        draw.rectangle((left, top, right - 1, bottom - 1), fill=255)
    if looked.getextrema() == (255, 255):
        return picture
    extent = min(min(right - left, bottom - top) for left, top, right, bottom in parts)
    line = max(1, round(min(extent, max(photo.size) / 4) / 125))
    ground = Image.blend(Image.new("RGB", photo.size, PALE), photo.convert("L").convert("RGB"), KEPT)
    ground.paste(HATCH, mask=_stripes(photo.size))
    drawn = Image.composite(picture, ground, looked)
    drawn.paste((255, 255, 255), mask=_rim(looked, line))
    return drawn


def _stripes(size: tuple[int, int]) -> Image.Image:
    """Return a mask of diagonal lines, forty or so along the longer side."""
    period = max(6, round(max(size) / 40))
    steps = np.arange(period, dtype=np.int32)
    away = np.abs((steps[:, None] + steps) % period - period / 2)  # from the middle of a line, in pixels along a row
    tile = (120 * np.clip(period / 10 + 0.5 - away, 0, 1)).astype(np.uint8)
    across, down = -(-size[0] // period), -(-size[1] // period)
    return Image.fromarray(np.ascontiguousarray(np.tile(tile, (down, across))[: size[1], : size[0]]))


def _rim(looked: Image.Image, line: int) -> Image.Image:
    """Return a mask of the seen side of the border between seen and unseen; the photo's own edge is no border."""
    import cv2

    inside: Array = np.asarray(looked)
    core = cv2.erode(inside, np.ones((2 * line + 1, 2 * line + 1), np.uint8), borderValue=255)
    return Image.fromarray(np.ascontiguousarray(inside - core))
