"""Nothing is kept of explanations that are done: a process does not grow, and no tensor outlives
its explanation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import explain
from explain.models import CenterCrop
from tests.conftest import ROOT, settled


def count_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    with Image.open(ROOT / "assets" / "chelsea.png") as opened:
        return opened.convert("RGB").resize((120, 80))


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer("tiny", size=32)


ACTIONS: dict[str, Callable[[explain.Explanation, Path], Any]] = {
    "predictions": lambda explanation, folder: explanation.predictions,
    "a sheet": lambda explanation, folder: explanation.sheet(),
    "a figure": lambda explanation, folder: explanation.figure().canvas.draw(),  # type: ignore[attr-defined]
    "what a notebook shows": lambda explanation, folder: explanation._repr_html_(),
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
        parts: list[Any] = [explanation, explanation.photo]
        for attribution in explanation.results[1].values():
            parts += [attribution, attribution.values, attribution.heatmap, attribution.logits]
        return list(map(weakref.ref, parts))

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
def test_a_model_goes_with_its_explainer(photo: Image.Image) -> None:
    """Layers are remembered for as long as their model lives, and no longer."""

    def run() -> list[weakref.ref[Any]]:
        layers = [nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)]
        model = settled(nn.Sequential(*layers)).train()
        explainer = explain.Explainer(model, preprocess=CenterCrop(32))
        explainer(photo, ["gradcam", "cam"])
        return list(map(weakref.ref, (model, model[0], model[0].weight, explainer)))

    assert_nothing_outlives(run)


@pytest.mark.usefixtures("new_objects_alone")
def test_lrp_keeps_no_weights_of_maps_merged_with_normalisations() -> None:
    width, depth = 64, 5
    layers = [
        layer
        for _ in range(depth)
        for layer in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2)]
    model = settled(nn.Sequential(*layers, *head)).eval()
    of_parameters = {parameter.data_ptr() for parameter in model.parameters()}
    live_bytes: list[int] = []

    class Measure(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Adds up the memory of tensors when a convolution or its derivative is about to run."""

        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "convolution" in str(operator):
                things = gc.get_objects()
                tensors = [thing for thing in things if issubclass(type(thing), torch.Tensor)]
                storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
                live_bytes.append(sum(storages[where] for where in storages.keys() - of_parameters))
            return operator(*args, **(kwargs or {}))

    with Measure():
        explain.attribute(model, torch.rand(1, width, 3, 3), "lrp", target=1)
    assert len(live_bytes) >= 3 * depth
    assert max(live_bytes) < 2.5 * model[0].weight.nbytes
