"""Pages of tables and pictures: what they hold, and how they look in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from explain.report.pages import Section, document
from tests.browsing import chromium
from tests.report.conftest import HOSTILE

SECTIONS = [
    Section("At first sight", f"One line.\n{HOSTILE}"),
    Section(
        "A table",
        "What it says.",
        [
            ["class", *(f"a long heading {k}" for k in range(8)), "share"],
            ["cat", *["some words"] * 8, "26%"],
            [HOSTILE, *["some words"] * 8, "–"],
        ],
        [(Image.new("RGB", (900, 300), "orange"), HOSTILE)],
    ),
]


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_page_fits_any_window_and_asks_for_nothing(
    tmp_path: Path, width: int, scheme: str
) -> None:
    file = tmp_path / "page.html"
    file.write_text(document("A title", "About it.", SECTIONS), "utf-8")
    said = []
    requests = []
    with chromium() as browser:
        tab = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        ).new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(file.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        table, picture = tab.locator(".wide").all()
        assert (
            table.evaluate("e => e.scrollWidth > e.clientWidth"),
            tab.locator("img").count(),
        ) == (True, 1)
        assert picture.evaluate("e => e.scrollWidth > e.clientWidth") is (width < 680)
        assert tab.locator("img").evaluate("e => e.naturalWidth") == 900
        assert tab.locator("td").first.evaluate("e => getComputedStyle(e).textAlign") == "left"
        assert (
            tab.locator("td.figure").first.evaluate("e => getComputedStyle(e).textAlign") == "right"
        )
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(246, 245, 242)" if scheme == "light" else "rgb(18, 17, 22)")
        assert tab.title() == "A title"
    assert said == []
    assert [url for url in requests if not url.startswith(("data:", file.as_uri()))] == []
