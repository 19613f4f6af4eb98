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
from explain.metrics import Verdict
from explain.metrics.sanity import CheckResult
from explain.metrics.verdict import CheckResults
from explain.models import CenterCrop
from explain.targets import Detections, Segmentation
from tests.conftest import settled

HOSTILE = '<img src=x onerror="document.title=1">'
LABELS = [
    "tabby cat",
    HOSTILE,
    "<!-- <script> </script><script>document.title = 2</script>",
    "{{data}}",
    "a\u2028b\u202ec",
]


class Small(nn.Module):
    """Two convolutions and a linear head, with two layers to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(6, len(LABELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(self.second(torch.relu(self.first(x))))
        scores: torch.Tensor = self.fc(maps.mean((2, 3)))
        return scores


PREPROCESS = CenterCrop(32, 0.9, (0.25, 0.5, 0.5), (0.5, 0.5, 0.5))


def photo(width: int = 90, height: int = 60, seed: int = 0) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    generator = np.random.default_rng(seed)
    levels = [
        128 + 110 * np.sin(generator.uniform(0.05, 0.2) * (x + generator.uniform(-1, 1) * y))
        for _ in range(3)
    ]
    return Image.fromarray(np.stack(levels, -1).astype(np.uint8))


@pytest.fixture(scope="session")
def explainer() -> explain.Explainer:
    model = settled(Small()).eval()
    with torch.no_grad():
        model.fc.weight.abs_()  # each class has something that speaks for it
    return explain.Explainer(model, LABELS, PREPROCESS)


@pytest.fixture(scope="session")
def explanation(explainer: explain.Explainer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three methods for two targets, at two layers, of a photo whose name tries to be markup."""
    place: Path = tmp_path_factory.mktemp("photos") / '"><img src=x>.png'
    photo().save(place)
    return explainer(
        str(place),
        ["gradcam", "layercam", "inputxgradient"],
        targets=[0, 1],
        layer=["first", "second"],
        fuse="mean",
    )


class Maps(nn.Module):
    """A segmentation of two classes: bright places, and the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = x.mean(1, keepdim=True)
        return torch.cat([bright, -bright], 1)


class Boxes(nn.Module):
    """A detector that always finds the same box."""

    def forward(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        box = torch.tensor([[8.0, 4.0, 24.0, 28.0]])
        return [
            {"boxes": box, "labels": torch.tensor([1]), "scores": image.mean().sigmoid()[None]}
            for image in x
        ]


def of_kind(kind: str) -> Any:
    """An explanation of each kind that a page may meet."""
    model = settled(Small()).eval()
    with torch.no_grad():
        model.fc.weight.abs_()
    if kind == "segmentation":
        return explain.Explainer(Maps(), None, PREPROCESS)(photo(), ["saliency"], Segmentation(0))
    if kind == "detection":
        return explain.Explainer(Boxes(), None, PREPROCESS)(photo(), ["saliency"], Detections(1))
    if kind == "function":
        return explain.Explainer(model, LABELS, PREPROCESS)(
            photo(), ["gradcam"], lambda output: output[:, 0]
        )
    if kind == "one logit":
        model.fc = nn.Linear(6, 1)
        return explain.Explainer(settled(model).eval(), ["yes"], PREPROCESS)(
            photo(), ["saliency"], 0
        )
    if kind == "nothing":
        with torch.no_grad():
            model.fc.weight.zero_()
        return explain.Explainer(model, LABELS, PREPROCESS)(photo(), ["gradcam", "saliency"], 0)
    if kind == "layer":
        return explain.Explainer(model, LABELS, PREPROCESS)(
            photo(), ["lrp", GradCAM(relu=False)], 0, layer="second"
        )
    if kind == "estimate":
        rise = RISE(samples=8)
        return explain.Explainer(model, LABELS, PREPROCESS)(
            photo(), [rise, "occlusion", "guidedbackprop"], 0
        )
    # for networks of a fixed size
    model.register_parameter("position", nn.Parameter(torch.zeros(1)))
    return explain.Explainer(model, LABELS, PREPROCESS, crop="whole")(
        photo(200, 90), ["gradcam", "saliency"], targets=[0, 1]
    )


KINDS = [
    "segmentation",
    "detection",
    "function",
    "one logit",
    "nothing",
    "layer",
    "estimate",
    "padded",
]


def checked(explanation: Any) -> Any:
    """The same explanation with the verdict of a check: one map passed, one failed, one was not
    asked for."""
    passed = CheckResult("faithful", "faithful", 0.02, True, "no other place is as good")
    failed = CheckResult("stable", "stable", 0.4, False, HOSTILE)
    unasked = CheckResult(
        "depends_on_class", "class", float("nan"), None, "there is only one class"
    )
    answers = {
        "gradcam": CheckResults("gradcam", (unasked, passed)),
        "layercam": CheckResults("layercam", (passed, failed), (HOSTILE,)),
    }
    return replace(explanation, verdicts={0: Verdict("tabby cat", answers)})
