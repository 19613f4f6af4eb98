"""Several maps on one photo, each in its colour, with what they are below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from explain.render.captions import NARROWEST, lettering
from explain.render.placement import Array, Region, mark_unseen, place
from explain.render.text import FAINT, INK, PAPER, fit, font

# Okabe and Ito's colours, told apart with colour-vision deficiencies; yellow comes late since it is faint on white.
COLORS = [(213, 94, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (240, 228, 66)]


def concepts(
    photo: Image.Image,
    maps: Array,
    region: Region,
    labels: Sequence[str],
    *,
    shares: Sequence[float] = (),
    title: str = "",
    detail: str = "",
    alpha: float = 0.75,
) -> Image.Image:
    """Colour each place of a photo by the strongest of K maps ``(K, H, W)`` in [0, 1]; say below what each one is.

    Args:
        labels: a line for each map.
        shares: of each map in all of them, 0 to 1, as a percentage before its line.
        title, detail: what all of them are: a bold line and a fainter one.
        alpha: opacity of the colours.

    >>> from explain.data.images import Box
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
    colored = mark_unseen(Image.composite(Image.fromarray(palette[first]), grey, opacity), photo, [region])
    ends = [f"{share:.0%}".replace("%", " %") for share in shares] or [""] * len(labels)
    return _with_lines(colored, list(zip(palette.tolist(), ends, labels, strict=True)), title, detail)


def _with_lines(
    picture: Image.Image, entries: Sequence[tuple[list[int], str, str]], title: str, detail: str
) -> Image.Image:
    width = max(NARROWEST, picture.width)
    large = lettering((width, max(1, picture.height)))
    size = max(11, round(large * 0.85))
    pad, line = round(large * 0.7), round(size * 1.7)
    head = (round(large * 1.45) if title else 0) + (round(size * 1.6) if detail else 0)
    canvas = Image.new("RGB", (width, picture.height + 2 * pad + head + line * len(entries)), PAPER)
    canvas.paste(picture, ((width - picture.width) // 2, 0))
    draw, top, room = ImageDraw.Draw(canvas), picture.height + pad, width - 2 * pad
    if title:
        draw.text((pad, top), fit(title, room, large, True), INK, font(large, True))
    if detail:
        draw.text((pad, top + head - round(size * 1.6)), fit(detail, room, size), FAINT, font(size))
    column = max((font(size, True).getlength(end) for _, end, _ in entries), default=0.0)
    after = pad + 2 * size + (round(column) + size if column else 0)
    for i, (color, end, label) in enumerate(entries):
        y = top + head + i * line
        draw.rectangle((pad, y, pad + size, y + size), fill=tuple(color))
        draw.text((pad + 2 * size, y - round(size * 0.1)), end, INK, font(size, True))
        draw.text((after, y - round(size * 0.1)), fit(label, width - pad - after, size), INK, font(size))
    return canvas
