"""Contact sheets as plain values: tiles in groups, and how they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from PIL import Image

from explain.render.legend import Legend
from explain.render.marks import Mark

ABREAST = 6  # tiles in a row at most
LEAST = 2  # tiles that a sheet is wide, so that its title has room
LONGEST = 3  # times as wide or high as a square, at most


@dataclass(frozen=True)
class Tile:
    """A picture with what is said below it: its name, a fainter line, and a remark where it must not be taken for more.

    ``alternative`` is what the picture shows, in words, and ``marks`` say what it was asked and whether it passed.
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
    """A contact sheet: what it says on top, the groups in their order, and what the colours mean."""

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
