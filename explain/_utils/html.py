"""Tables as text, and pieces of HTML for notebooks: everything is escaped, every picture has an
alternative text."""

import base64
import html
import io
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from explain._utils.errors import printable

if TYPE_CHECKING:  # tables need no pictures
    from PIL import Image


def png(picture: "Image.Image") -> bytes:
    """Return the bytes of a picture as a PNG file, for pages and notebooks; lightly compressed,
    since compression takes nearly all of the time."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


LARGEST = 220_000
"""Bytes that a picture in a notebook has at most, so that a result takes at most 300 kB there."""


def picture_html(
    picture: "Image.Image",
    alternative: str,
    max_bytes: int = LARGEST,
    style: str = "max-width: 100%",
) -> str:
    """A picture as an HTML ``img`` with its file, at most ``max_bytes`` before base64: a PNG, else
    a JPEG, reduced if need be. ``alternative`` is its text, ``style`` its CSS."""
    content = png(picture)
    kind = "png"
    scale = 1.0
    # at a twentieth of its sides, it is given however many bytes it has
    while len(content) > max_bytes and scale > 0.05:
        buffer = io.BytesIO()
        smaller = picture.convert("RGB").resize(
            [max(1, round(scale * side)) for side in picture.size]
        )
        smaller.save(buffer, "JPEG", quality=85)
        content = buffer.getvalue()
        kind = "jpeg"
        scale *= 0.85
    data = base64.b64encode(content).decode("ascii")
    return (
        f'<img src="data:image/{kind};base64,{data}" alt="{escaped(alternative)}" style="{style}">'
    )


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return an HTML table of texts, which are escaped; cells that begin with a digit are aligned
    at the right."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def aligned(rows: Sequence[Sequence[str]], to_the_right: Collection[int] = ()) -> list[str]:
    """Return a table as lines of plain text, one for each row, with columns of equal width; the
    columns with the indices ``to_the_right`` are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for number, cell in enumerate(row):
            width = widths[number]
            cells.append(cell.rjust(width) if number in to_the_right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def lines_html(lines: Iterable[str]) -> str:
    """Return lines of text as HTML that shows them as they are, escaped, and broken only where the
    page is narrow."""
    text = "\n".join(map(escaped, lines))
    return f'<pre style="white-space: pre-wrap">{text}</pre>'


def escaped(text: str) -> str:
    """Return a text escaped for HTML, with control characters shown as escapes: nothing in it can
    become markup."""
    return html.escape(printable(text))


def _cell(text: str) -> str:
    """An HTML table cell; at the right if the text begins with a digit."""
    style = ' style="text-align: right"' if text[:1].isdigit() else ""
    return f"<td{style}>{escaped(text)}</td>"
