"""Does a map depend on the class, and on what the model has learned?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

from explain._utils.errors import MetricError
from explain.checks.answers import Answer
from explain.checks.questions import SAME, Question, of_zeros, with_zeros
from explain.metrics.base import MetricInput, MetricResult
from explain.metrics.maps import Maps, Sign
from explain.metrics.rankings import correlation
from explain.metrics.similarity import Similarity, similarity
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult


@dataclass(frozen=True)
class DependsOnClass(Question, ReattributionMetric):
    """How alike the map is to those of classes far down the model's ranking.

    They are taken at equal distances from its lower half, and not from its top: a tabby and an Egyptian cat should look
    alike. The figure is the mean similarity. Less is better.

    Args:
        classes: how many.
        most: the similarity from which on the map fails; at 0.71, half of a map's variation is that of the other.
        similarity, sign: as for `MPRT`.

    Sixt et al., "When Explanations Lie", ICML 2020, for comparing the maps of classes.

    >>> DependsOnClass(classes=2).better
    'less'
    """

    classes: int = 3
    most: float = SAME
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
        for place in far_down(others.shape[1] - 1, self.classes):
            yield Variant(("ranked", place), classes=others[:, place])

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        alike = similarity(self.similarity, data.maps.of_places(self.sign), found.maps.of_places(self.sign))
        return with_zeros(alike, found)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        return MetricResult(numbers[..., 0].mean(1), parts={"alike": numbers[..., 0], "zeros": numbers[..., 1]})

    def judge(self, result: MetricResult) -> Answer:
        figure = float(result.value[0])
        count = result.parts["alike"].shape[1]
        whose = f"the maps of {count} classes" if count > 1 else "the map of a class"
        what = f"similarity {figure:.2f} to {whose} far down the ranking{of_zeros(result)}"
        return self.answer(figure, figure < self.most, f"{what} (must be below {self.most:.2g})")


def far_down(others: int, count: int) -> list[int]:
    """Places in a ranking with ``others`` classes behind the first, at equal distances in its lower half.

    >>> far_down(999, 3), far_down(2, 3), far_down(1, 3)
    ([583, 750, 916], [2], [1])
    """
    first = others / 2
    return sorted({min(others, 1 + int(first + (number + 0.5) / count * first)) for number in range(count)})


LEAST = 0.05
"""Details are compared where both maps are, on average around, at least this share as strong as at their strongest."""


@dataclass(frozen=True)
class DependsOnModel(Question, ReattributionMetric):
    """How alike the map is to those of copies of the model whose upper layers have random weights.

    Of the layers with weights, the later half, in the order in which a forward pass uses them, is initialised once
    more, as each one's class does it, normalisations with their statistics; the model's answer is lost then. Maps
    that draw what the first layers see, such as edges, do not change. (If all layers were initialised, the first
    filters would draw something else, and such a map would seem to depend on the model.)

    Two things are compared, and the figure is the larger one. **Places**: the mean similarity over the copies. For maps
    with a value for each pixel, also **details**: the correlation of values that are divided by the mean magnitude
    around them, where both maps say something, without its sign and at its largest over the copies. Multiplied by a
    coarse map, or by minus one, a map has the same details. How alike the copies' maps are among each other is in
    ``parts`` ("among"). A map that is zero everywhere is like no other. Less is better.

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
    most: float = SAME
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
        """The map of a copy, as places and how much its details are those of the map: ``(N, 1 + H * W)``."""
        details = same_details(data.maps, found.maps, self.sign)
        return torch.cat([details[:, None], found.maps.of_places(self.sign).flatten(1).double()], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        details = numbers[..., 0].amax(1)
        others = numbers[..., 1:].reshape(*numbers.shape[:2], *data.size).unbind(1)
        own = data.maps.of_places(self.sign).double()
        places = torch.stack([similarity(self.similarity, own, other) for other in others], 1).mean(1)
        pairs = [similarity(self.similarity, one, other) for one, other in combinations(others, 2)]
        among = torch.stack(pairs, 1).mean(1) if pairs else torch.full_like(places, torch.nan)
        zeros = (numbers[..., 1:] == 0).all(2)
        parts = {"places": places, "details": details, "among": among, "zeros": zeros}
        return MetricResult(torch.where(details > places, details, places), parts=parts)

    def judge(self, result: MetricResult) -> Answer:
        figure, among = float(result.value[0]), float(result.parts["among"][0])
        kind = " in details" if result.parts["details"][0] > result.parts["places"][0] else ""
        copies = result.parts["zeros"].shape[1]
        whose = f"the maps of {copies} copies" if copies > 1 else "the map of a copy"
        what = f"similarity {figure:.2f}{kind} to {whose} with random upper layers"
        beside = "" if among != among else f"; these are {among:.2f} alike"
        return self.answer(
            figure, figure < self.most, f"{what}{of_zeros(result)} (must be below {self.most:.2g}{beside})"
        )


def same_details(one: Maps, other: Maps, sign: Sign) -> torch.Tensor:
    """How much two maps have the same details, wherever these are strong: ``(N,)``, NaN for maps of a layer.

    >>> values = torch.randn(1, 1, 40, 40, dtype=torch.float64)
    >>> ramp = torch.linspace(1, 3, 40, dtype=torch.float64)
    >>> same_details(Maps("a", values, (40, 40)), Maps("b", -values * ramp, (40, 40)), "own") > 0.99
    tensor([True])
    """
    maps = [each.of_places(sign).double() for each in (one, other)]
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
    """The mean around each place, in a square of a twentieth of the shorter side."""
    side = max(3, round(min(maps.shape[1:]) / 20) // 2 * 2 + 1)
    return F.avg_pool2d(maps[:, None], side, stride=1, padding=side // 2, count_include_pad=False)[:, 0]
