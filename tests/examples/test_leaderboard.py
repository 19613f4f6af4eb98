"""The leaderboard: its statistics, and that its page says what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.hooks.test_tour import example, scripts_of


@pytest.fixture
def script() -> Iterator[Any]:
    with scripts_of("", "benchmarks", "benchmarks/parts", "leaderboard"):
        yield lambda name: example(f"leaderboard/{name}")


def test_means_leave_out_what_was_not_measured_in_every_sample(script: Any) -> None:
    standings = script("standings")
    generator = np.random.default_rng(3)
    values = generator.random((6, 3))
    values[generator.random((6, 3)) < 0.3] = np.nan
    values[:, 2] = np.nan
    weights = standings.draws(6, 40, seed=1)
    assert (weights.sum(1) == 6).all()
    means = standings.means(values, weights)
    for mean, weight in zip(means, weights.astype(int), strict=True):
        sample = np.ma.masked_invalid(np.repeat(values, weight, axis=0))
        assert mean == pytest.approx(sample.mean(0).filled(np.nan), nan_ok=True)


def rows(photos: int = 20, costly: int = 5) -> Iterator[tuple[Any, ...]]:
    """Five methods that are right in the order of their names, on photos of which some are easier
    for all.

    The fourth is measured on the easiest photos only, and the last has the map of the first.
    """
    for photo in range(photos):
        for number, method in enumerate(("attnlrp", "gradcam", "lrp", "noise", "saliency")):
            if method == "noise" and photo < photos - costly:
                continue
            truth = photo - number % 4 / 10
            yield "planted", "plain", method, "truth", f"p{photo:02}", photo % 3, truth
            yield "planted", "plain", method, "passes", f"p{photo:02}", photo % 3, 100.0
        yield "planted", "plain", "attnlrp", "same map as saliency", f"p{photo:02}", photo % 3, 1.0


def test_methods_are_compared_on_the_same_photos_and_copies_count_once(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = script("cells").cells_of(rows())
    assert cell.methods == ("attnlrp", "gradcam", "lrp", "noise", "saliency")
    assert [cell.methods[place] for place in cell.firsts] == [*cell.methods[:4]]
    assert cell.counts("truth").tolist() == [20, 20, 20, 5, 20]
    truth = cell.sampled("truth", 1)
    # although the photos of the last are the easiest
    assert (truth[0, :3] - truth[0, 3]).tolist() == pytest.approx([0.3, 0.2, 0.1])
    shares = script("cells").beats(truth, cell.groups)
    assert shares[0].tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0, 1])
    page = script("page")
    monkeypatch.setattr(page, "board", lambda: {("planted", "plain"): cell})
    order = [line.split("|")[1].strip() for line in page.of_truth().splitlines()[2:]]
    assert order == ["`attnlrp`", "`saliency`", "`gradcam`", "`lrp`", "*noise*"]


@pytest.mark.long  # it reads all that is stored
def test_the_page_and_the_table_with_filters_say_what_is_stored(script: Any) -> None:
    pytest.importorskip("pyarrow", reason="the stored table is read with pyarrow, an extra")
    assert script("page").main(["--check"]) == 0
