"""The stored values as arrays: a `Cell` for each network and kind of ground truth, and who is
better than whom in it.

Three things are done to the values before methods are compared. A method that was measured on some
of the photos is compared with the others on these: the median of those that were measured on all is
taken off each photo's values. Methods whose maps have the same order of pixels on nearly all photos
count as one. Maps that know nothing of the network (`run.BLIND`) are among the methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from standings import Array, draws, means

SAME = "same map as "
ALIKE = 0.95  # of the photos: methods that have the same map on these count as one
# of the photos: methods that were measured on these make up what others are compared with
MOST = 0.9
DRAWS = 400


@dataclass(frozen=True, eq=False)
class Cell:
    """What was measured of one network with one kind of ground truth: ``values`` ``(photos,
    methods, metrics)``.

    ``groups`` ``(methods,)`` has the place of the first method with the same map; ``passes`` are
    those of each method.
    """

    truth: str
    model: str
    photos: tuple[str, ...]
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    values: Array
    seeds: Array
    groups: Array
    passes: Mapping[str, float]

    @cached_property
    def weights(self) -> Array:
        """Bootstrap samples of the photos ``(samples, photos)``, the same for all metrics."""
        return draws(len(self.photos), DRAWS)

    @cached_property
    def firsts(self) -> Array:
        """The places of the first method of each distinct map."""
        return np.unique(self.groups)

    def raw(self, metric: str) -> Array:
        """The values of a metric ``(photos, methods)``; NaN where there are none."""
        if metric not in self.metrics:
            return np.full(self.values.shape[:2], np.nan)
        return self.values[:, :, self.metrics.index(metric)]

    def of(self, metric: str) -> Array:
        """The values of a metric ``(photos, methods)``, photos made comparable."""
        return comparable(self.raw(metric))

    def sampled(self, metric: str, sign: int) -> Array:
        """The mean of each method in each bootstrap sample ``(samples, methods)``, more being
        better."""
        found = sign * means(self.of(metric), self.weights)
        scale = np.nanmax(np.abs(found), initial=0.0)
        return np.round(found / scale, 9) * scale if scale > 0 else found  # equal means stay equal

    def steady(self, metric: str) -> Array:
        """The methods ``(methods,)`` that were measured on nearly all photos that the metric was
        measured on."""
        return steady(self.raw(metric))

    def counts(self, metric: str) -> Array:
        """On how many photos each method was measured ``(methods,)``."""
        return (~np.isnan(self.raw(metric))).sum(0)


def steady(values: Array) -> Array:
    """The methods ``(methods,)`` of which nearly as many photos were measured as of any."""
    counts = (~np.isnan(values)).sum(0)
    return counts >= MOST * max(counts.max(), 1)


def comparable(values: Array) -> Array:
    """Values ``(photos, methods)`` of which the photos' own part is taken out: the median of
    methods measured on all.

    >>> comparable(np.array([[1.0, 2.0], [3.0, np.nan]])).tolist()
    [[2.0, 3.0], [2.0, nan]]
    """
    own = np.ma.masked_invalid(values[:, steady(values)])
    part = np.ma.median(own, axis=1, keepdims=True).filled(np.nan)
    known = part[~np.isnan(part)]
    return values - part + (known.mean() if len(known) else np.nan)


def beats(figures: Array, groups: Array) -> Array:
    """Of the other distinct maps, the share that each method is better than ``(..., methods)``;
    equal ones count half.

    ``groups`` ``(methods,)`` has the place of the first method with the same map.

    >>> beats(np.array([3.0, 1.0, 2.0, np.nan]), np.array([0, 1, 2, 3])).tolist()
    [1.0, 0.0, 0.5, nan]
    """
    firsts = np.unique(groups)
    others = figures[..., None, firsts]
    own = figures[..., :, None]
    foreign = (groups[:, None] != firsts) & ~np.isnan(others)
    better = (((own > others) + 0.5 * (own == others)) * foreign).sum(-1)
    count = np.broadcast_to(foreign, (*figures.shape, len(firsts))).sum(-1)
    return np.where(np.isnan(figures) | (count < 1), np.nan, better / np.where(count < 1, 1, count))


def grouped(
    methods: Sequence[str],
    same: Mapping[tuple[str, str], int],
    together: Mapping[tuple[str, str], int],
) -> Any:
    """The place of the first method with the same map, for each method.

    >>> grouped(["a", "b", "c"], {("a", "c"): 9}, {("a", "c"): 9}).tolist()
    [0, 1, 0]
    """
    group = {name: name for name in methods}
    for pair, count in sorted(same.items()):
        if count >= ALIKE * together[pair]:
            one, other = sorted(group[name] for name in pair)
            group = {name: one if own == other else own for name, own in group.items()}
    return np.array([methods.index(group[name]) for name in methods])


def cells_of(rows: Iterable[tuple[Any, ...]]) -> list[Cell]:
    """All cells of a table's rows."""
    by_cell: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    for row in rows:
        by_cell.setdefault(row[:2], []).append(row[2:])
    return [_cell(truth, model, each) for (truth, model), each in sorted(by_cell.items())]


def _cell(truth: str, model: str, rows: Sequence[tuple[Any, ...]]) -> Cell:
    figures = [row for row in rows if row[1] != "passes" and not row[1].startswith(SAME)]
    names, kinds, photos = (sorted({row[i] for row in figures}) for i in (0, 1, 2))
    places = [{name: i for i, name in enumerate(each)} for each in (photos, names, kinds)]
    values = np.full([len(each) for each in places], np.nan)
    seeds = np.zeros(len(photos), np.int64)
    passes: dict[str, list[float]] = {}
    same: dict[tuple[str, str], int] = {}
    for method, metric, photo, seed, value in rows:
        if metric == "passes":
            passes.setdefault(method, []).append(value)
        elif metric.startswith(SAME):
            pair = (method, metric.removeprefix(SAME))
            same[pair] = same.get(pair, 0) + 1
        else:
            values[places[0][photo], places[1][method], places[2][metric]] = value
            seeds[places[0][photo]] = seed
    if truth == "parts":  # a map that says nothing has no order of parts, and is not right
        known = ~np.isnan(values).all(2)
        for metric in [place for name, place in places[2].items() if name.startswith("truth")]:
            values[:, :, metric][known & np.isnan(values[:, :, metric])] = 0
    there = dict(zip(names, (~np.isnan(values)).any(2).T, strict=True))
    together = {pair: int((there[pair[0]] & there[pair[1]]).sum()) for pair in same}
    costs = {name: float(np.median(each)) for name, each in passes.items()}
    return Cell(
        truth,
        model,
        tuple(photos),
        tuple(names),
        tuple(kinds),
        values,
        seeds,
        grouped(names, same, together),
        costs,
    )
