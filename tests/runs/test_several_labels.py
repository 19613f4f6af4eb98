"""Runs of photos of which several labels may be true, and of detectors with annotations of COCO."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import explain
from explain import ArgumentError, ExplainWarning, RunError
from explain.cli.output import RunProgress
from explain.metrics import evaluate
from explain.runs.runner import State
from tests.conftest import TinyNet, settled
from tests.report.test_report import Read
from tests.runs.networks import as_it_is, explainer, folder_of, picture, stored_run
from tests.targets.test_detections import Small

LABELS = ["Mass", "Edema", "Hernia", "Nodule", "Fluid"]
CHESTS = """Path,Age,Mass,Edema,Hernia,Fluid,Nodule
photos/000.png,61,1,1.0,0,-1,
photos/001.png,58,0,,0,0,0
photos/002.png,58,,,,1,1
"""


def several(path: Path) -> explain.Run:
    """A run of four photos with a network of five labels; nothing is said of the last photo."""
    folder_of(path / "photos", 4)
    (path / "chests.csv").write_text(CHESTS)
    source = path / "photos"
    network = explainer(categories=LABELS, activation="sigmoid")
    return stored_run(path, source, network, boxes=path / "chests.csv")


def by_hand(number: int) -> list[float]:
    with torch.no_grad():
        logits = settled(TinyNet()).eval()(as_it_is(picture(number))[None])[0]
    return (1 / (1 + (-logits.double()).exp())).tolist()  # type: ignore[no-any-return]


def test_the_probability_of_every_label_is_stored_and_written(tmp_path: Path) -> None:
    run = several(tmp_path)
    expected = [by_hand(number) for number in range(4)]
    assert run.export(tmp_path / "scores.csv", photos=True) == 4
    with (tmp_path / "scores.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for row, of_photo in zip(table, expected, strict=True):
        assert [float(row[label]) for label in LABELS] == pytest.approx(of_photo, abs=1e-6)
    truths = [row["labels"] and json.loads(row["labels"]) for row in table]
    assert truths == [["Mass", "Edema"], [], ["Fluid", "Nodule"], ""]
    run.export(tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [list(line["probabilities"]) for line in lines] == [LABELS] * 4
    with pytest.raises(RunError, match=r"one of .csv, .jsonl, got 'a.parquet'"):
        run.export(tmp_path / "a.parquet", photos=True)
    one_of_five = stored_run(tmp_path, [picture(0)], name="one.sqlite")
    one_of_five.export(tmp_path / "one.csv", photos=True)
    with (tmp_path / "one.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert sum(float(row[f"class {number}"]) for number in range(5)) == pytest.approx(1)
    assert list(one_of_five.labelled_photos()) == []


# of three photos and five labels
TRUE = np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], bool)
UNCERTAIN = np.array([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)


def test_labels_that_are_missed_and_false_alarms_are_counted_explained_and_shown(
    tmp_path: Path,
) -> None:
    run = several(tmp_path)
    probabilities = np.array([by_hand(number) for number in range(3)])
    threshold = np.sort(probabilities.flatten())[6:8].mean()
    predicted = probabilities >= threshold
    missed = TRUE & ~predicted
    alarms = predicted & ~TRUE & ~UNCERTAIN

    def named(mistakes: Any, label: int) -> dict[str, Any]:
        return {
            f"{number:03}.png": pytest.approx(probabilities[number, label], abs=1e-6)
            for number in np.flatnonzero(mistakes[:, label])
        }

    expected = {
        label: (named(missed, k), named(alarms, k))
        for k, label in enumerate(LABELS)
        if (missed | alarms)[:, k].any()
    }
    network = explainer(categories=LABELS, activation="sigmoid")
    insight = run.insight(explainer=network, threshold=threshold)
    assert insight.labels is not None
    assert "mistakes" not in insight.to_dict()
    actual = {one.label: (one.missed_photos, one.alarm_photos) for one in insight.labels}
    assert actual == expected
    counts = [one.missed + one.false_alarms for one in insight.labels]
    assert counts == sorted(filter(None, (missed | alarms).sum(0)), reverse=True)
    first = insight.labels[0]
    is_true = TRUE[:, LABELS.index(first.label)]
    absent = ~is_true & ~UNCERTAIN[:, LABELS.index(first.label)]
    assert (first.present, first.absent) == (is_true.sum(), absent.sum())
    for one in insight.labels:
        for name, heatmap in one.maps.items():
            x = as_it_is(picture(int(name[:3])))[None]
            target = LABELS.index(one.label)
            alone = explain.attribute(network.model, x, "gradcam", target=target)
            torch.testing.assert_close(heatmap, alone.heatmap[0], rtol=1e-3, atol=1e-4)
    written = {path.name for path in insight.save(tmp_path / "out")}
    kinds = sum(bool(photos) for both in expected.values() for photos in both)
    assert sum(name.startswith("labels-") for name in written) == kinds

    place, _ = run.to_html(tmp_path / "run.html", threshold=threshold)
    photos = Read(place.read_text("utf-8")).data["index"]["photos"]
    for number in range(3):
        wrong = {f"missed: {LABELS[k]}" for k in np.flatnonzero(missed[number])}
        wrong |= {f"false alarm: {LABELS[k]}" for k in np.flatnonzero(alarms[number])}
        assert {mistake for mistake, _ in photos[number]["mistakes"]} == wrong
    tops = probabilities.argmax(1)
    are_right = [TRUE[n, top] if TRUE[n].any() else None for n, top in enumerate(tops)]
    assert [photo.get("right") for photo in photos] == [*are_right, None]
    assert insight.maps.correct.tolist() == pytest.approx(
        [math.nan if is_right is None else float(is_right) for is_right in [*are_right, None]],
        nan_ok=True,
    )
    one_of_five = stored_run(tmp_path, [picture(0)], name="1.sqlite")
    with pytest.raises(ArgumentError, match="threshold has no effect"):
        one_of_five.insight(threshold=0.3)


@pytest.mark.parametrize("labels", [(1, 0, 1, 0), ("sick", "normal", "sick", "normal")])
def test_one_label_is_missed_or_a_false_alarm_too(labels: Any, tmp_path: Path) -> None:
    model = settled(TinyNet(classes=1)).eval()
    network = explainer(model, categories=["sick"], activation="sigmoid")
    with torch.no_grad():
        yes = [float(model(as_it_is(picture(n))[None]).double().sigmoid()) for n in range(4)]
    threshold = sum(sorted(yes)[1:3]) / 2
    photos = [(picture(number), label) for number, label in enumerate(labels)]
    run = stored_run(tmp_path, photos, network, "saliency")
    is_sick = [label in (1, "sick") for label in labels]
    missed = sum(sick and p < threshold for sick, p in zip(is_sick, yes, strict=True))
    alarms = sum(not sick and p >= threshold for sick, p in zip(is_sick, yes, strict=True))
    mistakes = run.insight(threshold=threshold).labels
    assert mistakes is not None
    counts = [(one.missed, one.false_alarms, one.present, one.absent) for one in mistakes]
    assert counts == ([(missed, alarms, 2, 2)] if missed or alarms else [])
    are_right = [sick == (p >= threshold) for sick, p in zip(is_sick, yes, strict=True)]
    assert [row.is_right(threshold) for row in run.rows()] == are_right
    assert run.insight(threshold=threshold).maps.correct.tolist() == list(map(float, are_right))


def test_labels_that_are_none_of_the_models_are_named_and_their_photos_count_by_the_rest(
    tmp_path: Path,
) -> None:
    network = explainer(categories=LABELS, activation="sigmoid")
    labels = [("No Finding",), ("Masss", "Edema"), ("Masss",), ("Hernia",)]
    photos = [(picture(number), list(of_photo)) for number, of_photo in enumerate(labels)]
    run = stored_run(tmp_path, photos, network, "saliency")
    insight = run.insight(threshold=0.0)  # so that all labels are predicted
    assert insight.unknown_labels == {"Masss": 2, "No Finding": 1}
    assert insight.labels is not None
    alarms = {one.label: one.false_alarms for one in insight.labels}
    assert alarms == {label: 4 - sum(label in of_photo for of_photo in labels) for label in LABELS}
    assert any("Masss (2 photos), No Finding (1 photo)" in line for line in insight.lines())


def detector() -> explain.Explainer:
    network = Small().eval()
    network.head.bias.data[4:] += 0.6  # so that something is detected
    return explain.Explainer(network, preprocess=as_it_is, categories=["cat", "dog"])


def coco(path: Path, category: str) -> Path:
    """Annotations of two photos of 64 x 48 pixels: two boxes of a category, and one of another."""
    folder_of(path / "photos", 2, (64, 48))
    other = "dog" if category == "cat" else "cat"
    content = {
        "images": [{"id": 70 + n, "file_name": f"{n:03}.png"} for n in range(2)],
        "categories": [{"id": 18, "name": "Dog"}, {"id": 17, "name": "cat"}],
        "annotations": [
            {"image_id": 70, "category_id": 17 + (name == "dog"), "bbox": box}
            for name, box in (
                (category, [2, 3, 20, 30]),
                (category, [40, 10, 12, 12]),
                (other, [0, 0, 64, 48]),
            )
        ],
    }
    file = path / "instances.json"
    file.write_text(json.dumps(content))
    return file


def test_boxes_of_coco_count_for_their_class_and_results_have_its_numbers(tmp_path: Path) -> None:
    photo = as_it_is(picture(0, (64, 48)))[None]
    explanation = detector()(picture(0, (64, 48)), "saliency")
    label = explanation.targets[0].split("@")[0]
    file = coco(tmp_path, label)
    source = tmp_path / "photos"
    run = stored_run(
        tmp_path, source, detector(), "saliency", boxes=file, metrics=["energypointinggame"]
    )
    first, second = run.rows()
    assert first.target == explanation.targets[0]
    assert first.boxes == ((2.0, 3.0, 22.0, 33.0), (40.0, 10.0, 52.0, 22.0))
    maps = {"saliency": explanation["saliency"].values}
    boxes = [[(2, 3, 22, 33), (40, 10, 52, 22)]]
    table = evaluate(detector().model, photo, maps, "energypointinggame", boxes=boxes)
    expected = float(table["saliency"]["energypointinggame"])
    assert first.metrics["energypointinggame"] == pytest.approx(expected, rel=1e-4)
    assert second.metrics["energypointinggame"] is None

    # read as pycocotools.coco.COCO.loadRes reads results
    count = run.export(tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert count == len(results) > 0
    assert {result["image_id"] for result in results} <= {70, 71}
    found = [
        (70 + number, 17 + (item.category or 0), item.value, item.box)
        for number in range(2)
        for item in detector()(picture(number, (64, 48)), "saliency").detections
    ]
    for result, (image, category, score, (x0, y0, x1, y1)) in zip(results, found, strict=True):
        assert (result["image_id"], result["category_id"]) == (image, category)
        assert result["score"] == pytest.approx(score, abs=1e-6)
        assert result["bbox"] == pytest.approx([x0, y0, x1 - x0, y1 - y0], abs=1e-3)

    annotations = json.loads(file.read_text())
    (tmp_path / "dogs.json").write_text(
        json.dumps({**annotations, "categories": annotations["categories"][:1]})
    )
    dogs = [result for result in results if result["category_id"] == 18]
    with pytest.warns(ExplainWarning, match="do not list 'cat'"):
        count = run.export(tmp_path / "d.json", boxes=tmp_path / "dogs.json")
    assert json.loads((tmp_path / "d.json").read_text()) == dogs
    with pytest.raises(RunError, match=r"must be one of a detector for a file .json"):
        several(tmp_path / "chests").export(tmp_path / "none.json")


def test_without_a_terminal_a_run_prints_a_line_a_minute_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = RunProgress()
    quick(State(5, 0, 0, 5, 1.0))
    quick.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("explain.cli.output.MINUTE", 0.05)
    line = RunProgress()
    steps = {
        "no photo done yet": None,
        "220 photos done, 480 left, 0 failed, 2 a second, about 4 min to go": State(
            120, 0, 100, 700, 60.0
        ),
        "698 photos done, 0 left, 2 failed, 2.4 a second": State(598, 2, 100, 700, 250.0),
    }
    said: list[str] = []
    for words, state in steps.items():
        if state is not None:
            line(state)
        begun = time.monotonic()
        while words not in said and time.monotonic() - begun < 20:
            said += capsys.readouterr().err.splitlines()
            time.sleep(0.02)
    line.close()
    assert list(dict.fromkeys(said)) == list(steps)
    assert capsys.readouterr().err.splitlines()[-1] == list(steps)[-1]
