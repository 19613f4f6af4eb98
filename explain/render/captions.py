"""What is written below a picture: texts that fit, captions, legends of colours, and marks of
checks.

Pictures here are strips: texts and colours are drawn as small pictures, which are then put side by
side or below each other.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import ceil, sqrt
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from explain._utils.errors import printable

RGB = tuple[int, int, int]
INK = (24, 24, 28)
FAINT = (110, 110, 118)
PAPER = (255, 255, 255)
# Okabe and Ito's colours, told apart with colour-vision deficiencies; yellow comes late since it is
# faint on white.
COLORS = [
    (213, 94, 0),
    (0, 114, 178),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (240, 228, 66),
]
Measure: TypeAlias = Callable[[str], float]
"""How wide a text is, in pixels or inches."""


@lru_cache(maxsize=32)
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the font of captions and labels in ``size`` pixels: DejaVu Sans, which matplotlib
    brings along, or Pillow's own font where matplotlib is not installed."""
    spec = importlib.util.find_spec("matplotlib")  # looks it up without importing it
    if spec is not None and spec.origin is not None:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        path = Path(spec.origin).parent / "mpl-data/fonts/ttf" / name
        if path.exists():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def fit(text: str, width: float, measure: Measure, end: str = "") -> str:
    """A text and its ``end`` in one line at most ``width`` wide, by ``measure``; the text is cut
    with an ellipsis where it must be, the end never."""
    text = printable(" ".join(text.split()))
    if measure(text + end) <= width:
        return text + end
    while text and measure(text + "…" + end) > width:
        text = text[:-1]
    return text.rstrip() + "…" + end


def wrapped(text: str, width: float, measure: Measure, most: int) -> list[str]:
    """Break a text between words into at most ``most`` lines of ``width``, measured by ``measure``;
    a line that is too long is cut with an ellipsis."""
    lines: list[str] = []
    line = ""
    in_one_line = printable(" ".join(text.split()))
    for word in in_one_line.replace(" %", "\u00a0%").split(" "):  # no break between 38 and %
        longer = f"{line} {word}".strip()
        if line and len(lines) < most - 1 and measure(longer) > width:
            lines.append(line.removesuffix(" ·"))  # this separates parts within a line only
            longer = word
        line = longer
    return [fit(written, width, measure) for written in [*lines, line] if written]


def space(width: int, height: int) -> Image.Image:
    """Return an empty picture in the colour of paper, of a size in pixels."""
    return Image.new("RGB", (width, height), PAPER)


def text_picture(
    text: str,
    size: int,
    color: RGB = INK,
    *,
    bold: bool = False,
    line: float = 1.35,
    top: float = 0,
) -> Image.Image:
    """Draw a text of ``size`` pixels in one line as a picture of its own, as wide as the text and
    ``line`` times its size high; ``top`` pixels above the text stay empty."""
    face = font(size, bold)
    picture = space(ceil(face.getlength(text)), round(size * line))
    ImageDraw.Draw(picture).text((0, top), text, color, face)
    return picture


def line_of(
    text: str,
    width: float,
    size: int,
    color: RGB = INK,
    *,
    bold: bool = False,
    line: float = 1.35,
    end: str = "",
) -> Image.Image:
    """Draw a text in one line that `fit` shortens to ``width`` pixels."""
    shortened = fit(text, width, font(size, bold).getlength, end)
    return text_picture(shortened, size, color, bold=bold, line=line)


def stacked(pictures: Sequence[Image.Image], width: int, align: float = 0.0) -> Image.Image:
    """Return pictures below each other as one picture, ``width`` pixels wide: at its left with
    ``align`` 0, in its middle with 0.5."""
    canvas = space(width, sum(picture.height for picture in pictures))
    top = 0
    for picture in pictures:
        canvas.paste(picture, (round((width - picture.width) * align), top))
        top += picture.height
    return canvas


def placed(
    pictures: Sequence[tuple[float, Image.Image]], width: int, align: float = 0.0
) -> Image.Image:
    """Return pictures, each with its left edge in pixels, side by side as one, ``width`` pixels
    wide: at its top with ``align`` 0, with their middles at one height with 0.5."""
    height = max((picture.height for _, picture in pictures), default=0)
    canvas = space(width, height)
    for left, picture in pictures:
        canvas.paste(picture, (round(left), int((height - picture.height) * align)))
    return canvas


def beside(pictures: Sequence[Image.Image], gap: float) -> Image.Image:
    """Return pictures side by side as one picture, ``gap`` pixels apart, with their middles at one
    height."""
    lefts = list(accumulate((picture.width + gap for picture in pictures), initial=0.0))
    places = list(zip(lefts, pictures, strict=False))  # the last left edge is that of no picture
    return placed(places, max(1, round(lefts[-1] - gap)), align=0.5)


@dataclass(frozen=True)
class Legend:
    """The colours of a picture as they are on the photo, and what they stand for."""

    colors: tuple[RGB, ...] = field(repr=False)
    """From the lowest to the highest value, or one for each label."""
    labels: tuple[str, ...]
    """For the lowest and the highest colour of a ramp; of steps, one for each colour."""
    meaning: str
    """What is shown, in a few words."""
    ramp: bool = True
    """Whether the colours pass into each other."""


def bar(legend: Legend, width: int, size: int) -> Image.Image:
    """A legend ``width`` pixels wide with text of ``size``: the colours, below them the labels, and
    the meaning of separate colours."""
    labels = [text_picture(label, size, FAINT, line=1.4) for label in legend.labels]
    places = []
    for i, label in enumerate(labels):
        if legend.ramp:  # the first at the left end, the last at the right end
            left = (width - label.width) * i / max(1, len(labels) - 1)
        else:
            left = width * (i + 0.5) / len(labels) - label.width / 2
        places.append((left, label))
    thick = max(6, round(size * 0.8))
    colors = ramp(legend, width, thick) if legend.ramp else _steps(legend, width, thick)
    parts = [colors, space(width, max(2, size // 5)), placed(places, width)]
    if not legend.ramp:  # the labels of a ramp say what it means; those of steps are only names
        parts.append(text_picture(legend.meaning, size, FAINT, line=1.4))
    return stacked(parts, max(part.width for part in parts), align=0.5)


def ramp(legend: Legend, width: int, height: int) -> Image.Image:
    """Return the bar of a legend whose colours pass into each other, as a picture of this size:
    colours between those of the legend are interpolated."""
    colors = np.asarray(legend.colors, np.float64)
    x = np.linspace(0, len(colors) - 1, width)
    row = np.stack([np.interp(x, np.arange(len(colors)), channel) for channel in colors.T], axis=1)
    return Image.fromarray(row.round().astype(np.uint8)[None].repeat(height, 0))


def _steps(legend: Legend, width: int, height: int) -> Image.Image:
    """Return the bar of a legend of separate colours, as a picture of this size: a rectangle for
    each colour."""
    picture = space(width, height)
    step = width / len(legend.colors)
    inset = height * 0.15
    for i, color in enumerate(legend.colors):
        edges = (round(i * step + inset), 0, round((i + 1) * step - inset) - 1, height - 1)
        ImageDraw.Draw(picture).rectangle(edges, fill=color, outline=FAINT)
    return picture


GOOD = (0, 112, 96)
BAD = (176, 60, 20)
FINER = 4  # signs are drawn larger by this, and then made smaller: their edges are smooth
SMALLEST_MARK = 8  # pixels of the words; where they still do not fit, the signs stand alone


@dataclass(frozen=True)
class Mark:
    """A check and its result: a tick in a disc, a cross in a square, or, for None, a dash in a
    ring."""

    word: str
    passed: bool | None


def draw_marks(marks: Sequence[Mark], width: int, size: int) -> Image.Image:
    """Draw marks side by side, at most ``width`` pixels wide: with words of ``size`` pixels, or
    smaller ones, or no words if these do not fit."""
    gap = max(4, round(size * 0.55))
    signs = [_sign(mark.passed, round(size * 1.15)) for mark in marks]
    pairs = []
    for mark, sign in zip(marks, signs, strict=True):
        color = FAINT if mark.passed is None else INK
        word = text_picture(mark.word, size, color, line=1.4, top=size * 0.1)
        pairs.append(beside([sign, word], gap / 2))
    picture = beside(pairs, gap * 1.5)
    if picture.width <= width:
        return picture
    if size > SMALLEST_MARK:
        return draw_marks(marks, width, size - 1)
    room = width // len(signs) - signs[0].width  # what each sign leaves of its part of the width
    return beside(signs, min(gap, room))


STROKES: dict[bool | None, list[tuple[float, ...]]] = {
    None: [(0.3, 0.5, 0.7, 0.5)],
    True: [(0.27, 0.53, 0.44, 0.69, 0.74, 0.34)],
    False: [(0.28, 0.28, 0.72, 0.72), (0.28, 0.72, 0.72, 0.28)],
}
"""The lines of each sign, as x and y of their points, in shares of its side."""


def _sign(passed: bool | None, side: int) -> Image.Image:
    """The sign of a check, ``side`` pixels a side: a tick in a disc (passed), a cross in a square
    (failed) or a dash in a ring (None), to be told apart without colour.
    """
    fine = side * FINER
    picture = space(fine, fine)
    draw = ImageDraw.Draw(picture)
    edges = (0, 0, fine - 1, fine - 1)
    thick = max(1, round(fine * 0.13))
    if passed is None:
        draw.ellipse(edges, outline=FAINT, width=thick)
    elif passed:
        draw.ellipse(edges, fill=GOOD)
    else:
        draw.rectangle(edges, fill=BAD)
    for stroke in STROKES[passed]:
        places = [share * fine for share in stroke]
        draw.line(places, fill=FAINT if passed is None else PAPER, width=thick, joint="curve")
    return picture.resize((side, side), Image.Resampling.LANCZOS)


NARROWEST = 260  # pixels that a strip needs for its words
SMALLEST = 320  # pixels along the longer side, below which a photo is enlarged for a caption


def enlargement(size: tuple[int, int]) -> int:
    """Return the whole number by which a photo of ``size`` (width, height) is enlarged before a
    caption is put below it: 1 unless both sides are below `SMALLEST`."""
    return ceil(SMALLEST / max(size)) if max(size) < SMALLEST else 1


def title_size(size: tuple[int, int]) -> int:
    """The height in pixels of a caption's title, below a picture of ``size`` (width, height); other
    texts are shares of it."""
    return max(13, round(min(size[0] / 28, sqrt(size[0] * size[1]) / 22)))


Entry: TypeAlias = tuple[RGB, str, str]
"""A colour, a share as text ("38 %" or empty) and a label."""


def _listed(entries: Sequence[Entry], room: int, size: int) -> list[Image.Image]:
    """Draw a line for each entry, ``room`` pixels wide: a square in its colour, share and label."""
    shares = [text_picture(share, size, bold=True, line=1.2) for _, share, _ in entries]
    # where labels begin: after the square with a gap, the longest share, and a gap
    left = 3 * size + max((share.width for share in shares), default=0)
    lines = []
    for (color, _, label), share in zip(entries, shares, strict=True):
        square = Image.new("RGB", (size + 1, size + 1), color)
        text = line_of(label, room - left, size, line=1.7)
        lines.append(placed([(0, square), (2 * size, share), (left, text)], room))
    return lines


def caption(
    picture: Image.Image,
    title: str,
    detail: str,
    legend: Legend | None = None,
    *,
    end: str = "",
    marks: Sequence[Mark] = (),
    entries: Sequence[Entry] = (),
) -> Image.Image:
    """A picture above a strip (at least 260 pixels wide): a bold title, whose ``end`` is never cut,
    up to three lines of detail, the legend at the right, and ``marks`` and ``entries`` below."""
    width = max(NARROWEST, picture.width)
    large = title_size((width, picture.height))  # of the title, small of all else
    small = max(11, round(large * 0.78))
    pad = round(large * 0.7)
    legend_bar = space(0, 0)
    room = width - 2 * pad
    if legend is not None:
        legend_bar = bar(legend, max(70, min(width // 4, 13 * small)), small)
        room -= legend_bar.width + pad
    lines = [line_of(title, room, large, bold=True, end=end)]
    # an empty line, so that pictures beside each other are equally high
    details = wrapped(detail, room, font(small).getlength, most=3) or [""]
    lines += [text_picture(line, small, FAINT) for line in details]
    if marks:
        lines += [space(0, small // 2), draw_marks(marks, room, small)]
    lines += _listed(entries, room, small)
    texts = stacked(lines, room)
    strip = space(width, max(texts.height, legend_bar.height) + 2 * pad)
    strip.paste(texts, (pad, pad))
    strip.paste(
        legend_bar, (width - pad - legend_bar.width, (strip.height - legend_bar.height) // 2)
    )
    return stacked([picture, strip], width, align=0.5)
