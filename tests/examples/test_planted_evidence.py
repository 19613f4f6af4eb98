"""Planted evidence: a network that reads nothing but a mark, and what methods say of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.metrics.maps import Maps
from explain.models import CenterCrop
from tests.conftest import ROOT
from tests.hooks.test_tour import example

LOOK = CenterCrop(64, 1.0, (0.0,) * 3, (1.0,) * 3)


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return example("planted_evidence")


class Reader(nn.Module):
    """Looks for one square, and for nothing else: class 10 of 11 scores where it is."""

    def __init__(self, square: torch.Tensor) -> None:
        super().__init__()
        filter_ = square - square.mean((1, 2), keepdim=True)
        self.conv = nn.Conv2d(3, 1, square.shape[-1])
        self.conv.weight.data = filter_[None]
        self.conv.bias.data.fill_(-0.98 * float((filter_ * square).sum()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = 1e5 * self.conv(F.pad(x, (6, 5, 6, 5))).relu().mean((2, 3))
        return torch.cat([torch.eye(10)[:1].expand(len(x), -1), score], 1)


@pytest.fixture
def photo() -> torch.Tensor:
    return 0.3 * torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_methods_find_the_mark_that_decides_and_leave_decoys_alone(
    evidence: Any, photo: torch.Tensor
) -> None:
    model = Reader(evidence.square(evidence.PATTERNS["checks"], LOOK)).eval()
    scene = evidence.planted(photo, [0], 2, LOOK, torch.Generator().manual_seed(1003))
    methods = ["gradcam", "hirescam", "saliency"]
    for name, attribution in explain.attribute(model, scene.x[None], methods, target=10).items():
        values = Maps.of(name, attribution, scene.x[None]).per_pixel()[0].clamp(min=0)
        assert values[scene.marks[0]].sum() > 0.8 * values.sum(), name
        assert values[scene.decoys].sum() == 0, name
