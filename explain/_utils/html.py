"""Pieces of HTML for notebooks: everything is escaped, every picture has an alternative text."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

from PIL import Image

from explain._utils.errors import printable


def png(picture: Image.Image) -> bytes:
    """Return a picture as a PNG file; light compression, since the time goes there."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


def picture_html(content: bytes, alternative: str) -> str:
    """Return an ``img`` with a PNG file inside.

    >>> picture_html(b"", "a <cat>")
    '<img src="data:image/png;base64," alt="a &lt;cat&gt;" style="max-width: 100%">'
    """
    data = base64.b64encode(content).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="{escaped(alternative)}" style="max-width: 100%">'


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return a table; of numbers, the columns are aligned at the right.

    >>> table_html(["layer"], [["<a>"]])
    '<table><thead><tr><th>layer</th></tr></thead><tbody><tr><td>&lt;a&gt;</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escaped(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def escaped(text: str) -> str:
    """Return a text as HTML shows it, whatever is in it."""
    return html.escape(printable(text))


def _cell(text: str) -> str:
    number = text[:1].isdigit()
    return f'<td style="text-align: right">{escaped(text)}</td>' if number else f"<td>{escaped(text)}</td>"
