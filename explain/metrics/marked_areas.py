"""Scores of photos whose marked areas are covered: does the area that a map marks matter more than
equal areas in other places, and than those that maps of the photo alone mark?"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain._utils.random_numbers import permutation
from explain.baselines.base import Baseline
from explain.baselines.replacements import Mean
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.engine.perturbations import rows_of
from explain.metrics.base import digest_of_tensor
from explain.metrics.maps import ranks_of
from explain.metrics.masked_scores import (
    count_of_placements,
    covered_in_turn,
    placements,
    strong_blur,
)

SHARES = (0.1, 0.2)
"""Shares of the pixels that are covered: those where a map has its largest values."""

AT_FIRST = 9
"""Placements that are tried before all others: most maps have lost after a few."""


@dataclass(frozen=True)
class MarkedAreas(Perturbation):
    """A photo of which the largest values of each of some maps ``(m, H, W)`` are covered: every
    share of the pixels by the mean colour and by a strong blur."""

    content: bytes = field(repr=False)
    maps: torch.Tensor = field(compare=False, repr=False)
    seed: int

    words = "photos whose marked areas are covered"
    photos_of_each: ClassVar[int] = 2 * len(SHARES)
    """How many photos each map has."""

    @classmethod
    def of(cls, maps: torch.Tensor, seed: int) -> "MarkedAreas":
        return cls(digest_of_tensor(maps), maps, seed)

    def baselines(self, images: torch.Tensor) -> tuple[Baseline, ...]:
        return Mean(), strong_blur(images.shape)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """The covered photos of `MarkedAreas`, for a single photo: for each map and each share of
        `SHARES`, the pixels with the map's largest values covered by the mean colour and by a
        strong blur, in this order; `_drops_of_marked` averages over them."""
        x = evidence.inputs
        covers = [baseline.covering(x) for baseline in self.baselines(x)]
        ranks = ranks_of(self.maps, self.seed).to(x.device)
        pixels = ranks[0].numel()
        areas = torch.tensor([round(share * pixels) for share in SHARES], device=x.device)

        def covered(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            """The photo covered as the rows with these ``numbers`` ``(b,)`` say: which map, which
            share, which baseline."""
            area = areas[numbers % self.photos_of_each // 2][:, None, None]
            keep = (ranks[numbers // self.photos_of_each] >= area)[:, None].to(x)
            return covered_in_turn(x[images], images, keep, covers, numbers % 2)

        return rows_of([len(self.maps) * self.photos_of_each], x.device, covered)


Drops = Callable[[torch.Tensor], torch.Tensor]
"""From maps ``(m, H, W)`` to what the score loses under the areas that each marks, ``(m,)``."""


@dataclass(frozen=True, eq=False)
class AreaTest:
    """What covering the marked areas of a photo says of its maps.

    ``photo_maps`` ``(m, H, W)`` are those of the photo alone (`photo_maps`), and ``drops`` covers
    areas.
    """

    photo_maps: torch.Tensor
    drops: Drops
    seed: int

    def test(self, values: torch.Tensor, count: int) -> tuple[float, int]:
        """Test the area that a map marks: the p-value of a map ``(H, W)`` against random placements
        of itself, and how many of the photo's own maps take as much from the score.

        The p-value is one by ``count + 1`` for a map whose marked area takes more than all
        placements and all maps of the photo, and else 1. A map whose place says nothing comes first
        among n placements with a probability of one by n + 1, so the p-value keeps its level.
        Placements are tried until one takes as much.
        """
        values = values.detach().cpu().double()
        own_drop = self.drops(values[None])[0]
        controls = int((self.drops(self.photo_maps) >= own_drop).sum())
        if controls or not math.isfinite(own_drop):
            return 1.0, controls
        total = count_of_placements((values.shape[0], values.shape[1])) - 1
        numbers = 1 + permutation(total, self.seed)[:count]
        for batch in (numbers[:AT_FIRST], numbers[AT_FIRST:]):
            if not len(batch):
                break
            placed = placements(values[None], batch.tolist())[:, 0]
            if bool((self.drops(placed) >= own_drop).any()):
                return 1.0, controls
        return 1 / (len(numbers) + 1), controls
