"""The technical report: its numbers are those of the tables; the networks whose evidence is known
are what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import explain
from tests.conftest import ROOT
from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    with scripts_of("", "benchmarks", "benchmarks/parts", "leaderboard"):
        yield example


def test_the_numbers_of_the_report_are_those_of_the_tables_and_all_of_them_are_there(
    script: Any,
) -> None:
    report = script("technical_report")
    stored = json.loads((ROOT / "assets" / "report" / "numbers.json").read_text("utf-8"))
    assert stored == report.numbers()
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("verdict.md", "leaderboard.md")]
    used = {name for page in pages for name in re.findall(r"\{\{ (\w+) \}\}", page)}
    assert used == set(stored)
    assert report.pooled() in pages[0]


def test_the_map_of_the_linear_network_is_exact(script: Any) -> None:
    right = script("verdict_right")
    model = right.Linear(3).double().eval()
    x = torch.randn(1, 3, right.SIDE, right.SIDE, dtype=torch.float64)
    mean = x.mean((2, 3), keepdim=True)
    method = right.IntegratedGradients(baseline="mean", steps=1)
    values = explain.attribute(model, x, method, target=4).values
    expected = model.head.weight[4].view_as(x[0]) * (x - mean)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_controls_are_shown_behind_a_gate_or_with_noise(script: Any) -> None:
    """For the class on top, the gated map is the control itself; for another one, noise that
    depends on the gradient."""
    controls = script("verdict_calibration").controls
    shown = torch.rand(16, 16, dtype=torch.float64)
    gated, plus = (controls({"it": shown}, number)[0] for number in (0, 1))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).double()
    x = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    order = model(x)[0].argsort(descending=True).tolist()
    maps = [explain.attribute(model, x, gated, target=target).values[0] for target in order]
    torch.testing.assert_close(maps[0], shown / shown.norm())
    assert not torch.allclose(maps[1], maps[2])
    added = explain.attribute(model, x, plus, target=order[1]).values[0]
    assert (added - shown / shown.norm()).norm().item() == pytest.approx(1)
