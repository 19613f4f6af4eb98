"""A run as a table for other programs, pictures of some of its photos, and a page with them."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ExplainError, OutputError, RunError
from explain.render.styles import get_style
from explain.store.lists import source_of
from tests.report.test_report import Read, unpacked
from tests.runs.networks import as_it_is, explainer, folder_of, picture, stored_run


@pytest.fixture
def run(tmp_path: Path) -> explain.Run:
    folder_of(tmp_path / "photos", 3)
    (tmp_path / "photos.csv").write_text(
        "path,label,x0,y0,x1,y1\nphotos/000.png,b,2,3,9,11\nphotos/001.png,a,,,,\nphotos/002.png,elsewhere,,,,\n"
    )
    return stored_run(
        tmp_path,
        tmp_path / "photos.csv",
        explainer(categories=list("abcde")),
        ["gradcam", "saliency"],
        metrics=["sparseness", "pointinggame"],
    )


def test_csv_and_json_lines_have_all_but_the_maps(run: explain.Run, tmp_path: Path) -> None:
    assert run.export(tmp_path / "out" / "run.csv") == run.export(tmp_path / "run.jsonl") == 6
    with (tmp_path / "out" / "run.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    for row, plain, typed in zip(run.rows(), table, lines, strict=True):
        assert (plain["name"], plain["method"], plain["target"]) == (
            row.name,
            row.method,
            row.target,
        )
        assert float(plain["score"]) == typed["score"] == row.score
        assert float(plain["sparseness"]) == typed["sparseness"] == row.metrics["sparseness"]
        assert typed["pointinggame"] == row.metrics["pointinggame"]
        assert typed["boxes"] == [list(box) for box in row.boxes]
        assert (typed["correct"], typed["input_width"]) == (row.correct, 24)
    assert json.loads(table[0]["boxes"]) == [[2, 3, 9, 11]]
    assert [line["pointinggame"] is None for line in lines] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    photos = [
        (picture(number), label)
        for number, label in enumerate(("=1+1", "+a", "-x", "@a", "-1", "cat"))
    ]
    run = stored_run(tmp_path, photos)
    run.export(tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert labels == ["'=1+1", "'+a", "'-x", "'@a", "-1", "cat"]


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are text there")
def test_photos_whose_names_are_no_text_are_on_the_page(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "coded", 2)
    os.rename(min(folder.iterdir()), os.fsencode(folder) + b"/caf\xe9.png")
    run = stored_run(tmp_path, folder)
    page, failures = run.to_html(tmp_path / "run.html")
    assert failures == {}
    assert len(Read(page.read_text("utf-8")).data["index"]["photos"]) == 2


def test_a_run_with_two_names_is_refused_before_it_is_written(tmp_path: Path) -> None:
    photos = [picture(0), picture(1)]
    file = stored_run(tmp_path, photos).path
    os.link(file, tmp_path / "other.sqlite")
    content = file.read_bytes()
    with pytest.raises(RunError, match="hard links"):
        stored_run(tmp_path, [*photos, picture(2)], name="other.sqlite")
    assert file.read_bytes() == content
    assert not list(tmp_path.glob("*-lock"))


def test_parquet_has_the_maps_too(run: explain.Run, tmp_path: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet", reason="an extra")
    assert run.export(tmp_path / "run.parquet") == 6
    table = parquet.read_table(tmp_path / "run.parquet")
    for row, exported in zip(run.rows(), table.to_pylist(), strict=True):
        values = np.array(exported["map"], np.float32).reshape(exported["map_shape"])
        assert torch.equal(torch.from_numpy(values), row.values)
        assert (exported["name"], exported["score"], exported["correct"]) == (
            row.name,
            row.score,
            row.correct,
        )
        assert exported["boxes"] == [list(box) for box in row.boxes]
    assert json.loads(table.schema.metadata[b"explain"])["weights"] == run.manifest["weights"]


def test_a_table_appears_complete_or_not_at_all(
    run: explain.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.csv"
    file.write_text("mine")
    with pytest.raises(RunError, match="overwrite=True"):
        run.export(file)
    with pytest.raises(RunError, match="file must"):
        run.export(tmp_path / "run.xlsx")
    monkeypatch.setattr("explain.runs.exporting.columns_without_map", lambda row, metrics: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.export(file, overwrite=True)
    assert file.read_text() == "mine"
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_pictures_are_drawn_of_the_photos_that_are_asked_for(
    run: explain.Run, tmp_path: Path
) -> None:
    written, failures = run.write_pictures("worst:2", tmp_path / "pictures")
    worst = list(run.rows(order="worst"))[:4]
    names = [
        f"{1 + i // 2}-{Path(row.name).stem}-{row.target}-{row.method}.png"
        for i, row in enumerate(worst)
    ]
    assert ([path.name for path in written], failures) == (names, {})
    expected = worst[0].overlay(get_style(worst[0].style))
    with Image.open(written[0]) as picture_file:
        assert picture_file.convert("RGB").tobytes() == expected.tobytes()
    alone = explainer(categories=list("abcde"))(
        picture(int(worst[0].name[-5])), worst[0].method
    ).overlay()
    difference = np.abs(np.asarray(expected, int) - np.asarray(alone, int))
    assert difference.max() <= 2  # the map is stored in half precision
    with pytest.raises(OutputError, match="exists already"):
        run.write_pictures("worst:1", tmp_path / "pictures")
    assert len(run.write_pictures("source", tmp_path / "pictures", overwrite=True)[0]) == 6


def test_photos_without_a_file_are_drawn_from_their_source(tmp_path: Path) -> None:
    photos: list[Any] = [picture(0), as_it_is(picture(1))]
    run = stored_run(tmp_path, photos, target=1)
    written, failures = run.write_pictures("source", tmp_path / "with", source=source_of(photos))
    assert [path.name for path in written] == ["1-photo-0-class-1-gradcam.png"]
    assert list(failures) == ["photo 1"]
    assert "tensor" in failures["photo 1"]
    written, failures = run.write_pictures("best", tmp_path / "without")
    assert written == []
    assert "source" in failures["photo 0"]
    with pytest.raises(RunError, match="photo must"):
        next(run.rows()).overlay(get_style("heat"))


def test_a_page_of_a_run_has_its_rows_without_the_model(run: explain.Run, tmp_path: Path) -> None:
    place, failures = run.to_html(tmp_path / "out" / "run.html")
    assert failures == {}
    data = Read(place.read_text("utf-8")).data
    rows = list(run.rows())
    for number, photo in enumerate(data["index"]["photos"]):
        of_photo = rows[2 * number : 2 * number + 2]
        assert (photo["name"], photo["label"]) == (
            Path(of_photo[0].name).name,
            of_photo[0].prediction,
        )
        assert (photo.get("truth"), photo.get("right")) == (
            (None, None)
            if of_photo[0].correct is None
            else (of_photo[0].label, of_photo[0].correct)
        )
        item = data[f"item-{number}"]
        assert [method["name"] for method in item["methods"]] == ["gradcam", "saliency"]
        for row, one in zip(of_photo, item["maps"][0], strict=True):
            values = row.values.abs().amax(0) if row.values.ndim == 3 else row.values
            assert (
                np.abs(unpacked(one["plane"]) - values.numpy()).max() <= float(values.max()) / 100
            )
            assert one["figures"] == dict(row.metrics)
            assert one["score"] == pytest.approx(row.score)
        assert "open_run" in item["again"]["python"]
    assert data["index"]["photos"][2]["figures"]["saliency"] == dict(rows[5].metrics)


def test_a_page_takes_the_worst_and_leaves_out_what_is_gone(
    run: explain.Run, tmp_path: Path
) -> None:
    place, _ = run.to_html(tmp_path / "worst.html", "worst:1")
    worst = next(iter(run.rows(order="worst"))).name
    assert [
        summary["name"] for summary in Read(place.read_text("utf-8")).data["index"]["photos"]
    ] == [Path(worst).name]
    (tmp_path / "photos" / "001.png").unlink()
    place, failures = run.to_html(tmp_path / "left.html")
    assert len(Read(place.read_text("utf-8")).data["index"]["photos"]) == 2
    assert list(failures) == [row.name for row in run.rows("gradcam")][1:2]
    with pytest.raises(OutputError, match="exists already"):
        run.to_html(place)
    for name in ("000", "002"):
        (tmp_path / "photos" / f"{name}.png").unlink()
    with pytest.raises(RunError, match="photos"):
        run.to_html(tmp_path / "none.html")
    with pytest.raises(ExplainError, match="pictures must"):
        run.to_html(tmp_path / "none.html", "first")
