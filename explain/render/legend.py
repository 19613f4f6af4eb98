"""What colours mean: plain values, and the bar that shows them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from PIL import Image, ImageDraw

from explain.render.text import FAINT, font

RGB = tuple[int, int, int]


@dataclass(frozen=True, repr=False)
class Legend:
    """The colours of a picture as they are on the photo, and what they stand for.

    Args:
        colors: from the lowest to the highest value, or one for each label.
        labels: the two ends of a ramp; of steps, one for each colour.
        about: what is shown, in a few words.
        ramp: whether the colours pass into each other.
    """

    colors: tuple[RGB, ...]
    labels: tuple[str, ...]
    about: str
    ramp: bool = True

    def __repr__(self) -> str:
        return f"Legend({self.about!r}, {' to '.join(self.labels) if self.ramp else ', '.join(self.labels)})"


def bar(legend: Legend, width: int, size: int) -> Image.Image:
    """Draw a legend ``width`` pixels wide with text of ``size``: the colours above, the labels below.

    >>> bar(Legend(((0, 0, 0), (255, 0, 0)), ("0", "max"), "heat"), 80, 10).width
    80
    """
    thick, gap = max(6, round(size * 0.8)), max(2, size // 5)
    canvas = Image.new("RGB", (width, thick + gap + round(size * 1.4)), (255, 255, 255))
    canvas.paste(_ramp(legend, width, thick) if legend.ramp else _steps(legend, width, thick), (0, 0))
    draw, face = ImageDraw.Draw(canvas), font(size)
    slots = len(legend.labels)
    for i, label in enumerate(legend.labels):
        length = face.getlength(label)
        left = (width - length) * i / max(1, slots - 1) if legend.ramp else (i + 0.5) * width / slots - length / 2
        draw.text((left, thick + gap), label, FAINT, face)
    return canvas


def explained(legend: Legend, width: int, size: int) -> Image.Image:
    """Draw a legend, and below steps, whose labels are mere shares, what they are shares of.

    >>> steps = Legend(((0, 0, 0), (255, 0, 0)), ("50 %", "90 %"), "evidence inside", ramp=False)
    >>> explained(steps, 120, 10).height - bar(steps, 120, 10).height
    14
    """
    colors = bar(legend, width, size)
    if legend.ramp:
        return colors
    line, face = round(size * 1.4), font(size)
    canvas = Image.new("RGB", (max(width, ceil(face.getlength(legend.about))), colors.height + line), (255, 255, 255))
    canvas.paste(colors, ((canvas.width - width) // 2, 0))
    left = (canvas.width - face.getlength(legend.about)) / 2
    ImageDraw.Draw(canvas).text((left, colors.height), legend.about, FAINT, face)
    return canvas


def _ramp(legend: Legend, width: int, height: int) -> Image.Image:
    colors = np.asarray(legend.colors, np.float64)
    at = np.linspace(0, len(colors) - 1, width)
    row = np.stack([np.interp(at, np.arange(len(colors)), colors[:, c]) for c in range(3)], axis=1)
    return Image.fromarray(np.broadcast_to(row.round().astype(np.uint8), (height, width, 3)).copy())


def _steps(legend: Legend, width: int, height: int) -> Image.Image:
    drawn = Image.new("RGB", (width, height), (255, 255, 255))
    draw, each = ImageDraw.Draw(drawn), width / len(legend.colors)
    for i, color in enumerate(legend.colors):
        edges = (round(i * each + height * 0.15), 0, round((i + 1) * each - height * 0.15) - 1, height - 1)
        draw.rectangle(edges, fill=color, outline=FAINT)
    return drawn
