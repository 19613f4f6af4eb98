"""Maps in FiftyOne and Weights & Biases. Where these are not installed, what their documented calls
receive is compared."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops

import explain
from explain import RunError
from explain.models import CenterCrop
from explain.render.styles import resampled_on_photo
from explain.runs.trackers import to_fiftyone, to_wandb
from tests.conftest import TinyNet, settled
from tests.runs.networks import folder_of, stored_run

LABELS = ["Mass", "Edema", "Hernia", "Nodule", "Fluid"]
METHODS = ["gradcam++", "saliency"]


def network() -> explain.Explainer:
    return explain.Explainer(settled(TinyNet()).eval(), LABELS, CenterCrop(16, 0.8))


class Sample(dict[str, Any]):
    def __init__(self, filepath: str) -> None:
        self.filepath = filepath


class Dataset:
    def __init__(self) -> None:
        self.samples: list[Any] = []

    def add_samples(self, samples: Any) -> None:
        self.samples += samples


class Table:
    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self.data: list[list[Any]] = []

    def add_data(self, *cells: Any) -> None:
        assert len(cells) == len(self.columns)
        self.data.append(list(cells))


class Run:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)


def kept(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fiftyone", "wandb"):
        if importlib.util.find_spec(name) is None:
            module: Any = ModuleType(name)
            module.Sample = Sample
            module.Dataset = Dataset
            module.Heatmap = module.Classification = kept
            module.Detection = module.Detections = kept
            module.Table = Table
            module.Image = lambda picture, caption: kept(image=picture, caption=caption)
            module.run = None
            monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    folder = folder_of(tmp_path / "photos", 2, (40, 30))
    return sorted(map(str, folder.iterdir()))


def test_fiftyone_gets_labels_and_maps_that_lie_on_the_photos(photos: list[str]) -> None:
    explanations = network()(photos, METHODS, targets=[1, 3])
    dataset = to_fiftyone(explanations, Dataset(), boxes=0.5)
    assert [sample["filepath"] for sample in map(fields_of, dataset.samples)] == photos
    for sample, explanation in zip(dataset.samples, explanations, strict=True):
        label, probability = explanation.predictions[0]
        assert sample["prediction"].label == label
        assert sample["prediction"].confidence == pytest.approx(probability)
        assert "ground_truth" not in fields_of(sample)
        names = {"gradcampp": (0, "gradcam++"), "saliency_2": (1, "saliency")}
        for name, (number, method) in names.items():
            a = explanation.results[number][method]
            heatmap = resampled_on_photo(a.heatmap[0].numpy(), (40, 30), explanation.box)
            assert np.array_equal(sample[name].map, heatmap)
            assert sample[name].target == explanation.targets[number]
            parts = sample[f"{name}_parts"].detections
            assert len(parts) == len(a.boxes(0.5)[0]) > 0
            for part, box in zip(parts, a.boxes(0.5)[0], strict=True):
                x0, y0, x1, y1 = explanation.box.to_photo(box, (16, 16))
                expected = [x0 / 40, y0 / 30, (x1 - x0) / 40, (y1 - y0) / 30]
                assert part.bounding_box == pytest.approx(expected)


def fields_of(sample: Any) -> dict[str, Any]:
    if isinstance(sample, Sample):
        return {"filepath": sample.filepath, **sample}
    return {name: sample[name] for name in sample.field_names}


def test_fiftyone_gets_the_maps_of_a_run_with_the_true_labels(
    photos: list[str], tmp_path: Path
) -> None:
    run = stored_run(tmp_path, list(zip(photos, [1, 3], strict=True)), network(), METHODS)
    dataset = to_fiftyone(run, Dataset())
    rows = list(run.rows())
    for sample, path, label in zip(dataset.samples, photos, ["Edema", "Nodule"], strict=True):
        own = [row for row in rows if row.path == path]
        assert sample["ground_truth"].label == label
        assert sample["prediction"].label == own[0].prediction
        heatmap = resampled_on_photo(own[1].heatmap.numpy(), (40, 30), own[1].box)
        assert np.array_equal(sample["saliency"].map, heatmap)
        assert sample["saliency"].probability == pytest.approx(own[1].probability)


def test_a_table_of_weights_and_biases_has_each_map(photos: list[str], tmp_path: Path) -> None:
    ours = network()
    explanations = ours(photos, METHODS, target=2)
    logged = Run()
    table = to_wandb(explanations, logged, key="maps")
    assert logged.logged == [{"maps": table}]
    columns = {name: [row[i] for row in table.data] for i, name in enumerate(table.columns)}
    assert columns["photo"] == ["000.png", "000.png", "001.png", "001.png"]
    assert columns["method"] == METHODS * 2
    assert columns["target"] == ["Hernia"] * 4
    for number, picture in enumerate(columns["map"]):
        explanation = explanations[number // 2]
        expected = explanation.overlay(METHODS[number % 2])
        drawn = picture.image.convert("RGB")
        assert ImageChops.difference(drawn, expected).getbbox() is None
        probability = columns["probability"][number]
        assert probability == pytest.approx(float(explanation.probabilities[2]))

    run = stored_run(tmp_path, list(zip(photos, [1, 3], strict=True)), ours, METHODS, target=2)
    of_run = to_wandb(run, Run())
    labels = [row[of_run.columns.index("label")] for row in of_run.data]
    assert labels == ["Edema", "Edema", "Nodule", "Nodule"]
    scores = [row[of_run.columns.index("score")] for row in of_run.data]
    assert scores == pytest.approx([row.score for row in run.rows()])


def test_what_cannot_be_sent_is_refused_in_one_line(photos: list[str]) -> None:
    without_file = network()(Image.new("RGB", (20, 20), "red"), "saliency")
    for ask in (
        lambda: to_fiftyone(without_file, Dataset()),
        lambda: to_fiftyone(["maps"], Dataset()),  # type: ignore[list-item]
        lambda: to_wandb(without_file),
    ):
        with pytest.raises(RunError) as refused:
            ask()
        assert "\n" not in str(refused.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, send in (("fiftyone", to_fiftyone), ("wandb", to_wandb)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(RunError, match=rf"explain-hooks\[{name}\]"):
            send([])
