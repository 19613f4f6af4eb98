"""The table of all methods and metrics: what counts as right, clones, and that stored values come
back."""

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
    assert run.truths(subject, mask.float(), "planted") == {"truth": 1.0}
    moved = mask.float().roll(2, 1)  # half of each square is shared: 8 of 24 pixels
    assert run.truths(subject, moved, "planted") == {"truth": pytest.approx(1 / 3)}
    parts = torch.stack([mask.float(), mask.float().roll(4, 0), mask.float().roll(-4, 1)])
    worth = {"shapley": [3.0, 2.0, 1.0], "removal": [1.0, 2.0, 3.0]}
    values = (parts * torch.tensor([5.0, 1.0, -2.0]).view(3, 1, 1)).sum(0)
    known = run.Subject("two", subject.x, 0, mask, parts, worth)
    assert run.truths(known, values, "parts") == {
        "truth": pytest.approx(1.0),
        "truth-removal": pytest.approx(-1.0),
    }


def test_clones_have_the_same_order_of_pixels_and_constant_maps_have_none(script: Any) -> None:
    one = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    maps = {
        "one": one,
        "same": one.exp(),
        "other": -one,
        "flat": torch.ones(8, 8),
        "level": torch.zeros(8, 8),
    }
    assert list(script("run").clones(maps)) == [("one", "same")]


def test_values_of_a_photo_are_measured_and_come_back_from_the_parquet_file(
    script: Any, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    run = script("run")
    store = script("store")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    ).eval()
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[8:20, 8:20] = True
    assert run.around(mask).tolist() == [8, 8, 20, 20]
    x = torch.rand(1, 3, 32, 32)
    methods = {name: run.get_method(name) for name in ("gradcam", "saliency")} | {
        "noise": run.BLIND["noise"]
    }
    maps = run.attributed(model, x, methods, [1])
    found = run.Maps.of("noise", maps["noise"], x).per_pixel()
    assert set(maps) == set(methods)
    assert torch.equal(found[0], torch.rand(32, 32, generator=torch.Generator().manual_seed(0)))
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
    lines.write_text(json.dumps(record) + "\n")
    assert store.known(lines, file) == {("boxes", "plain"): {"a"}}
    store.parquet(lines, file)
    again = set(store.stored(file))
    assert again == set(store.rows(lines))
    assert len(again) == 5
    record["photo"] = "b"
    lines.write_text(json.dumps(record) + "\n")
    store.parquet(lines, file)
    assert store.known(tmp_path / "none", file) == {("boxes", "plain"): {"a", "b"}}


def test_methods_are_reduced_with_those_inside_them(script: Any) -> None:
    run = script("run")
    assert run.reduced(run.get_method("kernelshap"), 2).samples == 200
    assert run.reduced(run.get_method("kernelshap"), 2).seed == 2
    assert run.reduced(run.get_method("idgi"), 0, steps=8).path.steps == 8
    assert run.reduced(run.get_method("gradcam"), 1) == run.get_method("gradcam")


def test_every_metric_has_its_round_and_every_period_its_three_seeds(script: Any) -> None:
    run = script("run")
    for period in (*run.PERIODS.values(), 35):
        numbers = [number for number in range(3 * period) if run.due(number, period)]
        assert len(numbers) == 3
        assert {number % 3 for number in numbers} == {0, 1, 2}
    first = {metric.name for metric in run.metrics_due(0, 0, every=False, masks=True)}
    every = {metric.name for metric in run.metrics_due(0, 0, every=True, masks=True)}
    assert every == {metric.name for metric in run.metrics_of(0, masks=True)}
    assert "infidelity" in first
    assert not first & ({*run.PERIODS} | {"maxsensitivity"})


def test_a_map_that_says_nothing_is_not_right_and_a_line_that_was_cut_off_is_left_out(
    script: Any, tmp_path: Path
) -> None:
    run = script("run")
    store = script("store")
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:2, :2] = True  # where the first square is
    subject = run.Subject("one", torch.zeros(1, 3, 8, 8), 0, mask)
    assert run.truths(subject, torch.ones(8, 8), "planted") == {"truth": 0}
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"photo": "a"}\n{"pho')
    assert list(store.lines(lines)) == [{"photo": "a"}]
