"""Metrics: how good is a map? Frozen dataclasses, as methods are.

    base              the base class `Metric`, its input and result; `@register`, and metrics by name
    evaluation        `evaluate`: model, photos, methods and metrics in, a table out
    table             a figure for each method, metric and image; prints itself
    maps              the maps that are evaluated: an attribution, or any array
    perturbed_inputs  `ScoreMetric`: metrics that score perturbed photos, each distinct photo run once
    variants          `ReattributionMetric`: metrics that run the method again, on each distinct variant once
    randomised        copies of a model with reinitialised layers
    faithfulness      curves: deletion, insertion, pixel flipping, ROAD, sufficiency, comprehensiveness; average drop
    segments          curves over squares and superpixels (SLIC): AOPC, selectivity, IROF
    sums              do values add up? faithfulness correlation, sensitivity-n, monotonicity, infidelity
    localisation      pointing games, relevance mass and rank, AUC, IoU, MaxBoxAccV2
    complexity        Gini index, entropy, effective complexity
    robustness        sensitivity, Lipschitz estimate, relative stability, continuity
    randomisation     parameter randomisation, random logit
    axioms            completeness, input invariance; ADCC
    ground_truth, rankings, similarity    boxes and masks; ranks of pixels and regions; similarity of two maps

A metric is one frozen dataclass under ``@register``, a subclass of `MapMetric`, `ScoreMetric` or `ReattributionMetric`.
"""

from typing import TYPE_CHECKING

from explain._utils.errors import getattr_of
from explain.metrics.axioms import ADCC, Completeness, InputInvariance
from explain.metrics.base import MapMetric, Metric, MetricInput, MetricResult, get_metric, list_metrics, register
from explain.metrics.complexity import Complexity, EffectiveComplexity, Sparseness
from explain.metrics.evaluation import evaluate
from explain.metrics.faithfulness import (
    ROAD,
    AverageDrop,
    Comprehensiveness,
    Deletion,
    IncreaseInConfidence,
    Insertion,
    PixelFlipping,
    Sufficiency,
)  # fmt: skip
from explain.metrics.localisation import (
    AUC,
    AttributionLocalisation,
    EnergyPointingGame,
    IoU,
    MaxBoxAccV2,
    PointingGame,
    RelevanceMass,
    RelevanceRank,
    TopKIntersection,
)  # fmt: skip
from explain.metrics.perturbed_inputs import ScoreMetric
from explain.metrics.randomisation import MPRT, EfficientMPRT, RandomLogit
from explain.metrics.robustness import Continuity, LocalLipschitz, RelativeStability, Sensitivity
from explain.metrics.segments import IROF, RegionPerturbation, Selectivity
from explain.metrics.sums import (
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Infidelity,
    Monotonicity,
    MonotonicityCorrelation,
    NonSensitivity,
    SensitivityN,
)  # fmt: skip
from explain.metrics.variants import ReattributionMetric

__all__ = [
    "ADCC", "AUC", "IROF", "MPRT", "ROAD", "AttributionLocalisation", "AverageDrop", "Completeness", "Complexity",
    "Comprehensiveness", "Continuity", "Deletion", "EffectiveComplexity", "EfficientMPRT", "EnergyPointingGame",
    "FaithfulnessCorrelation", "FaithfulnessEstimate", "IncreaseInConfidence", "Infidelity", "InputInvariance",
    "Insertion", "IoU", "LocalLipschitz", "MapMetric", "MaxBoxAccV2", "Metric", "MetricInput", "MetricResult",
    "Monotonicity", "MonotonicityCorrelation", "NonSensitivity", "PixelFlipping", "PointingGame", "RandomLogit",
    "ReattributionMetric", "RegionPerturbation", "RelativeStability", "RelevanceMass", "RelevanceRank", "ScoreMetric",
    "Selectivity", "Sensitivity", "SensitivityN", "Sparseness", "Sufficiency", "TopKIntersection", "evaluate",
    "get_metric", "list_metrics", "register",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = getattr_of("metrics")
