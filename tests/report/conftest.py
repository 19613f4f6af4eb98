"""Explanations to report on: of a small network, with names that try to be markup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.models import CenterCrop
from tests.conftest import settled

HOSTILE = '<img src=x onerror="document.title=1">'
LABELS = ["tabby cat", HOSTILE, "</script><script>document.title = 2</script>", "{{data}}", "a\u2028b\u202ec"]


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
    levels = [128 + 110 * np.sin(generator.uniform(0.05, 0.2) * (x + generator.uniform(-1, 1) * y)) for _ in range(3)]
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
        str(place), ["gradcam", "layercam", "inputxgradient"], [0, 1], layer=["first", "second"], fuse="mean"
    )
