"""A run as a table for other programs, and pictures of some of its photos."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ExplainError, OutputError, RunError
from explain.render.styles import get_style
from explain.runs.files import source_of
from tests.runs.networks import as_it_is, explainer, folder_of, picture


@pytest.fixture
def run(tmp_path: Path) -> explain.Run:
    folder_of(tmp_path / "photos", 3)
    (tmp_path / "photos.csv").write_text(
        "path,label,x0,y0,x1,y1\nphotos/000.png,b,2,3,9,11\nphotos/001.png,a,,,,\nphotos/002.png,c,,,,\n"
    )
    return explain.run(
        tmp_path / "photos.csv", explainer(categories=list("abcde")), ["gradcam", "saliency"],
        output=tmp_path / "run.sqlite", metrics=["insertion", "pointinggame"], workers=0,
    )  # fmt: skip


def test_csv_and_json_lines_have_all_but_the_maps(run: explain.Run, tmp_path: Path) -> None:
    assert run.export(tmp_path / "out" / "run.csv") == run.export(tmp_path / "run.jsonl") == 6
    with (tmp_path / "out" / "run.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    for row, plain, typed in zip(run.rows(), table, lines, strict=True):
        assert (plain["name"], plain["method"], plain["target"]) == (row.name, row.method, row.target)
        assert float(plain["score"]) == typed["score"] == row.score
        assert float(plain["insertion"]) == typed["insertion"] == row.metrics["insertion"]
        assert typed["pointinggame"] == row.metrics["pointinggame"]
        assert typed["boxes"] == [list(box) for box in row.boxes]
        assert (typed["correct"], typed["input_width"]) == (row.correct, 24)
    assert json.loads(table[0]["boxes"]) == [[2, 3, 9, 11]]
    assert [line["pointinggame"] is None for line in lines] == [False, False, True, True, True, True]


def test_parquet_has_the_maps_too(run: explain.Run, tmp_path: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet", reason="an extra")
    assert run.export(tmp_path / "run.parquet") == 6
    table = parquet.read_table(tmp_path / "run.parquet")
    for row, found in zip(run.rows(), table.to_pylist(), strict=True):
        values = np.array(found["map"], np.float32).reshape(found["map_shape"])
        assert torch.equal(torch.from_numpy(values), row.values)
        assert (found["name"], found["score"], found["correct"]) == (row.name, row.score, row.correct)
        assert found["boxes"] == [list(box) for box in row.boxes]
    assert json.loads(table.schema.metadata[b"explain"])["weights"] == run.manifest["weights"]


def test_parquet_without_its_package_is_refused(
    run: explain.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("explain.runs.exporting.importlib.import_module", missing)
    with pytest.raises(RunError, match="pyarrow must"):
        run.export(tmp_path / "run.parquet")
    assert not (tmp_path / "run.parquet").exists()


def test_a_table_appears_complete_or_not_at_all(
    run: explain.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.csv"
    file.write_text("mine")
    with pytest.raises(RunError, match="overwrite=True"):
        run.export(file)
    with pytest.raises(RunError, match="file must"):
        run.export(tmp_path / "run.xlsx")
    monkeypatch.setattr("explain.runs.exporting.plain", lambda row, metrics: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.export(file, overwrite=True)
    assert file.read_text() == "mine"
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_pictures_are_drawn_of_the_photos_that_are_asked_for(run: explain.Run, tmp_path: Path) -> None:
    written, failures = run.write_pictures("worst:2", tmp_path / "pictures")
    worst = list(run.rows(order="worst"))[:4]
    names = [f"{1 + i // 2}-{Path(row.name).stem}-{row.target}-{row.method}.png" for i, row in enumerate(worst)]
    assert ([path.name for path in written], failures) == (names, {})
    expected = worst[0].overlay(get_style(worst[0].style))
    with Image.open(written[0]) as drawn:
        assert drawn.convert("RGB").tobytes() == expected.tobytes()
    alone = explainer(categories=list("abcde"))(picture(int(worst[0].name[-5])), worst[0].method).overlay()
    difference = np.abs(np.asarray(expected, int) - np.asarray(alone, int))
    assert difference.max() <= 2  # the map is stored in half precision
    with pytest.raises(OutputError, match="exists already"):
        run.write_pictures("worst:1", tmp_path / "pictures")
    assert len(run.write_pictures("source", tmp_path / "pictures", overwrite=True)[0]) == 6


def test_photos_without_a_file_are_drawn_from_their_source(tmp_path: Path) -> None:
    photos: list[Any] = [picture(0), as_it_is(picture(1))]
    run = explain.run(photos, explainer(), output=tmp_path / "run.sqlite", target=1, workers=0)
    written, failures = run.write_pictures("source", tmp_path / "with", source=source_of(photos))
    assert [path.name for path in written] == ["1-photo-0-class-1-gradcam.png"]
    assert failures == {
        "photo 1": "photo 'photo 1' must be an image to be drawn, but its source has a tensor; give images"
    }
    written, failures = run.write_pictures("best", tmp_path / "without")
    assert written == []
    assert failures["photo 0"] == "photo 'photo 0' must have a file to be drawn, but has none; give its source"
    with pytest.raises(RunError, match="photo must"):
        next(run.rows()).overlay(get_style("heat"))


@pytest.mark.parametrize("which", ["worst:0", "first", "worst:x", "worst:"])
def test_an_unknown_choice_of_pictures_is_refused(which: str, run: explain.Run, tmp_path: Path) -> None:
    with pytest.raises(
        ExplainError, match=f"pictures must be one of source, worst, best, as in 'worst:50', got '{which}'"
    ):
        run.write_pictures(which, tmp_path)
