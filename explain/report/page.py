"""The page: values, HTML, CSS and JavaScript put together into one file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from explain._utils.errors import printable
from explain._utils.version import __version__
from explain.render import Mask
from explain.render.colors import lookup_table

FORMAT = 1
STYLES = ("look.css",)
SCRIPTS = (
    "elements.js",
    "source.js",
    "planes.js",
    "areas.js",
    "colors.js",
    "pane.js",
    "stage.js",
    "film.js",
    "panels.js",
    "evidence.js",
    "tables.js",
    "viewer.js",
    "sheet.js",
    "start.js",
)
BEGIN = "begin.js"
COLORMAPS = ("plasma", "viridis", "inferno", "cividis", "RdBu_r", "PuOr_r")
"""The colour maps that a page brings along: four for magnitudes, two for contributions."""


@dataclass(frozen=True)
class PageTemplate:
    """What a page is made of beside its data: its ``kind``, style, script, and what it may ask for besides."""

    kind: str
    style: str
    script: str
    policy: str = ""


def static(names: Sequence[str]) -> str:
    """The text of files of the page, one after the other."""
    return "\n".join(_static(name) for name in names)


def page(
    index: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    *,
    title: str,
    widget: bool = False,
    front: PageTemplate | None = None,
) -> str:
    """Return a page as one text.

    Args:
        index: what the page is about; its ``photos`` say in short what each item is.
        items: what `explain.report.item` returns for each photo.
        title: what a window or tab is called.
        widget: whether it is shown inside another page.
        front: style and script, where they are not those of a report.

    Nothing in the values can become markup or a script: they are JSON in which ``<`` is written as an escape, the
    scripts put them into texts only, and the page forbids every script and style but its own, by their hashes.

    >>> "<img" in page({"photos": [{"name": "<img src=x>"}]}, [], title="<img>")
    False
    """
    front = front or _report(widget)
    about = {
        "format": FORMAT,
        "version": __version__,
        "colormaps": _colormaps(),
        "cover": Mask.cover,
        "widget": widget,
        **index,
    }
    data = [_block("index", about), *(_block(f"item-{number}", each) for number, each in enumerate(items))]
    parts = {
        "title": html.escape(printable(title)),
        "policy": html.escape(_policy(front)),
        "kind": front.kind,
        "style": front.style,
        "script": front.script,
        "data": "\n".join(data),
        "words": _words(index),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _static("page.html"))


def _report(widget: bool) -> PageTemplate:
    return PageTemplate("widget" if widget else "report", static(STYLES), static((*SCRIPTS, BEGIN)))


def _policy(front: PageTemplate) -> str:
    """What the page may load: pictures from within itself, its own style and its own script, and nothing else."""
    own = front.policy or "img-src data: blob:"
    return (
        f"default-src 'none'; {own}; style-src {_hash(front.style)}; script-src {_hash(front.script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def style_and_policy(names: Sequence[str]) -> tuple[str, str]:
    """Style sheets in one text, and a policy for a page that has nothing but them and pictures."""
    style = static(names)
    return style, f"default-src 'none'; img-src data:; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _block(name: str, values: Any) -> str:
    """Values as a block of JSON that no text in it can end."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)  # ASCII only, so that any encoding reads it
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _words(index: Mapping[str, Any]) -> str:
    """What is said where scripts do not run."""
    rows = [
        f"<tr><td>{html.escape(printable(each.get('name', '')))}</td>"
        f"<td>{html.escape(printable(each.get('label', '')))}</td></tr>"
        for each in index.get("photos", ())
    ]
    return f"<table><thead><tr><th>photo</th><th>best answer</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"


@cache
def _colormaps() -> dict[str, str]:
    return {name: base64.b64encode(lookup_table(name).tobytes()).decode("ascii") for name in COLORMAPS}


@cache
def _static(name: str) -> str:
    return (resources.files("explain.report") / "static" / name).read_text("utf-8")
