"""The leaderboard: its statistics, that work goes on where it stopped, and that its page says what was measured."""

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
from explain.models import CenterCrop, Classifier
from tests.conftest import ROOT
from tests.hooks.test_tour import example

ASSETS = ROOT / "assets" / "leaderboard"


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a script of the leaderboard by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return example


# Statistics


def test_means_leave_out_what_was_not_measured_in_every_sample(board: Any) -> None:
    standings, generator = board("standings"), np.random.default_rng(3)
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
            assert (np.isnan(sample[column]) and not len(known)) or sample[column] == pytest.approx(known.mean())


def test_an_interval_holds_the_mean_of_other_photos_about_as_often_as_it_says(board: Any) -> None:
    standings, generator = board("standings"), np.random.default_rng(0)
    weights, held = standings.draws(40, 300), 0
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


@pytest.fixture
def leaderboard(board: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = board("leaderboard")
    look = CenterCrop(16, 1.0, (0.0,) * 3, (1.0,) * 3)
    classifier = Classifier(Small().eval(), look, ["red", "other"], "small")
    monkeypatch.setattr(module, "load", lambda name: classifier)
    return module


def test_photos_are_those_that_the_model_gets_right_with_boxes_that_leave_something(
    leaderboard: Any, data: Path
) -> None:
    found = {photo.name: photo for photo in leaderboard.photos(data, leaderboard.load("small"), 10)}
    assert set(found) == {"val_0.JPEG", "val_1.JPEG"}
    assert found["val_1.JPEG"].box == (4, 6, 12, 14)
    assert found["val_1.JPEG"].target == 0
    assert found["val_1.JPEG"].share == 64 / 256
    seen = explain.data.images.Box(4, 4, 12, 12)
    assert leaderboard.within((2, 6, 10, 14), seen, torch.zeros(1, 3, 16, 16)) == (0, 4, 12, 16)


# The page


def test_the_page_and_the_table_say_what_was_measured(board: Any) -> None:
    module = board("leaderboard_page")
    found = json.loads((ASSETS / "leaderboard.json").read_text("utf-8"))
    assert module.PAGE.read_text("utf-8") == module.as_page(found, module.planted(ASSETS))
    assert (ASSETS / "leaderboard.csv").read_text("utf-8") == module.as_csv(found)
    for name, model in found["models"].items():
        assert (ASSETS / f"{name}.png").exists()
        known = [each for each, about in model["methods"].items() if about["kind"] == "method"]
        assert not set(known) - {*explain.list_methods()}
        assert set(module.BASELINES) <= set(model["methods"])
