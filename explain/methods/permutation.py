"""Regions exchanged between the images of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explain.engine import Attributions, Evidence, Need, Rows
from explain.errors import MethodError
from explain.fills import Zero
from explain.methods import sources_of_masks as sources
from explain.methods.base import Style
from explain.methods.checks import check_options
from explain.methods.coalitions import Coalitions, OfRegions
from explain.methods.estimates import FromScores, Gradually
from explain.methods.masks import Order, Score, ScoreOf, whole_score
from explain.methods.regions import Regions, Squares, regions_of
from explain.methods.sources import Source
from explain.methods.surrogate import Drop, OneByOne


@dataclass(frozen=True)
class Exchanged:
    """Photos of which one region is that of another image of the batch."""

    masks: Coalitions
    seed: int

    of_layer: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __str__(self) -> str:
        return "photos with a region of another image"

    def count(self, channels: int) -> int:
        return 0

    def count_at(self, size: tuple[int, ...]) -> int:
        return self.masks.most(size)

    def others(self, images: int) -> torch.Tensor:
        """Which image each one gets its region from: all stand in a random circle, and look to their neighbour."""
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        circle = torch.randperm(images, generator=generator, device="cpu")
        found = torch.empty_like(circle)
        found[circle] = circle.roll(1)
        return found

    def rows(self, evidence: Evidence) -> Rows:
        x = evidence.inputs
        if len(x) < 2:
            raise MethodError(
                "featurepermutation must have a batch of several images, between which regions are exchanged, got 1; "
                "give more, or take featureablation"
            )
        drawn = self.masks.drawn(evidence)
        order, others = Order.of(drawn.counts, x.device), self.others(len(x)).to(x.device)

        def make(rows: torch.Tensor) -> torch.Tensor:
            images = order.images[rows]
            keep = drawn.keep(images, order.numbers[rows]) > 0
            return torch.where(keep, x[images], x[others[images]])

        return Rows(order.images, make)


@dataclass(frozen=True)
class FeaturePermutation(FromScores):
    """What the score loses if a region is that of another image of the batch.

    What stands in its place is thus a photo too, and no colour that the network has never seen. The values depend on
    the other images.

    Args:
        regions: as for `FeatureAblation`; they should be the same for all images.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: says which image gets the regions of which.

    Returns:
        ``(N, H, W)``, each pixel with its region's value, in units of the score.

    Fisher, Rudin and Dominici, "All Models are Wrong, but Many are Useful", JMLR 2019 (arXiv:1801.01489); for single
    images as in Captum.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.rand(2, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, FeaturePermutation(regions=2), target=1)
    >>> torch.allclose(a.values[0], (model[1].weight[1].reshape(3, 2, 2) * (x[0] - x[1])).sum(0))
    True
    """

    regions: Regions = field(default_factory=Squares)
    score: Score = "logit"
    seed: int = 0

    name: ClassVar[str] = "featurepermutation"
    about: ClassVar[str] = "what the score loses with a region of another image"
    paper: ClassVar[str] = "Fisher et al., JMLR 2019"
    source: ClassVar[Source] = sources.PERMUTATION
    style: ClassVar[Style] = "signed"
    only_for: ClassVar[str] = "batches of several images"

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", regions_of(self.name, self.regions))
        check_options(self)

    @property
    def found(self) -> Attributions:
        masks = Coalitions(self.regions, OneByOne())
        fold = Gradually(OfRegions(masks, Drop(), Zero(), self.score))
        return Attributions(Exchanged(masks, self.seed), ScoreOf(self.score), fold)

    @property
    def beside(self) -> frozenset[Need[Any]]:
        return frozenset({whole_score(self.score)})
