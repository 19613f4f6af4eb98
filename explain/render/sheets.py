"""Contact sheets: tiles in groups, how they are laid out, and the picture of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from math import ceil
from statistics import median_high
from string import ascii_lowercase
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageDraw

from explain._utils.errors import ExplainError, check_whole_number
from explain.render.captions import (
    FAINT,
    INK,
    RGB,
    Legend,
    Mark,
    draw_marks,
    font,
    ramp,
    space,
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

    def identity(place: tuple[int, tuple[Group, Tile]]) -> int:
        _, (group, _) = place
        return id(group)  # two groups with equal contents are still two

    for _, cells in groupby(places.items(), identity):
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
        photo_columns = 0 if self.groups[0].own_row else 1  # empty below the photo
        groups = cells[photo_columns:]
        longest = max(map(len, groups))
        step = _balanced(longest, max(1, self._abreast - photo_columns))
        # the first parts of all groups, then their second parts, ...
        parts = [
            group[start : start + step] for start in range(0, longest, step) for group in groups
        ]
        rows: list[Places] = [dict(enumerate(part, start=photo_columns)) for part in parts]
        if photo_columns:
            rows[0] = dict(enumerate(cells[0] + parts[0]))
        return rows

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
        below: dict[int, tuple[str, Legend]] = {}  # those of the row below, by column
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


def contact_sheet(layout: Layout, tile: int = 300) -> Image.Image:
    """Draw a contact sheet with each picture fitted into a square of ``tile`` pixels, or for very
    long photos more."""
    page = _Sheet(tile, layout.columns, layout.stretch)
    page.fill(layout, heading=bool(layout.title or layout.detail))
    return page.picture()


def table(
    rows: Sequence[Sequence[Tile]], columns: Sequence[str] = (), tile: int = 240
) -> Image.Image:
    """Draw a table of pictures: names over the columns, if there are any, and the texts of the
    tiles below them."""
    page = _Sheet(tile, max(map(len, rows)))
    page.top += page.lines({i: [(name, INK, 1.0)] for i, name in enumerate(columns)}, bold=True)
    for tiles in rows:
        group = Group("", tuple(tiles))
        # without ``names``, those of the tiles stand below them
        page.row({i: (group, cell) for i, cell in enumerate(tiles)}, legends={}, names=None)
    return page.picture()


Align: TypeAlias = Literal["left", "center", "right"]
LINE = 1.35  # height of a line of text, in font sizes
TITLE = 1.2  # size of the title, in font sizes
SMALL = 0.8  # size of details and labels, in font sizes


class Written(NamedTuple):
    """A line of text at a place on a page."""

    left: float
    top: float
    text: str
    size: float
    color: RGB
    bold: bool
    align: Align


class Page(ABC):
    """The texts and images of a layout with their places, from the left and the top. Lengths are
    in pixels or inches, and so is the font's ``size``. They are drawn at the end, when it is known
    how high the page is: ``top`` is how far it is filled, where the next row begins."""

    letters = False
    """Whether (a), (b), ... stand above the pictures."""

    def __init__(
        self,
        width: float,
        columns: int,
        stretch: tuple[float, float],
        size: float,
        gap: float,
        margin: float = 0.0,
    ) -> None:
        """Set the measures: the width of the page and the gap between pictures, from which a
        column's follows (``cell``); ``stretch`` is that of `Layout`."""
        self.width = width
        self.stretch = stretch
        self.size = size
        self.gap = gap
        self.margin = margin
        self.cell = (width - 2 * margin - (columns - 1) * gap) / columns
        self.top = margin
        self.texts: list[Written] = []
        # left, top, width and height on the page, and the picture
        self.images: list[tuple[float, float, float, float, Image.Image]] = []
        self._lettered = 0  # how many pictures have a letter

    @abstractmethod
    def text_width(self, text: str, size: float, bold: bool) -> float:
        """The width of a text."""

    @abstractmethod
    def checks(self, tile: Tile, left: float) -> float:
        """Show the results of a tile's checks below ``top``; returns their height."""

    def fill(self, layout: Layout, *, heading: bool) -> None:
        """Put a contact sheet on the page: its title and detail, and its rows."""
        if heading:
            width = self.width - 2 * self.margin
            write = partial(self.write, left=self.margin, width=width, align="left")
            self.top += write(layout.title, size=TITLE, color=INK, bold=True)
            self.top += write(layout.detail, size=SMALL, color=FAINT)
            self.top += self.gap
        rows = zip(layout.places(), layout.legends(), layout.names(), strict=True)
        for places, legends, names in rows:
            self.row(places, legends, names)

    def row(
        self, places: Places, legends: Mapping[int, Legend], names: Mapping[int, Tile] | None
    ) -> None:
        """Put a row of pictures with texts and legends by column on the page, and move ``top``
        below it. In a table, ``names`` are the tiles named above the row, else None.
        """
        if names:
            self.top += self.lines({c: _named(tile) for c, tile in names.items()}) + self.gap
        self._headings(places)
        if self.letters:
            self._letters(places)
        self.top += self._pictures(places)
        texts = {}
        for column, (_, tile) in places.items():
            lines = _named(tile) if names is None else []
            texts[column] = [*lines, (tile.remark, REMARK, 1.0)]
        self.top += self.lines(texts)
        checks = (self.checks(tile, self._left(c)) for c, (_, tile) in places.items())
        self.top += max(checks, default=0.0)
        self.top += max((self._bar(c, legend) for c, legend in legends.items()), default=0.0)
        self.top += max(self.gap, 0.8 * self.size)  # space before the next row

    def lines(
        self, columns: Mapping[int, Sequence[tuple[str, RGB, float]]], *, bold: bool = False
    ) -> float:
        """Write each column's texts ``(text, color, size)`` below each other (sizes are multiples
        of the font's); returns the tallest column's height. ``top`` stays.
        """
        tallest = 0.0
        for column, lines in columns.items():
            height = 0.0
            for text, color, size in lines:
                height += self.write(
                    text, self._left(column), self.cell, size, color=color, bold=bold, below=height
                )
            tallest = max(tallest, height)
        return tallest

    def _headings(self, places: Places) -> None:
        """Write the heading of each group of pictures over its first tile in the row, fainter where
        the group began in a row above; move ``top`` below the headings."""
        tallest = 0.0
        for group, first, count in groups_of(places):
            _, first_tile = places[first]
            color = INK if first_tile is group.tiles[0] else FAINT
            width = count * (self.cell + self.gap) - self.gap
            height = self.write(
                group.heading,
                self._left(first),
                width,
                size=1.0,
                color=color,
                bold=True,
                align="left",
            )
            tallest = max(tallest, height)
        self.top += tallest

    def _letters(self, places: Places) -> None:
        """Write (a), (b), ... above the pictures of a row, counted on through the whole page; move
        ``top`` below the letters."""
        for column in places:
            name = f"({_letter(self._lettered)})"
            self.write(name, self._left(column), self.cell, size=1.0, bold=True, align="left")
            self._lettered += 1
        self.top += LINE * self.size

    def _pictures(self, places: Places) -> float:
        """Add a row's pictures, scaled into their columns, with middles at one height; returns the
        tallest's height with a gap. ``top`` stays.
        """
        wide, high = self.stretch
        max_height = self.cell * high / wide
        sizes = {}
        for column, (_, tile) in places.items():
            scale = min(self.cell / tile.picture.width, max_height / tile.picture.height)
            sizes[column] = tile.picture.width * scale, tile.picture.height * scale
        tallest = max((height for _, height in sizes.values()), default=0.0)
        for column, (_, tile) in places.items():
            width, height = sizes[column]
            left = self._left(column) + (self.cell - width) / 2
            picture_top = self.top + (tallest - height) / 2
            self.images.append((left, picture_top, width, height, tile.picture))
        return tallest + self.gap / 2

    def _bar(self, column: int, legend: Legend) -> float:
        """Add a legend to a column: colours as images, labels and meaning as texts (between a
        ramp's two labels if there is room); returns its height. ``top`` stays.
        """
        # narrower than the pictures, so that labels do not touch those of the next column
        bar_width = 0.92 * self.cell
        left = self._left(column) + (self.cell - bar_width) / 2
        thick = 0.5 * self.size
        count = len(legend.labels)
        step = bar_width / max(1, count)
        colors_top = self.top + self.gap / 2
        labels_below = self.gap / 2 + (thick + self.gap / 2)  # how far below ``top`` they stand
        write = partial(self.write, size=SMALL, color=FAINT, below=labels_below)
        if legend.ramp:
            self.images.append((left, colors_top, bar_width, thick, ramp(legend, 256, height=1)))
            inner: list[Align] = ["center"] * (count - 2)
            aligned: list[Align] = ["left", *inner, "right"]
            heights = [
                write(label, left, bar_width, align=align)
                # not strict: a single label stands at the left
                for label, align in zip(legend.labels, aligned, strict=False)
            ]
        else:
            for number, color in enumerate(legend.colors):
                patch = Image.new("RGB", (1, 1), color)
                # a tenth of the step stays empty on each side
                patch_left = left + (number + 0.1) * step
                self.images.append((patch_left, colors_top, 0.8 * step, thick, patch))
            heights = [write(label, left + i * step, step) for i, label in enumerate(legend.labels)]
        text_width = partial(self.text_width, size=SMALL * self.size, bold=False)
        widest_label = max(map(text_width, legend.labels), default=0.0)
        # the meaning stands in the middle, and so as far from both ends as from the wider label
        room = bar_width - 2 * (widest_label + self.gap)
        is_between_labels = legend.ramp and count == 2 and text_width(legend.meaning) < room
        meaning_below = labels_below
        if not is_between_labels:
            meaning_below += max(heights, default=0.0)
        return meaning_below + write(legend.meaning, left, bar_width, below=meaning_below)

    def write(
        self,
        text: str,
        left: float,
        width: float,
        size: float,
        *,
        color: RGB = INK,
        bold: bool = False,
        align: Align = "center",
        below: float = 0.0,
    ) -> float:
        """Add a text, ``size`` times the font's size, in up to three lines of ``width``, by
        ``below`` under ``top``, which stays; returns its height.
        """
        font_size = size * self.size
        place = left + {"left": 0.0, "center": width / 2, "right": width}[align]
        lines = wrapped(text, width, partial(self.text_width, size=font_size, bold=bold), most=3)
        for number, line in enumerate(lines):
            line_top = self.top + below + number * LINE * font_size
            self.texts.append(Written(place, line_top, line, font_size, color, bold, align))
        return len(lines) * LINE * font_size

    def _left(self, column: int) -> float:
        """Return where a column of the page begins."""
        return self.margin + column * (self.cell + self.gap)


def _named(tile: Tile) -> list[tuple[str, RGB, float]]:
    """Return the texts (text, colour, size) of a tile's name and detail; a size is a multiple of
    the font's."""
    return [(tile.name, INK, 1.0), (tile.detail, FAINT, SMALL)]


def _letter(number: int) -> str:
    """Return the letters of a picture by its number from 0: a to z, then aa, ab, ..."""
    first, last = divmod(number, len(ascii_lowercase))
    return (_letter(first - 1) if first else "") + ascii_lowercase[last]


class _Sheet(Page):
    """A contact sheet as a picture; lengths are in pixels."""

    def __init__(self, tile: int, columns: int, stretch: tuple[float, float] = (1.0, 1.0)) -> None:
        """Fit the measures to a square of ``tile`` pixels for each picture."""
        check_whole_number("tile", tile, SMALLEST, optional=False, error=ExplainError)
        gap = max(8, tile // 20)
        width = gap + columns * (round(tile * stretch[0]) + gap)
        size = max(10, tile // 16)
        super().__init__(width, columns, stretch, size=size, gap=gap, margin=gap)

    def text_width(self, text: str, size: float, bold: bool) -> float:
        return font(round(size), bold).getlength(text)

    def checks(self, tile: Tile, left: float) -> float:
        if not tile.marks:
            return 0.0
        marks = draw_marks(tile.marks, int(self.cell), round(0.9 * self.size))
        left += (self.cell - marks.width) / 2
        self.images.append((left, self.top, marks.width, marks.height, marks))
        return marks.height

    def picture(self) -> Image.Image:
        """Draw the page."""
        canvas = space(round(self.width), round(self.top))
        for left, top, width, height, picture in self.images:
            size = (max(1, round(width)), max(1, round(height)))
            resized = picture.resize(size, Image.Resampling.LANCZOS)
            canvas.paste(resized, (round(left), round(top)))
        draw = ImageDraw.Draw(canvas)
        for line in self.texts:
            face = font(round(line.size), line.bold)
            place = (round(line.left), round(line.top))
            draw.text(place, line.text, line.color, face, anchor=ANCHORS[line.align])
        return canvas


ANCHORS: dict[Align, str] = {"left": "la", "center": "ma", "right": "ra"}
"""Pillow's names."""


def evenly_spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` of the numbers 0 to ``count`` - 1, evenly spread, with the first and
    the last."""
    return sorted({round(place) for place in np.linspace(0, max(0, count - 1), min(count, most))})
