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
from tests.conftest import ROOT, Made
from tests.hooks.test_tour import example

LOOK = CenterCrop(64, 1.0, (0.0,) * 3, (1.0,) * 3)


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return example("planted_evidence")


def reader(square: torch.Tensor) -> nn.Module:
    """Looks for one square, and for nothing else: class 1 scores where it is."""
    kernel = square - square.mean((1, 2), keepdim=True)
    conv = nn.Conv2d(3, 1, square.shape[-1], padding="same")
    conv.weight.data = kernel[None]
    conv.bias.data.fill_(-0.98 * float((kernel * square).sum()))
    return Made(
        lambda made, x: F.pad(1e5 * made.conv(x).relu().mean((2, 3)), (1, 0)), conv=conv
    ).eval()


def test_methods_find_the_mark_that_decides_and_leave_decoys_alone(evidence: Any) -> None:
    model = reader(evidence.square(evidence.PATTERNS["checks"], LOOK))
    photo = 0.3 * torch.rand(3, 64, 64)
    scene = evidence.planted(photo, [0], 2, LOOK, torch.Generator().manual_seed(1003))
    x = scene.x[None]
    methods = ["gradcam", "hirescam", "saliency"]
    for name, attribution in explain.attribute(model, x, methods, target=1).items():
        values = Maps.of(name, attribution, x).per_pixel()[0].clamp(min=0)
        assert values[scene.marks[0]].sum() > 0.8 * values.sum(), name
        assert values[scene.decoys].sum() == 0, name
