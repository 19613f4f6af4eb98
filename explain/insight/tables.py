"""Tables of insight, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from explain._utils.errors import printable

WIDEST = 50  # letters of a column


@dataclass(frozen=True)
class TableSection:
    """A table with its title, what it says, what is said where it is empty, and what its picture is called."""

    title: str
    about: str
    rows: Sequence[Sequence[str]]
    nothing: str = "none"
    picture: str = ""

    @property
    def lines(self) -> list[str]:
        """The table as lines for people, below its title."""
        return [self.title, *(aligned(self.rows) if len(self.rows) > 1 else [f"  {self.nothing}"])]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines: texts at the left of their columns.

    >>> aligned([["a", "bcd"], ["ef", "g"]])
    ['  a   bcd', '  ef  g']
    """
    plain = [[printable(cell) for cell in row] for row in rows]
    widths = [min(WIDEST, max(len(row[i]) for row in plain)) for i in range(len(plain[0]))]
    return [
        "  " + "  ".join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in plain
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
