"""Runs of photos of which several labels may be true, and of detectors with annotations of COCO."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import explain
from explain import ArgumentError, ExplainWarning, RunError
from explain.cli import main
from explain.cli.output import RunProgress
from explain.render.styles import get_style
from explain.runs.runner import State
from explain.targets import Predicted
from tests.conftest import TinyNet, settled
from tests.report.test_report import Read
from tests.runs.networks import as_it_is, explainer, folder_of, picture, read_csv, stored_run
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
    return stored_run(path, path / "photos", NETWORK, boxes=path / "chests.csv")


NETWORK = explainer(categories=LABELS, activation="sigmoid")


def by_hand(network: explain.Explainer, count: int) -> Any:
    """The probability of each label of each photo (count, K)."""
    x = torch.stack([as_it_is(picture(number)) for number in range(count)])
    with torch.no_grad():
        return network.model(x).double().sigmoid().numpy()


def test_the_probability_of_every_label_is_stored_and_written(tmp_path: Path) -> None:
    run = several(tmp_path)
    assert run.export(tmp_path / "scores.csv", photos=True) == 4
    table = read_csv(tmp_path / "scores.csv")
    written = [[float(row[label]) for label in LABELS] for row in table]
    assert np.array(written) == pytest.approx(by_hand(NETWORK, 4), abs=1e-6)
    truths = [row["labels"] and json.loads(row["labels"]) for row in table]
    assert truths == [["Mass", "Edema"], [], ["Fluid", "Nodule"], ""]
    with pytest.raises(RunError, match=r"one of .csv, .jsonl, got 'a.parquet'"):
        run.export(tmp_path / "a.parquet", photos=True)
    one_of_five = stored_run(tmp_path, [picture(0)], name="one.sqlite")
    one_of_five.export(tmp_path / "one.jsonl", photos=True)
    row = json.loads((tmp_path / "one.jsonl").read_text())
    assert sum(row["probabilities"].values()) == pytest.approx(1)
    with pytest.raises(ArgumentError, match="threshold has no effect"):
        one_of_five.insight(threshold=0.3)


# of three photos and five labels
TRUE = np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], bool)
UNCERTAIN = np.array([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)


def test_labels_that_are_missed_and_false_alarms_are_counted_explained_and_shown(
    tmp_path: Path,
) -> None:
    run = several(tmp_path)
    probabilities = by_hand(NETWORK, 3)
    threshold = np.sort(probabilities.flatten())[6:8].mean()
    predicted = probabilities >= threshold
    mistakes = {"missed": TRUE & ~predicted, "false alarm": predicted & ~TRUE & ~UNCERTAIN}
    insight = run.insight(explainer=NETWORK, threshold=threshold)
    assert insight.labels is not None
    named: set[tuple[str, str, str]] = set()
    for one in insight.labels:
        label = LABELS.index(one.label)
        of_kinds = {"missed": one.missed_photos, "false alarm": one.alarm_photos}
        for kind, photos in of_kinds.items():
            named |= {(kind, name, one.label) for name in photos}
            for name, probability in photos.items():
                assert probability == pytest.approx(probabilities[int(name[:3]), label], abs=1e-6)
        absent = (~TRUE & ~UNCERTAIN)[:, label].sum()
        assert (one.present, one.absent) == (TRUE[:, label].sum(), absent)
        for name, heatmap in one.maps.items():
            x = as_it_is(picture(int(name[:3])))[None]
            alone = explain.attribute(NETWORK.model, x, "gradcam", target=label)
            torch.testing.assert_close(heatmap, alone.heatmap[0], rtol=1e-3, atol=1e-4)
    expected = {
        (kind, f"{number:03}.png", LABELS[label])
        for kind, of_kind in mistakes.items()
        for number, label in np.argwhere(of_kind)
    }
    assert named == expected
    counts = [one.missed + one.false_alarms for one in insight.labels]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == len(expected)
    written = [path for path in insight.save(tmp_path / "out") if "labels-" in path.name]
    assert len(written) == len({(kind, label) for kind, _, label in expected})

    place, _ = run.to_html(tmp_path / "run.html", threshold=threshold)
    photos = Read(place.read_text("utf-8")).data["index"]["photos"]
    shown = {(words, photo["name"]) for photo in photos[:3] for words, _ in photo["mistakes"]}
    assert shown == {(f"{kind}: {label}", name) for kind, name, label in expected}
    tops = probabilities.argmax(1)
    are_right = [TRUE[n, top] if TRUE[n].any() else None for n, top in enumerate(tops)]
    assert [photo.get("right") for photo in photos] == [*are_right, None]


@pytest.mark.parametrize("labels", [(1, 0, 1, 0), ("sick", "normal", "sick", "normal")])
def test_one_label_is_missed_or_a_false_alarm_too(labels: Any, tmp_path: Path) -> None:
    network = explainer(
        settled(TinyNet(classes=1)).eval(), categories=["sick"], activation="sigmoid"
    )
    photos = [(picture(number), label) for number, label in enumerate(labels)]
    run = stored_run(tmp_path, photos, network, "saliency")
    probabilities = by_hand(network, 4)[:, 0]
    threshold = np.median(probabilities)
    is_sick = np.array([True, False] * 2)
    is_right = is_sick == (probabilities >= threshold)
    assert [row.is_right(threshold) for row in run.rows()] == is_right.tolist()
    insight = run.insight(threshold=threshold)
    assert insight.maps.correct.tolist() == is_right.tolist()
    counts = [(one.missed, one.false_alarms, one.present) for one in insight.labels or ()]
    assert counts == [((is_sick & ~is_right).sum(), (~is_sick & ~is_right).sum(), 2)]


def test_labels_that_are_none_of_the_models_are_named_and_their_photos_count_by_the_rest(
    tmp_path: Path,
) -> None:
    labels = [("No Finding",), ("Masss", "Edema"), ("Masss",), ("Hernia",)]
    photos = [(picture(number), list(of_photo)) for number, of_photo in enumerate(labels)]
    run = stored_run(tmp_path, photos, NETWORK, "saliency")
    insight = run.insight(threshold=0.0)  # so that all labels are predicted
    assert insight.unknown_labels == {"Masss": 2, "No Finding": 1}
    assert insight.labels is not None
    alarms = {one.label: one.false_alarms for one in insight.labels}
    assert alarms == {"Mass": 4, "Edema": 3, "Hernia": 3, "Nodule": 4, "Fluid": 4}
    assert any("Masss (2), No Finding (1)" in line for line in insight.lines())


def detector() -> explain.Explainer:
    network = Small().eval()
    network.head.bias.data[4:] += 0.6  # so that something is detected
    return explain.Explainer(network, preprocess=as_it_is, categories=["cat", "dog"])


def coco(path: Path, label: str) -> Path:
    """Annotations of two photos of 64 x 48 pixels: two boxes of a label, and one of another."""
    folder_of(path / "photos", 2, (64, 48))
    ids = {"cat": 17, "dog": 18}
    other = ({*ids} - {label}).pop()
    boxes = [(label, [2, 3, 20, 30]), (label, [40, 10, 12, 12]), (other, [0, 0, 64, 48])]
    content = {
        "images": [{"id": 70 + n, "file_name": f"{n:03}.png"} for n in range(2)],
        "categories": [{"id": 18, "name": "Dog"}, {"id": 17, "name": "cat"}],
        "annotations": [
            {"image_id": 70, "category_id": ids[name], "bbox": box} for name, box in boxes
        ],
    }
    file = path / "instances.json"
    file.write_text(json.dumps(content))
    return file


def test_boxes_of_coco_count_for_their_class_and_results_have_its_numbers(tmp_path: Path) -> None:
    network = detector()
    explanations = [network(picture(number, (64, 48)), "saliency") for number in range(2)]
    file = coco(tmp_path, explanations[0].targets[0].split("@")[0])
    run = stored_run(tmp_path, tmp_path / "photos", network, "saliency", boxes=file)
    first, second = run.rows()
    assert first.target == explanations[0].targets[0]
    assert first.boxes == ((2.0, 3.0, 22.0, 33.0), (40.0, 10.0, 52.0, 22.0))
    assert second.boxes == ()

    # read as pycocotools.coco.COCO.loadRes reads results
    count = run.export(tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert count == len(results) > 0
    detections = [
        (70 + number, detection)
        for number, explanation in enumerate(explanations)
        for detection in explanation.detections
    ]
    for result, (image, detection) in zip(results, detections, strict=True):
        x0, y0, x1, y1 = detection.box or ()
        assert (result["image_id"], result["category_id"]) == (image, 17 + detection.category)
        assert result["score"] == pytest.approx(detection.value, abs=1e-6)
        assert result["bbox"] == pytest.approx([x0, y0, x1 - x0, y1 - y0], abs=1e-3)

    annotations = json.loads(file.read_text())
    annotations["categories"] = annotations["categories"][:1]
    (tmp_path / "dogs.json").write_text(json.dumps(annotations))
    with pytest.warns(ExplainWarning, match="do not list 'cat'"):
        run.export(tmp_path / "d.json", boxes=tmp_path / "dogs.json")
    dogs = [result for result in results if result["category_id"] == 18]
    assert json.loads((tmp_path / "d.json").read_text()) == dogs
    with pytest.raises(RunError, match=r"must be one of a detector for a file .json"):
        several(tmp_path / "chests").export(tmp_path / "none.json")


def test_each_label_may_have_a_threshold_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = several(tmp_path)
    probabilities = by_hand(NETWORK, 3)
    thresholds = np.full(5, 0.5)
    thresholds[1] = probabilities[:, 1].mean()
    of_labels = {"Edema": float(thresholds[1])}
    predicted = probabilities >= thresholds
    insight = run.insight(threshold=of_labels)
    assert insight.labels is not None
    for label in insight.labels:
        column = label.label_class
        assert label.missed == (TRUE & ~predicted)[:, column].sum()
        assert label.false_alarms == (predicted & ~TRUE & ~UNCERTAIN)[:, column].sum()
    assert f"Edema {100 * thresholds[1]:.3g} %" in str(insight.parts()["labels"])
    by_number = run.insight(threshold={1: of_labels["Edema"]})
    assert by_number.to_dict() == insight.to_dict()
    words = ["insight", str(run.path), "--json", "--threshold", f"Edema={of_labels['Edema']}"]
    assert main(words) == 0
    assert (
        json.loads(capsys.readouterr().out)["insights"][0]["labels"] == insight.to_dict()["labels"]
    )
    assert main([*words, "--threshold", "Ghost=0.5"]) == 2
    assert "Ghost" in capsys.readouterr().err
    asked = Predicted(of_labels)
    of_run = stored_run(
        tmp_path,
        tmp_path / "photos",
        NETWORK,
        target=asked,
        boxes=tmp_path / "chests.csv",
        name="asked.sqlite",
    )
    own = of_run.insight()
    counts = [
        [(label.label, label.missed, label.false_alarms) for label in found.labels or ()]
        for found in (own, insight)
    ]
    assert counts[0] == counts[1]
    assert own.threshold == insight.threshold
    for name, target, finding, correct in zip(
        own.maps.names, own.maps.targets, own.maps.findings, own.maps.correct, strict=True
    ):
        row, column = int(name[:3]), LABELS.index(target)
        if row == 3 or UNCERTAIN[row, column]:
            continue
        assert finding == ("present" if TRUE[row, column] else "absent")
        assert bool(correct) == (predicted[row, column] == TRUE[row, column])
    for wrong in (1.5, {"Edema": -1}, {"Ghost": 0.5}, True):
        with pytest.raises(explain.ExplainError, match=r"threshold|Ghost") as error:
            run.insight(threshold=wrong)
        assert "\n" not in str(error.value)


def test_pictures_of_a_run_have_the_boxes_of_its_detector(tmp_path: Path) -> None:
    network = detector()
    photo = picture(0, (64, 48))
    explanation = network(photo, "saliency")
    run = stored_run(tmp_path, [photo], network, "saliency")
    (row,) = run.rows()
    (box,) = explanation.boxes
    assert box is not None
    assert row.detection is not None
    assert row.detection.label == box.label == row.target
    assert row.detection.box == pytest.approx(box.box, abs=1e-4)
    assert [one.label for one in row.detections] == [one.label for one in explanation.detections]
    style = get_style("intensity")
    expected = np.asarray(explanation.overlay(style=style)).astype(int)
    assert np.abs(np.asarray(row.overlay(style, photo)) - expected).max() <= 2
    place, failures = run.to_html(tmp_path / "run.html", source=[photo])
    assert not failures
    page = Read(place.read_text("utf-8")).data["item-0"]
    own = Read(explanation.to_html()).data["item-0"]
    assert len(page["boxes"]) == len(own["boxes"]) > 0
    for drawn, known in zip(page["boxes"], own["boxes"], strict=True):
        assert drawn == pytest.approx(known, abs=1e-3)
    assert page["targets"][0]["place"]["box"] == pytest.approx(
        own["targets"][0]["place"]["box"], abs=1e-3
    )
    assert [name for name, *_ in page["predictions"]] == [name for name, *_ in own["predictions"]]


def test_without_a_terminal_a_run_prints_a_line_a_minute_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = RunProgress()
    quick(State(5, 0, 0, 5, 1.0))
    quick.close()
    monkeypatch.setattr("explain.cli.output.MINUTE", 0.01)
    progress = RunProgress()
    lines = capsys.readouterr().err.splitlines()
    assert lines == []
    for state in (State(120, 0, 100, 700, 60.0), State(598, 2, 100, 700, 250.0)):
        progress(state)
        end = time.monotonic() + 20
        while not any(f"{state.done + 100} photos" in line for line in lines):
            assert time.monotonic() < end
            time.sleep(0.005)
            lines += capsys.readouterr().err.splitlines()
    progress.close()
    assert "220 photos done, 480 left, 0 failed, 2 a second, about 4 min to go" in lines
    assert capsys.readouterr().err.splitlines()[-1] == (
        "698 photos done, 0 left, 2 failed, 2.4 a second"
    )


def by_label(network: explain.Explainer, number: int, limits: Any) -> list[str]:
    """The labels of a photo whose probability reaches their limit, the most probable first."""
    probabilities = by_hand(network, number + 1)[number]
    order = np.argsort(-probabilities)
    found = [LABELS[label] for label in order if probabilities[label] >= limits[label]]
    return found or [LABELS[order[0]]]


THRESHOLDS: list[tuple[Any, list[float]]] = [
    ("predicted", [0.5] * 5),
    (explain.targets.Predicted(0.56), [0.56] * 5),
    (explain.targets.Predicted({"Mass": 0.95, "Edema": 0.0, 4: 0.55}), [0.95, 0, 0.5, 0.5, 0.55]),
]


@pytest.mark.parametrize(("target", "limits"), THRESHOLDS)
def test_every_label_that_is_predicted_of_a_photo_is_explained(target: Any, limits: Any) -> None:
    photos = [picture(number) for number in range(4)]
    explanations = NETWORK(photos, ["gradcam", "saliency"], target=target)
    assert len({len(explanation.targets) for explanation in explanations}) > 1
    for number, explanation in enumerate(explanations):
        assert explanation.targets == by_label(NETWORK, number, limits)
        for label, maps in zip(explanation.targets, explanation.results, strict=True):
            x = as_it_is(photos[number])[None]
            alone = explain.attribute(NETWORK.model, x, "gradcam", target=LABELS.index(label))
            torch.testing.assert_close(maps["gradcam"].values, alone.values)
    (alone_again,) = NETWORK(photos[1:2], target=target)
    assert alone_again.targets == explanations[1].targets


def test_where_no_label_is_predicted_the_most_probable_is_explained_and_it_is_said() -> None:
    with pytest.warns(ExplainWarning, match="no label reaches"):
        explanation = NETWORK(picture(0), target=explain.targets.Predicted(1.0))
    assert explanation.targets == by_label(NETWORK, 0, [1.0] * 5)
    one_is_true = explainer(categories=LABELS)  # with a softmax
    assert len(one_is_true(picture(0), target="predicted").targets) == 1


def test_targets_beside_those_that_are_predicted_are_explained_once() -> None:
    explanation = NETWORK(picture(0), targets=["Nodule", "predicted", "Mass"])
    found = by_label(NETWORK, 0, [0.5] * 5)
    others = [label for label in found if label not in ("Nodule", "Mass")]
    assert explanation.targets == ["Nodule", *others, "Mass"]


@pytest.mark.parametrize("threshold", [2, -0.1, "half", True, {"Mass": 1.5}, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(threshold: Any) -> None:
    with pytest.raises(explain.TargetError, match="threshold"):
        explain.targets.Predicted(threshold)


def test_what_is_predicted_is_refused_in_one_line_where_it_is_not_known() -> None:
    of_numbers = explainer(activation="none", categories=LABELS)
    for ask in (
        lambda: explain.attribute(NETWORK.model, torch.rand(1, 3, 20, 24), target="predicted"),
        lambda: of_numbers(picture(0), target="predicted"),
        lambda: NETWORK(picture(0), target=explain.targets.Predicted({"Feather": 0.5})),
    ):
        with pytest.raises(explain.TargetError, match=r"predicted|Feather") as refused:
            ask()
        assert "\n" not in str(refused.value)


def test_maps_of_photos_with_a_label_and_without_it_are_apart_in_the_insight(
    tmp_path: Path,
) -> None:
    count = 14
    labels = [["Mass"] if number % 2 else ["Hernia"] for number in range(count)]
    photos = [(picture(number), of_photo) for number, of_photo in enumerate(labels)]
    run = stored_run(tmp_path, photos, NETWORK, targets=["Mass", "Hernia"])
    insight = run.insight()
    looks = {look.title: look for look in insight.looks}
    titles = {f"{label}, {finding}" for label in ("Mass", "Hernia") for finding in FINDINGS}
    assert looks.keys() == titles
    probabilities = by_hand(NETWORK, count)
    for look in insight.looks:
        label = LABELS.index(look.target)
        numbers = [
            number
            for number in range(count)
            if (look.target in labels[number]) == (look.finding == "present")
        ]
        maps = []
        for number in numbers:
            x = as_it_is(picture(number))[None]
            heatmap = explain.attribute(NETWORK.model, x, target=label).heatmap
            on_grid = torch.nn.functional.adaptive_avg_pool2d(heatmap, 16)[0]
            maps.append(on_grid / on_grid.sum())
        torch.testing.assert_close(look.mean, torch.stack(maps).mean(0), rtol=2e-3, atol=1e-5)
        predicted = probabilities[numbers, label] >= 0.5
        are_right = predicted == (look.finding == "present")
        assert look.accuracy == pytest.approx(are_right.mean())
        assert look.photos == len(numbers)
    assert insight.finding("Mass, absent") is looks["Mass, absent"]
    assert any("Mass, absent" in line for line in insight.lines())
    assert insight.to_dict()["looks"][0]["finding"] in FINDINGS


FINDINGS = ("present", "absent")


def test_a_run_has_a_row_for_each_label_that_is_predicted_and_pages_name_each_map(
    tmp_path: Path,
) -> None:
    folder_of(tmp_path / "photos", 4)
    run = stored_run(tmp_path, tmp_path / "photos", NETWORK, target="predicted")
    found: dict[str, list[str]] = {}
    for row in run.rows():
        found.setdefault(row.name, []).append(row.target)
        probability = by_hand(NETWORK, 4)[int(row.name[:3]), LABELS.index(row.target)]
        assert row.probability == pytest.approx(probability, abs=1e-6)
    expected = {f"{n:03}.png": by_label(NETWORK, n, [0.5] * 5) for n in range(4)}
    assert found == expected
    again = stored_run(tmp_path, tmp_path / "photos", NETWORK, target="predicted")
    assert len(again) == len(run)
    with pytest.raises(RunError, match="target"):
        stored_run(tmp_path, tmp_path / "photos", NETWORK, target=explain.targets.Predicted(0.2))

    least = stored_run(tmp_path, tmp_path / "photos", NETWORK, name="n.sqlite", target="Nodule")
    place, _ = least.to_html(tmp_path / "run.html")
    for number, photo in enumerate(Read(place.read_text("utf-8")).data["index"]["photos"]):
        share = by_hand(NETWORK, 4)[number, LABELS.index("Nodule")]
        assert photo["target"] == "Nodule"
        assert photo["of_target"] == explain.targets.outputs.percent(share)
