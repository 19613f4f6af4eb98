"""What is written below a picture: texts that fit, captions, legends of colours, and marks of checks."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from explain._utils.errors import printable

RGB = tuple[int, int, int]
INK, FAINT, PAPER = (24, 24, 28), (110, 110, 118), (255, 255, 255)
# Okabe and Ito's colours, told apart with colour-vision deficiencies; yellow comes late since it is faint on white.
COLORS = [(213, 94, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (240, 228, 66)]
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


def bar(legend: Legend, width: int, size: int, *, about: bool = False) -> Image.Image:
    """Draw a legend ``width`` pixels wide with text of ``size``: the colours above, the labels below.

    With ``about``, what is shown is written too: between two labels of a ramp where there is room, and else below.

    >>> bar(Legend(((0, 0, 0), (255, 0, 0)), ("0", "max"), "heat"), 80, 10).width
    80
    >>> steps = Legend(((0, 0, 0), (255, 0, 0)), ("50 %", "90 %"), "evidence inside", ramp=False)
    >>> bar(steps, 120, 10, about=True).height - bar(steps, 120, 10).height
    14
    """
    thick, gap, line, face = max(6, round(size * 0.8)), max(2, size // 5), round(size * 1.4), font(size)
    length = sum(map(face.getlength, (legend.about, *legend.labels))) + 2 * size
    between = legend.ramp and len(legend.labels) == 2 and length < width
    words = legend.about if about and not between else ""
    full = max(width, ceil(face.getlength(words)))
    canvas = Image.new("RGB", (full, thick + gap + line * (2 if words else 1)), PAPER)
    start = (full - width) // 2
    canvas.paste(_ramp(legend, width, thick) if legend.ramp else _steps(legend, width, thick), (start, 0))
    draw, slots = ImageDraw.Draw(canvas), len(legend.labels)
    for i, label in enumerate(legend.labels):
        length = face.getlength(label)
        left = (width - length) * i / max(1, slots - 1) if legend.ramp else (i + 0.5) * width / slots - length / 2
        draw.text((start + left, thick + gap), label, FAINT, face)
    if about and between:
        draw.text((start + (width - face.getlength(legend.about)) / 2, thick + gap), legend.about, FAINT, face)
    draw.text(((full - face.getlength(words)) / 2, thick + gap + line), words, FAINT, face)
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


GOOD, BAD = (0, 112, 96), (176, 60, 20)
FINER = 4  # signs are drawn larger by this, and then made smaller: their edges are smooth
SMALLEST_MARK = 8  # pixels of the words; where they still do not fit, the signs stand alone


@dataclass(frozen=True)
class Mark:
    """A check and its result: a tick in a disc, a cross in a square, or, for None, a dash in a ring."""

    word: str
    passed: bool | None

    @property
    def result(self) -> str:
        return "not checked" if self.passed is None else "passed" if self.passed else "failed"


def row(marks: Sequence[Mark], width: int, size: int) -> Image.Image:
    """Draw marks side by side, at most ``width`` pixels wide, with words of ``size`` pixels, or smaller ones.

    >>> row([Mark("model", True), Mark("class", False)], 200, 12).height
    17
    """
    height = round(size * 1.4)
    while True:
        face, gap = font(size), max(4, round(size * 0.55))
        each = [round(size * 1.15) + gap / 2 + face.getlength(mark.word) for mark in marks]
        words = sum(each) + 1.5 * gap * (len(marks) - 1) <= width
        if words or size <= SMALLEST_MARK:
            break
        size -= 1
    canvas = Image.new("RGB", (width, height), PAPER)
    draw, side, x = ImageDraw.Draw(canvas), min(height, round(size * 1.15)), 0.0
    for mark in marks:
        canvas.paste(_sign(mark.passed, side), (round(x), (height - side) // 2))
        if words:
            x += side + gap / 2
            draw.text((x, (height - 1.2 * size) / 2), mark.word, FAINT if mark.passed is None else INK, face)
            x += face.getlength(mark.word) + gap * 1.5
        else:
            x += min(height + gap, width // max(1, len(marks)))
    return canvas.crop((0, 0, max(1, min(width, round(x - gap * 1.5 if words else x))), height))


def _sign(passed: bool | None, side: int) -> Image.Image:
    fine = side * FINER
    drawn = Image.new("RGB", (fine, fine), PAPER)
    draw, thick = ImageDraw.Draw(drawn), max(1, round(fine * 0.13))
    edges = (0, 0, fine - 1, fine - 1)

    def line(*places: tuple[float, float], color: tuple[int, int, int] = PAPER) -> None:
        draw.line([(x * fine, y * fine) for x, y in places], fill=color, width=thick, joint="curve")

    if passed is None:
        draw.ellipse(edges, outline=FAINT, width=thick)
        line((0.3, 0.5), (0.7, 0.5), color=FAINT)
    elif passed:
        draw.ellipse(edges, fill=GOOD)
        line((0.27, 0.53), (0.44, 0.69), (0.74, 0.34))
    else:
        draw.rectangle(edges, fill=BAD)
        line((0.28, 0.28), (0.72, 0.72))
        line((0.28, 0.72), (0.72, 0.28))
    return drawn.resize((side, side), Image.Resampling.LANCZOS)


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


def beside(one: Image.Image, other: Image.Image) -> Image.Image:
    """Put two pictures of the same height side by side.

    >>> beside(Image.new("RGB", (60, 40)), Image.new("RGB", (60, 40))).width
    122
    """
    gap = max(2, one.width // 50)
    canvas = Image.new("RGB", (one.width + gap + other.width, one.height), PAPER)
    canvas.paste(one, (0, 0))
    canvas.paste(other, (one.width + gap, 0))
    return canvas


def caption(
    picture: Image.Image, title: str, detail: str, legend: Legend | None = None, *, end: str = "",
    marks: Sequence[Mark] = (),
) -> Image.Image:  # fmt: skip
    """Put a strip under a picture: a bold title, a fainter line of detail and, where it helps, what colours mean.

    A picture narrower than 260 pixels is centred above a strip of that width. The ``end`` of the title, a percentage,
    is never cut. ``marks`` are a row of their own, below.

    >>> caption(Image.new("RGB", (400, 300)), "tabby cat", "gradcam", end=", 87 %").width
    400
    """
    width = max(NARROWEST, picture.width)
    large = lettering((width, max(1, picture.height)))
    small, pad = max(11, round(large * 0.78)), round(large * 0.7)
    colors = None if legend is None else bar(legend, max(70, min(width // 4, 13 * small)), small, about=not legend.ramp)
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
