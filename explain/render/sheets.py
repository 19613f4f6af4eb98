"""Contact sheets: tiles in groups, how they are laid out, and the picture of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import ceil
from statistics import median_high

import numpy as np
from PIL import Image, ImageDraw

from explain._utils.errors import ExplainError, check_whole_number
from explain.render.captions import (
    FAINT,
    INK,
    RGB,
    Legend,
    Mark,
    bar,
    draw_marks,
    font,
    line_of,
    placed,
    space,
    stacked,
    text_picture,
    wrapped,
)

ABREAST = 6  # tiles in a row at most
LEAST = 2  # how many tiles wide a sheet is at least, so that its title has room
LONGEST = 3  # how many times as wide or high as a square a tile is at most


@dataclass(frozen=True)
class Tile:
    """A picture with texts below it: its name, a fainter line of detail, and a warning in
    ``remark``. ``marks`` are the results of its checks, and ``legend`` says what its colours mean.
    """

    picture: Image.Image = field(repr=False)
    name: str = ""
    detail: str = ""
    remark: str = ""
    marks: tuple[Mark, ...] = ()
    legend: Legend | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Group:
    """Tiles that belong together, below a heading. With ``own_row``, the group has a row of its
    own: the columns of such groups line up.
    """

    heading: str
    tiles: tuple[Tile, ...]
    own_row: bool = False


Places = Mapping[int, tuple[Group, Tile]]
"""The tiles of a row with their groups, by column."""


def groups_of(places: Places) -> Iterator[tuple[Group, int, int]]:
    """Yield the groups of tiles in a row of a sheet, each with the column of its first tile and the
    number of its tiles in that row: a heading is as wide as these."""
    # by identity: two groups with equal contents are still two
    for _, cells in groupby(places.items(), lambda place: id(place[1][0])):
        (first, (group, _)), *rest = cells
        yield group, first, 1 + len(rest)


@dataclass(frozen=True)
class Layout:
    """A contact sheet: title and detail at the top, and the groups in their order, with at most
    ``abreast`` tiles side by side."""

    title: str
    detail: str
    groups: tuple[Group, ...] = field(repr=False)
    abreast: int = ABREAST

    @property
    def tiles(self) -> list[Tile]:
        """The tiles of all groups, in their order."""
        return [tile for group in self.groups for tile in group.tiles]

    def places(self) -> list[Places]:
        """A sheet's rows: tiles with groups by column. In a table, wide groups are cut into parts,
        and a photo without its own row is in column 0 of the first row, the rest beside it."""
        cells = [[(group, tile) for tile in group.tiles] for group in self.groups]
        if not self.lined_up:
            all_cells = list(chain.from_iterable(cells))
            starts = range(0, len(all_cells), self.columns)
            return [dict(enumerate(all_cells[start : start + self.columns])) for start in starts]
        first = 0 if self.groups[0].own_row else 1
        groups = cells[first:]
        columns = max(map(len, groups))
        step = _balanced(columns, max(1, self._abreast - first))
        parts = [
            group[start : start + step] for start in range(0, columns, step) for group in groups
        ]
        if first:
            parts[0] = cells[0] + parts[0]
        return [dict(enumerate(part, first * int(i > 0))) for i, part in enumerate(parts)]

    @property
    def lined_up(self) -> bool:
        """Whether groups have rows of their own: a table, with names over its columns."""
        return any(group.own_row for group in self.groups)

    def names(self) -> list[dict[int, Tile] | None]:
        """For each row of a table, by column, the tiles whose name and detail stand above it: those
        that differ from the tile above. None for each row of other sheets.
        """
        if not self.lined_up:
            return [None] * len(self.places())
        above: dict[int, tuple[str, str]] = {}
        rows: list[dict[int, Tile] | None] = []
        for places in self.places():
            names: dict[int, Tile] = {}
            for column, (_, tile) in places.items():
                if above.get(column) != (tile.name, tile.detail):
                    names[column] = tile
                above[column] = (tile.name, tile.detail)
            rows.append(names)
        return rows

    def legends(self) -> list[dict[int, Legend]]:
        """For each row, by column, the legends below it: a ramp once a column, under the last tile
        that has it (in a table, under the same name); separate colours under each tile."""
        rows: list[dict[int, Legend]] = []
        below: dict[int, tuple[str, Legend]] = {}
        for places in reversed(self.places()):
            shown: dict[int, tuple[str, Legend]] = {}
            legends: dict[int, Legend] = {}
            for column, (_, tile) in places.items():
                if tile.legend is None:
                    continue
                shown[column] = (tile.name if self.lined_up else "", tile.legend)
                # separate colours say how much of that tile's own map lies inside
                if below.get(column) != shown[column] or not tile.legend.ramp:
                    legends[column] = tile.legend
            rows.append(legends)
            below = shown
        return rows[::-1]

    @property
    def columns(self) -> int:
        """How many columns of tiles the sheet has; chosen so that the last row is nearly as full as
        the others. In a table, the photo's column counts too."""
        if self.lined_up:
            return max(max(row) for row in self.places()) + 1
        return max(min(LEAST, self._abreast), _balanced(len(self.tiles), self._abreast))

    @property
    def _abreast(self) -> int:
        """How many tiles stand side by side at most, fewer where tiles are wider than a square."""
        return max(1, int(self.abreast / self.stretch[0]))

    @property
    def stretch(self) -> tuple[float, float]:
        """The width and height of a tile, in sides of a square: (1, 1), but longer where the median
        picture of the sheet is more than twice as long as wide."""
        ratio = median_high(tile.picture.width / tile.picture.height for tile in self.tiles)
        wide = min(max(1.0, ratio / 2), LONGEST)
        high = min(max(1.0, 0.5 / ratio), LONGEST)
        return wide, high


def _balanced(count: int, most: int) -> int:
    """Return how many of ``count`` tiles stand in each row, in as few rows as possible with at most
    ``most`` tiles in a row."""
    return ceil(count / ceil(count / most))


SMALLEST = 20  # pixels along the side of a tile
REMARK = (176, 60, 20)
RULE = (214, 216, 222)


def contact_sheet(layout: Layout, tile: int = 300) -> Image.Image:
    """Draw a contact sheet with each picture fitted into a square of ``tile`` pixels, or for very
    long photos more."""
    sheet = _Sheet(tile, layout.columns, layout.stretch)
    strips = [sheet.head(layout)] if layout.title or layout.detail else []
    strips += map(sheet.row, layout.places(), layout.legends(), layout.names())
    return sheet.spaced(strips)


def table(
    rows: Sequence[Sequence[Tile]], columns: Sequence[str] = (), tile: int = 240
) -> Image.Image:
    """Draw a table of pictures: names over the columns, if there are any, and the texts of the
    tiles below them."""
    sheet = _Sheet(tile, max(map(len, rows)))
    strips = [sheet.names(columns)] if columns else []
    for tiles in rows:
        group = Group("", tuple(tiles))
        strips.append(sheet.row({i: (group, cell) for i, cell in enumerate(tiles)}, {}))
    return sheet.spaced(strips)


class _Sheet:
    """The measures of a sheet in pixels, and its parts as strips of its full width."""

    def __init__(self, tile: int, columns: int, stretch: tuple[float, float] = (1.0, 1.0)) -> None:
        """Set the measures of a contact sheet in pixels: the width (``tile``) and height (``high``)
        of a picture's space, the size of texts, the height of a line, the gap and the whole width.
        """
        check_whole_number("tile", tile, SMALLEST, optional=False, error=ExplainError)
        self.tile = round(tile * stretch[0])
        self.high = round(tile * stretch[1])
        self.text = max(10, tile // 16)
        self.line = round(self.text * 1.45)
        self.gap = max(8, tile // 20)
        self.width = self.gap + columns * (self.tile + self.gap)

    def spaced(self, strips: Sequence[Image.Image]) -> Image.Image:
        """Return strips of the sheet's width below each other as one picture, with a gap before,
        between and after them."""
        gap = space(self.width, self.gap)
        return stacked([gap, *chain.from_iterable((strip, gap) for strip in strips)], self.width)

    def across(self, pictures: Mapping[int, Image.Image], align: float = 0.5) -> Image.Image:
        """Return a strip of the sheet's width with a picture in each given column: in its middle
        (``align`` 0.5) or at its left (0)."""
        step = self.tile + self.gap
        places = []
        for column, picture in pictures.items():
            indent = round((self.tile - picture.width) * align)
            places.append((self.gap + column * step + indent, picture))
        return placed(places, self.width)

    def head(self, layout: Layout) -> Image.Image:
        """Return the strip at the top of a contact sheet: the title, and the detail as a fainter
        line."""
        room = self.width - 2 * self.gap
        title = line_of(layout.title, room, round(self.text * 1.5), bold=True, line=1.4)
        detail = line_of(layout.detail, room, self.text, FAINT)
        return self.across({0: stacked([title, detail], room)}, align=0)

    def names(self, columns: Sequence[str]) -> Image.Image:
        """Return the strip with the names of a table's columns, each over its column."""
        names = [line_of(name, self.tile, self.text, bold=True) for name in columns]
        return self.across(dict(enumerate(names)))

    def row(
        self,
        places: Places,
        legends: Mapping[int, Legend],
        names: Mapping[int, Tile] | None = None,
    ) -> Image.Image:
        """A row as a strip: tiles and legends by column, above them each group's heading. In a
        table, ``names`` are the tiles named above the row; else None, with names below.
        """
        small = {column: self._fitted(tile.picture) for column, (_, tile) in places.items()}
        tallest = max((picture.height for picture in small.values()), default=1)
        cells = {}
        for column, (_, tile) in places.items():
            margin = (tallest - small[column].height) // 2
            above = space(0, margin)
            below = space(0, tallest - small[column].height - margin)
            texts = self._texts(tile, with_name=names is None)
            cells[column] = stacked([above, small[column], below, *texts], self.tile, align=0.5)
        parts = [self.across(cells)]
        if any(group.heading for group, _ in places.values()):
            parts.insert(0, self.across(self._headings(places), align=0))
        gap = space(0, self.gap // 2)
        if names:
            titles = {}
            for column, tile in names.items():
                titles[column] = stacked(self._named(tile), self.tile, align=0.5)
            parts = [self.across(titles), gap, *parts]
        if legends:
            size = max(9, round(self.text * 0.8))
            bars = {}
            for column, legend in legends.items():
                bars[column] = bar(legend, self.tile, size, with_meaning=True)
            parts += [gap, self.across(bars)]
        return stacked(parts, self.width)

    def _headings(self, places: Places) -> dict[int, Image.Image]:
        """The headings of a row's groups as pictures, by their first tile's column: the name,
        fainter where the group began above, and a line over the group's tiles.
        """
        headings = {}
        for group, first, count in groups_of(places):
            width = count * (self.tile + self.gap) - self.gap
            color = INK if places[first][1] is group.tiles[0] else FAINT
            name = line_of(group.heading, width, self.text, color, bold=True)
            heading = space(width, round(self.line * 1.5))
            heading.paste(name)
            start = name.width + self.gap
            if group.heading and start < width:
                middle = round(self.text * 0.65)
                thick = max(1, self.text // 10)
                ImageDraw.Draw(heading).line((start, middle, width, middle), RULE, thick)
            headings[first] = heading
        return headings

    def _texts(self, tile: Tile, with_name: bool) -> list[Image.Image]:
        """Return the texts below a tile's picture as pictures: name and detail (unless they stand
        above the row), the remark, which warns, and the marks of checks."""
        lines = self._named(tile) if with_name else []
        lines += self._lines(tile.remark, REMARK, 2)
        if tile.marks:
            lines.append(draw_marks(tile.marks, self.tile, round(self.text * 0.9)))
        return [space(0, round(self.line * 0.3)), *lines] if lines else []

    def _named(self, tile: Tile) -> list[Image.Image]:
        """Return a tile's name as a picture of one line, and its detail as up to two."""
        return self._lines(tile.name, INK, 1) + self._lines(tile.detail, FAINT, 2)

    def _lines(self, text: str, color: RGB, most: int) -> list[Image.Image]:
        """Return a text as pictures of up to ``most`` lines, each at most as wide as a tile."""
        lines = wrapped(text, self.tile, font(self.text).getlength, most)
        return [text_picture(line, self.text, color, line=1.45) for line in lines]

    def _fitted(self, picture: Image.Image) -> Image.Image:
        """Return a picture scaled into the space of a tile, smaller or larger, in its own
        proportions."""
        scale = min(self.tile / picture.width, self.high / picture.height)
        sides = [max(1, round(side * scale)) for side in picture.size]
        return picture.resize(sides, Image.Resampling.LANCZOS)


def evenly_spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` of the numbers 0 to ``count`` - 1, evenly spread, with the first and
    the last."""
    return sorted({round(place) for place in np.linspace(0, max(0, count - 1), min(count, most))})
