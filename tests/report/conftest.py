"""Explanations to report on: of a small network, with names that try to be markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.methods import RISE, GradCAM
from explain.metrics import Check, CheckResult, MapCheck
from explain.models import CenterCrop
from explain.targets import Detections, Segmentation
from tests.conftest import Made, settled

HOSTILE = '<img src=x onerror="document.title=1">'
LABELS = [
    "tabby cat",
    HOSTILE,
    "<!-- <script> </script><script>document.title = 2</script>",
    "{{data}}",
    "a\u2028b\u202ec",
]


PREPROCESS = CenterCrop(32, 0.9, (0.25, 0.5, 0.5), (0.5, 0.5, 0.5))


def photo(width: int = 90, height: int = 60, seed: int = 0) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    generator = np.random.default_rng(seed)
    levels = [
        128 + 110 * np.sin(generator.uniform(0.05, 0.2) * (x + generator.uniform(-1, 1) * y))
        for _ in range(3)
    ]
    return Image.fromarray(np.stack(levels, -1).astype(np.uint8))


def small() -> nn.Module:
    """Two convolutions and a linear head, with two layers to look at; each class has something that
    speaks for it."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(net.second(torch.relu(net.first(x))))
        return net.fc(maps.mean((2, 3)))

    parts = {
        "first": nn.Conv2d(3, 4, 3, stride=2, padding=1),
        "second": nn.Conv2d(4, 6, 3, stride=2, padding=1),
        "fc": nn.Linear(6, len(LABELS)),
    }
    model = settled(Made(forward, **parts)).eval()
    with torch.no_grad():
        model.fc.weight.abs_()
    return model


@pytest.fixture(scope="session")
def explainer() -> explain.Explainer:
    return explain.Explainer(small(), LABELS, PREPROCESS)


@pytest.fixture(scope="session")
def explanation(explainer: explain.Explainer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three methods for two targets, at two layers, of a photo whose name tries to be markup."""
    place: Path = tmp_path_factory.mktemp("photos") / '"><img src=x>.png'
    photo().save(place)
    methods = ["gradcam", "layercam", "inputxgradient"]
    layers: dict[str, Any] = {"layer": ["first", "second"], "fuse": "mean"}
    return explainer(str(place), methods, targets=[0, 1], **layers)


def segmenter(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A segmentation of two classes: bright places, and the others."""
    bright = x.mean(1, keepdim=True)
    return torch.cat([bright, -bright], 1)


def detector(net: Any, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Always finds the same box."""
    box = torch.tensor([[8.0, 4.0, 24.0, 28.0]])
    return [
        {"boxes": box, "labels": torch.tensor([1]), "scores": image.mean().sigmoid()[None]}
        for image in x
    ]


QUESTIONS: dict[str, tuple[Any, ...]] = {
    "segmentation": (["saliency"], Segmentation(0)),
    "detection": (["saliency"], Detections(1)),
    "function": (["gradcam"], lambda output: output[:, 0]),
    "one logit": (["saliency"], 0),
    "nothing": (["gradcam", "saliency"], 0),
    "layer": (["lrp", GradCAM(relu=False)], 0),
    "estimate": ([RISE(samples=8), "occlusion", "guidedbackprop"], 0),
    "padded": (["gradcam", "saliency"], 1),
}


KINDS = list(QUESTIONS)


def of_kind(kind: str) -> Any:
    """An explanation of each kind that a page may meet."""
    model = {"segmentation": Made(segmenter), "detection": Made(detector)}.get(kind, small())
    options: dict[str, Any] = {}
    if kind == "one logit":
        model.fc = settled(nn.Linear(6, 1))
    if kind == "nothing":
        nn.init.zeros_(model.fc.weight)
    if kind == "padded":  # for networks of a fixed size
        model.register_parameter("position", nn.Parameter(torch.zeros(1)))
        options["crop"] = "whole"
    labels = {"segmentation": None, "detection": None, "one logit": ["yes"]}.get(kind, LABELS)
    explainer = explain.Explainer(model, labels, PREPROCESS, **options)
    picture = photo(200, 90) if kind == "padded" else photo()
    return explainer(picture, *QUESTIONS[kind], layer="second" if kind == "layer" else None)


def checked(explanation: Any) -> Any:
    """The same explanation with a check of two of its maps, of every mark and with a hostile
    text."""
    model = CheckResult("model", 0.12, 1.0, "✓", "0.12 alike")
    of_class = CheckResult("class", float("nan"), float("nan"), "?", "not measured: one class")
    covering = CheckResult("covering", 0.4, 0.3, "✗", f"covering the marked fifth: {HOSTILE}")
    stability = CheckResult("stability", 0.1, 1.3, "✓", HOSTILE)
    results = {
        name: MapCheck(name, model, of_class, covering, stability, note)
        for name, note in {"gradcam": "", "layercam": HOSTILE}.items()
    }
    return replace(explanation, checks={0: Check("tabby cat", results)})
