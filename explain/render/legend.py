"""Several maps on one photo, each in its colour, with a legend below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from explain.render.overlay import Array, Region, mark_unseen, place
from explain.render.text import INK, PAPER, fit, font

# Okabe and Ito's colours, told apart with colour-vision deficiencies; yellow comes late since it is faint on white.
COLORS = [(213, 94, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (240, 228, 66)]


def concepts(
    photo: Image.Image, maps: Array, region: Region, labels: Sequence[str], *, alpha: float = 0.75
) -> Image.Image:
    """Colour each place of a photo by the strongest of K maps ``(K, H, W)`` in [0, 1]; name each colour below.

    >>> from explain.images import Box
    >>> concepts(Image.new("RGB", (300, 200)), np.ones((2, 4, 4)), Box(0, 0, 300, 200), ["fur", "eyes"]).width
    300
    """
    strongest, first = place(maps[0], photo.size, region), np.zeros(photo.size[::-1], np.uint16)
    for i, values in enumerate(maps[1:], start=1):  # one at a time: on a large photo, all of them might not fit
        placed = place(values, photo.size, region)
        first[placed > strongest] = i
        np.maximum(placed, strongest, out=strongest)
    palette = np.array([COLORS[i % len(COLORS)] for i in range(len(maps))], np.uint8)
    opacity = Image.fromarray((255 * alpha * np.sqrt(np.arange(256) / 255)).round().astype(np.uint8)[strongest])
    grey = photo.convert("L").convert("RGB")
    drawn = mark_unseen(Image.composite(Image.fromarray(palette[first]), grey, opacity), region)
    return _with_legend(drawn, [tuple(color) for color in palette.tolist()], labels)


def _with_legend(picture: Image.Image, colors: Sequence[tuple[int, ...]], labels: Sequence[str]) -> Image.Image:
    width = max(260, picture.width)
    size = max(12, min(32, round(width / 34)))
    pad, line = round(size * 0.8), round(size * 1.7)
    canvas = Image.new("RGB", (width, picture.height + 2 * pad + line * len(labels)), PAPER)
    canvas.paste(picture, ((width - picture.width) // 2, 0))
    draw = ImageDraw.Draw(canvas)
    for i, (color, label) in enumerate(zip(colors, labels, strict=True)):
        top = picture.height + pad + i * line
        draw.rectangle((pad, top, pad + size, top + size), fill=color)
        draw.text((2 * pad + size, top - round(size * 0.1)), fit(label, width - 3 * pad - size, size), INK, font(size))
    return canvas
