"""Is a map stable? It must not change when the photo changes and the scores do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch

from explain._utils.random_numbers import normal
from explain.checks.base import SIMILAR, Check, CheckResult
from explain.methods.base import over_all
from explain.metrics.base import MetricInput, MetricResult
from explain.metrics.maps import Sign
from explain.metrics.similarity import Similarity, similarity
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult


@dataclass(frozen=True)
class AddNoise:
    """Add normal noise; ``sigma`` is its deviation, relative to the range of the photo's values."""

    sigma: float
    seed: int

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        drawn = normal(images.shape[1:], torch.Generator("cpu").manual_seed(self.seed % 2**63))
        return images + self.sigma * over_all(span(images), images) * drawn.to(images)


@dataclass(frozen=True)
class Brighten:
    """Raise all values by a share of their range."""

    by: float

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.by * over_all(span(images), images)


@dataclass(frozen=True)
class IncreaseContrast:
    """Multiply each channel's distance from its mean by a factor."""

    factor: float

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        mean = images.mean((2, 3), keepdim=True)
        return mean + self.factor * (images - mean)


def span(images: torch.Tensor) -> torch.Tensor:
    """The range of each photo's values ``(N,)``."""
    least, most = images.flatten(1).aminmax(dim=1)
    return most - least


@dataclass(frozen=True)
class Stable(Check, ReattributionMetric):
    """How similar the map stays when the photo changes so little that the scores do not change.

    The photo gets noise, more or less light, and more or less contrast. Changes that move the class's probability by
    more than ``slack`` (without classes, the score by more than this share of it) do not count. The figure is the mean
    similarity over the others. More is better.

    Args:
        noises: deviations of the noise, relative to the range of the photo's values.
        light: shares of that range by which all values are raised.
        contrast: factors for the distance of values from their channel's mean.
        slack: how far the scores may move.
        least: the smallest similarity that passes.
        similarity, sign: as for `MPRT`.
        seed: of the noise.

    Ghorbani et al., "Interpretation of Neural Networks is Fragile", AAAI 2019.

    >>> Stable().better
    'more'
    """

    noises: tuple[float, ...] = (0.005, 0.01)
    light: tuple[float, ...] = (-0.03, 0.03)
    contrast: tuple[float, ...] = (0.95, 1.05)
    slack: float = 0.05
    least: float = SIMILAR
    similarity: Similarity = "spearman"
    sign: Sign = "own"
    seed: int = 0

    name = "stable"
    word = "stable"
    about = "similarity of the map to those of changed photos with the same scores"
    paper = "Ghorbani et al., AAAI 2019"
    units = "similarity"
    better = "more"
    minimums: ClassVar = {"slack": 0}

    @property
    def reduced(self) -> Self:
        return replace(self, noises=self.noises[-1:], light=(), contrast=())

    @property
    def changes(self) -> list[AddNoise | Brighten | IncreaseContrast]:
        noises = [AddNoise(sigma, self.seed * 1009 + number) for number, sigma in enumerate(self.noises)]
        return [*noises, *map(Brighten, self.light), *map(IncreaseContrast, self.contrast)]

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        for change in self.changes:
            yield Variant(("changed", change), partial(change, context.images))

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        alike = similarity(self.similarity, data.maps.per_pixel(self.sign), found.maps.per_pixel(self.sign))
        return torch.stack([alike.double(), self._moved(data, found).double()], 1)

    def _moved(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        """How far the scores have moved ``(N,)``."""
        if data.probability is None or data.classes is None or found.logits is None:
            least = torch.finfo(data.target_score.dtype).tiny
            return (found.score - data.target_score).abs() / data.target_score.abs().clamp(min=least)
        return (data.outputs.of_classes(found.logits, data.classes) - data.probability).abs()

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        alike, still = numbers[..., 0], numbers[..., 1] <= self.slack
        value = torch.where(still, alike, 0).sum(1) / still.sum(1)  # NaN where no change counts
        least = torch.where(still, alike, torch.inf).amin(1)
        return MetricResult(value, parts={"alike": alike, "counted": still.sum(1), "least": least})

    def decide(self, result: MetricResult) -> CheckResult:
        figure, counted = float(result.value[0]), int(result.parts["counted"][0])
        of = result.parts["alike"].shape[1]
        if not counted:
            return self.result(figure, None, "every small change of the photo moved the scores")
        words = f"similarity {figure:.2f} over {counted} of {of} small changes that left the scores alone"
        return self.result(figure, figure >= self.least, f"{words} (must be at least {self.least:.2g})")
