"""A real browser for tests: where it is, how it is begun, and what a page in it asked for and
said."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image

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
    """A page in a tab, with all that it asked for and said; ``local`` is where it may ask."""

    def __init__(self, tab: Any, local: str = "about:") -> None:
        self.tab = tab
        self.local = ("data:", "blob:", "about:", local)
        self.requests: list[str] = []
        self.said: list[str] = []
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: self.said.append(str(error)))

    @property
    def elsewhere(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(self.local)]

    def until(self, truth: str) -> None:
        """Wait for something; Playwright's own waiting is forbidden by the pages' policy."""
        for _ in range(2400):  # two minutes: machines may be slow
            if self.tab.evaluate(truth):
                return
            self.tab.wait_for_timeout(50)
        raise AssertionError(f"never: {truth}")

    def screenshot(self, selector: str = "body") -> Image.Image:
        """What is shown of the page, or of a part of it."""
        shot = self.tab if selector == "body" else self.tab.locator(selector)
        return Image.open(io.BytesIO(shot.screenshot())).convert("RGB")

    @property
    def small_targets(self) -> list[str]:
        """What is to be touched and is less than 24 pixels wide or high."""
        found: list[str] = self.tab.evaluate(
            """[...document.querySelectorAll('button, summary, select, input:not(.hidden), label:has(input)')]
            .filter((each) => !each.closest('label') || each.matches('label'))
            .map((each) => [each, each.getBoundingClientRect()])
            .filter(([, { width, height }]) => width && height && Math.min(width, height) < 24)
            .map(([each, { width, height }]) => `${each.outerHTML.slice(0, 80)} ${width} x ${height}`)"""
        )
        return found

    @property
    def violations(self) -> list[str]:
        """What is in the way of a screen reader."""
        axe = pytest.importorskip(
            "axe_playwright_python.sync_playwright", reason='pip install -e ".[browser]"'
        )
        audit = axe.Axe().run(self.tab, options={"resultTypes": ["violations"]})
        return [f"{one['id']}: {one['nodes']}" for one in audit.response["violations"]]


Opens = Callable[..., Any]


@contextmanager
def tabs(browser: Any, kind: Callable[..., Tab], expected: str = "never said") -> Iterator[Opens]:
    """A function that opens tabs. In the end, they must have asked for nothing from elsewhere, and
    complained of nothing but what is expected."""
    pages = []

    def opens(*args: Any, size: dict[str, int] = DESKTOP, **options: Any) -> Any:
        context = browser.new_context(viewport=size, **options)
        pages.append(kind(context.new_page(), *args))
        return pages[-1]

    yield opens
    for page in pages:
        assert page.elsewhere == []
        assert [line for line in page.said if expected not in line] == []
        page.tab.context.close()
