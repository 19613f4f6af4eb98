"""Contact sheets: tiles in groups, how they are laid out, and the picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from PIL import Image, ImageDraw

from explain._utils.errors import ExplainError, shown
from explain.render.captions import FAINT, INK, PAPER, Legend, Mark, bar, fit, font, wrapped
from explain.render.captions import row as marked

ABREAST = 6  # tiles in a row at most
LEAST = 2  # tiles that a sheet is wide, so that its title has room
LONGEST = 3  # times as wide or high as a square, at most


@dataclass(frozen=True)
class Tile:
    """A picture with texts below it: its name, a fainter line of detail, and a warning in ``remark``.

    ``alternative`` describes the picture in words, and ``marks`` are the results of its checks.
    """

    picture: Image.Image = field(repr=False)
    name: str = ""
    detail: str = ""
    remark: str = ""
    alternative: str = ""
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Group:
    """Tiles that belong together, below a heading."""

    heading: str
    tiles: tuple[Tile, ...]
    goes_on: bool = False
    """Whether this is the rest of a group that began in the row above."""


@dataclass(frozen=True, repr=False)
class Layout:
    """A contact sheet: title and detail at the top, the groups in their order, and the legends of the colours."""

    title: str
    detail: str
    groups: tuple[Group, ...]
    legends: tuple[Legend, ...] = ()

    @property
    def tiles(self) -> list[Tile]:
        return [tile for group in self.groups for tile in group.tiles]

    def __repr__(self) -> str:
        return f"Layout({self.title!r}, {len(self.tiles)} tiles in {len(self.groups)} groups)"

    def rows(self) -> list[list[Group]]:
        """Return the groups as they stand in rows of `columns` tiles; only the last is shorter, with two at least."""
        ends = _ends(len(self.tiles), self.columns)
        return [_between(self.groups, start, end) for start, end in pairwise([0, *ends])]

    @property
    def columns(self) -> int:
        """How many tiles stand side by side, such that the last row is as full as it can be, and few groups are cut.

        >>> blank = Tile(Image.new("RGB", (1, 1)))
        >>> [Layout("", "", (Group("", (blank,) * n),)).columns for n in (1, 3, 6, 7, 13)]
        [2, 3, 6, 4, 5]
        """
        abreast = max(1, int(ABREAST / self.stretch[0]))
        longest = max(min(LEAST, abreast), min(abreast, len(self.tiles)))
        return min(range(min(3, longest), longest + 1), key=lambda columns: (self._cost(columns), -columns))

    @property
    def stretch(self) -> tuple[float, float]:
        """How wide and how high a tile is: a square, but longer for photos more than twice as long as wide.

        >>> [Layout("", "", (Group("", (Tile(Image.new("RGB", size)),)),)).stretch for size in ((60, 40), (80, 20))]
        [(1.0, 1.0), (2.0, 1.0)]
        """
        sizes = [tile.picture.size for tile in self.tiles]
        ratio = sorted(width / height for width, height in sizes)[len(sizes) // 2] if sizes else 1.0
        return min(max(1.0, ratio / 2), LONGEST), min(max(1.0, 0.5 / ratio), LONGEST)

    def _cost(self, columns: int) -> int:
        ends = _ends(len(self.tiles), columns)
        owners = [number for number, group in enumerate(self.groups) for _ in group.tiles]
        cut = sum(owners[end - 1] == owners[end] for end in ends[:-1])
        ragged = len(ends) > 1 and ends[-2] % columns > 0
        return CUT * cut + RAGGED * ragged + (columns * len(ends) - len(self.tiles)) ** 2


# What is to be avoided, by how much, beside the square of empty places: a group that is cut, and a row that is short
# since the last one would have a single tile without it.
CUT, RAGGED = 12, 200


def _ends(count: int, columns: int) -> list[int]:
    """Where rows end: each is full but for the last; a tile alone there gets company from the row before."""
    ends = [*range(columns, count, columns), count] if count else []
    if len(ends) > 1 and ends[-1] - ends[-2] == 1 and columns > 2:
        ends[-2] -= 1
    return ends


def _between(groups: Sequence[Group], start: int, end: int) -> list[Group]:
    """Return the groups' tiles from one place to another."""
    found, first = [], 0
    for group in groups:
        last = first + len(group.tiles)
        tiles = group.tiles[max(0, start - first) : max(0, end - first)]
        if tiles:
            found.append(replace(group, tiles=tiles, goes_on=first < start))
        first = last
    return found


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
    return drawing.stacked([drawing.head(layout), *(drawing.row(row) for row in rows)])


def table(rows: Sequence[Sequence[Tile]], columns: Sequence[str] = (), tile: int = 240) -> Image.Image:
    """Draw a table of pictures: names over the columns, if there are any, and the texts of the tiles below them.

    >>> table([[Tile(Image.new("RGB", (40, 30)))] * 3], ["a", "b", "c"], tile=100).width
    332
    """
    drawing = _Sheet(tile, max(len(row) for row in rows))
    parts = [drawing.row([Group("", tuple(row))]) for row in rows]
    if columns:
        parts.insert(0, drawing.names(columns))
    return drawing.stacked(parts)


class _Sheet:
    """The measures of a sheet, and its parts as strips of its full width."""

    def __init__(self, tile: int, columns: int, stretch: tuple[float, float] = (1.0, 1.0)) -> None:
        if isinstance(tile, bool) or not isinstance(tile, int) or tile < SMALLEST:
            raise ExplainError(
                f"tile must be a whole number of pixels from {SMALLEST}, got {shown(tile)}; 300 is usual"
            )
        self.tile, self.high = round(tile * stretch[0]), round(tile * stretch[1])
        self.text = max(10, tile // 20)
        self.gap = max(8, tile // 20)
        self.width = self.gap + columns * (self.tile + self.gap)

    def stacked(self, strips: Sequence[Image.Image]) -> Image.Image:
        """Put strips of the sheet's width below each other."""
        canvas = Image.new("RGB", (self.width, sum(strip.height for strip in strips) + self.gap), PAPER)
        top = 0
        for strip in strips:
            canvas.paste(strip, (0, top))
            top += strip.height
        return canvas

    def head(self, layout: Layout) -> Image.Image:
        """The title, a fainter line, and the legends at the right; empty where there are none."""
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
        lines = max((len(self._lines(tile)) + bool(tile.marks) for tile in tiles), default=0)
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
        for words, color in self._lines(tile):
            self._centred(draw, words, self._middle(place), y, color)
            y += line
        if tile.marks:
            signs = marked(tile.marks, self.tile, round(self.text * 0.9))
            strip.paste(signs, (round(self._middle(place) - signs.width / 2), y))

    def _lines(self, tile: Tile) -> list[tuple[str, tuple[int, int, int]]]:
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
