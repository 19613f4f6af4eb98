"""Metrics: how good is a map? Frozen dataclasses, as methods are.

    maps         the maps that are judged: an attribution, or any array
    orders       rankings without favour to any place, steps, areas, correlations
    base         what a metric is, what it gets to see, and what it finds
    rows         altered photos as values, each distinct one run once
    readings     what is read of an altered photo
    truth        boxes and masks
    curves       deletion, insertion, pixel flipping, ROAD, sufficiency, comprehensiveness
    superpixels  pieces of one colour and place
    regions      the same over squares and superpixels: AOPC, selectivity, IROF
    subsets      do values add up? correlations, sensitivity-n, monotonicity, non-sensitivity
    noise        infidelity
    drops        the photo seen through its heatmap: average drop, increase in confidence
    complexity   Gini index, entropy, effective complexity
    places       localisation on boxes and masks
    boxes        MaxBoxAccV2
    registry     metrics by name
    table        a figure for each method, metric and image; prints itself
    evaluation   `evaluate`: model, photos, methods and metrics in, a table out

A metric of a map is a class with a name and a ``__call__``; one that looks at how the model answers to altered photos
says in ``asks`` which, and is otherwise a function of their scores.
"""

from explain.metrics.base import Better, Case, Judged, Metric, OfMap, Reading
from explain.metrics.boxes import MaxBoxAccV2
from explain.metrics.complexity import Complexity, EffectiveComplexity, Sparseness
from explain.metrics.curves import ROAD, Comprehensiveness, Deletion, Insertion, PixelFlipping, Sufficiency
from explain.metrics.drops import AverageDrop, IncreaseInConfidence
from explain.metrics.evaluation import evaluate
from explain.metrics.maps import Maps, Sign
from explain.metrics.noise import Infidelity
from explain.metrics.places import (
    AUC,
    AttributionLocalisation,
    EnergyPointingGame,
    IoU,
    PointingGame,
    RelevanceMass,
    RelevanceRank,
    TopKIntersection,
)
from explain.metrics.regions import IROF, RegionPerturbation, Selectivity
from explain.metrics.registry import MetricLike, get_metric, list_metrics, register
from explain.metrics.rows import Ask, OfScores
from explain.metrics.subsets import (
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Monotonicity,
    MonotonicityCorrelation,
    NonSensitivity,
    SensitivityN,
)
from explain.metrics.table import Table

_METRICS: list[Metric] = [
    Deletion(), Insertion(), PixelFlipping(), PixelFlipping("lerf"), ROAD(), Comprehensiveness(), Sufficiency(),
    RegionPerturbation(), Selectivity(), IROF(),
    FaithfulnessCorrelation(), FaithfulnessEstimate(), SensitivityN(), Monotonicity(), MonotonicityCorrelation(),
    NonSensitivity(), Infidelity(), AverageDrop(), IncreaseInConfidence(),
    PointingGame(), EnergyPointingGame(), AttributionLocalisation(), RelevanceMass(), RelevanceRank(),
    TopKIntersection(), AUC(), IoU(), MaxBoxAccV2(),
    Sparseness(), Complexity(), EffectiveComplexity(),
]  # fmt: skip
for _metric in _METRICS:
    register(_metric)

__all__ = [
    "AUC", "IROF", "ROAD", "Ask", "AttributionLocalisation", "AverageDrop", "Better", "Case", "Complexity",
    "Comprehensiveness", "Deletion", "EffectiveComplexity", "EnergyPointingGame", "FaithfulnessCorrelation",
    "FaithfulnessEstimate", "IncreaseInConfidence", "Infidelity", "Insertion", "IoU", "Judged", "Maps", "MaxBoxAccV2",
    "Metric", "MetricLike", "Monotonicity", "MonotonicityCorrelation", "NonSensitivity", "OfMap", "OfScores",
    "PixelFlipping", "PointingGame", "Reading", "RegionPerturbation", "RelevanceMass", "RelevanceRank", "Selectivity",
    "SensitivityN", "Sign", "Sparseness", "Sufficiency", "Table", "TopKIntersection", "evaluate", "get_metric",
    "list_metrics", "register",
]  # fmt: skip
