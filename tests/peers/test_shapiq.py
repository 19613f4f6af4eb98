"""Interactions of regions, as shapiq computes them from all coalitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain.methods import FaithSHAP

shapiq = pytest.importorskip("shapiq", reason="shapiq is not installed")

REGIONS = 9


def test_interactions_are_those_of_faith_shap_from_all_coalitions() -> None:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    for weights in model.parameters():
        weights.data = torch.randn(weights.shape, generator=generator, dtype=torch.float64) / 3
    x = torch.rand(1, 1, 6, 6, generator=generator, dtype=torch.float64)
    squares = torch.arange(6)[:, None] // 2 * 3 + torch.arange(6) // 2

    def game(coalitions: Any) -> Any:
        seen = torch.as_tensor(coalitions).reshape(-1, REGIONS).double()
        return model(x * seen[:, squares][:, None])[:, 0].detach().numpy()

    found = shapiq.ExactComputer(game, n_players=REGIONS)("FSII", order=2).dict_values
    a = explain.attribute(model, x, FaithSHAP(regions=squares), target=0)
    assert a.interactions is not None
    for first in range(REGIONS):
        for second in range(first, REGIONS):
            theirs = found[(first, second) if second > first else (first,)]
            ours = float(a.interactions[0, first, second])
            assert ours == pytest.approx(theirs, abs=1e-8)
