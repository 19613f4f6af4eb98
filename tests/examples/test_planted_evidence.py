"""Planted evidence: a network that reads nothing but a mark, and what methods and the page say of
it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import FeatureAblation, Squares
from explain.methods.base import get_method
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
    """Looks for one square, and for nothing else: what it finds is the score of class 10, of 11."""

    def __init__(self, square: torch.Tensor) -> None:
        super().__init__()
        filter_ = square - square.mean((1, 2), keepdim=True)
        self.conv = nn.Conv2d(3, 1, square.shape[-1])
        self.fc = nn.Linear(1, 11)
        with torch.no_grad():
            self.conv.weight.copy_(filter_[None])
            self.conv.bias.fill_(-0.98 * float((filter_ * square).sum()))
            self.fc.weight.zero_()
            self.fc.weight[10] = 1e5
            self.fc.bias.zero_()
            self.fc.bias[0] = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.conv(F.pad(x, (6, 5, 6, 5))).relu().mean((2, 3)))
        return found


@pytest.fixture
def photo() -> torch.Tensor:
    return 0.3 * torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_marks_and_decoys_lie_apart_where_their_masks_say(
    evidence: Any, photo: torch.Tensor
) -> None:
    for seed in range(20):
        scene = evidence.planted(photo, [2, 0], 2, LOOK, torch.Generator().manual_seed(seed))
        masks = [scene.marks[2], scene.marks[0], scene.decoys]
        assert [int(mask.sum()) for mask in masks] == [144, 144, 288]
        assert int(torch.stack(masks).sum(0).max()) == 1
        assert torch.equal((scene.x != photo).any(0), torch.stack(masks).any(0))
        rows, columns = scene.marks[2].nonzero().amin(0).tolist()
        square = scene.x[:, rows : rows + 12, columns : columns + 12]
        assert torch.equal(square, evidence.square(evidence.PATTERNS["corner"], LOOK))


def test_methods_find_the_mark_that_decides_and_leave_decoys_alone(
    evidence: Any, photo: torch.Tensor
) -> None:
    model = Reader(evidence.square(evidence.PATTERNS["checks"], LOOK)).eval()
    scene = evidence.planted(photo, [0], 2, LOOK, torch.Generator().manual_seed(1003))
    methods: dict[str, Any] = {
        name: get_method(name) for name in ("gradcam", "hirescam", "inputxgradient", "saliency")
    }
    methods["featureablation"] = FeatureAblation(Squares(16))
    for name, found in explain.attribute(model, scene.x[None], methods, target=10).items():
        values = Maps.of(name, found, scene.x[None]).per_pixel()[0].clamp(min=0)
        share = float(values[scene.marks[0]].sum() / values.sum())
        # its cells reach beyond the mark
        assert share > (0.4 if name == "featureablation" else 0.8), name
        if name != "inputxgradient":
            assert float(values[scene.decoys].sum()) == 0, name
