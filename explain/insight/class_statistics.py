"""Where each class looks: its mean map, and how much of it lies on the object."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from explain.insight.maps import RunMaps, fields_of, json_value
from explain.metrics.intervals import mean_and_error

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

    @property
    def is_known(self) -> bool:
        """Whether any photo has a figure."""
        return not math.isnan(self.value)

    @classmethod
    def of(cls, values: torch.Tensor) -> "MeanWithError":
        """Return the mean of those values ``(N,)`` that are not NaN, and its standard error."""
        mean, error, _ = mean_and_error(values)
        return cls(mean, error)

    def __format__(self, spec: str) -> str:
        """In a template of ``sections.toml``: the mean alone."""
        return format(self.value, spec)

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": json_value(self.value), "error": json_value(self.error)}


@dataclass(frozen=True, eq=False, kw_only=True)
class MapStatistics:
    """What some maps of one class have in common. ``finding`` says, of photos with several labels,
    that the class is "present" or "absent" in these; else it is empty."""

    target: str
    finding: str = ""
    accuracy: float
    # the share of the evidence within the boxes
    on_object: MeanWithError
    # the share in the outer eighth; 7/16 of an even map
    at_border: MeanWithError
    # 1 for an even map, 0 for a single position
    entropy: MeanWithError
    # ``(16, 16)``, adds up to 1
    mean: torch.Tensor = field(repr=False)
    # the names of the photos
    members: tuple[str, ...] = field(repr=False)

    @classmethod
    def of(cls, maps: RunMaps, **figures: Any) -> Self:
        """Make the statistics of some maps, all of one class; ``figures`` are the further fields of
        a subclass."""
        return cls(
            target=maps.targets[0],
            finding=maps.findings[0],
            accuracy=MeanWithError.of(maps.correct).value,
            on_object=MeanWithError.of(maps.on_object),
            at_border=MeanWithError.of(maps.at_border),
            entropy=MeanWithError.of(maps.entropy),
            mean=maps.values.mean(0),
            members=maps.names,
            **figures,
        )

    @property
    def title(self) -> str:
        """The class, with the finding if there is one: "Edema, absent"."""
        return ", ".join(filter(None, (self.target, self.finding)))

    def to_dict(self) -> dict[str, Any]:
        """The statistics in plain values of JSON, for ``insight.json``; "map" is the mean map, as a
        list of rows."""
        return {**fields_of(self), "map": json_value(self.mean)}


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassStatistics(MapStatistics):
    """Where one class looks, and how that differs from the other classes; `class_mean_maps` orders
    classes by ``striking``."""

    photos: int
    # ``(16, 16)``, the standard deviation of the maps
    spread: torch.Tensor = field(repr=False)
    # the share of the photo within the boxes; an object of more than nine tenths does not count
    object_size: MeanWithError
    # of ``on_object`` beyond ``object_size``: 0 for an even map, 1 with all on the object
    excess: MeanWithError
    # the distance of the mean map from that of all other photos, beyond chance: 0 if equal, 1 for
    # even maps of different halves
    apart: float
    striking: float
    # ``(16, 16)``, the mean map less that of all other photos
    beyond_others: torch.Tensor = field(repr=False)


def class_mean_maps(maps: RunMaps) -> list[ClassStatistics]:
    """The mean map of each class, by how far its excess is below that of all photos less 1.96
    standard errors; without boxes, by how far its mean map is from that of others.
    """
    object_size = torch.where(maps.object_size <= FILLED, maps.object_size, math.nan)
    excess = (maps.on_object - object_size) / (1 - object_size)
    mean_excess = MeanWithError.of(excess)
    # less those of a class, these are the sums over all other classes
    map_sum = maps.values.double().sum(0)
    square_sum = (maps.values.double() ** 2).sum(0)
    statistics = []
    for rows in maps.of_finding.values():
        if len(rows) < LEAST:
            continue
        class_maps = maps[rows]
        class_excess = MeanWithError.of(excess[rows])
        values = class_maps.values.double()
        rest_count = len(maps) - len(rows)
        mean_of_rest = (map_sum - values.sum(0)) / max(1, rest_count)
        apart = _apart(values, mean_of_rest, square_sum, rest_count)
        striking = (
            mean_excess.value - (class_excess.value + SURE * class_excess.error)
            if mean_excess.is_known  # some photos have boxes
            else apart
        )
        statistics.append(
            ClassStatistics.of(
                class_maps,
                photos=len(rows),
                spread=class_maps.values.std(0),
                object_size=MeanWithError.of(class_maps.object_size),
                excess=class_excess,
                apart=apart,
                # NaN for a class without boxes, beside others with boxes: the last one then
                striking=-math.inf if math.isnan(striking) else striking,
                beyond_others=class_maps.values.mean(0) - mean_of_rest.float(),
            )
        )
    return sorted(
        statistics, key=lambda of_class: (-of_class.striking, -of_class.apart, of_class.title)
    )


def _apart(
    values: torch.Tensor, mean_of_rest: torch.Tensor, square_sum: torch.Tensor, rest_count: int
) -> float:
    """How far a class's mean of ``values`` ``(n, 16, 16)`` lies from that of the other maps, less
    what chance gives (the variances of both means); the sum of squares ``(16, 16)`` is over all.
    """
    if rest_count < 2 or len(values) < 2:
        return 0.0
    mean = values.mean(0)
    variance_of_mean = values.var(0) / len(values)
    variance_of_rest = ((square_sum - (values**2).sum(0)) / rest_count - mean_of_rest**2) / (
        rest_count - 1
    )
    # rounding errors can make a variance that is computed from sums negative
    chance = variance_of_mean + variance_of_rest.clamp(min=0)
    squared_distance = ((mean - mean_of_rest) ** 2 - chance).sum().clamp(min=0)
    # The root of the places brings it to the scale of a sum over them: 1 for two even maps that
    # each fill another half of the photo, and more where maps fill less.
    return float((squared_distance * mean.numel()).sqrt() / 2)
