"""A real browser for tests: where it is, how it is begun, and what a page in it asked for and
said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = os.environ.get("EXPLAIN_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@contextmanager
def chromium(*options: str) -> Iterator[Any]:
    """The browser; the test is skipped where there is none, or no Playwright to drive it."""
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason='a browser is driven by Playwright: pip install -e ".[browser]"',
    )
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium, or name one in EXPLAIN_CHROMIUM")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *options])
        yield found
        found.close()


class Tab:
    """A page in a tab, with all that it asked for and said."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.requests: list[str] = []
        self.said: list[str] = []
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: self.said.append(str(error)))
