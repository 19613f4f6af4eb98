"""The leaderboard's table in a real browser: its filters, and that sorting sorts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browsing import DESKTOP, chromium
from tests.conftest import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
STATIC = ROOT / "docs" / "_static"


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Any]:
    """The part of the page that has the table, opened from disk."""
    text = (ROOT / "docs" / "leaderboard.md").read_text("utf-8")
    part = text.split("```{raw} html\n", 1)[1].split("```", 1)[0]
    shutil.copytree(STATIC, tmp_path / "_static")
    page = tmp_path / "page.html"
    page.write_text(f'<!doctype html><meta charset="utf-8">{part}', "utf-8")
    with chromium() as browser:
        tab = browser.new_page(viewport=DESKTOP)
        tab.goto(page.as_uri())
        tab.wait_for_selector("#board:not([hidden]) tbody tr")
        yield tab


def test_rows_are_those_that_were_chosen_in_the_order_of_their_figures(board: Any) -> None:
    text = (STATIC / "leaderboard-data.js").read_text("utf-8")
    table = json.loads(text[text.index("{") : text.rindex("}") + 1])
    chosen = {"kind": "faint", "architecture": "residual"}
    group = next(group for group in table["groups"] if chosen.items() <= group.items())
    means = group["means"][table["scores"].index("pixel AUC")]
    figures = dict(zip(group["methods"], means, strict=True))
    for name in (*chosen, "side"):
        board.select_option(f"[name={name}]", group[name])
    board.click("thead button:has-text('pixel AUC')")
    board.wait_for_selector("th[aria-sort=descending]:has-text('pixel AUC')")
    names = board.locator("tbody th").all_inner_texts()
    assert set(names) == figures.keys()
    assert names == sorted(names, key=figures.__getitem__, reverse=True)
    board.fill("[name=search]", "gradcam")
    board.wait_for_function("document.querySelectorAll('#board tbody tr').length < 10")
    assert all("gradcam" in name for name in board.locator("tbody th").all_inner_texts())
