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
    x = torch.randn(
        1,
        3,
        right.SIDE,
        right.SIDE,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    mean = x.mean((2, 3), keepdim=True)
    found = explain.attribute(
        model, x, right.IntegratedGradients(baseline="mean", steps=1), target=4
    )
    exact = model.head.weight[4].view_as(x[0]) * (x - mean)
    torch.testing.assert_close(found.values, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(exact.sum((1, 2, 3)), (model(x) - model(mean.expand_as(x)))[:, 4])


def test_the_network_behind_a_window_sees_nothing_beside_it(script: Any) -> None:
    right = script("verdict_right")
    model = right.Window(1).eval()
    x = torch.randn(1, 3, right.SIDE, right.SIDE, generator=torch.Generator().manual_seed(0))
    other = torch.where(model.mask.bool(), x, torch.zeros_like(x))
    assert model.mask.sum() == right.SEEN**2
    with torch.inference_mode():
        assert torch.equal(model(x), model(other))
        assert not torch.equal(
            model(x), model(torch.where(model.mask.bool(), torch.zeros_like(x), x))
        )


def test_a_map_points_at_the_mark_where_its_largest_square_overlaps_it(script: Any) -> None:
    right = script("verdict_right")
    mask = torch.zeros(16, 16)
    mask[4:8, 8:12] = 1
    assert right.points_at(mask, mask)
    assert right.points_at(mask.roll(2, 1), mask)  # 8 of 24 pixels are shared
    assert not right.points_at(mask.roll(3, 1), mask)


def test_tables_have_shares_and_rank_correlations(script: Any) -> None:
    right = script("verdict_right")

    def results(hit: bool, passed: bool) -> dict[str, bool | None]:
        checks = dict.fromkeys(right.CHECKS, True)
        return {**checks, "depends_on_class": None, "faithful": passed, "hit": hit}

    one = {"good": results(True, True), "fair": results(True, True), "bad": results(False, False)}
    two = {"good": results(True, True), "fair": results(False, True), "bad": results(False, False)}
    records = [
        {"network": "planted, residual", "photo": "one", "maps": one},
        {
            "network": "planted, residual",
            "photo": "two",
            "maps": {**two, "fair": results(False, False)},
        },
        {"network": "known", "photo": "one", "maps": {"right": {"faithful": False}}},
    ]
    found = right.tables(records)
    rows = found["planted, residual"].splitlines()
    assert rows[2] == "| good | 2 | 100% | 100% | 100% | 100% | 100% | 100% (34% to 100%) |"
    assert rows[3] == "| fair | 2 | 50% | 100% | 100% | 50% | 100% | 50% (9% to 91%) |"
    assert "faithful 1.00" in rows[-1]
    assert found["known"].splitlines()[-1] == "| right | 1 | – | – | 0% | – | 0% (0% to 79%) |"
