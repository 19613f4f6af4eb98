"""Pictures side by side: contact sheets with a title, groups, names below the pictures, and what the colours mean."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from explain.errors import ExplainError, shown
from explain.render.layout import Group, Layout, Tile
from explain.render.legend import Legend, bar
from explain.render.marks import row as marked
from explain.render.text import FAINT, INK, PAPER, fit, font, wrapped

SMALLEST = 20  # pixels along the side of a tile
REMARK = (176, 60, 20)
RULE = (214, 216, 222)


def sheet(layout: Layout, tile: int = 300) -> Image.Image:
    """Draw a contact sheet with each picture fitted into a square of ``tile`` pixels, or for very long photos more.

    >>> blank = Tile(Image.new("RGB", (40, 30)), "photo")
    >>> sheet(Layout("a cat", "", (Group("", (blank,) * 3),)), tile=100).width
    332
    """
    drawing = _Sheet(tile, layout.columns, layout.stretch)
    rows = layout.rows()
    parts = [drawing.head(layout), *(drawing.row(row) for row in rows)]
    canvas = Image.new("RGB", (drawing.width, sum(part.height for part in parts) + drawing.gap), PAPER)
    top = 0
    for part in parts:
        canvas.paste(part, (0, top))
        top += part.height
    return canvas


def table(rows: Sequence[Sequence[Tile]], columns: Sequence[str] = (), tile: int = 240) -> Image.Image:
    """Draw a table of pictures: names over the columns, if there are any, and what the tiles say below them.

    >>> table([[Tile(Image.new("RGB", (40, 30)))] * 3], ["a", "b", "c"], tile=100).width
    332
    """
    drawing = _Sheet(tile, max(len(row) for row in rows))
    parts = [drawing.row([Group("", tuple(row))]) for row in rows]
    if columns:
        parts.insert(0, drawing.names(columns))
    canvas = Image.new("RGB", (drawing.width, sum(part.height for part in parts) + drawing.gap), PAPER)
    top = 0
    for part in parts:
        canvas.paste(part, (0, top))
        top += part.height
    return canvas


class _Sheet:
    """The measures of a sheet, and its parts as strips of its whole width."""

    def __init__(self, tile: int, columns: int, stretch: tuple[float, float] = (1.0, 1.0)) -> None:
        if isinstance(tile, bool) or not isinstance(tile, int) or tile < SMALLEST:
            raise ExplainError(
                f"tile must be a whole number of pixels from {SMALLEST}, got {shown(tile)}; 300 is usual"
            )
        self.tile, self.high = round(tile * stretch[0]), round(tile * stretch[1])
        self.text = max(10, tile // 20)
        self.gap = max(8, tile // 20)
        self.width = self.gap + columns * (self.tile + self.gap)

    def head(self, layout: Layout) -> Image.Image:
        """The title, a fainter line, and the legends at the right; nothing where there is nothing to say."""
        if not (layout.title or layout.detail or layout.legends):
            return Image.new("RGB", (self.width, 0), PAPER)
        large = round(self.text * 1.5)
        height = self.gap + round(large * 1.4) + round(self.text * 1.6)
        strip = Image.new("RGB", (self.width, height), PAPER)
        room = self.width - 2 * self.gap
        draw = ImageDraw.Draw(strip)
        for legend in reversed(layout.legends):
            room -= self._legend(strip, legend, self.gap + room)
        draw.text((self.gap, self.gap), fit(layout.title, room, large, True), INK, font(large, True))
        line = fit(layout.detail, room, self.text)
        draw.text((self.gap, self.gap + round(large * 1.4)), line, FAINT, font(self.text))
        return strip

    def _legend(self, strip: Image.Image, legend: Legend, right: int) -> int:
        """Draw a legend that ends at ``right``, with its heading; return the width that it takes."""
        small = max(9, round(self.text * 0.8))
        labels = 0.0 if legend.ramp else sum(font(small).getlength(label) + small for label in legend.labels)
        length = round(max(font(small).getlength(legend.about), labels, 7 * small))
        if right - length < strip.width // 2:  # the title has the first half
            return 0
        draw = ImageDraw.Draw(strip)
        draw.text((right - length, self.gap), legend.about, FAINT, font(small))
        strip.paste(bar(legend, length, small), (right - length, self.gap + round(small * 1.5)))
        return length + 2 * self.gap

    def names(self, columns: Sequence[str]) -> Image.Image:
        strip = Image.new("RGB", (self.width, self.gap + round(self.text * 1.7)), PAPER)
        for i, name in enumerate(columns):
            self._centred(ImageDraw.Draw(strip), name, self._middle(i), self.gap, INK, bold=True)
        return strip

    def row(self, groups: Sequence[Group]) -> Image.Image:
        """A row of groups, each under its heading and a rule."""
        tiles = [tile for group in groups for tile in group.tiles]
        line = round(self.text * 1.45)
        tallest = max((self._fitted(tile.picture)[1] for tile in tiles), default=1)
        heading = round(line * 1.5) if any(group.heading for group in groups) else 0
        lines = max((len(self._said(tile)) + bool(tile.marks) for tile in tiles), default=0)
        below = lines * line + (round(line * 0.3) if lines else 0)
        strip = Image.new("RGB", (self.width, self.gap + heading + tallest + below), PAPER)
        place = 0
        for group in groups:
            self._heading(strip, group, place)
            for tile in group.tiles:
                self._tile(strip, tile, place, self.gap + heading, tallest)
                place += 1
        return strip

    def _heading(self, strip: Image.Image, group: Group, place: int) -> None:
        if not group.heading or not group.tiles:
            return
        left = self.gap + place * (self.tile + self.gap)
        right = left + len(group.tiles) * (self.tile + self.gap) - self.gap
        draw = ImageDraw.Draw(strip)
        shown = fit(group.heading, right - left, self.text, bold=True)
        draw.text((left, self.gap), shown, FAINT if group.goes_on else INK, font(self.text, True))
        start = left + font(self.text, True).getlength(shown) + self.gap
        if start < right:
            middle = self.gap + round(self.text * 0.65)
            draw.line((start, middle, right, middle), fill=RULE, width=max(1, self.text // 10))

    def _tile(self, strip: Image.Image, tile: Tile, place: int, top: int, tallest: int) -> None:
        left = self.gap + place * (self.tile + self.gap)
        small = tile.picture.resize(self._fitted(tile.picture), Image.Resampling.LANCZOS)
        strip.paste(small, (left + (self.tile - small.width) // 2, top + (tallest - small.height) // 2))
        line = round(self.text * 1.45)
        y = top + tallest + round(line * 0.3)
        draw = ImageDraw.Draw(strip)
        for words, color in self._said(tile):
            self._centred(draw, words, self._middle(place), y, color)
            y += line
        if tile.marks:
            signs = marked(tile.marks, self.tile, round(self.text * 0.9))
            strip.paste(signs, (round(self._middle(place) - signs.width / 2), y))

    def _said(self, tile: Tile) -> list[tuple[str, tuple[int, int, int]]]:
        """The lines below a picture, with their colours: a name in one, the rest in up to two each."""
        texts = ((tile.name, INK, 1), (tile.detail, FAINT, 2), (tile.remark, REMARK, 2))
        return [(line, color) for text, color, most in texts for line in wrapped(text, self.tile, self.text, most)]

    def _fitted(self, picture: Image.Image) -> tuple[int, int]:
        scale = min(self.tile / picture.width, self.high / picture.height)
        return max(1, round(picture.width * scale)), max(1, round(picture.height * scale))

    def _middle(self, place: int) -> float:
        return self.gap + place * (self.tile + self.gap) + self.tile / 2

    def _centred(
        self, draw: ImageDraw.ImageDraw, words: str, x: float, y: float, color: tuple[int, int, int], bold: bool = False
    ) -> None:
        shown, face = fit(words, self.tile, self.text, bold), font(self.text, bold)
        draw.text((x - face.getlength(shown) / 2, y), shown, color, face)
