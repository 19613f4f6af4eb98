"""Does a map depend on the model? It must not stay what it is where the model has lost what it learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import ClassVar

import torch
import torch.nn.functional as F

from explain.metrics.again import Found, Setting, World
from explain.metrics.base import Better, Case, Judged, check
from explain.metrics.maps import Maps, Sign
from explain.metrics.orders import correlation
from explain.metrics.similarity import Similarity, similarity
from explain.metrics.verdict.answers import Answer
from explain.metrics.verdict.asking import SAME, answered, figure_of, of_zeros

LEAST = 0.05
"""Details are compared where both maps are, on average around, at least this share as strong as at their strongest."""


@dataclass(frozen=True)
class DependsOnModel:
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

    name: ClassVar[str] = "depends_on_model"
    word: ClassVar[str] = "model"
    about: ClassVar[str] = "how alike the map is to those of copies whose upper layers are initialised once more"
    paper: ClassVar[str] = "Adebayo et al., NeurIPS 2018"
    units: ClassVar[str] = "similarity"
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self, copies=1)

    def unasked(self, world: World, case: Case) -> str:
        return "" if world.randomised.layers else "the model has no weights that could be others"

    @property
    def brief(self) -> DependsOnModel:
        return replace(self, copies=1)

    def settings(self, world: World, case: Case) -> Iterator[Setting]:
        layers = world.randomised.layers
        upper = layers[len(layers) // 2 :]
        for number in range(self.copies):
            seed = self.seed * 1009 + number
            make = partial(world.randomised.of, upper, seed)
            yield Setting(("model", frozenset(upper), seed, ()), model=make)

    def compare(self, case: Case, found: Found) -> torch.Tensor:
        """The map of a copy, as places and how much its details are those of the map: ``(N, 1 + H * W)``."""
        details = same_details(case.maps, found.maps, self.sign)
        return torch.cat([details[:, None], found.maps.of_places(self.sign).flatten(1).double()], 1)

    def __call__(self, case: Case, numbers: torch.Tensor) -> Judged:
        details = numbers[..., 0].amax(1)
        others = numbers[..., 1:].reshape(*numbers.shape[:2], *case.size).unbind(1)
        own = case.maps.of_places(self.sign).double()
        places = torch.stack([similarity(self.similarity, own, other) for other in others], 1).mean(1)
        pairs = [similarity(self.similarity, one, other) for one, other in combinations(others, 2)]
        among = torch.stack(pairs, 1).mean(1) if pairs else torch.full_like(places, torch.nan)
        zeros = (numbers[..., 1:] == 0).all(2)
        parts = {"places": places, "details": details, "among": among, "zeros": zeros}
        return Judged(torch.where(details > places, details, places), parts=parts)

    def judge(self, judged: Judged) -> Answer:
        figure, among = figure_of(judged), float(judged.parts["among"][0])
        kind = " in details" if judged.parts["details"][0] > judged.parts["places"][0] else ""
        copies = judged.parts["zeros"].shape[1]
        whose = f"the maps of {copies} copies" if copies > 1 else "the map of a copy"
        what = f"similarity {figure:.2f}{kind} to {whose} with random upper layers"
        beside = "" if among != among else f"; these are {among:.2f} alike"
        return answered(
            self, figure, figure < self.most, f"{what}{of_zeros(judged)} (must be below {self.most:.2g}{beside})"
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
