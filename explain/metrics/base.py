"""What a metric is, what it gets to see, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from explain._utils.errors import KnownOptions, MethodError, MetricError, image_name, shown, warn
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
"""The same, or by how much the class's logit is above the best other one."""


@dataclass(frozen=True, eq=False)
class MetricInput:
    """What a metric gets to see of N photos and one method's maps of them.

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
            self._ranks[sign, seed] = ranks_of(self.maps.of_places(sign), seed)
        return self._ranks[sign, seed]

    def original(self, score: Score) -> torch.Tensor:
        """The score of the unperturbed photos ``(N,)``."""
        return self.target_score if score == "logit" else need_probability(self.probability)

    def lost(self, score: Score, scores: torch.Tensor) -> torch.Tensor:
        """What the perturbed photos lose of the original score ``(N, K)``; zero within rounding errors.

        Rounding errors depend on the other photos of a batch, and must not decide a figure.
        """
        original = self.original(score)[:, None]
        lost = original - scores
        return torch.where(lost.abs() <= rounding(original, scores), 0, lost)


def rounding(*scores: torch.Tensor) -> torch.Tensor:
    """Up to which difference the scores ``(N, K)`` of photos may well be the same: ``(N, 1)``."""
    largest = torch.stack([each.abs().amax(1) for each in scores]).amax(0)
    return ROUNDING * torch.finfo(scores[0].dtype).eps * largest[:, None]


ROUNDING = 128
"""How many of the last bits of a score may be rounding errors."""


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
    """A way to judge a map, as a frozen dataclass: its fields are its options, checked against their types.

    A metric is a subclass of `MapMetric`, which sees the map and nothing else, of `ScoreMetric`, which scores perturbed
    photos, or of `ReattributionMetric`, which runs the method again. Class attributes say what it is:

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
            "target must be one of several classes for a metric that reads its probability, got a target without one; "
            f"{remedy}"
        )
    return probability


def undefined(metric: str, of: str, value: torch.Tensor, wrong: torch.Tensor, why: str) -> torch.Tensor:
    """Put NaN where a figure is not defined, and say so in a warning."""
    if wrong.any():
        images = ", ".join(image_name(i) for i in wrong.nonzero().flatten().tolist())
        warn(f"{metric} of {of} is not defined for image {images}: {why}; it is NaN there")
    return torch.where(wrong, torch.nan, value)
