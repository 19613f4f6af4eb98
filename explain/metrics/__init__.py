"""Metrics: how good is a map? Frozen dataclasses, as methods are.

- ``base``: the base class `Metric`, its input and result; `@register`, and metrics by name;
  `ScoreMetric`: metrics that score perturbed photos, each distinct photo run once
- ``evaluation``: `evaluate`: model, photos, methods and metrics in, a table out
- ``maps``: the maps that are evaluated: an attribution, or any array; ranks, and similarity of two
  maps
- ``randomised``: copies of a model with reinitialised layers
- ``variants``: `ReattributionMetric`: metrics that run the method again, on each distinct variant
  once
- ``faithfulness``: curves: deletion, insertion, pixel flipping, ROAD, sufficiency,
  comprehensiveness, monotonicity; average drop; over squares and superpixels (SLIC): AOPC,
  selectivity, IROF
- ``contributions``: do values add up? faithfulness correlation, sensitivity-n, infidelity,
  completeness
- ``localisation``: pointing games, relevance mass and rank, AUC, IoU, MaxBoxAccV2; boxes and masks
- ``robustness``: sensitivity, Lipschitz estimate, relative stability, continuity
- ``randomisation``: parameter randomisation, random logit
- ``axioms``: Gini index, entropy, effective complexity; input invariance; ADCC
- ``covering``: does what the map marks matter more than as much elsewhere?
- ``intervals``: means of many photos with 95 % intervals
- ``supported``: what "check" stands for, and which methods many photos support
- ``checking``: `check_maps`: what four metrics say of the maps of one photo, in words

A metric is one class under ``@register``, which makes it a frozen dataclass: a subclass of
`MapMetric`, `ScoreMetric` or `ReattributionMetric`.
"""

from explain.metrics.axioms import (
    ADCC,
    Complexity,
    EffectiveComplexity,
    InputInvariance,
    Sparseness,
)
from explain.metrics.base import (
    MapMetric,
    Metric,
    MetricInput,
    MetricResult,
    ScoreMetric,
    get_metric,
    list_metrics,
    register,
)
from explain.metrics.checking import Check, CheckResult, MapCheck
from explain.metrics.contributions import (
    Completeness,
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Infidelity,
    MonotonicityCorrelation,
    NonSensitivity,
    SensitivityN,
)
from explain.metrics.covering import Covering
from explain.metrics.evaluation import EvaluationPlan, Table, evaluate, plan_evaluation
from explain.metrics.faithfulness import (
    IROF,
    ROAD,
    AverageDrop,
    Comprehensiveness,
    Deletion,
    IncreaseInConfidence,
    Insertion,
    Monotonicity,
    PixelFlipping,
    RegionPerturbation,
    Selectivity,
    Sufficiency,
)
from explain.metrics.intervals import MeanInterval
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
from explain.metrics.randomisation import MPRT, EfficientMPRT, RandomLogit
from explain.metrics.robustness import Continuity, LocalLipschitz, RelativeStability, Sensitivity
from explain.metrics.variants import ReattributionMetric

__all__ = [
    "ADCC",
    "AUC",
    "IROF",
    "MPRT",
    "ROAD",
    "AttributionLocalisation",
    "AverageDrop",
    "Check",
    "CheckResult",
    "Completeness",
    "Complexity",
    "Comprehensiveness",
    "Continuity",
    "Covering",
    "Deletion",
    "EffectiveComplexity",
    "EfficientMPRT",
    "EnergyPointingGame",
    "EvaluationPlan",
    "FaithfulnessCorrelation",
    "FaithfulnessEstimate",
    "IncreaseInConfidence",
    "Infidelity",
    "InputInvariance",
    "Insertion",
    "IoU",
    "LocalLipschitz",
    "MapCheck",
    "MapMetric",
    "MaxBoxAccV2",
    "MeanInterval",
    "Metric",
    "MetricInput",
    "MetricResult",
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
    "ScoreMetric",
    "Selectivity",
    "Sensitivity",
    "SensitivityN",
    "Sparseness",
    "Sufficiency",
    "Table",
    "TopKIntersection",
    "evaluate",
    "get_metric",
    "list_metrics",
    "plan_evaluation",
    "register",
]
