"""The leaderboard: its images have the evidence that they say, its scores are what plain counting
gives, and its page says what was measured."""

from __future__ import annotations

import json
import random
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


@pytest.mark.parametrize("side", [32, 64])
def test_the_class_of_an_image_follows_from_its_squares_by_the_rule_of_its_kind(
    script: Any, side: int
) -> None:
    marks = script("marks")
    generator = torch.Generator().manual_seed(0)
    patterns = {name: marks.bright(name, side) for name in marks.PATTERNS}
    for kind in ("contrast", "and", "xor"):
        for label in (0, 1, 0, 1, 0, 1):
            scene = marks.scene(kind, side, "test", label, generator, 1)
            names = []
            for square in scene.squares:
                names += [name for name, content in patterns.items() if content.equal(square.shown)]
            first = "corner" in names
            second = "cross" in names
            rules = {"contrast": first, "and": first and second, "xor": first != second}
            assert rules[kind] == bool(label), (kind, names)
    for kind in marks.KINDS:
        scene = next(marks.explained(kind, side, 0))
        assert len(scene.squares) == marks.PARTS
        assert scene.parts.sum(0).max() == 1  # squares do not overlap
        x = scene.image()
        everything = scene.without_each_set()
        assert everything[-1].equal(x)
        changed = (everything[0] != x).any(0)
        assert not (changed & ~scene.parts.any(0)).any()
        if kind == "grey":
            assert (x[:, scene.mask] == 0).all()
        if kind == "absence":
            assert x[:, scene.mask].equal(scene.photo[:, scene.mask])


def test_scores_are_what_plain_counting_gives(script: Any) -> None:
    scores = script("scores")
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(7, 7, dtype=torch.bool)
    mask[1:4, 2:5] = True
    for _ in range(5):
        values = torch.randint(0, 4, (7, 7), generator=generator).double()  # with many ties
        pairs = [
            (float(one > other) + float(one == other) * 0.5)
            for one in values[mask]
            for other in values[~mask]
        ]
        assert scores.pixel_auc(values, mask) == pytest.approx(sum(pairs) / len(pairs))
        hits = []
        for _ in range(4000):
            order = list(range(49))
            random.shuffle(order)
            order.sort(key=lambda place: -float(values.flatten()[place]))
            hits.append(float(mask.flatten()[order[:9]].float().mean()))
        assert scores.top_share(values, mask) == pytest.approx(np.mean(hits), abs=0.01)
        values = torch.rand(7, 7, dtype=torch.float64, generator=generator)
        best = max(
            ((top, left) for top in range(5) for left in range(5)),
            key=lambda place: float(values[place[0] : place[0] + 3, place[1] : place[1] + 3].sum()),
        )
        shared = mask[best[0] : best[0] + 3, best[1] : best[1] + 3].sum()
        assert scores.best_squares(values, mask, 1) == pytest.approx(float(shared / (18 - shared)))
    worth = torch.rand(16, dtype=torch.float64, generator=generator)
    added = np.zeros(4)
    orders = list(permutations(range(4)))
    for order in orders:
        kept = 0
        for part in order:
            added[part] += float(worth[kept | 1 << part] - worth[kept])
            kept |= 1 << part
    assert scores.shapley_values(worth).numpy() == pytest.approx(added / len(orders))


def test_two_marks_are_found_by_the_two_best_squares_that_do_not_overlap(script: Any) -> None:
    scores = script("scores")
    mask = torch.zeros(12, 12, dtype=torch.bool)
    mask[1:4, 1:4] = True
    mask[7:10, 6:9] = True
    # one mark is twice as bright, so that squares beside it have larger sums than the other mark
    values = mask.double()
    values[1:4, 1:4] *= 2
    assert scores.best_squares(values, mask, 2) == 1
    assert scores.best_squares(mask.double().roll(6, 1), mask, 2) == 0
    assert scores.best_squares(torch.ones(12, 12), mask, 2) == 0


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

    mixed = script("mixed")
    generator = np.random.default_rng(0)
    rows = []
    for architecture, level in zip("abcd", (0.1, 0.4, 0.5, 0.9), strict=True):
        for kind in ("one", "two", "three"):
            value = level + 0.01 * generator.normal()
            rows.append((kind, architecture, 32, 0, value))
    table = pandas.DataFrame(rows, columns=["kind", "architecture", "side", "seed", "value"])
    found = mixed.estimate(table)
    means = table.groupby("architecture")["value"].mean()
    assert found.mean == pytest.approx(means.mean(), abs=1e-6)
    reach = stats.t.ppf(0.975, 3) * means.std(ddof=1) / 2
    assert found.high - found.mean == pytest.approx(reach, rel=0.02)


@pytest.mark.long  # it fits a model for each figure
def test_the_page_and_the_table_with_filters_say_what_is_stored(script: Any) -> None:
    pytest.importorskip("statsmodels", reason="mixed models are those of statsmodels, an extra")
    assert script("page").main(["--check"]) == 0
