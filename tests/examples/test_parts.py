"""Scenes whose parts can be removed, and what is measured on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import Made
from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    """Load a script of the folder by its name."""
    with scripts_of("benchmarks/parts"):
        yield lambda name: example(f"benchmarks/parts/{name}")


def test_scenes_are_the_same_each_time_and_show_their_class(script: Any) -> None:
    scenes = script("scenes")
    first, again, other = (scenes.render(scenes.draw(3, seed)) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert scenes.consistent(scenes.draw(3, 7).parts) == [3]


def test_what_is_removed_changes_pixels_of_its_masks_only(script: Any) -> None:
    scenes = script("scenes")
    scene = scenes.draw(7, 47)
    whole = scenes.render(scene)
    masks = scenes.masks(scene)
    for name in masks.keys() & set(scenes.ELEMENTS):
        changed = (scenes.render(scene.without(name)) != whole).any(-1)
        assert not (changed & ~masks[name]).any(), name


def test_a_line_of_the_output_has_what_interventions_and_maps_say(script: Any) -> None:
    scenes = script("scenes")
    measure = script("measure")
    scene = scenes.draw(2, 5, script("train").background_of_class(2))
    weights = nn.Parameter(torch.randn(16, 3, 64, 64) / 100)
    # adds up a picture times weights for each class, and nothing else
    reader = Made(lambda made, x: torch.einsum("nchw,kchw->nk", x, made.weights), weights=weights)
    _, x = measure.pictures(scene, 1)
    record = measure.record_of("resnet", reader, scene, x, ["inputxgradient"], 1)

    def values_of(of_scene: Any) -> torch.Tensor:
        rendered = measure.as_input(scenes.render(of_scene)[None])[0]
        return (weights[2] * rendered).detach().sum(0)

    values = values_of(scene)
    rest = values_of(scene.without("crest", "eye"))
    expected = [values.sum().item(), rest.sum().item()]
    assert [record["scores"][31], record["scores"][0b01101]] == pytest.approx(expected, abs=1e-3)
    part = measure.wider(scenes.masks(scene))[0].bool()
    of_part = record["methods"]["inputxgradient"]["sums"][0]
    assert of_part == pytest.approx(values[part].sum().item(), abs=1e-3)


@pytest.mark.long
def test_training_and_measuring_go_on_where_they_stopped(script: Any, tmp_path: Path) -> None:
    script("train").main([str(tmp_path), "--models", "resnet", "--small"])
    output = tmp_path / "parts.jsonl"
    options = f"{tmp_path} --models resnet --seeds 1 --costly-from 1 --scenes 1 --costly 0"
    for _ in range(2):
        script("measure").main([*options.split(), "--output", str(output)])
        (line,) = output.read_text("utf-8").splitlines()
        assert json.loads(line)["scene"] == 0
