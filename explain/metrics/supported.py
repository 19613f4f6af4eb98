"""Which methods many photos support: do their maps depend on model and class, and mark what matters
more than what maps without a model mark?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from explain._utils.html import aligned
from explain.metrics.covering import Covering
from explain.metrics.intervals import MeanInterval
from explain.metrics.randomisation import MPRT, RandomLogit
from explain.metrics.robustness import Sensitivity

SIMILAR = 0.5**0.5
"""The correlation from which on two maps share half of their variation, or more."""

CHECK = (
    MPRT(steps=1, share=0.5, copies=2),
    RandomLogit(),
    Covering(placements=4),
    Covering(against="edges"),
    Covering(against="middle"),
    Sensitivity(samples=4),
)
"""The metrics that "check" stands for; of many photos, fewer places suffice than of one."""

DEPENDENCE = {"mprt-upper": "model", "randomlogit": "class"}
"""Metrics of how alike maps are for a random model and for other classes, whose figures must be
below `SIMILAR`, and what they then say that maps depend on."""

EFFECTS = ("covering", "covering-edges", "covering-middle")
"""Paired differences to maps without a model: the same map elsewhere, edges, and the middle."""

BEST = "best"
"""The difference to whichever of these three does best on a photo; it must be above 0."""

TOO_FEW = "photos"

FEWEST = 10
"""Photos below which nothing is supported: an interval of a few figures rests on their being
normal."""


@dataclass(frozen=True)
class Support:
    """What the figures of many photos say of a ``method``, with the ``intervals`` of the metrics in
    `CHECK`, by name."""

    method: str
    intervals: Mapping[str, MeanInterval]

    @property
    def failed(self) -> list[str]:
        """What does not support it, by name: the metrics in `DEPENDENCE` that find the map alike
        without the model or the class, `BEST`, and `TOO_FEW` photos."""
        failed = []
        # where there are too few figures, ends are NaN, which is neither below nor above: it fails
        for metric in DEPENDENCE:
            maps_differ = self.intervals[metric].high < SIMILAR
            if not maps_differ:
                failed.append(metric)
        # how much more the score falls without what the map marks than without what the best of
        # three maps that ask no model marks: at 0, the method finds no more than these
        finds_more = self.intervals[BEST].low > 0
        if not finds_more:
            failed.append(BEST)
        if any(interval.count < FEWEST for interval in self.intervals.values()):
            failed.append(TOO_FEW)
        return failed

    @property
    def supported(self) -> bool:
        """Whether all metrics support it."""
        return not self.failed


def supports(figures: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Support]:
    """What figures ``(N,)``, by method and metric, say of each method whose figures have all of
    `CHECK`."""
    names = [metric.name for metric in CHECK]
    support_of_methods = {}
    for method, columns in figures.items():
        if all(name in columns for name in names):
            intervals = {name: MeanInterval.of(columns[name]) for name in names}
            # what is best on a photo leaves the least difference to it
            least = torch.stack([columns[name] for name in EFFECTS]).amin(0)
            intervals[BEST] = MeanInterval.of(least)
            support_of_methods[method] = Support(method, intervals)
    return support_of_methods


def lines_of(support_of_methods: Mapping[str, Support]) -> Iterator[str]:
    """Yield a line for each method: whether it is supported, and by which figures, with ✓ or ✗."""
    rows = []
    for method, support in support_of_methods.items():
        cells = []
        # what each figure says of a method that it supports
        for name, words in {**DEPENDENCE, BEST: "more than the best map without a model"}.items():
            mark = "✗" if name in support.failed else "✓"
            cells.append(f"{mark} {words} {support.intervals[name]}")
        rows.append([method, "supported" if support.supported else "not supported", *cells])
    yield from aligned(rows)
