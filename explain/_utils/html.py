"""Tables as text, and pieces of HTML for notebooks: everything is escaped, every picture has an
alternative text."""

import base64
import html
import io
from collections.abc import Collection, Iterable, Sequence

from PIL import Image

from explain._utils.errors import printable


def png(picture: Image.Image) -> bytes:
    """Return a picture as a PNG file; light compression, since the time goes there."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


LARGEST = 220_000
"""Bytes that a picture in a notebook has at most, so that a result takes at most 300 kB there."""


def picture_html(
    picture: Image.Image, alternative: str, most: int = LARGEST, style: str = "max-width: 100%"
) -> str:
    """Return an ``img`` with a file of at most ``most`` bytes inside: a PNG, or else a JPEG, and
    reduced if need be.

    >>> picture_html(Image.new("RGB", (2, 1)), "a <cat>")[-46:]
    '" alt="a &lt;cat&gt;" style="max-width: 100%">'
    """
    content = png(picture)
    kind = "png"
    scale = 1.0
    while len(content) > most and scale > 0.05:
        buffer = io.BytesIO()
        smaller = picture.convert("RGB").resize(
            [max(1, round(scale * side)) for side in picture.size]
        )
        smaller.save(buffer, "JPEG", quality=85)
        content = buffer.getvalue()
        kind = "jpeg"
        scale = 0.85 * scale
    data = base64.b64encode(content).decode("ascii")
    return (
        f'<img src="data:image/{kind};base64,{data}" alt="{escaped(alternative)}" style="{style}">'
    )


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return a table; cells that begin with a digit are aligned at the right.

    >>> table_html(["layer"], [["<a>"]])
    '<table><thead><tr><th>layer</th></tr></thead><tbody><tr><td>&lt;a&gt;</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escaped(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def aligned(rows: Sequence[Sequence[str]], to_the_right: Collection[int] = ()) -> list[str]:
    """A line of text for each row of a table, with columns of equal width; those with these numbers
    are aligned at the right.

    >>> aligned([("layer", "ms"), ("conv", "9")], to_the_right=[1])
    ['layer  ms', 'conv    9']
    """
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
    """Return lines of text as they are, broken where the page is narrow.

    >>> lines_html(["a", "<b>"])
    '<pre style="white-space: pre-wrap">a\\n&lt;b&gt;</pre>'
    """
    text = "\n".join(map(escaped, lines))
    return f'<pre style="white-space: pre-wrap">{text}</pre>'


def escaped(text: str) -> str:
    """Return a text as HTML shows it, whatever is in it."""
    return html.escape(printable(text))


def _cell(text: str) -> str:
    style = ' style="text-align: right"' if text[:1].isdigit() else ""
    return f"<td{style}>{escaped(text)}</td>"
