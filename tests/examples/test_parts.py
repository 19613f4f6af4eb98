"""Scenes whose parts can be removed, and what is measured on them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    """Load a script of the folder by its name."""
    with scripts_of("benchmarks/parts"):
        yield lambda name: example(f"benchmarks/parts/{name}")


def test_scenes_are_the_same_each_time_and_show_their_class(script: Any) -> None:
    scenes = script("scenes")
    scene = scenes.draw(3, 7)
    assert np.array_equal(scenes.render(scene), scenes.render(scenes.draw(3, 7)))
    assert not np.array_equal(scenes.render(scene), scenes.render(scenes.draw(3, 8)))
    assert scenes.consistent(scene.parts) == [3]


def test_what_is_removed_changes_pixels_of_its_masks_only(script: Any) -> None:
    scenes = script("scenes")
    scene = scenes.draw(7, 47)
    whole = scenes.render(scene)
    masks = scenes.masks(scene)
    for name in masks.keys() & set(scenes.ELEMENTS):
        changed = (scenes.render(scene.without(name)) != whole).any(-1)
        assert not (changed & ~masks[name]).any(), name


def test_shapley_values_are_means_over_all_orders(script: Any) -> None:
    scores = np.random.default_rng(0).normal(size=32).tolist()
    expected = np.zeros(5)
    for order in itertools.permutations(range(5)):
        kept = 0
        for part in order:
            expected[part] += (scores[kept | 1 << part] - scores[kept]) / math.factorial(5)
            kept |= 1 << part
    assert np.allclose(script("dimensions").shapley(scores), expected)


class Reader(nn.Module):
    """Adds up a picture times weights for each class, and nothing else."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nchw,kchw->nk", x, self.weights)


def test_a_line_of_the_output_has_what_interventions_and_maps_say(script: Any) -> None:
    scenes = script("scenes")
    measure = script("measure")
    scene = scenes.draw(2, 5, script("train").background_of_class(2))
    weights = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0)) / 100
    _, x = measure.pictures(scene, 1)
    record = measure.record_of("resnet", Reader(weights), scene, x, ["inputxgradient"], 1)
    values = (weights[2] * measure.as_input(scenes.render(scene)[None])[0]).sum(0)
    assert record["scores"][31] == pytest.approx(float(values.sum()), abs=1e-3)
    rest = measure.as_input(scenes.render(scene.without("crest", "eye"))[None])[0]
    assert record["scores"][0b01101] == pytest.approx(float((weights[2] * rest).sum()), abs=1e-3)
    part = measure.wider(scenes.masks(scene))[0].bool()
    of_part = record["methods"]["inputxgradient"]["sums"][0]
    assert of_part == pytest.approx(float(values[part].sum()), abs=1e-3)


def test_training_and_measuring_go_on_where_they_stopped(script: Any, tmp_path: Path) -> None:
    script("train").main([str(tmp_path), "--models", "resnet", "--small"])
    output = tmp_path / "parts.jsonl"
    options = f"{tmp_path} --models resnet --seeds 1 --costly-from 1 --scenes 1 --costly 0"
    for _ in range(2):
        script("measure").main([*options.split(), "--output", str(output)])
        (line,) = output.read_text("utf-8").splitlines()
        assert json.loads(line)["scene"] == 0
