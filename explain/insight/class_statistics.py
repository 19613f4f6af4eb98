"""Where each class looks: its mean map, and how much of it lies on the object."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from explain.insight.maps import RunMaps, fields_of, json_value

SURE = 1.96  # standard errors within which the true mean lies in 95 of 100 cases
FILLED = 0.9
"""The share of a photo from which on an object fills it: all evidence is on it then, wherever a
class looks."""
LEAST = 5
"""Photos without which nothing is said of a class: their spread could not be estimated."""


@dataclass(frozen=True, eq=False)
class MeanWithError:
    """A mean over photos, and its standard error; NaN where no photo has a figure, or a single one
    for the error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: torch.Tensor) -> "MeanWithError":
        """The mean of those that are not NaN.

        >>> MeanWithError.of(torch.tensor([1.0, float("nan"), 3.0]))
        MeanWithError(value=2.0, error=1.0)
        """
        defined = values[~values.isnan()].double()
        count = len(defined)
        error = float(defined.std() / math.sqrt(count)) if count > 1 else math.nan
        return cls(float(defined.mean()) if count else math.nan, error)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": json_value(self.value), "error": json_value(self.error)}


@dataclass(frozen=True, eq=False, kw_only=True)
class MapStatistics:
    """What some maps of one class have in common.

    ``mean`` ``(16, 16)`` is their mean; each adds up to 1. ``on_object`` is the share of the
    evidence within the boxes, ``at_border`` that in the outer eighth (7/16 of an even map),
    ``entropy`` 1 for an even map, 0 for a single place.
    """

    target: str
    accuracy: float
    on_object: MeanWithError
    at_border: MeanWithError
    entropy: MeanWithError
    mean: torch.Tensor = field(repr=False)

    @classmethod
    def of(cls, maps: RunMaps, **figures: Any) -> Self:
        """The statistics of some maps, and what else is known of them."""
        return cls(
            target=maps.targets[0],
            accuracy=MeanWithError.of(maps.correct).value,
            on_object=MeanWithError.of(maps.on_object),
            at_border=MeanWithError.of(maps.at_border),
            entropy=MeanWithError.of(maps.entropy),
            mean=maps.values.mean(0),
            **figures,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**fields_of(self), "map": json_value(self.mean)}


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassStatistics(MapStatistics):
    """Where one class looks.

    ``spread`` ``(16, 16)`` is the standard deviation of its maps. ``object_size`` is the share of
    the photo that these cover, and ``excess`` how far the first is beyond the second: 0 is what an
    even map has, 1 has all on the object. Photos that the object fills (more than nine tenths) say
    nothing of that, and do not count for it. ``apart`` is how far the mean map lies from that of
    all other photos, beyond what chance alone would give: 0 where they are the same, 1 for two even
    maps of different halves of the photo. ``beyond_others`` ``(16, 16)`` is the difference of the
    two. ``striking`` is the figure that classes are ordered by, see `class_mean_maps`.
    """

    photos: int
    spread: torch.Tensor = field(repr=False)
    object_size: MeanWithError
    excess: MeanWithError
    apart: float
    striking: float
    beyond_others: torch.Tensor = field(repr=False)


def class_mean_maps(maps: RunMaps) -> list[ClassStatistics]:
    """Say where each class looks, the most striking first.

    Where boxes are known, a class is the more striking, the less of its evidence is on the object:
    classes are ordered by how far their excess (see `ClassStatistics`) lies below that of all
    photos, less 1.96 standard errors, so that a class of few photos does not come first by chance.
    Without boxes, they are ordered by how far their mean map is apart from that of the other
    photos.

    Args:
        maps: the maps of a run; classes of few photos are left out.
    """
    object_size = torch.where(maps.object_size <= FILLED, maps.object_size, math.nan)
    excess = (maps.on_object - object_size) / (1 - object_size)
    boxed = bool((~excess.isnan()).any())
    usual = MeanWithError.of(excess).value
    total = maps.values.double().sum(0)
    squares = (maps.values.double() ** 2).sum(0)
    statistics = []
    for rows in maps.of_target.values():
        if len(rows) < LEAST:
            continue
        of_class = maps[rows]
        beyond = MeanWithError.of(excess[rows])
        apart = _apart(of_class.values.double(), total, squares, len(maps))
        below = usual - (beyond.value + SURE * beyond.error) if boxed else apart
        mean_of_others = (total - of_class.values.double().sum(0)) / max(1, len(maps) - len(rows))
        statistics.append(
            ClassStatistics.of(
                of_class,
                photos=len(rows),
                spread=of_class.values.std(0),
                object_size=MeanWithError.of(of_class.object_size),
                excess=beyond,
                apart=apart,
                striking=-math.inf if math.isnan(below) else below,
                beyond_others=of_class.values.mean(0) - mean_of_others.float(),
            )
        )
    return sorted(statistics, key=lambda look: (-look.striking, -look.apart, look.target))


def _apart(values: torch.Tensor, total: torch.Tensor, squares: torch.Tensor, count: int) -> float:
    """How far the mean of some maps lies from that of all others, less what chance gives.

    The square of the distance of two means is on average the square of the true distance, and their
    variances.
    """
    rest_count = count - len(values)
    if rest_count < 2 or len(values) < 2:
        return 0.0
    mean = values.mean(0)
    rest = (total - values.sum(0)) / rest_count
    noise = values.var(0) / len(values)
    of_rest = ((squares - (values**2).sum(0)) / rest_count - rest**2) / (rest_count - 1)
    true = ((mean - rest) ** 2 - noise - of_rest.clamp(min=0)).sum().clamp(min=0)
    # The root of the places brings it to the scale of a sum over them: 1 for two even maps that
    # each fill another half of the photo, and more where maps fill less.
    return float((true * mean.numel()).sqrt() / 2)
