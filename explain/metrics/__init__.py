"""Metrics: how good is a map? Frozen dataclasses, as methods are.

    base              the base class `Metric`, what a metric gets to see, and its result
    registry          `@register`, and metrics by name
    evaluation        `evaluate`: model, photos, methods and metrics in, a table out
    table             a figure for each method, metric and image; prints itself
    maps              the maps that are judged: an attribution, or any array
    perturbed_inputs  `ScoreMetric`: metrics that score perturbed photos, each distinct photo run once
    variants          `ReattributionMetric`: metrics that run the method again, on each distinct variant once
    randomised        copies of a model with randomised layers
    faithfulness      curves: deletion, insertion, pixel flipping, ROAD, sufficiency, comprehensiveness; average drop
    segment_order     curves over squares and superpixels: AOPC, selectivity, IROF
    sums              do values add up? faithfulness correlation, sensitivity-n, monotonicity, infidelity
    localisation      pointing games, relevance mass and rank, AUC, IoU, MaxBoxAccV2
    complexity        Gini index, entropy, effective complexity
    robustness        sensitivity, Lipschitz estimate, relative stability, continuity
    randomisation     parameter randomisation, random logit
    axioms            completeness, input invariance; ADCC
    ground_truth, rankings, similarity, superpixels    boxes and masks; orders of pixels; how alike two maps are; SLIC

A metric is one frozen dataclass under ``@register``, a subclass of `MapMetric`, `ScoreMetric` or `ReattributionMetric`.
"""

from __future__ import annotations

from explain.metrics.axioms import ADCC, Completeness, InputInvariance
from explain.metrics.base import Better, MapMetric, Metric, MetricInput, MetricResult, Score
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
)
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
)
from explain.metrics.maps import Maps, Sign
from explain.metrics.perturbed_inputs import ScoreMetric, ScoreRequest
from explain.metrics.randomisation import MPRT, EfficientMPRT, RandomLogit
from explain.metrics.registry import MetricLike, get_metric, list_metrics, register
from explain.metrics.robustness import Continuity, LocalLipschitz, RelativeStability, Sensitivity
from explain.metrics.segment_order import IROF, RegionPerturbation, Selectivity
from explain.metrics.sums import (
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Infidelity,
    Monotonicity,
    MonotonicityCorrelation,
    NonSensitivity,
    SensitivityN,
)
from explain.metrics.table import Table
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult

__all__ = [
    "ADCC",
    "AUC",
    "IROF",
    "MPRT",
    "ROAD",
    "AttributionLocalisation",
    "AverageDrop",
    "Better",
    "Completeness",
    "Complexity",
    "Comprehensiveness",
    "Continuity",
    "Deletion",
    "EffectiveComplexity",
    "EfficientMPRT",
    "EnergyPointingGame",
    "FaithfulnessCorrelation",
    "FaithfulnessEstimate",
    "IncreaseInConfidence",
    "Infidelity",
    "InputInvariance",
    "Insertion",
    "IoU",
    "LocalLipschitz",
    "MapMetric",
    "Maps",
    "MaxBoxAccV2",
    "Metric",
    "MetricInput",
    "MetricLike",
    "MetricResult",
    "ModelContext",
    "Monotonicity",
    "MonotonicityCorrelation",
    "NonSensitivity",
    "PixelFlipping",
    "PointingGame",
    "RandomLogit",
    "ReattributionMetric",
    "RegionPerturbation",
    "RelativeStability",
    "RelevanceMass",
    "RelevanceRank",
    "Score",
    "ScoreMetric",
    "ScoreRequest",
    "Selectivity",
    "Sensitivity",
    "SensitivityN",
    "Sign",
    "Sparseness",
    "Sufficiency",
    "Table",
    "TopKIntersection",
    "Variant",
    "VariantResult",
    "evaluate",
    "get_metric",
    "list_metrics",
    "register",
]
