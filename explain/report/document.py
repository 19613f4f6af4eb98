"""A page of sections with tables and pictures, in the look of a report: one file without a script."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from explain._utils.errors import printable
from explain._utils.html import png
from explain.report.page import style_and_policy

FIGURE = re.compile(r"[-+±]?[\d.,]+(e[-+]?\d+)?%?|–")


@dataclass(frozen=True)
class Section:
    """A part of a document: what it is about, a table whose first row is its heading, and pictures with their texts.

    Lines of ``about`` are paragraphs.
    """

    heading: str
    about: str = ""
    table: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[Image.Image, str]] = field(default=(), repr=False)


def document(title: str, about: str, sections: Sequence[Section]) -> str:
    """Return a page as one text.

    Args:
        title: what it is called.
        about: a sentence below the title.
        sections: its parts.

    Nothing in the texts can become markup, and the page loads nothing: its pictures are in it.

    >>> "<img src=x" in document("<img src=x>", "", [Section("<img src=x>", table=[["<img src=x>"]])])
    False
    """
    style, policy = style_and_policy(("look.css", "document.css"))
    parts = "\n".join(_section(each) for each in sections)
    return (
        f'<!doctype html>\n<html lang="en" class="document">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{_said(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n<main>\n<h1>{_said(title)}</h1>\n'
        f"<p>{_said(about)}</p>\n{parts}\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    about = "\n".join(f"<p>{_said(line)}</p>" for line in section.about.splitlines())
    table = _wide(_table(section.table)) if len(section.table) > 1 else ""
    pictures = "".join(
        _wide(f'<img src="data:image/png;base64,{base64.b64encode(png(picture)).decode("ascii")}" alt="{_said(text)}">')
        for picture, text in section.pictures
    )
    return f"<section>\n<h2>{_said(section.heading)}</h2>\n{about}\n{table}\n{pictures}\n</section>"


def _wide(part: str) -> str:
    """Something that may be wider than the page, and is moved by itself then; by keys too."""
    return f'<div class="wide" tabindex="0">{part}</div>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers end at the same place, so that they can be compared."""
    figures = [all(FIGURE.fullmatch(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    kinds = [' class="figure"' if each else "" for each in figures]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{_said(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    head, body = cells("th", rows[0]), "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _said(text: str) -> str:
    return html.escape(printable(text))
