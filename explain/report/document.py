"""A page of sections with tables and pictures, in the look of a report: one file without a script."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from explain.errors import printable
from explain.render import png
from explain.report.page import style_and_policy


@dataclass(frozen=True)
class Section:
    """A part of a document: what it is about, a table whose first row is its heading, and pictures with their texts."""

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
    about = f"<p>{_said(section.about)}</p>" if section.about else ""
    pictures = "".join(
        f'<img src="data:image/png;base64,{base64.b64encode(png(picture)).decode("ascii")}" alt="{_said(alternative)}">'
        for picture, alternative in section.pictures
    )
    return f"<section>\n<h2>{_said(section.heading)}</h2>\n{about}\n{_table(section.table)}\n{pictures}\n</section>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    if len(rows) < 2:
        return ""
    head = "".join(f"<th>{_said(cell)}</th>" for cell in rows[0])
    body = "\n".join(f"<tr>{''.join(f'<td>{_said(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _said(text: str) -> str:
    return html.escape(printable(text))
