"""A row of marks under a picture: what it was asked, and whether it passed; each sign has a shape of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from explain.render.text import FAINT, INK, PAPER, font

GOOD, BAD = (0, 112, 96), (176, 60, 20)
FINER = 4  # signs are drawn larger by this, and then made smaller: their edges are smooth
SMALLEST = 8  # pixels of the words; where they still do not fit, the signs stand alone


@dataclass(frozen=True)
class Mark:
    """One word and whether it holds: a tick in a disc, a cross in a square, or, for None, a dash in a ring."""

    word: str
    passed: bool | None

    @property
    def said(self) -> str:
        return "not asked" if self.passed is None else "passed" if self.passed else "failed"

    @property
    def text(self) -> str:
        """The same in letters.

        >>> Mark("class", False).text
        '✗ class'
        """
        return f"{'–' if self.passed is None else '✓' if self.passed else '✗'} {self.word}"


def row(marks: Sequence[Mark], width: int, size: int) -> Image.Image:
    """Draw marks side by side, at most ``width`` pixels wide, with words of ``size`` pixels, or smaller ones.

    >>> row([Mark("model", True), Mark("class", False)], 200, 12).height
    17
    """
    height = round(size * 1.4)
    while size > SMALLEST and _length(marks, size) > width:
        size -= 1
    words = _length(marks, size) <= width
    canvas = Image.new("RGB", (width, height), PAPER)
    draw, face, gap = ImageDraw.Draw(canvas), font(size), _gap(size)
    step = None if words else min(height + gap, width // max(1, len(marks)))
    x = 0.0
    for mark in marks:
        side = min(height, round(size * 1.15))
        canvas.paste(_sign(mark.passed, side), (round(x), (height - side) // 2))
        if step is not None:
            x += step
            continue
        x += side + gap / 2
        draw.text((x, (height - 1.2 * size) / 2), mark.word, FAINT if mark.passed is None else INK, face)
        x += face.getlength(mark.word) + gap * 1.5
    used = max(1, min(width, round(x if step is not None else x - gap * 1.5)))
    return canvas.crop((0, 0, used, height))


def _gap(size: int) -> int:
    return max(4, round(size * 0.55))


def _length(marks: Sequence[Mark], size: int) -> float:
    face, gap = font(size), _gap(size)
    each = [round(size * 1.15) + gap / 2 + face.getlength(mark.word) for mark in marks]
    return sum(each) + 1.5 * gap * (len(marks) - 1)


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
