"""Pages of tables and pictures: what they hold, and how they look in a real browser."""

from __future__ import annotations

from PIL import Image

from explain.report.pages import Section, document
from tests.report.conftest import HOSTILE

SECTIONS = [
    Section("At first sight", f"One line.\n{HOSTILE}"),
    Section(
        "A table",
        "What it says.",
        [
            ["class", *(f"a long heading {k}" for k in range(8)), "share"],
            ["cat", *["some words"] * 8, "26 %"],
            [HOSTILE, *["some words"] * 8, "–"],
        ],
        [(Image.new("RGB", (900, 300), "orange"), HOSTILE)],
    ),
]


def test_lines_are_paragraphs_and_numbers_end_at_the_same_place() -> None:
    page = document("A title", "About it.", SECTIONS)
    assert "<p>One line.</p>\n<p>&lt;img" in page
    assert page.count('<th class="figure">') == 1
    assert page.count('<td class="figure">') == 2
    assert '<td class="figure">26 %</td>' in page
    assert "<img src=x" not in page
    assert "<table" not in document("A title", "", [Section("Empty", table=[["class"]])])
