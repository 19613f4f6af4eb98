"""Tables as they are published: in Markdown, between markers in the pages of docs/, or in
assets/tables/ where nobody needs to read all of them.

Every script that measures one says which rows it prints, as `Table`, without measuring; a test
compares them with what is published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

END = "<!-- end -->"
ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "assets" / "tables").glob("*.md"))]


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Table:
    """The heads of a table's columns, and the first cells of its rows; several where one does not
    tell rows apart."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def head(self) -> str:
        return line(self.columns) + "\n|" + "---|" * len(self.columns)

    def complaints(self, published: str) -> list[str]:
        """What is published that this table does not have; it may have more."""
        lines = [cells_of(each) for each in published.strip().splitlines()]
        if not lines:
            return []
        wrong = (
            []
            if lines[0] == self.columns
            else [f"{self.name}: the columns are {lines[0]}, not {self.columns}"]
        )
        keys = len(self.rows[0])
        unknown = [cells[:keys] for cells in lines[2:] if cells[:keys] not in self.rows]
        wrong += [f"{self.name}: no row {row} is printed" for row in unknown]
        return wrong + [
            f"{self.name}: {cells} misses cells"
            for cells in lines
            if len(cells) != len(self.columns)
        ]


def cells_of(row: str) -> tuple[str, ...]:
    """The cells of a row in Markdown.

    >>> cells_of("| a | b \\| c |")
    ('a', 'b \\\\| c')
    """
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1])


def _marked(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table: {re.escape(name)} -->\n)(.*?)({re.escape(END)})", re.DOTALL)


def names(text: str) -> list[str]:
    """The tables that a text has a place for."""
    return re.findall(r"<!-- table: (\S+) -->", text)


def page_of(name: str) -> Path:
    """The page that has a place for a table."""
    found = [page for page in PAGES if name in names(page.read_text("utf-8"))]
    if len(found) != 1:
        raise ValueError(
            f"table {name!r} must have one place in docs/ or assets/tables/, got {len(found)}; see '<!-- table: "
            f"{name} -->'"
        )
    return found[0]


def published(text: str, name: str) -> str:
    """What stands at the place of a table."""
    found = _marked(name).search(text)
    if found is None:
        raise ValueError(
            f"text must have a place for table {name!r}: '<!-- table: {name} -->' and '{END}'; add "
            "them"
        )
    return found[2]


def replaced(text: str, name: str, rows: str) -> str:
    """Put other rows at the place of a table."""
    published(text, name)
    return _marked(name).sub(lambda found: f"{found[1]}{rows.strip()}\n{found[3]}", text)


def in_markdown(printed: str) -> str:
    """The table within what a script printed."""
    return "\n".join(each for each in printed.splitlines() if each.startswith("|"))


def shown(figure: float) -> str:
    """A figure with as many digits as mean something.

    >>> shown(1.049), shown(17.04), shown(302.3)
    ('1.05', '17.0', '302')
    """
    return (
        f"{figure:.2f}"
        if figure < 9.995
        else f"{figure:.1f}"
        if figure < 99.95
        else f"{figure:.0f}"
    )
