"""The scripts on insight do what they say, on photos that the tests make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.hooks.test_tour import example

CLASSES = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set laid out as Tiny-ImageNet, with six photos of each of two classes and one of a
    third."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("".join(f"n{k:08}\n" for k in range(CLASSES)))
    rows = []
    for number in range(13):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "val" / "images" / f"val_{number}.JPEG")
        rows.append(f"val_{number}.JPEG\tn{number // 6:08}\t8\t8\t39\t{39 + number}\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))
    return folder


def test_the_figures_of_the_page_are_those_of_the_file() -> None:
    module = example("insight_tiny")
    found = json.loads((ROOT / "assets" / "insight" / "tiny.json").read_text("utf-8"))
    page = (ROOT / "docs" / "runs.md").read_text("utf-8")
    assert f"<!-- begin tiny -->\n{module.section(found)}\n<!-- end tiny -->" in page
    for kind in ("looks", "reasons", "mistakes"):
        assert len(found[kind]) == module.FIRST
    assert found["photos"] == 10_000


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return example("insight_planted")


def test_the_page_says_of_the_planted_shortcut_what_the_file_says() -> None:
    found = json.loads((ROOT / "assets" / "insight" / "planted.json").read_text("utf-8"))
    page = (ROOT / "docs" / "runs.md").read_text("utf-8")
    assert [each["first is the shortcut"] for each in found] == [True] * 5
    firsts = [each["clusters"][0]["stands out"] for each in found]
    others = [
        each["stands out"]
        for seed in found
        for each in seed["clusters"]
        if each["class"] != seed["class"]
    ]
    assert (
        f"by {min(firsts):.2f} to {max(firsts):.2f}, where those of other classes reached "
        f"{max(others):.2f}" in (" ".join(page.split()))
    )
