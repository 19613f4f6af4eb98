"""What a metric is, its input and its result; and metrics by name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from explain._utils.errors import KnownOptions, MethodError, MetricError, image_name, keywords, shown, warn
from explain._utils.spelling import did_you_mean
from explain.baselines.registry import get_baseline
from explain.methods.options import check_options
from explain.metrics.maps import Maps, Sign
from explain.metrics.rankings import ranks_of
from explain.targets.outputs import Outputs

Better = Literal["more", "less"]
"""Whether more or less of a figure is better."""

Score = Literal["logit", "probability"]
"""Which score of a perturbed photo counts: the target's own (of a class, its logit), or the class's probability."""

ScoreKind = Literal["logit", "probability", "margin"]
"""The same, or the margin of the class's logit over the best other one."""

ROUNDING = 128
"""How many of the last bits of a score may be rounding errors."""

ZERO, CONSTANT = "its map is zero everywhere", "its map is constant"


@dataclass(frozen=True, eq=False)
class MetricInput:
    """What a metric sees: N photos, and one method's maps of them.

    ``images`` ``(N, C, H, W)`` are the model's inputs, ``target_score`` ``(N,)`` is the score that was explained and
    ``probability`` ``(N,)`` that of the class, where the target is one of ``classes`` ``(N,)``; ``outputs`` says how
    the model's outputs become probabilities. Where the object is: ``boxes`` are lists of boxes ``(k, 4)``, one for each
    photo, and ``regions`` truth values ``(N, H, W)``.
    """

    maps: Maps
    images: torch.Tensor
    target_score: torch.Tensor
    probability: torch.Tensor | None = None
    classes: torch.Tensor | None = None
    boxes: Sequence[torch.Tensor] | None = None
    regions: torch.Tensor | None = None
    outputs: Outputs = field(default_factory=Outputs)
    _ranks: dict[tuple[Sign, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        return int(self.images.shape[-2]), int(self.images.shape[-1])

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]

    def ranks(self, sign: Sign, seed: int) -> torch.Tensor:
        """The rank of each pixel ``(N, H, W)``, 0 for the largest value; equal values are shuffled."""
        if (sign, seed) not in self._ranks:
            self._ranks[sign, seed] = ranks_of(self.maps.per_pixel(sign), seed)
        return self._ranks[sign, seed]

    def original(self, score: Score) -> torch.Tensor:
        """The score of the unperturbed photos ``(N,)``."""
        return self.target_score if score == "logit" else need_probability(self.probability)

    def loss(self, score: Score, scores: torch.Tensor) -> torch.Tensor:
        """The original score less those of the perturbed photos ``(N, K)``; zero within rounding errors.

        Rounding errors depend on the other photos of a batch, and must not decide a figure.
        """
        original = self.original(score)[:, None]
        loss = original - scores
        largest = torch.maximum(original.abs(), scores.abs().amax(1, keepdim=True))
        return torch.where(loss.abs() <= ROUNDING * torch.finfo(scores.dtype).eps * largest, 0, loss)

    def undefined(self, metric: Metric, value: torch.Tensor, wrong: torch.Tensor, why: str) -> torch.Tensor:
        """Put NaN where a figure is not defined, and warn of it."""
        if wrong.any():
            images = ", ".join(image_name(i) for i in wrong.nonzero().flatten().tolist())
            warn(f"{metric.name} of {self.maps.name} is not defined for image {images}: {why}; it is NaN there")
        return torch.where(wrong, torch.nan, value)


@dataclass(frozen=True, eq=False)
class MetricResult:
    """One figure for each image ``(N,)``; its ``curve`` ``(N, K)`` over the shares ``at`` ``(K,)``, where it has one;
    and other ``parts`` of it, each ``(N,)`` or ``(N, ...)``."""

    value: torch.Tensor
    curve: torch.Tensor | None = None
    at: torch.Tensor | None = None
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric(KnownOptions):
    """A measure of how good a map is, as a frozen dataclass: its fields are its options, checked against their types.

    A metric is a subclass of `MapMetric`, which sees the map and nothing else, of `ScoreMetric`, which scores perturbed
    photos, or of `ReattributionMetric`, which runs the method again. Class attributes describe it:

    - ``name``, ``about`` and ``paper``, as in a list of metrics;
    - ``units`` of its figure, and whether more or less of it is ``better``;
    - ``needs_object``: whether it needs boxes or masks of the object;
    - ``minimums``: by name of an option, the smallest number that it may be;
    - ``percentages``: the options that are shares in per cent, above 0 and below 100.
    """

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    units: ClassVar[str] = "0 to 1"
    better: ClassVar[Better] = "more"
    needs_object: ClassVar[bool] = False
    minimums: ClassVar[Mapping[str, float]] = {}
    percentages: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if hasattr(self, "baseline"):
            object.__setattr__(self, "baseline", get_baseline(self.baseline))
        try:
            check_options(self, **self.minimums)
        except MethodError as error:
            raise MetricError(str(error)) from None
        for option in self.percentages:
            value = getattr(self, option)
            shares = value if isinstance(value, tuple) else [value]
            if not shares or not all(0 < share < 100 for share in shares):
                raise MetricError(
                    f"{option} of {self.name} must be per cent above 0 and below 100, got {shown(value)}; use 50"
                )


@dataclass(frozen=True)
class MapMetric(Metric):
    """A metric of the map alone, and of where the object is."""

    def __call__(self, data: MetricInput) -> MetricResult:
        """Return a figure for each image."""
        raise NotImplementedError


def need_probability(probability: torch.Tensor | None, remedy: str = "choose score='logit'") -> torch.Tensor:
    """The probability of the class; refused where there is none."""
    if probability is None:
        raise MetricError(
            f"target must be one of several classes for a metric of its probability, got a target without one; {remedy}"
        )
    return probability


MetricLike: TypeAlias = "str | Metric"

_known: dict[str, Metric] = {}


def register(metric: type[Metric] | None = None, /, **options: Any) -> Any:
    """Make a metric known by its name: ``@register`` with its default options, ``@register(order="lerf")`` with others.

    Raises:
        MetricError: the name is taken by another metric, or cannot be one.
    """

    def add(kind: type[Metric]) -> type[Metric]:
        made = kind(**options)
        if not re.fullmatch(r"[a-z0-9+._-]+", made.name):
            raise MetricError(
                f"name of a metric must be of lower-case letters, digits and + . _ -, got {made.name!r}; change it"
            )
        if _known.setdefault(made.name, made) != made:
            raise MetricError(
                f"metric {made.name!r} is already registered by {type(_known[made.name]).__qualname__}; choose another "
                "name"
            )
        return kind

    return add if metric is None else add(metric)


@keywords()
def list_metrics(pattern: str = "*") -> list[str]:
    """Return the names of the metrics that match a glob pattern, in alphabetical order.

    >>> list_metrics("delet*")
    ['deletion']
    """
    if not isinstance(pattern, str):
        raise MetricError(f"pattern must be a text such as 'delet*', got {shown(pattern)}")
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_metric(metric: MetricLike) -> Metric:
    """Return the metric for a name; a metric is returned as it is.

    Raises:
        MetricError: the name is unknown, or the object is no metric.

    >>> get_metric("insertion").better
    'more'
    """
    if isinstance(metric, str):
        name = metric.strip().lower()
        if name not in _known:
            raise MetricError(f"metric {shown(metric)} is unknown; {did_you_mean(name, list_metrics())}")
        return _known[name]
    if not isinstance(metric, Metric):
        remedy = f"use {metric.__name__}()" if isinstance(metric, type) else "see explain.list_metrics()"
        raise MetricError(f"metric must be a name or a metric, got {shown(metric)}; {remedy}")
    return metric


def by_name(metrics: MetricLike | Iterable[MetricLike]) -> dict[str, Metric]:
    """Return the metrics by their names, in order.

    Raises:
        MetricError: there is none, or two different ones have one name.
    """
    given = [metrics] if isinstance(metrics, str) or not isinstance(metrics, Iterable) else metrics
    chosen: dict[str, Metric] = {}
    for metric in map(get_metric, given):
        if chosen.setdefault(metric.name, metric) != metric:
            raise MetricError(
                f"metrics must have different names, got two of {metric.name!r}; evaluate them in two calls"
            )
    if not chosen:
        raise MetricError("metrics must name at least one metric, got none; see explain.list_metrics()")
    return chosen
