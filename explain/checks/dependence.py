"""Does a map depend on the class, and on the model's weights?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

from explain._utils.errors import MetricError
from explain.checks.base import SIMILAR, Check, CheckResult
from explain.metrics.base import MetricInput, MetricResult
from explain.metrics.maps import Maps, Sign
from explain.metrics.randomisation import zero_everywhere
from explain.metrics.rankings import correlation
from explain.metrics.similarity import Similarity, similarity
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult


@dataclass(frozen=True)
class DependsOnClass(Check, ReattributionMetric):
    """How similar the map is to those of classes far down the model's ranking.

    They are taken at equal distances from its lower half, and not from its top: the maps of a tabby and of an Egyptian
    cat should be similar. The figure is the mean similarity. Less is better.

    Args:
        classes: how many.
        most: the similarity from which on the map fails; at 0.71, half of a map's variation is that of the other.
        similarity, sign: as for `MPRT`.

    Sixt et al., "When Explanations Lie", ICML 2020, for comparing the maps of classes.

    >>> DependsOnClass(classes=2).better
    'less'
    """

    classes: int = 3
    most: float = SIMILAR
    similarity: Similarity = "spearman"
    sign: Sign = "own"

    name = "depends_on_class"
    word = "class"
    about = "how alike the map is to those of classes far down the ranking"
    paper = "Sixt et al., ICML 2020"
    units = "similarity"
    better = "less"
    minimums: ClassVar = {"classes": 1}

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        if context.classes is None or context.logits is None:
            return "the target is no class, so there are no others to compare with"
        return "" if context.logits.shape[1] > 1 else "the model has one class only"

    @property
    def reduced(self) -> Self:
        return replace(self, classes=1)

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        if context.classes is None or context.logits is None or context.logits.shape[1] < 2:
            raise MetricError(
                f"target must be one of several classes for {self.name}: {self.not_applicable(context, data)}"
            )
        scores = context.logits.scatter(1, context.classes[:, None], torch.inf)
        others = scores.sort(dim=1, descending=True, stable=True).indices
        for rank in far_down(others.shape[1] - 1, self.classes):
            yield Variant(("ranked", rank), classes=others[:, rank])

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        similar = similarity(self.similarity, data.maps.per_pixel(self.sign), found.maps.per_pixel(self.sign))
        return torch.stack([similar.double(), zero_everywhere(found).double()], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        return MetricResult(numbers[..., 0].mean(1), parts={"alike": numbers[..., 0], "zeros": numbers[..., 1]})

    def decide(self, result: MetricResult) -> CheckResult:
        figure = float(result.value[0])
        count = result.parts["alike"].shape[1]
        others = f"the maps of {count} classes" if count > 1 else "the map of a class"
        reason = f"similarity {figure:.2f} to {others} far down the ranking{_zeros(result)}"
        return self.result(figure, figure < self.most, f"{reason} (must be below {self.most:.2g})")


def far_down(others: int, count: int) -> list[int]:
    """Positions at equal distances in the lower half of a ranking with ``others`` classes after the first.

    >>> far_down(999, 3), far_down(2, 3), far_down(1, 3)
    ([583, 750, 916], [2], [1])
    """
    first = others / 2
    return sorted({min(others, 1 + int(first + (number + 0.5) / count * first)) for number in range(count)})


LEAST = 0.05
"""Details are compared where both maps are, on average around, at least this share as strong as at their strongest."""


@dataclass(frozen=True)
class DependsOnModel(Check, ReattributionMetric):
    """How similar the map is to those of copies of the model with random weights in the upper layers.

    We reinitialise the upper half of the layers with weights, in the order in which a forward pass uses them, each as
    its class does it, normalisations with their statistics; the model's prediction is lost then. Maps that show what
    the first layers detect, such as edges, do not change. (If all layers were reinitialised, the first filters would
    detect something else, and such a map would seem to depend on the model.)

    Two things are compared, and the figure is the larger one. **Places**: the mean similarity over the copies. For maps
    with a value for each pixel, also **details**: the absolute correlation of values divided by the mean magnitude
    around them, where both maps are strong, at its largest over the copies. Multiplied by a coarse map, or by minus
    one, a map has the same details. The mean similarity among the copies' maps is in ``parts`` ("among"). A map that is
    zero everywhere is similar to no other. Less is better.

    Args:
        copies: how many.
        most: the figure from which on the map fails; at 0.71, half of a map's variation is that of the other.
        similarity, sign: of places, as for `MPRT`.
        seed: of the weights.

    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, whose cascade from the output this is halfway.

    >>> DependsOnModel().copies
    3
    """

    copies: int = 3
    most: float = SIMILAR
    similarity: Similarity = "spearman"
    sign: Sign = "own"
    seed: int = 0

    name = "depends_on_model"
    word = "model"
    about = "how alike the map is to those of copies whose upper layers are initialised once more"
    paper = "Adebayo et al., NeurIPS 2018"
    units = "similarity"
    better = "less"
    minimums: ClassVar = {"copies": 1}

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        return "" if context.randomised.layers else "the model has no weights that could be others"

    @property
    def reduced(self) -> Self:
        return replace(self, copies=1)

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        layers = context.randomised.layers
        upper = layers[len(layers) // 2 :]
        for number in range(self.copies):
            seed = self.seed * 1009 + number
            make = partial(context.randomised.of, upper, seed)
            yield Variant(("model", frozenset(upper), seed, ()), model=make)

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        """The similarity of details, and the map of the copy: ``(N, 1 + H * W)``."""
        details = same_details(data.maps, found.maps, self.sign)
        return torch.cat([details[:, None], found.maps.per_pixel(self.sign).flatten(1).double()], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        details = numbers[..., 0].amax(1)
        others = numbers[..., 1:].reshape(*numbers.shape[:2], *data.size).unbind(1)
        own = data.maps.per_pixel(self.sign).double()
        places = torch.stack([similarity(self.similarity, own, other) for other in others], 1).mean(1)
        pairs = [similarity(self.similarity, one, other) for one, other in combinations(others, 2)]
        among = torch.stack(pairs, 1).mean(1) if pairs else torch.full_like(places, torch.nan)
        zeros = (numbers[..., 1:] == 0).all(2)
        parts = {"places": places, "details": details, "among": among, "zeros": zeros}
        return MetricResult(torch.where(details > places, details, places), parts=parts)

    def decide(self, result: MetricResult) -> CheckResult:
        figure, among = float(result.value[0]), float(result.parts["among"][0])
        kind = " in details" if result.parts["details"][0] > result.parts["places"][0] else ""
        copies = result.parts["zeros"].shape[1]
        others = f"the maps of {copies} copies" if copies > 1 else "the map of a copy"
        threshold = f"must be below {self.most:.2g}" + ("" if math.isnan(among) else f"; these are {among:.2f} alike")
        reason = f"similarity {figure:.2f}{kind} to {others} with random upper layers{_zeros(result)} ({threshold})"
        return self.result(figure, figure < self.most, reason)


def _zeros(result: MetricResult) -> str:
    """How many of the other maps are zero everywhere, which count as not similar."""
    zeros = int(result.parts["zeros"][0].sum())
    return f", {zeros} of which are zero everywhere" if zeros else ""


def same_details(one: Maps, other: Maps, sign: Sign) -> torch.Tensor:
    """The similarity of the details of two maps, where both are strong: ``(N,)``, NaN for maps of a layer.

    >>> values = torch.randn(1, 1, 40, 40, dtype=torch.float64)
    >>> ramp = torch.linspace(1, 3, 40, dtype=torch.float64)
    >>> same_details(Maps("a", values, (40, 40)), Maps("b", -values * ramp, (40, 40)), "own") > 0.99
    tensor([True])
    """
    maps = [each.per_pixel(sign).double() for each in (one, other)]
    if one.values.ndim == 3 or other.values.ndim == 3:
        return torch.full_like(maps[0][:, 0, 0], torch.nan)
    around = [_around(each.abs()) for each in maps]
    both = torch.stack([each > LEAST * each.flatten(1).amax(1)[:, None, None] for each in around]).all(0)
    ratios = [each / torch.where(mean > 0, mean, 1) for each, mean in zip(maps, around, strict=True)]
    found = [
        correlation(a[where][None], b[where][None]) if where.any() else a.new_zeros(1)
        for a, b, where in zip(*ratios, both, strict=True)
    ]
    return torch.cat(found).nan_to_num(0).abs()


def _around(maps: torch.Tensor) -> torch.Tensor:
    """The mean around each pixel, in a square of a twentieth of the shorter side."""
    side = max(3, round(min(maps.shape[1:]) / 20) // 2 * 2 + 1)
    return F.avg_pool2d(maps[:, None], side, stride=1, padding=side // 2, count_include_pad=False)[:, 0]
