"""FunnyBirds' dimensions, computed from what a map gives to each part and what the network answers
without it.

All sets of parts were removed once, so that ``logits[s]`` are a network's scores of a scene that
keeps the parts of the set ``s``: bit ``i`` stands for part ``i``. A method enters with its
importances: the sums of its map on the parts and objects, and the sum of its positive values.

completeness    half of distractibility and half of the mean of three checks (controlled synthetic
                data, preservation, deletion), at the best threshold. Parts above this share of the
                map are called important: are they a set that tells the class, is the answer kept
                with them alone, and lost without them; and are irrelevant things left out
correctness     single deletion: the rank correlation of importances and score drops over the five
parts contrastivity   target sensitivity: parts shared with one class count more in its map than in
that of another class

Definitions: R. Hesse, S. Schaub-Meyer, S. Roth, FunnyBirds, ICCV 2023. Some things differ. A
threshold is a share of the map's positive values instead of their signed sum, and the best one is
sought in each bootstrap sample, too. Correlations are not rescaled, and a map that has none (all
parts equal) counts as 0 instead of being left out. Contrastivity is asked where joint removal
itself gives the expected order; so it gets 1 by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import factorial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scenes import ELEMENTS, OBJECTS, PARTS, sufficient

Array = NDArray[np.float64]
ALL = 2 ** len(PARTS) - 1
THRESHOLDS = np.linspace(0.01, 0.5, 50)
IRRELEVANT = 0.05  # of the score: what changes it by less is irrelevant


def bits(names: Sequence[str]) -> int:
    """The set of these parts, as a number.

    >>> bits(["tail", "feet"])
    5
    """
    return sum(1 << PARTS.index(name) for name in names)


def drops(scores: Sequence[float]) -> Array:
    """How much the score falls without each part: scores of all sets ``(32,)`` to ``(5,)``."""
    return np.array([scores[ALL] - scores[ALL ^ (1 << i)] for i in range(len(PARTS))])


def shapley(scores: Sequence[float]) -> Array:
    """The exact Shapley value of each part, from the scores of all sets of parts."""
    count = len(PARTS)
    found = np.zeros(count)
    for subset in range(2**count):
        size = subset.bit_count()
        for part in range(count):
            if not subset >> part & 1:
                weight = factorial(size) * factorial(count - size - 1) / factorial(count)
                found[part] += weight * (scores[subset | 1 << part] - scores[subset])
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's correlation, with equal values at their mean rank; 0 where one does not vary."""

    def ranked(values: Sequence[float]) -> Array:
        each = np.asarray(values, np.float64)
        return (each[:, None] > each).sum(1) + (each[:, None] == each).sum(1) / 2

    a, b = (each - each.mean() for each in (ranked(one), ranked(other)))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0


def irrelevant(scores: Sequence[float], objects: Sequence[float]) -> list[str]:
    """The parts and objects without which the score is higher, or lower by less than 5 %."""
    fall = [*drops(scores), *(scores[ALL] - np.asarray(objects))]
    limit = IRRELEVANT * abs(scores[ALL])
    return [name for name, each in zip(ELEMENTS, fall, strict=True) if each < limit]


def completeness(
    importances: Sequence[float], positive: float, scene: Mapping[str, Any]
) -> dict[str, list[float]]:
    """The four checks of a scene at each threshold. ``scene`` has the label, answers and scores of
    the network."""
    unimportant = set(irrelevant(scene["scores"], scene["objects"]))
    checks: dict[str, list[float]] = {
        "sufficient": [],
        "preserved": [],
        "deleted": [],
        "not distracted": [],
    }
    for threshold in THRESHOLDS:
        chosen = [
            n
            for n, v in zip(ELEMENTS, importances, strict=True)
            if v > threshold * positive and v > 0
        ]
        parts = [name for name in chosen if name not in OBJECTS]
        known = [len(set(each) & set(parts)) / len(each) for each in sufficient(scene["label"])]
        checks["sufficient"].append(max(known))
        checks["preserved"].append(float(scene["answers"][bits(parts)] == scene["answers"][ALL]))
        checks["deleted"].append(
            float(scene["answers"][ALL ^ bits(parts)] != scene["answers"][ALL])
        )
        wrong = len(unimportant & set(chosen)) / len(unimportant) if unimportant else float("nan")
        checks["not distracted"].append(1 - wrong)
    return checks


def sensitivity(first: Sequence[float], second: Sequence[float]) -> float:
    """Target sensitivity: ``first`` has the sums of the map of one class on the parts shared with
    it and with the other class, ``second`` those of the map of the other class."""
    return (float(first[0] > second[0]) + float(first[1] < second[1])) / 2


def joint(rival: Mapping[str, Any], parts: Sequence[str]) -> float:
    """How much the score of a class falls without several parts at once."""
    return float(rival["scores"][ALL] - rival["scores"][ALL ^ bits(parts)])


def by_intervention(scene: Mapping[str, Any]) -> list[list[float]]:
    """What the parts shared with either of two classes are worth to each, in truth: what
    `sensitivity` compares."""
    return [[joint(rival, each["parts"]) for each in scene["rivals"]] for rival in scene["rivals"]]


def expected(scene: Mapping[str, Any]) -> bool:
    """Whether the network itself tells the two classes apart by the parts that each shares: else
    nothing is asked."""
    return sensitivity(*by_intervention(scene)) == 1


# Over scenes


def draws(scenes: int, count: int = 1000) -> Array:
    """How often each scene is drawn in each bootstrap sample; the first row takes each once."""
    drawn = np.random.default_rng(0).multinomial(scenes, np.full(scenes, 1 / scenes), size=count)
    return np.vstack([np.ones((1, scenes)), drawn]).astype(np.float64)


def mean_of(values: Sequence[float]) -> dict[str, float]:
    """The mean over scenes and its 95 % interval; NaN is left out."""
    kept = np.array([v for v in values if v == v])
    if not len(kept):
        return {}
    weights = draws(len(kept))
    return interval(weights @ kept / weights.sum(1), len(kept))


def interval(sampled: Array, scenes: int) -> dict[str, float]:
    low, high = np.percentile(sampled[1:], [2.5, 97.5])
    return {"mean": float(sampled[0]), "low": float(low), "high": float(high), "scenes": scenes}


def complete(checks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Completeness over scenes, its threshold, and the four checks there."""
    weights = draws(len(checks))
    tables = {name: np.array([each[name] for each in checks], np.float64) for name in checks[0]}
    sampled = {}
    for name, table in tables.items():
        there = ~np.isnan(table)
        sampled[name] = (weights @ np.where(there, table, 0)) / np.maximum(
            weights @ there.astype(np.float64), 1
        )
    three = (sampled["sufficient"] + sampled["preserved"] + sampled["deleted"]) / 3
    whole = (three + sampled["not distracted"]) / 2
    best = int(whole[0].argmax())
    found: dict[str, Any] = interval(whole.max(1), len(checks))
    found |= {name: float(each[0, best]) for name, each in sampled.items()}
    return found | {"threshold": float(THRESHOLDS[best])}
