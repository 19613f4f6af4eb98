"""A strip under a picture that says what it is, in proportion to the picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from PIL import Image, ImageDraw

from explain.render.legend import Legend, explained
from explain.render.marks import Mark, row
from explain.render.text import FAINT, INK, PAPER, fit, font, wrapped

NARROWEST = 260  # pixels that a strip needs for its words
SMALLEST = 320  # pixels along the longer side, below which a photo is enlarged for a caption


def enlargement(size: tuple[int, int]) -> int:
    """Return by how much a photo of ``size`` (width, height) is enlarged to stand above words.

    >>> enlargement((32, 32)), enlargement((320, 200))
    (10, 1)
    """
    return ceil(SMALLEST / max(size)) if max(size) < SMALLEST else 1


def lettering(size: tuple[int, int]) -> int:
    """Return the size of the largest text under a picture of ``size`` (width, height), in pixels."""
    return max(13, round(min(size[0] / 28, sqrt(size[0] * size[1]) / 22)))


def caption(
    picture: Image.Image,
    title: str,
    detail: str,
    legend: Legend | None = None,
    *,
    end: str = "",
    marks: Sequence[Mark] = (),
) -> Image.Image:
    """Put a strip under a picture: a bold title, a fainter line of detail and, where it helps, what colours mean.

    A picture narrower than 260 pixels is centred above a strip of that width. The ``end`` of the title, a percentage,
    is never cut. ``marks`` are a row of their own, below.

    >>> caption(Image.new("RGB", (400, 300)), "tabby cat", "gradcam", end=", 87 %").width
    400
    """
    width = max(NARROWEST, picture.width)
    large = lettering((width, max(1, picture.height)))
    small = max(11, round(large * 0.78))
    pad = round(large * 0.7)
    colors = None if legend is None else explained(legend, max(70, min(width // 4, 13 * small)), small)
    room = width - 2 * pad - (0 if colors is None else colors.width + pad)
    details = wrapped(detail, room, small, 3) or [""]
    signs = row(marks, room, small) if marks else None
    words = round(large * 1.35) + len(details) * round(small * 1.35)
    below = 0 if signs is None else signs.height + small // 2
    lines = max(words + below, 0 if colors is None else colors.height)
    canvas = Image.new("RGB", (width, picture.height + lines + 2 * pad), PAPER)
    canvas.paste(picture, ((width - picture.width) // 2, 0))
    draw, top = ImageDraw.Draw(canvas), picture.height + pad
    if colors is not None:
        canvas.paste(colors, (width - pad - colors.width, top + (lines - colors.height) // 2))
    if signs is not None:
        canvas.paste(signs, (pad, top + words + small // 2))
    draw.text((pad, top), fit(title, room, large, True, end), INK, font(large, True))
    for i, line in enumerate(details):
        draw.text((pad, top + round(large * 1.35) + i * round(small * 1.35)), line, FAINT, font(small))
    return canvas
