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
