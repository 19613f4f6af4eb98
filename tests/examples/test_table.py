"""The table of all methods and metrics: what counts as right, and that stored values come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    with scripts_of("", "benchmarks/parts", "leaderboard"):
        yield lambda name: example(f"leaderboard/{name}")


def test_a_map_is_right_where_its_largest_square_is_the_mark_and_where_parts_have_their_worth(
    script: Any,
) -> None:
    run = script("run")
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[4:8, 8:12] = True
    subject = run.Subject("one", torch.zeros(1, 3, 16, 16), 0, mask)
    moved = mask.float().roll(2, 1)  # half of each square is shared: 8 of 24 pixels
    for values, truth in ((mask.float(), 1), (moved, 1 / 3), (torch.ones(16, 16), 0)):
        assert run.truths(subject, values, "planted") == {"truth": pytest.approx(truth)}
    parts = torch.stack([mask.float(), mask.float().roll(4, 0), mask.float().roll(-4, 1)])
    worth = {"shapley": [3.0, 2.0, 1.0], "removal": [1.0, 2.0, 3.0]}
    scene = run.Subject("two", subject.x, 0, mask, parts, worth)
    values = 5 * parts[0] + parts[1] - 2 * parts[2]
    truths = run.truths(scene, values, "parts")
    assert truths == pytest.approx({"truth": 1.0, "truth-removal": -1.0})


def test_values_of_a_photo_come_back_from_the_parquet_file(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    store = script("store")
    record = {
        "truth": "boxes",
        "model": "plain",
        "photo": "a",
        "seed": 0,
        "clones": [["gradcam", "noise"]],
        "values": {"gradcam": {"deletion": 0.25}, "noise": {"deletion": 0.5}},
        "costs": {"gradcam": 2.0, "noise": 0.0},
    }
    lines = tmp_path / "lines.jsonl"
    file = tmp_path / "table.parquet"
    lines.write_text(json.dumps(record) + '\n{"photo": "cut o')
    store.parquet(lines, file)
    rows = set(store.stored(file))
    assert rows == set(store.rows(lines))
    assert len(rows) == 5
    lines.write_text(json.dumps(record | {"photo": "b"}) + "\n")
    store.parquet(lines, file)
    assert store.known(tmp_path / "none", file) == {("boxes", "plain"): {"a", "b"}}
