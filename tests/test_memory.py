"""Nothing is kept of explanations that are done: a process does not grow, and no tensor outlives
its explanation."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.models import CenterCrop
from tests.conftest import ROOT, TinyNet, settled
from tests.engine.test_callers import count_tensors

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    with Image.open(ROOT / "assets" / "chelsea.png") as opened:
        return opened.convert("RGB").resize((120, 80))


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer("tiny", size=32)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="there is no /proc to read the memory from"
)
def test_a_thousand_explanations_take_no_more_memory_than_fifty(
    photo: Image.Image, explainer: explain.Explainer, tmp_path: Path
) -> None:
    net = settled(TinyNet()).eval()
    x = torch.randn(2, 3, 48, 40, generator=torch.Generator().manual_seed(0))
    methods = ["gradcam", "guidedbackprop", "layercam", "saliency", "eigencam"]

    def one(i: int) -> None:
        if i % 4:
            explain.attribute(net, x, methods[i % 5] if i % 20 != 3 else "fullgrad", target=i % 5)
            return
        explanation = explainer(photo, ["gradcam", "guidedbackprop"][: 1 + i % 8 // 4])
        if i % 8 == 0:
            explanation.overlay(caption=True)
        if i % 40 == 0:
            explanation.save(tmp_path, overwrite=True)
        if i % 100 == 0:
            explanation.figure()

    for i in range(50):
        one(i)
    before = resident()
    for i in range(50, 1000):
        one(i)
    assert (resident() - before) / MEGABYTE < 20


ACTIONS: dict[str, Callable[[explain.Explanation, Path], Any]] = {
    "predictions": lambda explanation, folder: explanation.predictions,
    "an overlay": lambda explanation, folder: explanation.overlay(),
    "an overlay with a caption": lambda explanation, folder: explanation.overlay(
        caption=True, alpha=0.4
    ),
    "a sheet": lambda explanation, folder: explanation.sheet(),
    "a figure": lambda explanation, folder: explanation.figure().canvas.draw(),  # type: ignore[attr-defined]
    "what a notebook shows": lambda explanation, folder: explanation._repr_html_(),
    "a record": lambda explanation, folder: explanation.record(),
    "files": lambda explanation, folder: explanation.save(folder, overwrite=True),
}


@pytest.mark.usefixtures("new_objects_alone")
@pytest.mark.parametrize("action", ACTIONS)
def test_an_explanation_goes_with_all_its_tensors_without_the_collector(
    action: str, photo: Image.Image, explainer: explain.Explainer, tmp_path: Path
) -> None:
    methods = ["gradcam", "guidedbackprop", "integratedgradients", "fullgrad"]

    def run() -> list[weakref.ref[Any]]:
        explanation = explainer(photo, methods[: 4 if action == "predictions" else 2], top_k=2)
        ACTIONS[action](explanation, tmp_path)
        found = [a for result in explanation.results for a in result.values()]
        parts = [part for a in found for part in (a, a.values, a.heatmap, a.score, a.logits)]
        return [weakref.ref(thing) for thing in (explanation, explanation.photo, *parts)]

    assert_nothing_outlives(run)


def assert_nothing_outlives(run: Callable[[], list[weakref.ref[Any]]]) -> None:
    """Fail if anything of a run outlives it, or if there are more tensors than before."""
    run()
    gc.collect()
    gc.disable()
    try:
        before = count_tensors()
        kept = [reference() for reference in run()]
        assert kept == [None] * len(kept)
        assert count_tensors() == before
    finally:
        gc.enable()


@pytest.mark.usefixtures("new_objects_alone")
def test_concepts_inspections_and_lists_of_layers_go_too(
    photo: Image.Image, explainer: explain.Explainer
) -> None:
    def run() -> list[weakref.ref[Any]]:
        picture, concepts = explainer.concepts(photo, 2)
        seen = explainer.inspect(photo)
        explain.list_layers(explainer.model, explainer.preprocess(photo)[None])
        return [
            weakref.ref(thing)
            for thing in (picture, concepts, concepts.maps, concepts.vectors, seen)
        ]

    assert_nothing_outlives(run)


@pytest.mark.usefixtures("new_objects_alone")
def test_a_method_goes_with_the_tensors_that_it_holds(explainer: explain.Explainer) -> None:
    def run() -> list[weakref.ref[Any]]:
        black = torch.zeros(1, 3, 32, 32)
        method = explain.methods.IntegratedGradients(steps=2, baseline=black)
        explain.attribute(explainer.model, torch.ones(1, 3, 32, 32), method, target=0)
        return [weakref.ref(black), weakref.ref(method)]

    assert_nothing_outlives(run)


@pytest.mark.usefixtures("new_objects_alone")
def test_an_explanation_that_fails_keeps_nothing_either(
    photo: Image.Image, explainer: explain.Explainer
) -> None:
    def run() -> list[weakref.ref[Any]]:
        for wrong in (
            {"target": 999},
            {"layer": "fc"},
            {"target": lambda output: output},
            {"layer": "unknown"},
        ):
            with pytest.raises(explain.ExplainError):
                explainer(photo, ["gradcam", "guidedbackprop"], **wrong)
        return []

    assert_nothing_outlives(run)


@pytest.mark.usefixtures("new_objects_alone")
def test_a_model_goes_with_its_explainer(photo: Image.Image) -> None:
    """Layers are remembered for as long as their model lives, and no longer."""

    def run() -> list[weakref.ref[Any]]:
        layers = [
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        ]
        model = settled(nn.Sequential(*layers)).train()
        explainer = explain.Explainer(model, preprocess=CenterCrop(32))
        explainer(photo, "gradcam")
        explain.attribute(model, explainer.preprocess(photo)[None], "cam")
        return [weakref.ref(thing) for thing in (model, model[0], model[0].weight, explainer)]

    assert_nothing_outlives(run)
