"""A page of sections with tables and pictures, in the style of a report: one file without a script."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from explain._utils.html import escaped, png
from explain.report.page import style_and_policy

FIGURE = re.compile(r"[-+±]?[\d.,]+(e[-+]?\d+)?%?|–")


@dataclass(frozen=True)
class Section:
    """A part of a document.

    The lines of ``about`` are paragraphs. The first row of ``table`` has the headings. ``pictures`` have alternative
    texts.
    """

    heading: str
    about: str = ""
    table: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[Image.Image, str]] = field(default=(), repr=False)


def document(title: str, about: str, sections: Sequence[Section]) -> str:
    """Return a page as one text.

    Args:
        title: the heading.
        about: a sentence below it.
        sections: the parts.

    Nothing in the texts can become markup, and the page loads nothing: its pictures are in it.

    >>> "<img src=x" in document("<img src=x>", "", [Section("<img src=x>", table=[["<img src=x>"]])])
    False
    """
    style, policy = style_and_policy(("look.css", "document.css"))
    parts = "\n".join(_section(each) for each in sections)
    return (
        f'<!doctype html>\n<html lang="en" class="document">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n<main>\n<h1>{escaped(title)}</h1>\n'
        f"<p>{escaped(about)}</p>\n{parts}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    about = "\n".join(f"<p>{escaped(line)}</p>" for line in section.about.splitlines())
    table = _wide(_table(section.table)) if len(section.table) > 1 else ""
    pictures = "".join(
        _wide(f'<img src="data:image/png;base64,{_encoded(picture)}" alt="{escaped(text)}">')
        for picture, text in section.pictures
    )
    return f"<section>\n<h2>{escaped(section.heading)}</h2>\n{about}\n{table}\n{pictures}\n</section>"


def _encoded(picture: Image.Image) -> str:
    return base64.b64encode(png(picture)).decode("ascii")


def _wide(part: str) -> str:
    """A part that scrolls by itself where it is wider than the page; with the keyboard too."""
    return f'<div class="wide" tabindex="0">{part}</div>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers are aligned at the right."""
    figures = [all(FIGURE.fullmatch(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    kinds = [' class="figure"' if each else "" for each in figures]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{escaped(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    head, body = cells("th", rows[0]), "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
