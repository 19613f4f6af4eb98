"""The leaderboard: its images have the evidence that they say, its scores are what plain counting
gives, and its page says what was measured."""

from __future__ import annotations

import doctest
import json
import operator
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    with scripts_of("", "benchmarks", "benchmarks/parts", "leaderboard"):
        yield lambda name: example(f"leaderboard/{name}")


RULES: dict[str, Any] = {
    "contrast": lambda corner, cross: corner,
    "and": operator.and_,
    "xor": operator.xor,
}


def test_the_class_of_an_image_follows_from_its_squares_by_the_rule_of_its_kind(
    script: Any,
) -> None:
    marks = script("marks")
    generator = torch.Generator().manual_seed(0)
    for kind, rule in RULES.items():
        for label in (0, 1, 0, 1, 0, 1):
            squares = marks.scene(kind, 32, "test", label, generator, 1).squares
            corner, cross = (
                any(marks.bright(name, 32).equal(square.shown) for square in squares)
                for name in ("corner", "cross")
            )
            assert rule(corner, cross) == bool(label), kind
    for kind in marks.KINDS:
        scene = next(marks.explained(kind, 32, 0))
        assert len(scene.squares) == marks.PARTS
        assert scene.parts.sum(0).max() == 1  # squares do not overlap
        x = scene.image()
        nothing, *_, whole = scene.without_each_set()
        assert whole.equal(x)
        assert not (nothing != x).any(0)[~scene.parts.any(0)].any()
        if kind in ("grey", "absence"):
            expected = scene.photo if kind == "absence" else torch.zeros_like(x)
            assert x[:, scene.mask].equal(expected[:, scene.mask])


def test_scores_are_what_plain_counting_gives(script: Any) -> None:
    scores = script("scores")
    assert doctest.testmod(scores).failed == 0
    mask = torch.tensor([[True, True, False], [False, True, False]])
    for seed in range(5):
        # with many ties
        values = torch.randint(0, 3, (2, 3), generator=torch.Generator().manual_seed(seed))
        inside = values[mask][:, None]
        outside = values[~mask]
        larger = (inside > outside).double() + 0.5 * (inside == outside)
        assert scores.pixel_auc(values, mask) == pytest.approx(larger.mean().item())
        orders = torch.tensor(list(permutations(range(6))))
        ordered = values.flatten()[orders].diff().le(0).all(1)  # from the largest down
        hits = mask.flatten()[orders[ordered][:, :3]]
        assert scores.top_share(values, mask) == pytest.approx(hits.double().mean().item())


def test_shapley_values_are_means_over_all_orders(script: Any) -> None:
    scores = torch.rand(32, dtype=torch.float64)
    orders = list(permutations(range(5)))
    expected = np.zeros(5)
    for order in orders:
        kept = 0
        for part in order:
            expected[part] += float(scores[kept | 1 << part] - scores[kept]) / len(orders)
            kept |= 1 << part
    assert script("scores").shapley_values(scores).numpy() == pytest.approx(expected)
    assert example("benchmarks/parts/dimensions").shapley(scores.tolist()) == pytest.approx(
        expected
    )


def test_two_marks_are_found_by_the_two_best_squares_that_do_not_overlap(script: Any) -> None:
    best_squares = script("scores").best_squares
    mask = torch.zeros(12, 12, dtype=torch.bool)
    mask[1:4, 1:4] = True
    mask[7:10, 6:9] = True
    # one mark is twice as bright, so that squares beside it have larger sums than the other mark
    values = mask.double()
    values[1:4, 1:4] *= 2
    assert best_squares(values, mask, 2) == 1
    assert best_squares(mask.double().roll(6, 1), mask, 2) == 0
    assert best_squares(torch.ones(12, 12), mask, 2) == 0


@pytest.mark.long
def test_a_quick_run_writes_a_line_for_each_network_and_goes_on_after_the_last(
    script: Any, tmp_path: Path
) -> None:
    run = script("run")
    results = tmp_path / "results.jsonl"
    arguments = [str(results), "--weights", str(tmp_path / "weights"), "--quick", "--cells", "1"]
    run.main(arguments)
    results.write_text(results.read_text() + '{"kind": "cut o')
    run.main(arguments)
    records = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    assert [record["kind"] for record in records] == ["contrast", "faint"]
    for record in records:
        assert set(record["scores"]["gradcam"]) == {*script("scores").SCORES, "inside"}
        assert {control.name for control in run.CONTROLS} < set(record["scores"])


def test_a_mean_over_balanced_networks_is_their_plain_mean_and_its_error_that_of_architectures(
    script: Any,
) -> None:
    pytest.importorskip("statsmodels", reason="mixed models are those of statsmodels, an extra")
    import pandas
    from scipy import stats

    generator = np.random.default_rng(0)
    levels = np.array([0.1, 0.4, 0.5, 0.9])[:, None] + 0.01 * generator.normal(size=(4, 3))
    rows = [
        (kind, architecture, 32, 0, value) for (architecture, kind), value in np.ndenumerate(levels)
    ]
    table = pandas.DataFrame(rows, columns=["kind", "architecture", "side", "seed", "value"])
    estimate = script("mixed").estimate(table)
    assert estimate.mean == pytest.approx(levels.mean(), abs=1e-6)
    reach = stats.t.ppf(0.975, 3) * levels.mean(1).std(ddof=1) / 2
    assert estimate.high - estimate.mean == pytest.approx(reach, rel=0.02)


@pytest.mark.long  # it fits a model for each figure
def test_the_page_and_the_table_with_filters_say_what_is_stored(script: Any) -> None:
    pytest.importorskip("statsmodels", reason="mixed models are those of statsmodels, an extra")
    assert script("page").main(["--check"]) == 0
