"""Contact sheets as plain values: tiles in groups, and how they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from PIL import Image

from explain.render.legend import Legend

ABREAST = 6  # tiles in a row at most
LEAST = 2  # tiles that a sheet is wide, so that its title has room


@dataclass(frozen=True)
class Tile:
    """A picture with what is said below it: its name, a fainter line, and a remark where it must not be taken for more.

    ``alternative`` is what the picture shows, in words.
    """

    picture: Image.Image = field(repr=False)
    name: str = ""
    detail: str = ""
    remark: str = ""
    alternative: str = ""


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
        """Return the groups as they stand in rows, all at most `columns` tiles long."""
        return _rows(self.groups, self.columns)[1]

    @property
    def columns(self) -> int:
        """How many tiles stand side by side, such that the rows come out best.

        >>> blank = Tile(Image.new("RGB", (1, 1)))
        >>> [Layout("", "", (Group("", (blank,) * n),)).columns for n in (1, 3, 6, 7, 13)]
        [2, 3, 6, 4, 5]
        """
        longest = max(LEAST, min(ABREAST, len(self.tiles)))
        return min(range(min(3, longest), longest + 1), key=lambda columns: (_rows(self.groups, columns)[0], -columns))


# What is to be avoided in rows, by how much: a tile alone, a group that is cut, and the square of empty places.
ALONE, CUT = 1000, 12


def _rows(groups: Sequence[Group], columns: int) -> tuple[int, list[list[Group]]]:
    """Cut a sequence of groups into rows in the best way; return its cost, and the rows."""
    owners = [number for number, group in enumerate(groups) for _ in group.tiles]
    best: list[tuple[int, int]] = [(0, 0)]  # of the first so many tiles: the cost, and where the last row begins
    for end in range(1, len(owners) + 1):
        cut = CUT if end < len(owners) and owners[end - 1] == owners[end] else 0
        starts = range(max(0, end - columns), end)
        best.append(min((best[i][0] + cut + ALONE * (end - i == 1) + (columns - end + i) ** 2, i) for i in starts))
    ends = [len(owners)]
    while ends[-1] > 0:
        ends.append(best[ends[-1]][1])
    ends.reverse()
    return best[-1][0], [_between(groups, start, end) for start, end in pairwise(ends)]


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
