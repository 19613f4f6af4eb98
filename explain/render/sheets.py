"""Contact sheets: tiles in groups, how they are laid out, and the picture of them."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from explain._utils.errors import ExplainError, shown
from explain._utils.html import picture_html
from explain.render.captions import FAINT, INK, PAPER, Legend, Mark, bar, fit, font, wrapped
from explain.render.captions import row as marked

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ABREAST = 6  # tiles in a row at most
LEAST = 2  # tiles that a sheet is wide, so that its title has room
LONGEST = 3  # times as wide or high as a square, at most


@dataclass(frozen=True)
class Tile:
    """A picture with texts below it: its name, a fainter line of detail, and a warning in ``remark``.

    ``alternative`` describes the picture in words, ``marks`` are the results of its checks, and ``legend`` says what
    its colours mean.
    """

    picture: Image.Image = field(repr=False)
    name: str = ""
    detail: str = ""
    remark: str = ""
    alternative: str = ""
    marks: tuple[Mark, ...] = ()
    legend: Legend | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Group:
    """Tiles that belong together, below a heading.

    ``goes_on`` says that this is the rest of a group that began in a row above. With ``indent``, the group has a row of
    its own, behind so many empty places; in the first row, the groups before it stand there.
    """

    heading: str
    tiles: tuple[Tile, ...]
    goes_on: bool = False
    indent: int = 0


def lined_up(first: Tile, rows: Sequence[tuple[str, Sequence[Tile]]]) -> tuple[Group, ...]:
    """Return a tile, and beside it rows of tiles with their headings, whose columns line up.

    More columns than a sheet is wide are shown in parts, one below the other.

    >>> tile = Tile(Image.new("RGB", (4, 3)))
    >>> [(len(group.tiles), group.goes_on) for group in lined_up(tile, [("a", [tile] * 7)])]
    [(1, False), (4, False), (3, True)]
    """
    columns = max(len(tiles) for _, tiles in rows)
    most = max(1, int(ABREAST / Layout("", "", (Group("", (first,)),)).stretch[0]) - 1)
    step = ceil(columns / ceil(columns / most))
    parts = [
        Group(heading, tuple(tiles[start : start + step]), start > 0, indent=1)
        for start in range(0, columns, step)
        for heading, tiles in rows
    ]
    return Group("", (first,)), *parts


@dataclass(frozen=True, repr=False)
class Layout:
    """A contact sheet: title and detail at the top, and the groups in their order."""

    title: str
    detail: str
    groups: tuple[Group, ...]

    @property
    def tiles(self) -> list[Tile]:
        return [tile for group in self.groups for tile in group.tiles]

    def __repr__(self) -> str:
        return f"Layout({self.title!r}, {len(self.tiles)} tiles in {len(self.groups)} groups)"

    def rows(self) -> list[list[Group]]:
        """Return the groups as they stand in rows of `columns` tiles; only the last is shorter, with two at least."""
        if self._lined_up:
            first = next(i for i, group in enumerate(self.groups) if group.indent)
            start = [*self.groups[:first], replace(self.groups[first], indent=0)]
            return [start, *([group] for group in self.groups[first + 1 :])]
        ends = _ends(len(self.tiles), self.columns)
        return [_between(self.groups, start, end) for start, end in pairwise([0, *ends])]

    @property
    def _lined_up(self) -> bool:
        return any(group.indent for group in self.groups)

    def places(self) -> list[dict[int, tuple[Group, Tile]]]:
        """Return for each row the tiles and their groups, by column."""
        rows = [(row[0].indent, [(group, tile) for group in row for tile in group.tiles]) for row in self.rows()]
        return [dict(enumerate(pairs, start)) for start, pairs in rows]

    def legends(self) -> list[dict[int, Legend]]:
        """Return for each row the legends below it, by column: none where the tile below has the same legend.

        Where columns line up, it must have the same name as well.
        """
        lined = self._lined_up
        rows = [{c: (tile.name if lined else "", tile.legend) for c, (_, tile) in row.items()} for row in self.places()]
        return [
            {c: each[1] for c, each in row.items() if each[1] is not None and below.get(c) != each}
            for row, below in zip(rows, [*rows[1:], {}], strict=True)
        ]

    @property
    def columns(self) -> int:
        """How many tiles stand side by side, such that the last row is as full as it can be, and few groups are cut.

        >>> blank = Tile(Image.new("RGB", (1, 1)))
        >>> [Layout("", "", (Group("", (blank,) * n),)).columns for n in (1, 3, 6, 7, 13)]
        [2, 3, 6, 4, 5]
        """
        if self._lined_up:
            return max(max(row) for row in self.places()) + 1
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
    return drawing.stacked([drawing.head(layout), *map(drawing.row, layout.places(), layout.legends())])


def table(rows: Sequence[Sequence[Tile]], columns: Sequence[str] = (), tile: int = 240) -> Image.Image:
    """Draw a table of pictures: names over the columns, if there are any, and the texts of the tiles below them.

    >>> table([[Tile(Image.new("RGB", (40, 30)))] * 3], ["a", "b", "c"], tile=100).width
    332
    """
    drawing = _Sheet(tile, max(len(row) for row in rows))
    parts = [drawing.row({c: (Group("", ()), tile) for c, tile in enumerate(row)}, {}) for row in rows]
    if columns:
        parts.insert(0, drawing.names(columns))
    return drawing.stacked(parts)


class _Sheet:
    """The measures of a sheet, and its parts as strips of its full width."""

    def __init__(self, tile: int, columns: int, stretch: tuple[float, float] = (1.0, 1.0)) -> None:
        if isinstance(tile, bool) or not isinstance(tile, int) or tile < SMALLEST:
            raise ExplainError(f"tile must be a whole number from {SMALLEST}, got {shown(tile)}; 300 is usual")
        self.tile, self.high = round(tile * stretch[0]), round(tile * stretch[1])
        self.text, self.gap = max(10, tile // 16), max(8, tile // 20)
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
        """The title, and a fainter line; empty where there are none."""
        if not (layout.title or layout.detail):
            return Image.new("RGB", (self.width, 0), PAPER)
        large = round(self.text * 1.5)
        strip = Image.new("RGB", (self.width, self.gap + round(large * 1.4) + round(self.text * 1.6)), PAPER)
        room, draw = self.width - 2 * self.gap, ImageDraw.Draw(strip)
        draw.text((self.gap, self.gap), fit(layout.title, room, large, True), INK, font(large, True))
        line = fit(layout.detail, room, self.text)
        draw.text((self.gap, self.gap + round(large * 1.4)), line, FAINT, font(self.text))
        return strip

    def names(self, columns: Sequence[str]) -> Image.Image:
        strip = Image.new("RGB", (self.width, self.gap + round(self.text * 1.7)), PAPER)
        for i, name in enumerate(columns):
            self._centred(ImageDraw.Draw(strip), name, self._middle(i), self.gap, INK, bold=True)
        return strip

    def row(self, places: Mapping[int, tuple[Group, Tile]], legends: Mapping[int, Legend]) -> Image.Image:
        """A row of tiles and legends by column, each group under its heading and a rule."""
        tiles = [tile for _, tile in places.values()]
        line = round(self.text * 1.45)
        tallest = max((self._fitted(tile.picture)[1] for tile in tiles), default=1)
        heading = round(line * 1.5) if any(group.heading for group, _ in places.values()) else 0
        lines = max((len(self._lines(tile)) + bool(tile.marks) for tile in tiles), default=0)
        below = lines * line + (round(line * 0.3) if lines else 0)
        bars = {c: bar(each, self.tile, max(9, round(self.text * 0.8)), about=True) for c, each in legends.items()}
        top = self.gap + heading + tallest + below + (self.gap // 2 if bars else 0)
        strip = Image.new("RGB", (self.width, top + max((each.height for each in bars.values()), default=0)), PAPER)
        before = None
        for place, (group, tile) in places.items():
            if group is not before:
                self._heading(strip, group, place)
            self._tile(strip, tile, place, self.gap + heading, tallest)
            before = group
        for place, each in bars.items():
            strip.paste(each, (round(self._middle(place) - each.width / 2), top))
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
        line, draw = round(self.text * 1.45), ImageDraw.Draw(strip)
        y = top + tallest + round(line * 0.3)
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


DPI = 120  # of figures
LONGEST_SIDE = 19  # inches of a figure


def figure(layout: Layout, alternative: str = "") -> "Figure":
    """Return a contact sheet as a figure, which belongs to no window, so that nothing has to be closed."""
    picture = sheet(layout, 340)
    dpi = max(DPI, max(picture.size) / LONGEST_SIDE)
    drawn = empty((picture.width / dpi, picture.height / dpi), alternative, dpi)
    drawn.set_layout_engine("none")
    axis = drawn.add_axes((0, 0, 1, 1))
    axis.imshow(np.asarray(picture), interpolation="none", aspect="auto")
    axis.set_axis_off()
    return drawn


def empty(size: tuple[float, float], alternative: str, dpi: float = DPI) -> "Figure":
    """Return a figure without axes that shows itself in a notebook, with a text for those who cannot see it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)  # inches
    made: Figure = _figure_class()(figsize=size, layout=spaced, dpi=dpi)
    made.alternative = alternative  # type: ignore[attr-defined]
    FigureCanvasAgg(made)
    return made


@cache
def _figure_class() -> Any:
    """The class of such figures; matplotlib is loaded when the first is made."""
    from matplotlib.figure import Figure

    def as_html(drawn: Any) -> str:
        return picture_html(as_picture(drawn), drawn.alternative)

    def display_once(drawn: Any) -> None:
        # Only IPython calls this, which would store a PNG of every figure as well.
        display: Any = import_module("IPython.display").display
        display({"text/plain": repr(drawn), "text/html": as_html(drawn)}, raw=True)

    members = {"_repr_html_": as_html, "_ipython_display_": display_once, "__module__": __name__}
    return type("ShownFigure", (Figure,), members)


def as_picture(drawn: "Figure") -> Image.Image:
    """Return the picture of a figure."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png")
    return Image.open(buffer)


def evenly_spread(count: int, most: int) -> list[int]:
    """Return at most so many places of ``count``, evenly spread, with the first and the last.

    >>> evenly_spread(3, 8), evenly_spread(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    return sorted({round(place) for place in np.linspace(0, max(0, count - 1), min(count, most))})
