"""Metrics: how good is a map? Frozen dataclasses, as methods are.

    maps         the maps that are judged: an attribution, or any array
    orders       rankings without favour to any place, steps, areas, correlations
    base         what a metric is, what it gets to see, and what it finds
    rows         altered photos as values, each distinct one run once
    readings     what is read of an altered photo
    truth        boxes and masks
    curves       deletion, insertion, pixel flipping, ROAD, sufficiency, comprehensiveness
    registry     metrics by name
    table        a figure for each method, metric and image; prints itself
    evaluation   `evaluate`: model, photos, methods and metrics in, a table out

A metric of a map is a class with a name and a ``__call__``; one that looks at how the model answers to altered photos
says in ``asks`` which, and is otherwise a function of their scores.
"""

from explain.metrics.base import Better, Case, Judged, Metric, OfMap, Reading
from explain.metrics.curves import ROAD, Comprehensiveness, Deletion, Insertion, PixelFlipping, Sufficiency
from explain.metrics.evaluation import evaluate
from explain.metrics.maps import Maps, Sign
from explain.metrics.registry import MetricLike, get_metric, list_metrics, register
from explain.metrics.rows import Ask, OfScores
from explain.metrics.table import Table

_METRICS: list[Metric] = [
    Deletion(), Insertion(), PixelFlipping(), PixelFlipping("lerf"), ROAD(), Comprehensiveness(), Sufficiency(),
]  # fmt: skip
for _metric in _METRICS:
    register(_metric)

__all__ = [
    "ROAD",
    "Ask",
    "Better",
    "Case",
    "Comprehensiveness",
    "Deletion",
    "Insertion",
    "Judged",
    "Maps",
    "Metric",
    "MetricLike",
    "OfMap",
    "OfScores",
    "PixelFlipping",
    "Reading",
    "Sign",
    "Sufficiency",
    "Table",
    "evaluate",
    "get_metric",
    "list_metrics",
    "register",
]
