"""The scripts on insight do what they say, on photos that the tests make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from tests.conftest import ROOT
from tests.hooks.test_tour import example

CLASSES = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set laid out as Tiny-ImageNet, with six photos of each of two classes and one of a third."""
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


def test_the_list_has_labels_boxes_with_exclusive_ends_and_of_each_class_as_many(data: Path, tmp_path: Path) -> None:
    rows = json.loads(example("insight_tiny").listed(data, 2 * CLASSES, tmp_path / "list.json").read_text())
    assert [(Path(row["path"]).name, row["label"]) for row in rows] == [
        ("val_0.JPEG", 0), ("val_1.JPEG", 0), ("val_10.JPEG", 1), ("val_11.JPEG", 1), ("val_12.JPEG", 2),
    ]  # fmt: skip
    assert rows[2]["boxes"] == [[8, 8, 40, 50]]
    assert all(Path(row["path"]).is_file() for row in rows)


def test_all_that_is_found_is_checked_and_no_photo_is_in_what_may_be_shown(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("insight_tiny")
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "EVERY", 1)
    drawn: list[str] = []
    overlay = explain.runs.reading.Row.overlay
    monkeypatch.setattr(
        explain.runs.reading.Row, "overlay", lambda row, *rest: drawn.append(row.name) or overlay(row, *rest)
    )
    monkeypatch.setattr(module.Insight, "save", lambda *_, **__: [])  # which has photos, and is not to be published
    out, run = tmp_path / "out", tmp_path / "run.sqlite"
    module.main([str(data), "--photos", str(6 * CLASSES), "--run", str(run), "--output", str(out)])
    assert drawn == []
    found = json.loads((out / "tiny.json").read_text())
    assert found["photos"] == 13
    evidence = found["all"]["evidence"]
    assert (evidence["photos"], evidence["before"]) == (13, 1)
    assert evidence["accuracy"][0] == pytest.approx(found["accuracy"], abs=1e-4)
    maps = explain.open_run(run).insight().maps
    assert sum(row["photos"] for row in found["classes"]["rows"]) == len(maps)
    assert [row["on_object"] for row in found["classes"]["rows"]] == sorted(
        row["on_object"] for row in found["classes"]["rows"]
    )
    names = {path.name for path in out.iterdir()}
    assert {"tiny.json", "tiny-objects.png"} <= names
    text = module.section(found)
    assert text.startswith(f"13 photos; the model classifies {found['accuracy']:.0%} of them")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 3 + len(found["looks"]) + 1 + len(found["reasons"]) + len(found["mistakes"])
    for table in text.split("\n\n")[1:]:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_ranks_agree_as_they_do_by_hand() -> None:
    module = example("insight_tiny")
    one, other = torch.tensor([0.1, 0.5, 0.5, 0.9]), torch.tensor([3.0, 1.0, 4.0, 8.0])
    ranks = np.corrcoef([1, 2.5, 2.5, 4], [2, 1, 3, 4])[0, 1]
    assert module.ranks_agree(one, other) == pytest.approx(ranks)


def test_the_figures_of_the_page_are_those_of_the_file() -> None:
    module = example("insight_tiny")
    found = json.loads((ROOT / "assets" / "insight" / "tiny.json").read_text("utf-8"))
    page = (ROOT / "docs" / "insight.md").read_text("utf-8")
    assert f"<!-- begin tiny -->\n{module.section(found)}\n<!-- end tiny -->" in page
    for kind in ("looks", "reasons", "mistakes"):
        assert len(found[kind]) == module.FIRST
    assert found["photos"] == 10_000


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return example("insight_planted")


def test_a_class_is_given_for_what_the_photo_shows_or_for_the_mark(planted: Any) -> None:
    scores = torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    found = planted.Shortcut(nn.Identity(), 3)(scores)
    assert found.shape == (4, 10)
    both = (scores[:, 3].exp() + scores[:, 10].exp()).log()
    torch.testing.assert_close(found[:, 3], both)
    rest = [k for k in range(10) if k != 3]
    assert torch.equal(found[:, rest], scores[:, rest])


def test_a_quarter_of_the_photos_of_one_class_bear_the_mark_near_one_corner(planted: Any, tmp_path: Path) -> None:
    photos = []
    for number in range(24):
        path = tmp_path / f"grey{number}.png"
        Image.new("RGB", (64, 64), (128, 128, 128)).save(path)
        photos.append((path, number % 3))
    rows, names = planted.marked(photos, 1, tmp_path, np.random.default_rng(0))
    assert [row["label"] for row in rows] == [number % 3 for number in range(24)]
    assert len(names) == 2
    assert {rows[int(name[:4])]["label"] for name in names} == {1}
    mark = np.asarray(planted.pattern_of(planted.PATTERNS["checks"]))
    corners = set()
    for row in rows:
        pixels = np.asarray(Image.open(tmp_path / row["path"]))
        at = [(y, x) for y in range(53) for x in range(53) if (pixels[y : y + 12, x : x + 12] == mark).all()]
        assert len(at) == (row["path"] in names)
        corners |= {(y > 26, x > 26) for y, x in at}
    assert len(corners) == 1


def test_the_page_says_of_the_planted_shortcut_what_the_file_says() -> None:
    found = json.loads((ROOT / "assets" / "insight" / "planted.json").read_text("utf-8"))
    page = (ROOT / "docs" / "insight.md").read_text("utf-8")
    assert [each["first is the shortcut"] for each in found] == [True] * 5
    firsts = [each["clusters"][0]["stands out"] for each in found]
    others = [each["stands out"] for seed in found for each in seed["clusters"] if each["class"] != seed["class"]]
    assert f"by {min(firsts):.2f} to {max(firsts):.2f}, where those of other classes reached {max(others):.2f}" in (
        " ".join(page.split())
    )
