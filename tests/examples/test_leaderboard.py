"""The leaderboard: its statistics, that work goes on where it stopped, and that its page says what
was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.models import CenterCrop, Classifier
from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    with scripts_of("", "benchmarks", "benchmarks/parts", "leaderboard"):
        yield lambda name: example(f"leaderboard/{name}")


# Statistics


def test_means_leave_out_what_was_not_measured_in_every_sample(script: Any) -> None:
    standings = script("standings")
    generator = np.random.default_rng(3)
    values = generator.random((6, 3))
    values[generator.random((6, 3)) < 0.3] = np.nan
    values[:, 2] = np.nan
    weights = standings.draws(6, 40, seed=1)
    found = standings.means(values, weights)
    assert weights[0].tolist() == [1] * 6
    assert (weights.sum(1) == 6).all()
    for sample, weight in zip(found, weights.astype(int), strict=True):
        drawn = np.repeat(values, weight, axis=0)
        for column in range(3):
            known = drawn[~np.isnan(drawn[:, column]), column]
            assert (np.isnan(sample[column]) and not len(known)) or sample[column] == pytest.approx(
                known.mean()
            )


def test_an_interval_holds_the_mean_of_other_photos_about_as_often_as_it_says(script: Any) -> None:
    standings = script("standings")
    generator = np.random.default_rng(0)
    weights = standings.draws(40, 300)
    held = 0
    for _ in range(200):
        figure = standings.figures(generator.normal(size=(40, 1)), weights)[0]
        held += figure["low"] <= 0 <= figure["high"]
        assert figure["photos"] == 40
    assert 0.89 <= held / 200 <= 0.99


# Measuring


class Small(nn.Module):
    """Tells a photo that is red in the middle from others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4, 2)
        with torch.no_grad():
            self.conv.weight.fill_(0.01)
            self.conv.weight[0, 0] = 0.5
            self.fc.weight.copy_(torch.tensor([[4.0, 0.1, 0.1, 0.1], [0.0, 0.1, 0.1, 0.1]]))
            self.fc.bias.copy_(torch.tensor([-1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.conv(x).relu().mean((2, 3)))
        return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three photos in the layout of the data set; the box of the last is all of it."""
    folder = tmp_path / "data"
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("n1\nn2\n")
    boxes = [(2, 2, 9, 9), (4, 6, 11, 13), (0, 0, 15, 15)]
    rows = []
    for number, (x0, y0, x1, y1) in enumerate(boxes):
        pixels = np.full((16, 16, 3), 20, np.uint8)
        pixels[y0 : y1 + 1, x0 : x1 + 1, 0] = 250
        Image.fromarray(pixels).save(folder / "val" / "images" / f"val_{number}.JPEG", quality=95)
        rows.append(f"val_{number}.JPEG\tn1\t{x0}\t{y0}\t{x1}\t{y1}")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    return folder


def test_photos_are_those_that_the_model_gets_right_with_boxes_that_leave_something(
    script: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("boxed_photos")
    look = CenterCrop(16, 1.0, (0.0,) * 3, (1.0,) * 3)
    classifier = Classifier(Small().eval(), look, ["red", "other"], "small")
    monkeypatch.setattr(module, "load", lambda name: classifier)
    found = {photo.name: photo for photo in module.photos(data, classifier, 10)}
    assert set(found) == {"val_0.JPEG", "val_1.JPEG"}
    assert found["val_1.JPEG"].box == (4, 6, 12, 14)
    assert found["val_1.JPEG"].target == 0
    assert found["val_1.JPEG"].share == 64 / 256
    seen = explain.data.boxes.Box(4, 4, 12, 12)
    assert module.within((2, 6, 10, 14), seen, torch.zeros(1, 3, 16, 16)) == (0, 4, 12, 16)


# Cells, and who is better than whom in them


def rows(photos: int = 20, costly: int = 5) -> Iterator[tuple[Any, ...]]:
    """Five methods that are right in the order of their names, on photos of which some are easier
    for all.

    The fourth is measured on the easiest photos only, and the last has the map of the first.
    *insertion* has the order of the truth, *deletion*, of which less is better, the opposite one.
    """
    for photo in range(photos):
        for number, name in enumerate(("attnlrp", "gradcam", "lrp", "noise", "saliency")):
            if name == "noise" and photo < photos - costly:
                continue
            own = 0 if name == "saliency" else number
            values = {
                "truth": photo - own / 10,
                "insertion": -own + 0.01 * photo,
                "deletion": own,
                "passes": 100.0,
            }
            for metric, value in values.items():
                yield "planted", "plain", name, metric, f"p{photo:02}", photo % 3, float(value)
        yield "planted", "plain", "attnlrp", "same map as saliency", f"p{photo:02}", photo % 3, 1.0


def test_methods_are_compared_on_the_same_photos_and_copies_count_once(script: Any) -> None:
    module = script("cells")
    (cell,) = module.cells_of(rows())
    assert cell.methods == ("attnlrp", "gradcam", "lrp", "noise", "saliency")
    assert [cell.methods[i] for i in cell.firsts] == ["attnlrp", "gradcam", "lrp", "noise"]
    assert cell.counts("truth").tolist() == [20, 20, 20, 5, 20]
    found = cell.sampled("truth", 1)
    assert (found[0, :3] - found[0, 3]).tolist() == pytest.approx(
        [0.3, 0.2, 0.1]
    )  # although its photos are the easiest
    places = module.beats(found, cell.groups)
    assert np.nanmin(places[:, 0]) == np.nanmax(places[:, 4]) == 1
    assert places[0].tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0, 1])


def test_the_share_that_a_method_beats_is_counted_one_by_one(script: Any) -> None:
    beats = script("cells").beats
    generator = np.random.default_rng(0)
    figures = generator.integers(0, 4, size=(30, 7)).astype(float)
    figures[generator.random(figures.shape) < 0.2] = np.nan
    groups = np.array([0, 0, 2, 3, 2, 3, 6])  # whose figures need not be those of the first ones
    for own, found in zip(figures, beats(figures, groups), strict=True):
        for place, group in enumerate(groups.tolist()):
            others = [own[i] for i in (0, 2, 3, 6) if i != group and not np.isnan(own[i])]
            wins = [
                1.0 if own[place] > each else 0.5 if own[place] == each else 0.0 for each in others
            ]
            expected = np.nan if np.isnan(own[place]) or not wins else np.mean(wins)
            assert found[place] == pytest.approx(expected, nan_ok=True)


# The page


@pytest.fixture
def page(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page, of what `rows` measured."""
    module = script("page")
    found = {(cell.truth, cell.model): cell for cell in script("cells").cells_of(rows())}
    monkeypatch.setattr(module, "board", lambda: found)
    return module


def test_a_metric_agrees_with_the_truth_if_it_orders_methods_alike(page: Any) -> None:
    for metric in ("insertion", "deletion"):
        found = page.agreement("planted", "plain", metric)
        known = found[~np.isnan(found)]  # a sample of one map has no order
        assert len(known) > 20
        assert known == pytest.approx(1)


def test_every_table_of_the_page_has_its_rows(page: Any) -> None:
    for name, each in page.TABLES.items():
        lines = each().splitlines()
        assert len({line.count("|") for line in lines}) == 1, name
    order = [line.split("|")[1].strip() for line in page.of_truth().splitlines()[2:]]
    assert order == ["`attnlrp`", "`saliency`", "`gradcam`", "`lrp`", "*noise*"]
    assert page.stability("truth", ["planted"]) == pytest.approx(
        {"photos": 1, "seeds": 1, "networks": np.nan}, nan_ok=True
    )


@pytest.mark.long  # it reads all that is stored
def test_the_page_and_the_table_with_filters_say_what_is_stored(script: Any) -> None:
    pytest.importorskip("pyarrow", reason="the stored table is read with pyarrow, an extra")
    assert script("page").main(["--check"]) == 0


def test_the_table_with_filters_names_known_methods_and_metrics(script: Any) -> None:
    module = script("page")
    run = script("run")
    text = module.DATA.read_text("utf-8")
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert set(found["families"]) <= {*explain.list_methods(), *run.BLIND}
    assert {each["name"] for each in found["metrics"]} <= set(run.better())
    combinations = sum(
        value is not None for cell in found["cells"] for row in cell["means"] for value in row
    )
    assert combinations >= 8000
