"""Some photos of a run as one page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import explain
from explain import ExplainError, OutputError, RunError
from tests.report.test_report import Read, unpacked
from tests.runs.networks import explainer, folder_of


@pytest.fixture
def run(tmp_path: Path) -> explain.Run:
    folder_of(tmp_path / "photos", 3)
    (tmp_path / "photos.csv").write_text("path,label\nphotos/000.png,b\nphotos/001.png,a\nphotos/002.png,elsewhere\n")
    return explain.run(
        tmp_path / "photos.csv", explainer(categories=list("abcde")), ["gradcam", "saliency"],
        output=tmp_path / "run.sqlite", metrics=["sparseness"], workers=0,
    )  # fmt: skip


def test_a_page_of_a_run_has_its_rows_without_the_model(run: explain.Run, tmp_path: Path) -> None:
    place, failures = run.to_html(tmp_path / "out" / "run.html")
    assert failures == {}
    data = Read(place.read_text("utf-8")).data
    rows = list(run.rows())
    for number, photo in enumerate(data["index"]["photos"]):
        mine = rows[2 * number : 2 * number + 2]
        assert (photo["name"], photo["label"]) == (Path(mine[0].name).name, mine[0].prediction)
        assert (photo.get("truth"), photo.get("right")) == (
            (None, None) if mine[0].correct is None else (mine[0].label, mine[0].correct)
        )
        item = data[f"item-{number}"]
        assert [method["name"] for method in item["methods"]] == ["gradcam", "saliency"]
        for row, one in zip(mine, item["maps"][0], strict=True):
            values = row.values.abs().amax(0) if row.values.ndim == 3 else row.values
            assert np.abs(unpacked(one["plane"]) - values.numpy()).max() <= float(values.max()) / 100
            assert one["figures"] == dict(row.metrics)
            assert one["score"] == pytest.approx(row.score)
        assert "open_run" in item["again"]["python"]
    assert data["index"]["photos"][2]["figures"]["saliency"] == dict(rows[5].metrics)


def test_a_page_takes_the_worst_and_leaves_out_what_is_gone(run: explain.Run, tmp_path: Path) -> None:
    place, _ = run.to_html(tmp_path / "worst.html", "worst:1")
    worst = next(iter(run.rows(order="worst"))).name
    assert [each["name"] for each in Read(place.read_text("utf-8")).data["index"]["photos"]] == [Path(worst).name]
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
