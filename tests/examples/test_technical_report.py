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


def test_tables_have_shares_and_rank_correlations(script: Any) -> None:
    right = script("verdict_right")
    records: list[Any] = [
        {"network": "known", "photo": "one", "maps": {"right": {"faithful": False}}}
    ]
    for photo, hit in (("one", True), ("two", False)):
        maps = {}
        for name, value in (("good", True), ("fair", hit), ("bad", False)):
            checks = dict.fromkeys(right.CHECKS, True) | {"depends_on_class": None}
            maps[name] = checks | {"faithful": value, "hit": value}
        records.append({"network": "planted, residual", "photo": photo, "maps": maps})
    tables = right.tables(records)
    rows = tables["planted, residual"].splitlines()
    assert rows[3] == "| fair | 2 | 50% | 100% | 100% | 50% | 100% | 50% (9% to 91%) |"
    assert "faithful 1.00" in rows[-1]
    assert tables["known"].splitlines()[-1] == "| right | 1 | – | – | 0% | – | 0% (0% to 79%) |"
