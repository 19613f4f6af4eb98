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
    page = (ROOT / "docs" / "leaderboard.md").read_text("utf-8")
    assert set(re.findall(r"\{\{ (\w+) \}\}", page)) == set(stored)


def test_the_map_of_the_linear_network_is_exact(script: Any) -> None:
    right = script("check_calibration")
    model = right.Linear(3).double().eval()
    x = torch.randn(1, 3, right.SIDE, right.SIDE, dtype=torch.float64)
    mean = x.mean((2, 3), keepdim=True)
    _, method = right.RIGHT["linear"]
    values = explain.attribute(model, x, method, target=4).values
    expected = model.head.weight[4].view_as(x[0]) * (x - mean)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_the_map_of_the_network_of_patches_is_exact(script: Any) -> None:
    right = script("check_calibration")
    model = right.Patches(0).double().eval()
    x = torch.randn(2, 3, right.SIDE, right.SIDE, dtype=torch.float64)
    _, method = right.RIGHT["patches"]
    values = explain.attribute(model, x, method, target=1).values
    cells = (model.see(x) * model.say.weight[1].view(-1, 1, 1)).sum(1)
    share = values / cells
    torch.testing.assert_close(share, share.mean().expand_as(share), rtol=1e-9, atol=0)


def test_controls_are_shown_behind_a_gate_or_with_noise(script: Any) -> None:
    """For the class on top, the gated map is the control itself; for another one, noise that
    depends on the gradient."""
    by_name = {method.name: method for method in script("check_calibration").controls()}
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).double()
    x = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    order = model(x)[0].argsort(descending=True).tolist()
    names = [f"contrast, {gate}" for gate in ("plain", "gated", "noised")]
    maps = [
        explain.attribute(model, x, [by_name[name] for name in names], target=target)
        for target in order
    ]
    plain = maps[0]["contrast, plain"].values
    torch.testing.assert_close(maps[0]["contrast, gated"].values, plain)
    torch.testing.assert_close(maps[1]["contrast, plain"].values, plain)
    assert not torch.allclose(maps[1]["contrast, gated"].values, maps[2]["contrast, gated"].values)
    assert (maps[1]["contrast, noised"].values - plain).norm().item() == pytest.approx(1)


def test_only_right_maps_are_counted_as_supported(script: Any) -> None:
    counted = script("check_calibration")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(20, generator=generator)
    right = {"mprt-upper": drawn * 0.5, "randomlogit": drawn * 0.5, "maxsensitivity": drawn}
    right |= dict.fromkeys(counted.EFFECTS, drawn + 0.1)
    lines = []
    for wrong in (None, "mprt-upper", "randomlogit", "covering-edges"):
        row = {**right, wrong: -drawn if wrong == "covering-edges" else drawn + 1}
        row.pop(None, None)
        columns = {name: values.tolist() for name, values in row.items()}
        lines.append({"group": "linear", "figures": {"map": columns}})
    assert counted.table(lines, 4, 20).splitlines()[2] == "| map | 4 | 1 (25%) |"
