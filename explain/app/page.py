"""The page: the report's own files, and the app's beside them."""

from __future__ import annotations

from importlib import resources
from typing import Any

from explain.app.covering import FILLS
from explain.app.limits import Limits
from explain.app.studio import Studio
from explain.report import SCRIPTS, STYLES, Front, page, static

OWN_SCRIPTS = ("live.js", "choosing.js", "covering.js", "doubting.js", "beside.js", "desk.js", "app.js")
POLICY = "img-src 'self' data: blob:; media-src blob:; connect-src 'self'"


def app_page(studio: Studio) -> str:
    """Return the page of the app as one text; what it asks for later comes from the same address."""
    style = "\n".join([static(STYLES), _own("app.css")])
    script = "\n".join([static(SCRIPTS), *map(_own, OWN_SCRIPTS)])
    index = {
        "title": "explain",
        "photos": [],
        "models": studio.about(),
        "examples": list(studio.examples),
        "fills": list(FILLS.items()),
        "limits": _told(studio.limits),
    }
    return page(index, [], title="explain", front=Front("report app", style, script, POLICY))


def _told(limits: Limits) -> dict[str, Any]:
    return {"upload": limits.upload, "pixels": limits.pixels, "seconds": limits.seconds, "targets": limits.targets}


def _own(name: str) -> str:
    return (resources.files("explain.app") / "static" / name).read_text("utf-8")
