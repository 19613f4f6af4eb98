"""Means with intervals, and how alike rankings are: the statistics behind docs/leaderboard.md.

Values are arrays ``(photos, methods)`` in which NaN stands for what was not measured. Intervals are
of the bootstrap over photos: they hold for other photos of the same kind, not for other models or
data sets.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LEVEL = 95


def draws(photos: int, count: int, seed: int = 0) -> Array:
    """How often each photo is drawn in each bootstrap sample ``(count, photos)``; the first row
    takes each once.

    >>> draws(3, 2).sum(1).tolist()
    [3.0, 3.0, 3.0]
    """
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(photos, np.full(photos, 1 / photos), size=count)
    return np.vstack([np.ones((1, photos)), drawn]).astype(np.float64)


def means(values: Array, weights: Array) -> Array:
    """The mean of each column in each sample ``(samples, columns)``; NaN where a sample has none of
    its photos.

    >>> means(np.array([[1.0, np.nan], [3.0, 5.0]]), np.array([[1.0, 1.0], [2.0, 0.0]])).tolist()
    [[2.0, 5.0], [1.0, nan]]
    """
    there = ~np.isnan(values)
    sums = weights @ np.where(there, values, 0.0)
    counts = weights @ there.astype(np.float64)
    return np.where(counts > 0, sums / np.where(counts > 0, counts, 1), np.nan)


def interval(samples: Array) -> tuple[float, float]:
    """The ends of the 95 % interval of a bootstrapped figure ``(samples,)``; NaN without any."""
    found = samples[~np.isnan(samples)]
    if not len(found):
        return float("nan"), float("nan")
    low, high = np.percentile(found, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def figures(values: Array, weights: Array) -> list[dict[str, float]]:
    """For each column its mean, the ends of its interval, and the number of photos that it was
    measured on."""
    sampled = means(values, weights)
    counts = (~np.isnan(values)).sum(0)
    found = []
    for column, photos in enumerate(counts.tolist()):
        low, high = interval(sampled[1:, column])
        found.append(
            {"mean": float(sampled[0, column]), "low": low, "high": high, "photos": photos}
        )
    return found


def ranks(values: Array) -> Array:
    """The ranks of values, 1 for the largest; equal ones share the mean of theirs, NaN has none.

    >>> ranks(np.array([0.5, 0.9, np.nan, 0.5])).tolist()
    [2.5, 1.0, nan, 2.5]
    """
    found = np.full(len(values), np.nan)
    there = ~np.isnan(values)
    known = values[there]
    higher = (known[None] > known[:, None]).sum(1)
    equal = (known[None] == known[:, None]).sum(1)
    found[there] = higher + (equal + 1) / 2
    return found


def rank_correlation(one: Array, other: Array) -> float:
    """Spearman's correlation over what both have; NaN where that is fewer than three, or does not
    vary.

    >>> rank_correlation(np.array([1.0, 2.0, 3.0, np.nan]), np.array([1.0, 4.0, 9.0, 0.0]))
    1.0
    """
    both = ~np.isnan(one) & ~np.isnan(other)
    if both.sum() < 3:
        return float("nan")
    a, b = (each - each.mean() for each in (ranks(one[both]), ranks(other[both])))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else float("nan")
