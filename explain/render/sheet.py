"""Pictures side by side: a contact sheet of rows with titles."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from explain.render.text import FAINT, INK, PAPER, fit, font


def sheet(
    rows: Sequence[Sequence[Image.Image]],
    *,
    columns: Sequence[str] = (),
    titles: Sequence[Sequence[str]] = (),
    tile: int = 240,
) -> Image.Image:
    """Set pictures in a grid, each fitted into a square tile; a name over each column, a title under each picture.

    >>> sheet([[Image.new("RGB", (40, 30))] * 3], tile=100).width
    340
    """
    gap, text = 10, max(10, tile // 19)
    line = round(text * 1.5)
    across = max(len(row) for row in rows)
    head = line + gap if columns else gap
    below = line if titles else 0
    heights = [max(_fitted(picture, tile)[1] for picture in row) for row in rows]
    size = (gap + across * (tile + gap), head + sum(heights) + len(rows) * (gap + below))
    canvas = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    for i, name in enumerate(columns):
        _centred(draw, name, gap + i * (tile + gap) + tile / 2, gap / 2, tile, text, bold=True)
    top = head
    for r, row in enumerate(rows):
        for c, picture in enumerate(row):
            left = gap + c * (tile + gap)
            small = picture.resize(_fitted(picture, tile), Image.Resampling.LANCZOS)
            canvas.paste(small, (left + (tile - small.width) // 2, top + (heights[r] - small.height) // 2))
            if titles and c < len(titles[r]):
                _centred(draw, titles[r][c], left + tile / 2, top + heights[r] + 2, tile, text)
        top += heights[r] + below + gap
    return canvas


def _fitted(picture: Image.Image, tile: int) -> tuple[int, int]:
    scale = tile / max(picture.size)
    return max(1, round(picture.width * scale)), max(1, round(picture.height * scale))


def _centred(
    draw: ImageDraw.ImageDraw, words: str, x: float, y: float, width: int, size: int, bold: bool = False
) -> None:
    shown = fit(words, width, size, bold)
    face = font(size, bold)
    draw.text((x - face.getlength(shown) / 2, y), shown, INK if bold else FAINT, face)
