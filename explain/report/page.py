"""The page: values, HTML, CSS and JavaScript in one file that needs no network."""

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
from explain._utils.html import escaped
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
COLORMAPS = ("plasma", "viridis", "inferno", "cividis", "RdBu_r", "PuOr_r")
"""The colour maps in a page: four for magnitudes, two for contributions."""


@dataclass(frozen=True)
class PageTemplate:
    """The parts of a page besides its data: its ``kind``, style, script, and what its policy allows besides these."""

    kind: str
    style: str
    script: str
    policy: str = ""


def static(names: Sequence[str]) -> str:
    """Return the text of several files of the page."""
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
        index: the page in short; its ``photos`` are the summaries of the items.
        items: the values of each photo, from `explain.report.item.item`.
        title: the title of the window or tab.
        widget: whether the page is part of another one.
        front: style and script, where they are not those of a report.

    Nothing in the values can become markup or a script: they are JSON in which ``<`` is written as an escape, the
    scripts put them into texts only, and the page forbids every script and style but its own, by their hashes.

    >>> "<img" in page({"photos": [{"name": "<img src=x>"}]}, [], title="<img>")
    False
    """
    front = front or PageTemplate("widget" if widget else "report", static(STYLES), static((*SCRIPTS, "begin.js")))
    own = front.policy or "img-src data: blob:"
    policy = (
        f"default-src 'none'; {own}; style-src {_hash(front.style)}; script-src {_hash(front.script)}; "
        "base-uri 'none'; form-action 'none'"
    )
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
        "policy": html.escape(policy),
        "kind": front.kind,
        "style": front.style,
        "script": front.script,
        "data": "\n".join(data),
        "words": _without_scripts(index),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _static("page.html"))


def style_and_policy(names: Sequence[str]) -> tuple[str, str]:
    """Return style sheets as one text, and the policy of a page that has only them and pictures."""
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


def _without_scripts(index: Mapping[str, Any]) -> str:
    """The table that is visible where scripts do not run."""
    rows = [  # the policy of the page forbids inline styles, so that `table_html` does not fit
        f"<tr><td>{escaped(each.get('name', ''))}</td><td>{escaped(each.get('label', ''))}</td></tr>"
        for each in index.get("photos", ())
    ]
    return f"<table><thead><tr><th>photo</th><th>prediction</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"


@cache
def _colormaps() -> dict[str, str]:
    return {name: base64.b64encode(lookup_table(name).tobytes()).decode("ascii") for name in COLORMAPS}


@cache
def _static(name: str) -> str:
    return (resources.files("explain.report") / "static" / name).read_text("utf-8")
