"""Is a map faithful? It must find the evidence better than the same map laid elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain._utils.errors import MetricError
from explain.baselines import Mean
from explain.baselines.base import Baseline
from explain.checks.answers import Answer
from explain.checks.questions import Question
from explain.metrics.base import MetricInput, MetricResult, Score, undefined
from explain.metrics.faithfulness import share_counts
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import ScoreMetric, ScoreRequest, covered_by_rank


@dataclass(frozen=True)
class Faithful(Question, ScoreMetric):
    r"""Whether a map finds the evidence better than copies of it that are rolled, flipped and turned.

    What counts is insertion minus deletion,
    :math:`\frac{1}{|Q|}\sum_q f(\mathrm{top}_q) - f(x \setminus \mathrm{top}_q)`: the score with nothing but the share
    q of the photo that the map ranks highest, less that without it. A copy has the same values, as sparse and as
    blurred, in other places. The figure is the p-value of a permutation test, :math:`p = (1 + k) / (1 + n)`, where k of
    the n copies are at least as good. Less is better.

    Copies that lie where the map lies, such as the flips of a blob in the middle, count as well: ``parts`` has how much
    of its place each shares ("overlap"), 1 for all of it. To leave them out would let a map pass that lies anywhere.

    The copies are drawn from the group of all rolls by thirds of the height and width, with all flips and, of square
    photos, turns, so that a map that lies anywhere with equal chance passes with at most the chance ``level``.

    Args:
        copies: n, at most how many there are.
        percentiles: Q, in per cent.
        baseline: what takes the place of what is not shown.
        score: what is read: the target's own "logit", or "probability".
        level: the largest p-value that passes.
        sign: how values become places.
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
        counts = share_counts(data, self.percentiles)
        end, own = data.size[0] * data.size[1], data.ranks(self.sign, self.seed)
        found = []
        for place in [AS_IT_LIES, *self._places(data.size)]:
            ranks = laid(own, place)
            hidden, shown = [0] * len(counts), [end] * len(counts)
            found.append(
                ScoreRequest(covered_by_rank(ranks, self.baseline, counts + hidden, shown + counts), self.score)
            )
        return found

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        half = len(self.percentiles)
        each = torch.stack([found[:, :half].mean(1) - found[:, half:].mean(1) for found in scores], 1)
        better = (each[:, 1:] >= each[:, :1]).sum(1)
        copies = each.shape[1] - 1
        still = (data.lost(self.score, torch.cat(list(scores), 1)) == 0).all(1)
        value = undefined(self.name, data.maps.name, (1 + better.double()) / (1 + copies), still, STILL)
        parts = {"better": better, "own": each[:, 0], "copies": each[:, 1:], "flat": data.maps.flat}
        return MetricResult(value, parts={**parts, "overlap": self._overlap(data)})

    def _overlap(self, data: MetricInput) -> torch.Tensor:
        """How much of what a copy ranks highest the map ranks highest too ``(N, n)``, on average over the shares."""
        own = data.ranks(self.sign, self.seed)
        tops = [own < count for count in share_counts(data, self.percentiles)]
        found = []
        for place in self._places(data.size):
            shared = [(laid(top, place) & top).flatten(1).sum(1) / top.flatten(1).sum(1) for top in tops]
            found.append(torch.stack(shared).mean(0))
        return torch.stack(found, 1)

    def judge(self, result: MetricResult) -> Answer:
        figure, better = float(result.value[0]), int(result.parts["better"][0])
        copies = result.parts["copies"].shape[1]
        if result.parts["flat"][0]:
            return self.answer(1.0, False, "the map says the same everywhere")
        if math.isnan(figure):
            return self.answer(figure, None, STILL)
        most = int(self.level * (1 + copies) + 1e-9) - 1
        if most < 0:  # a photo that is no square has fewer places
            return self.answer(figure, None, f"{copies} places are too few for a p-value of {self.level:g}")
        words = f"{better} of {copies} copies of the map in other places explain the score at least as well"
        near = int(
            ((result.parts["copies"] >= result.parts["own"][:, None]) & (result.parts["overlap"] > 0.5))[0].sum()
        )
        beside = f"; {near} of these share more than half of the map's place" if near else ""
        return self.answer(figure, better <= most, f"{words} (at most {most} may){beside}")

    def _places(self, size: tuple[int, int]) -> list[Place]:
        """A draw from all places but the map's own."""
        known = places(size)
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        drawn = torch.randperm(len(known), generator=generator, device="cpu")[: self.copies]
        return [known[number] for number in drawn.tolist()]


STILL = "to cover the photo, or parts of it, does not change the score"

Place = tuple[int, bool, float, float]
"""How a map is laid: quarter turns, whether it is flipped, and how far it is rolled down and to the right, in shares of
the height and the width."""

AS_IT_LIES: Place = (0, False, 0.0, 0.0)
PARTS = 3  # rolls are by thirds


def places(size: tuple[int, int]) -> list[Place]:
    """All places but the map's own: rolls by thirds, flips, and turns, by quarters if the photo is square.

    With the map's own, they are a group, for sides that 3 divides: to lay a map twice is to lay it once in another of
    them. For other sides they are one to within a pixel.

    >>> len(places((224, 224))), len(places((224, 300)))
    (71, 35)
    """
    turns = range(4) if size[0] == size[1] else (0, 2)
    rolls = [part / PARTS for part in range(PARTS)]
    found = [(t, f, down, across) for t in turns for f in (False, True) for down in rolls for across in rolls]
    return [place for place in found if place != AS_IT_LIES]


def laid(maps: torch.Tensor, place: Place) -> torch.Tensor:
    """Lay maps ``(N, H, W)`` elsewhere.

    >>> laid(torch.tensor([[[1, 2, 3]]]), (0, False, 0.0, 1 / 3))
    tensor([[[3, 1, 2]]])
    """
    turns, flipped, down, across = place
    found = torch.rot90(maps, turns, (1, 2))
    found = found.flip(2) if flipped else found
    return found.roll((round(down * found.shape[1]), round(across * found.shape[2])), (1, 2))
