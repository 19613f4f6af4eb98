"""The font that pictures are lettered in, and texts that fit."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

from explain._utils.errors import printable

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


def fit(text: str, width: float, size: int, bold: bool = False, end: str = "") -> str:
    """Shorten a text with an ellipsis until it is at most ``width`` pixels wide; its ``end`` is always kept.

    >>> fit("a cat with a very long name", 100, 12, end=", 38 %").endswith("…, 38 %")
    True
    """
    text = printable(" ".join(text.split()))
    face = font(size, bold)
    if face.getlength(text + end) <= width:
        return text + end
    while text and face.getlength(text + "…" + end) > width:
        text = text[:-1]
    return text.rstrip() + "…" + end


def wrapped(text: str, width: float, size: int, most: int = 2) -> list[str]:
    """Break a text into at most so many lines between words; what does not fit into them ends with an ellipsis.

    >>> wrapped("product of 3 layers, layer2.1 to layer3.2", 140, 12)
    ['product of 3 layers,', 'layer2.1 to layer3.2']
    >>> wrapped("", 100, 12)
    []
    """
    words, face = printable(" ".join(text.split())).split(), font(size)
    lines: list[str] = []
    while words and len(lines) < most - 1:
        count = next((n for n in range(len(words), 1, -1) if face.getlength(" ".join(words[:n])) <= width), 1)
        lines.append(fit(" ".join(words[:count]).removesuffix(" ·"), width, size))
        del words[:count]
    return [*lines, fit(" ".join(words), width, size)] if words else lines
