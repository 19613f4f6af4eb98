"""Text on pictures: captions, titles, and the font they are set in."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from explain.errors import printable
from explain.render.overlay import swatch

INK, FAINT, PAPER = (24, 24, 28), (110, 110, 118), (255, 255, 255)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@lru_cache(maxsize=32)
def font(size: int, bold: bool = False) -> Font:
    """Return DejaVu Sans, which matplotlib brings along, or Pillow's own font without it."""
    spec = importlib.util.find_spec("matplotlib")  # looks it up without importing it
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / f"DejaVuSans{'-Bold' if bold else ''}.ttf"
        if path.exists():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def fit(text: str, width: float, size: int, bold: bool = False) -> str:
    """Shorten a text with an ellipsis until it is at most ``width`` pixels wide."""
    text = printable(" ".join(text.split()))
    face = font(size, bold)
    if face.getlength(text) <= width:
        return text
    while text and face.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def caption(
    picture: Image.Image, title: str, detail: str, colormap: str | None = None, ends: tuple[str, str] = ("0", "max")
) -> Image.Image:
    """Put a strip under a picture: a bold title, a fainter line of detail and, where it helps, a colour bar.

    A picture narrower than 260 pixels is centred above a strip of that width.
    """
    width = max(260, picture.width)
    large = max(13, min(40, round(width / 30)))
    small = max(11, round(large * 0.78))
    pad = round(large * 0.7)
    strip = pad + round(large * 1.35) + round(small * 1.35) + pad
    canvas = Image.new("RGB", (width, picture.height + strip), PAPER)
    canvas.paste(picture, ((width - picture.width) // 2, 0))
    draw = ImageDraw.Draw(canvas)
    room = width - 2 * pad
    if colormap is not None:
        room -= _color_bar(canvas, colormap, ends, picture.height, strip, pad, small)
    draw.text((pad, picture.height + pad), fit(title, room, large, True), INK, font(large, True))
    draw.text((pad, picture.height + pad + round(large * 1.35)), fit(detail, room, small), FAINT, font(small))
    return canvas


def _color_bar(
    canvas: Image.Image, colormap: str, ends: tuple[str, str], top: int, strip: int, pad: int, size: int
) -> int:
    """Draw a colour bar at the right of the strip; return the width that it takes from the text."""
    face = font(size)
    length, thick = max(60, canvas.width // 6), max(6, round(size * 0.7))
    left = canvas.width - pad - length
    y = top + pad + round(size * 0.35)
    canvas.paste(swatch(colormap, (length, thick)), (left, y))
    draw = ImageDraw.Draw(canvas)
    draw.text((left, y + thick + 3), ends[0], FAINT, face)
    draw.text((left + length - face.getlength(ends[1]), y + thick + 3), ends[1], FAINT, face)
    return length + pad
