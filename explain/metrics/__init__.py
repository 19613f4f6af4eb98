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
- ``masked_scores``: scores of randomly masked photos, and the permutation test
- ``sanity``: a check is a metric with a threshold: does the map depend on model and class, is it
  faithful (a permutation test against the map in other places), is it stable under small changes of
  the photo?
- ``verdict``: `check_maps`: maps of one photo in, a verdict out; a summary of verdicts

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
from explain.metrics.contributions import (
    Completeness,
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Infidelity,
    MonotonicityCorrelation,
    NonSensitivity,
    SensitivityN,
)
from explain.metrics.evaluation import evaluate
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
from explain.metrics.sanity import Faithful
from explain.metrics.variants import ReattributionMetric
from explain.metrics.verdict import Verdict

__all__ = [
    "ADCC",
    "AUC",
    "IROF",
    "MPRT",
    "ROAD",
    "AttributionLocalisation",
    "AverageDrop",
    "Completeness",
    "Complexity",
    "Comprehensiveness",
    "Continuity",
    "Deletion",
    "EffectiveComplexity",
    "EfficientMPRT",
    "EnergyPointingGame",
    "Faithful",
    "FaithfulnessCorrelation",
    "FaithfulnessEstimate",
    "IncreaseInConfidence",
    "Infidelity",
    "InputInvariance",
    "Insertion",
    "IoU",
    "LocalLipschitz",
    "MapMetric",
    "MaxBoxAccV2",
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
    "TopKIntersection",
    "Verdict",
    "evaluate",
    "get_metric",
    "list_metrics",
    "register",
]
