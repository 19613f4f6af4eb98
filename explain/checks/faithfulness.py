"""Is a map faithful? It must locate the evidence better than copies of it in other places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain._utils.errors import MetricError
from explain.baselines import Mean
from explain.baselines.base import Baseline
from explain.checks.base import Check, CheckResult
from explain.metrics.base import MetricInput, MetricResult, Score
from explain.metrics.faithfulness import share_counts
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import ScoreMetric, ScoreRequest, cover_ranks


@dataclass(frozen=True)
class Faithful(Check, ScoreMetric):
    r"""Whether a map finds the evidence better than copies of it that are rolled, flipped and turned.

    What counts is insertion minus deletion,
    :math:`\frac{1}{|Q|}\sum_q f(\mathrm{top}_q) - f(x \setminus \mathrm{top}_q)`: the score with nothing but the share
    q of the photo that the map ranks highest, less that without it. A copy has the same values, as sparse and as
    blurred, in other places. The figure is the p-value of a permutation test, :math:`p = (1 + k) / (1 + n)`, where k of
    the n copies are at least as good. Less is better.

    Copies in the same place, such as the flips of a blob in the middle, count as well: ``parts`` has the "overlap" of
    each with the map, from 0 to 1. Without them, a map with a random location could pass.

    The copies are drawn from the group of all rolls by thirds of the height and width, with all flips and, of square
    photos, turns, so that a map with a uniformly random location passes with a probability of at most ``level``.

    Args:
        copies: n, at most how many there are.
        percentiles: Q, in per cent.
        baseline: what replaces the pixels that are not shown.
        score: the target's own "logit", or "probability".
        level: the largest p-value that passes.
        sign: how values become one number for each pixel.
        seed: of the draw, and of the order of equal values.

    Phipson and Smyth, "Permutation P-values Should Never Be Zero", 2010, for the test; insertion and deletion as in
    Petsiuk et al., BMVC 2018.

    >>> Faithful().better
    'less'
    """

    copies: int = 39
    percentiles: tuple[float, ...] = (25, 50)
    baseline: Baseline = field(default_factory=Mean)
    score: Score = "logit"
    level: float = 0.05
    sign: Sign = "own"
    seed: int = 0

    name = "faithful"
    word = "faithful"
    about = "p-value of insertion less deletion among those of the same map laid elsewhere"
    paper = "Phipson and Smyth, 2010"
    units = "p-value"
    better = "less"
    minimums: ClassVar = {"copies": 1, "level": 0}
    percentages = ("percentiles",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level >= 1:
            raise MetricError(f"level of faithful must be below 1, the largest p-value, got {self.level:g}; take 0.05")
        if self.level * (1 + self.copies) < 1:
            raise MetricError(
                f"level of faithful must be at least 1 / (1 + copies) to be reached, got {self.level:g} with "
                f"{self.copies} copies; give more copies, at most 71"
            )

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        counts, own = share_counts(data, self.percentiles), data.ranks(self.sign, self.seed)
        start, end = counts + [0] * len(counts), [data.pixels] * len(counts) + counts  # shown alone, and covered
        copies = [own, *(placed(own, placement) for placement in self.placements(data.size))]
        return [cover_ranks(ranks, start, end, self.baseline, self.score) for ranks in copies]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        half = len(self.percentiles)
        each = torch.stack([found[:, :half].mean(1) - found[:, half:].mean(1) for found in scores], 1)
        better = (each[:, 1:] >= each[:, :1]).sum(1)
        copies = each.shape[1] - 1
        unchanged = (data.loss(self.score, torch.cat(list(scores), 1)) == 0).all(1)
        value = data.undefined(self, (1 + better.double()) / (1 + copies), unchanged, UNCHANGED)
        parts = {"better": better, "own": each[:, 0], "copies": each[:, 1:], "flat": data.maps.constant}
        return MetricResult(value, parts={**parts, "overlap": self._overlap(data)})

    def _overlap(self, data: MetricInput) -> torch.Tensor:
        """The share of each copy's top pixels that are the map's top pixels too ``(N, n)``, on average over Q."""
        own = data.ranks(self.sign, self.seed)
        tops = torch.stack([own < count for count in share_counts(data, self.percentiles)])  # (Q, N, H, W)
        found = []
        for placement in self.placements(data.size):
            copies = placed(tops.flatten(0, 1), placement).reshape(tops.shape)
            found.append(((copies & tops).flatten(2).sum(2) / tops.flatten(2).sum(2)).mean(0))
        return torch.stack(found, 1)

    def decide(self, result: MetricResult) -> CheckResult:
        figure, better, parts = float(result.value[0]), int(result.parts["better"][0]), result.parts
        copies = parts["copies"].shape[1]
        if parts["flat"][0]:
            return self.result(1.0, False, "the map is constant")
        if math.isnan(figure):
            return self.result(figure, None, UNCHANGED)
        most = int(self.level * (1 + copies) + 1e-9) - 1
        if most < 0:  # a photo that is no square has fewer placements
            return self.result(figure, None, f"{copies} places are too few for a p-value of {self.level:g}")
        near = int(((parts["copies"] >= parts["own"][:, None]) & (parts["overlap"] > 0.5))[0].sum())
        overlap = f"; {near} of these share more than half of the map's place" if near else ""
        reason = f"{better} of {copies} copies of the map in other places explain the score at least as well"
        return self.result(figure, better <= most, f"{reason} (at most {most} may){overlap}")

    def placements(self, size: tuple[int, int]) -> list[Placement]:
        """A draw from all placements but the map's own."""
        known = all_placements(size)
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        drawn = torch.randperm(len(known), generator=generator, device="cpu")[: self.copies]
        return [known[number] for number in drawn.tolist()]


UNCHANGED = "to cover the photo, or parts of it, does not change the score"

Placement = tuple[int, bool, float, float]
"""How a copy is placed: quarter turns, whether it is flipped, and how far it is rolled down and to the right, in shares
of the height and the width."""

ORIGINAL: Placement = (0, False, 0.0, 0.0)


def all_placements(size: tuple[int, int]) -> list[Placement]:
    """All placements but the map's own: rolls by thirds, flips, and turns, by quarters if the photo is square.

    With the map's own, they are a group if 3 divides the sides: two placements in sequence are another one of them. For
    other sides they are a group to within a pixel.

    >>> len(all_placements((224, 224))), len(all_placements((224, 300)))
    (71, 35)
    """
    turns, thirds = range(4) if size[0] == size[1] else (0, 2), (0.0, 1 / 3, 2 / 3)
    found = [(t, f, down, across) for t in turns for f in (False, True) for down in thirds for across in thirds]
    return found[1:]


def placed(maps: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Place maps ``(N, H, W)``.

    >>> placed(torch.tensor([[[1, 2, 3]]]), (0, False, 0.0, 1 / 3))
    tensor([[[3, 1, 2]]])
    """
    turns, flipped, down, across = placement
    found = torch.rot90(maps, turns, (1, 2))
    found = found.flip(2) if flipped else found
    return found.roll((round(down * found.shape[1]), round(across * found.shape[2])), (1, 2))
