"""Metrics: how good is a map? Frozen dataclasses, as methods are.

    maps         the maps that are judged: an attribution, or any array
    orders       rankings without favour to any place, steps, areas, correlations
    base         what a metric is, what it gets to see, and what it finds
    rows         altered photos as values, each distinct one run once
    readings     what is read of an altered photo
    blanks       photos that are covered all over, and keep their class
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
    similarity   how alike two maps are
    again        metrics that ask the method again, each distinct setting once
    robustness   sensitivity, Lipschitz estimate, relative stability, continuity
    randomised   copies of a model whose layers are initialised once more
    randomisation  parameter randomisation, random logit
    axioms       completeness, input invariance; ADCC
    registry     metrics by name
    table        a figure for each method, metric and image; prints itself
    evaluation   `evaluate`: model, photos, methods and metrics in, a table out

A metric of a map is a class with a name and a ``__call__``; one that looks at how the model answers to altered photos
says in ``asks`` which, and is otherwise a function of their scores; one that asks the method again says in ``settings``
of what: altered photos, another class, a randomised copy of the model.
"""

from __future__ import annotations

from explain.metrics.axioms import ADCC, Completeness, InputInvariance
from explain.metrics.base import Better, MapMetric, Metric, MetricInput, MetricResult, ObjectMetric, Reading
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
    "ObjectMetric",
    "PixelFlipping",
    "PointingGame",
    "RandomLogit",
    "Reading",
    "ReattributionMetric",
    "RegionPerturbation",
    "RelativeStability",
    "RelevanceMass",
    "RelevanceRank",
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

_METRICS: list[Metric] = [
    Deletion(), Insertion(), PixelFlipping(), PixelFlipping("lerf"), ROAD(), Comprehensiveness(), Sufficiency(),
    RegionPerturbation(), Selectivity(), IROF(),
    FaithfulnessCorrelation(), FaithfulnessEstimate(), SensitivityN(), Monotonicity(), MonotonicityCorrelation(),
    NonSensitivity(), Infidelity(), AverageDrop(), IncreaseInConfidence(),
    PointingGame(), EnergyPointingGame(), AttributionLocalisation(), RelevanceMass(), RelevanceRank(),
    TopKIntersection(), AUC(), IoU(), MaxBoxAccV2(),
    Sparseness(), Complexity(), EffectiveComplexity(),
    Sensitivity(), Sensitivity(of="mean"), LocalLipschitz(), RelativeStability(), RelativeStability(by="output"),
    Continuity(), MPRT(), MPRT(order="bottom"), MPRT(order="independent"), MPRT(samples=8), EfficientMPRT(),
    RandomLogit(), Completeness(), InputInvariance(), ADCC(),
]  # fmt: skip
for _metric in _METRICS:
    register(_metric)
