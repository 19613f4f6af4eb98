"""What the guide says of insight is what its scripts wrote."""

from __future__ import annotations

import json

from tests.conftest import ROOT
from tests.hooks.test_tour import example


def test_the_figures_of_the_page_are_those_of_the_file() -> None:
    module = example("insight_tiny")
    figures = json.loads((ROOT / "assets" / "insight" / "tiny.json").read_text("utf-8"))
    page = (ROOT / "docs" / "runs.md").read_text("utf-8")
    assert f"<!-- begin tiny -->\n{module.section(figures)}\n<!-- end tiny -->" in page


def test_the_page_says_of_the_planted_shortcut_what_the_file_says() -> None:
    seeds = json.loads((ROOT / "assets" / "insight" / "planted.json").read_text("utf-8"))
    page = (ROOT / "docs" / "runs.md").read_text("utf-8")
    assert all(seed["first is the shortcut"] for seed in seeds)
    firsts = [seed["clusters"][0]["stands out"] for seed in seeds]
    rest = max(
        cluster["stands out"]
        for seed in seeds
        for cluster in seed["clusters"]
        if cluster["class"] != seed["class"]
    )
    words = f"by {min(firsts):.2f} to {max(firsts):.2f}, where those of other classes reached"
    assert f"{words} {rest:.2f}" in " ".join(page.split())
