"""What a metric is, what it gets to see, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from explain._utils.errors import MethodError, MetricError, image_name, warn
from explain.baselines import get_baseline
from explain.methods.options import check_options
from explain.metrics.maps import Maps, Sign
from explain.metrics.rankings import ranks_of
from explain.targets import Outputs

Better = Literal["more", "less"]
"""Whether more or less of a figure is better."""

Reading = Literal["probability", "score"]
"""What is read of an altered photo: the probability of the class that is explained, or the target's own score (of a
class, its logit)."""

Read = Literal["probability", "score", "margin"]
"""What a metric may ask to be read: also by how much that class's logit is above the best other one."""


@dataclass(frozen=True, eq=False)
class MetricInput:
    """What a metric gets to see of N photos and one method's maps of them.

    ``images`` ``(N, C, H, W)`` are the model's inputs, ``score`` ``(N,)`` what was explained and ``probability``
    ``(N,)`` that of the class, where the target is one of ``classes`` ``(N,)``; ``outputs`` says how the model's
    outputs become probabilities. ``boxes`` are lists of boxes ``(k, 4)``, one for each photo, and ``regions``
    ``(N, H, W)`` truth values: where the object is.
    """

    maps: Maps
    images: torch.Tensor
    score: torch.Tensor
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

    def ranks(self, sign: Sign, seed: int) -> torch.Tensor:
        """The rank of each pixel ``(N, H, W)``, 0 for the largest value; equal values are shuffled."""
        if (sign, seed) not in self._ranks:
            self._ranks[sign, seed] = ranks_of(self.maps.of_places(sign), seed)
        return self._ranks[sign, seed]

    def original(self, reading: Reading) -> torch.Tensor:
        """What is read of the photos as they are."""
        return self.score if reading == "score" else need_probability(self.probability)

    def lost(self, reading: Reading, scores: torch.Tensor) -> torch.Tensor:
        """What altered photos ``(N, K)`` lose of what is read of the photos as they are; rounding errors are nothing.

        The same photo has other rounding errors beside others, which must not decide a figure.
        """
        original = self.original(reading)[:, None]
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


@runtime_checkable
class Metric(Protocol):
    """A way to judge a map, as a frozen value.

    ``units`` says what its figure is measured in and ``better`` whether more or less of it is better.
    """

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def paper(self) -> str: ...

    @property
    def units(self) -> str: ...

    @property
    def better(self) -> Better: ...


@runtime_checkable
class MapMetric(Metric, Protocol):
    """A metric that needs nothing but the map, and where the object is."""

    def __call__(self, case: MetricInput) -> MetricResult: ...


@runtime_checkable
class ObjectMetric(Protocol):
    """A metric that has to be told where the object is."""

    of_object: ClassVar[bool]


def need_probability(probability: torch.Tensor | None, remedy: str = "choose reading='score'") -> torch.Tensor:
    """The probability of the class; refused where there is none."""
    if probability is None:
        raise MetricError(
            "target must be one of several classes for a metric that reads its probability, got a target without one; "
            f"{remedy}"
        )
    return probability


def check(metric: Any, **least: float) -> None:
    """Refuse options that are not of their field's type; for numbers, ``least`` is the smallest that they may be.

    Raises:
        MetricError: an option does not fit.
    """
    try:
        check_options(metric, **least)
    except MethodError as error:
        raise MetricError(str(error)) from None
    if hasattr(metric, "baseline"):
        object.__setattr__(metric, "baseline", get_baseline(metric.baseline))


def undefined(metric: str, of: str, value: torch.Tensor, wrong: torch.Tensor, why: str) -> torch.Tensor:
    """Put NaN where a figure is not defined, and say so in a warning."""
    if wrong.any():
        images = ", ".join(image_name(i) for i in wrong.nonzero().flatten().tolist())
        warn(f"{metric} of {of} is not defined for image {images}: {why}; it is NaN there")
    return torch.where(wrong, torch.nan, value)
