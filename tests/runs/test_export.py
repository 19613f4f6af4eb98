"""A run as a table for other programs, pictures of some of its photos, and a page with them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import explain
from explain import ExplainError, OutputError, RunError
from explain.render.styles import get_style
from explain.store.lists import source_of
from tests.report.test_report import Read, unpacked
from tests.runs.networks import as_it_is, explainer, folder_of, picture, read_csv, stored_run


@pytest.fixture
def run(tmp_path: Path) -> explain.Run:
    folder_of(tmp_path / "photos", 3)
    (tmp_path / "photos.csv").write_text(
        "path,label,x0,y0,x1,y1\nphotos/000.png,b,2,3,9,11\nphotos/001.png,a,,,,\nphotos/002.png,=elsewhere,,,,\n"
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
    table = read_csv(tmp_path / "out" / "run.csv")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    for row, plain, typed in zip(run.rows(), table, lines, strict=True):
        for name in ("name", "method", "target", "score", "correct"):
            assert typed[name] == getattr(row, name)
            assert plain[name] == ("" if typed[name] is None else str(typed[name]))
        assert {name: typed[name] for name in row.metrics} == dict(row.metrics)
        assert (
            typed["boxes"] == json.loads(plain["boxes"] or "[]") == [list(box) for box in row.boxes]
        )
    # no cell is a formula
    assert [row["label"] for row in table[::2]] == ["b", "a", "'=elsewhere"]
    assert [line["pointinggame"] is None for line in lines] == [False] * 2 + [True] * 4


@pytest.mark.skipif(sys.platform == "win32", reason="names of files are text there")
def test_photos_whose_names_are_no_text_are_on_the_page(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "coded", 1)
    os.rename(folder / "000.png", os.fsencode(folder) + b"/caf\xe9.png")
    _, failures = stored_run(tmp_path, folder).to_html(tmp_path / "run.html")
    assert failures == {}


def test_a_run_with_two_names_is_refused_before_it_is_written(tmp_path: Path) -> None:
    file = stored_run(tmp_path, [picture(0)]).path
    os.link(file, tmp_path / "other.sqlite")
    content = file.read_bytes()
    with pytest.raises(RunError, match="hard links"):
        stored_run(tmp_path, [picture(0), picture(2)], name="other.sqlite")
    assert file.read_bytes() == content


def test_parquet_has_the_maps_too(run: explain.Run, tmp_path: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet", reason="an extra")
    assert run.export(tmp_path / "run.parquet") == 6
    table = parquet.read_table(tmp_path / "run.parquet")
    for row, exported in zip(run.rows(), table.to_pylist(), strict=True):
        assert exported["map"] == row.values.flatten().tolist()
        assert exported["map_shape"] == list(row.values.shape)
        assert (exported["name"], exported["score"]) == (row.name, row.score)
        assert exported["boxes"] == [list(box) for box in row.boxes]
    assert json.loads(table.schema.metadata[b"explain"])["weights"] == run.manifest["weights"]


def test_a_table_appears_complete_or_not_at_all(
    run: explain.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.csv"
    file.write_text("mine")
    for name, message in (("run.csv", "overwrite=True"), ("run.xlsx", "file must")):
        with pytest.raises(RunError, match=message):
            run.export(tmp_path / name)
    files = set(tmp_path.iterdir())
    monkeypatch.setattr("explain.runs.exporting.columns_without_map", lambda row, metrics: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.export(file, overwrite=True)
    assert file.read_text() == "mine"
    assert set(tmp_path.iterdir()) == files


def test_pictures_are_drawn_of_the_photos_that_are_asked_for(
    run: explain.Run, tmp_path: Path
) -> None:
    written, failures = run.write_pictures("worst:2", tmp_path / "pictures")
    worst = list(run.rows(order="worst"))[:4]
    places = zip((1, 1, 2, 2), worst, strict=True)
    names = [f"{n}-{Path(row.name).stem}-{row.target}-{row.method}.png" for n, row in places]
    assert ([path.name for path in written], failures) == (names, {})
    network = explainer(categories=list("abcde"))
    alone = network(picture(int(worst[0].name[-5])), worst[0].method).overlay()
    with Image.open(written[0]) as file:
        difference = np.asarray(file.convert("RGB"), int) - np.asarray(alone, int)
    assert np.abs(difference).max() <= 2  # the map is stored in half precision
    with pytest.raises(OutputError, match="exists already"):
        run.write_pictures("worst:1", tmp_path / "pictures")


def test_photos_without_a_file_are_drawn_from_their_source(tmp_path: Path) -> None:
    photos: list[Any] = [picture(0), as_it_is(picture(1))]
    run = stored_run(tmp_path, photos, target=1)
    written, failures = run.write_pictures("source", tmp_path, source=source_of(photos))
    assert [path.name for path in written] == ["1-photo-0-class-1-gradcam.png"]
    assert "tensor" in failures["photo 1"]
    written, failures = run.write_pictures("best", tmp_path)
    assert written == []
    assert "source" in failures["photo 0"]
    with pytest.raises(RunError, match="photo must"):
        next(run.rows()).overlay(get_style("heat"))


def test_a_page_of_a_run_has_its_rows_without_the_model(run: explain.Run, tmp_path: Path) -> None:
    place, failures = run.to_html(tmp_path / "out" / "run.html")
    assert failures == {}
    data = Read(place.read_text("utf-8")).data
    photos = data["index"]["photos"]
    assert [photo.get("truth") for photo in photos] == ["b", "a", None]
    rows = list(run.rows())
    assert photos[2]["figures"]["saliency"] == dict(rows[5].metrics)
    for place_of_row, row in enumerate(rows):
        number, of_method = divmod(place_of_row, 2)
        assert (photos[number]["name"], photos[number]["label"]) == (
            Path(row.name).name,
            row.prediction,
        )
        assert photos[number].get("right") == row.correct
        item = data[f"item-{number}"]
        assert item["methods"][of_method]["name"] == row.method
        drawn = item["maps"][0][of_method]
        values = row.values.abs().amax(0) if row.values.ndim == 3 else row.attribution.signed[0]
        plane = unpacked(drawn["plane"])  # where cells look; pixels, since there are few
        assert plane / plane.max() == pytest.approx((values / values.max()).numpy(), abs=0.01)
        assert (drawn["figures"], drawn["score"]) == (dict(row.metrics), pytest.approx(row.score))


def test_a_page_takes_the_worst_and_leaves_out_what_is_gone(
    run: explain.Run, tmp_path: Path
) -> None:
    def names(page: Path) -> list[str]:
        photos = Read(page.read_text("utf-8")).data["index"]["photos"]
        return [photo["name"] for photo in photos]

    place, _ = run.to_html(tmp_path / "worst.html", "worst:1")
    assert names(place) == [Path(next(iter(run.rows(order="worst"))).name).name]
    (tmp_path / "photos" / "001.png").unlink()
    place, failures = run.to_html(tmp_path / "left.html")
    assert (names(place), list(failures)) == (["000.png", "002.png"], ["photos/001.png"])
    with pytest.raises(OutputError, match="exists already"):
        run.to_html(place)
    shutil.rmtree(tmp_path / "photos")
    with pytest.raises(RunError, match="photos"):
        run.to_html(tmp_path / "none.html")
    with pytest.raises(ExplainError, match="pictures must"):
        run.to_html(tmp_path / "none.html", "first")
