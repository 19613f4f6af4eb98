"""Faithfulness by curves over regions: squares of a grid, or superpixels, covered one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain.baselines import Mean, Noise, Zero
from explain.baselines.base import Baseline
from explain.metrics.base import MetricInput, MetricResult, Score
from explain.metrics.faithfulness import FAITHFUL, by_original
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import ScoreMetric, ScoreRequest, covered_by_rank
from explain.metrics.rankings import area, grid_regions, region_ranks, steps_of
from explain.metrics.registry import register
from explain.metrics.superpixels import superpixels


class _GridCurve(ScoreMetric):
    """The curve of the scores while squares are covered in the order of the map's sums."""

    side: int
    steps: int
    baseline: Baseline
    score: Score
    sign: Sign
    seed: int

    units = FAITHFUL
    minimums: ClassVar = {"side": 1, "steps": 1}

    def squares(self, data: MetricInput) -> int:
        """How many squares a photo has."""
        height, width = (-(-length // self.side) for length in data.size)
        return height * width

    def counts(self, data: MetricInput) -> list[int]:
        """How many squares are covered at each step."""
        raise NotImplementedError

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        regions = grid_regions(data.size, self.side, data.images)
        ranks, counts = region_ranks(data.maps.of_places(self.sign), regions, self.seed), self.counts(data)
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, [0] * len(counts), counts), self.score)]


@register
@dataclass(frozen=True)
class RegionPerturbation(_GridCurve):
    r"""The area over the MoRF perturbation curve (AOPC): what the score loses while squares are covered.

    :math:`\mathrm{AOPC} = \frac{1}{L+1}\sum_{k=0}^{L} \bigl(f(x^{(0)}) - f(x^{(k)})\bigr)`, the square with the largest
    sum of the map first. More is better.

    Args:
        side: of the squares in pixels; the paper's are 9 × 9 at 224 pixels.
        steps: L, or as many as there are squares.
        baseline: noise as in the paper, which is here normal with the photo's own mean and deviation.
        score, sign, seed: as for `explain.metrics.Deletion`.

    Samek et al., "Evaluating the Visualization of What a Deep Neural Network Has Learned", TNNLS 2017.

    >>> RegionPerturbation(side=4).steps
    100
    """

    side: int = 9
    steps: int = 100
    baseline: Baseline = field(default_factory=Noise)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    name = "regionperturbation"
    about = "what the probability loses on average while squares are covered, largest first (AOPC)"
    paper = "Samek et al., TNNLS 2017"
    better = "more"

    def counts(self, data: MetricInput) -> list[int]:
        return list(range(min(self.steps, self.squares(data)) + 1))

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        curve = scores[0][:, :1] - scores[0]
        return MetricResult(curve.mean(1), scores[0], torch.tensor(self.counts(data)) / self.squares(data))


@register
@dataclass(frozen=True)
class Selectivity(_GridCurve):
    """The area under the score's curve while all squares of the photo are covered, the largest sum of the map first.

    The formula is that of `explain.metrics.Deletion`, over the share of the squares. Less is better.

    Args:
        side: of the squares in pixels.
        steps: in how many steps all of them are covered, or as many as there are squares.
        baseline, score, sign, seed: as for `explain.metrics.Deletion`.

    Montavon et al., "Methods for interpreting and understanding deep neural networks", DSP 2018.

    >>> Selectivity(side=4).better
    'less'
    """

    side: int = 8
    steps: int = 64
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    name = "selectivity"
    about = "area under the probability while squares are covered, largest first"
    paper = "Montavon et al., DSP 2018"
    better = "less"

    def counts(self, data: MetricInput) -> list[int]:
        return steps_of(self.squares(data), self.steps)

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        counts = self.counts(data)
        return MetricResult(area(scores[0], counts), scores[0], torch.tensor(counts) / counts[-1])


@register
@dataclass(frozen=True)
class IROF(ScoreMetric):
    r"""Iterative removal of features: the area over the curve of the score's share that is left, over superpixels.

    :math:`1 - \mathrm{AUC}\bigl(p_k / p_0\bigr)`, where the first k superpixels by the mean of the map in each are
    covered. More is better. Not defined where :math:`p_0` is next to nothing.

    Args:
        segments: about how many superpixels there are, see `explain.metrics.superpixels`.
        baseline: the photo's mean colour, as in the paper.
        score, sign, seed: as for `explain.metrics.Deletion`.

    Rieger and Hansen, "IROF: a low resource evaluation metric for explanation methods", 2020 (arXiv:2003.08747).

    >>> IROF().better
    'more'
    """

    segments: int = 100
    baseline: Baseline = field(default_factory=Mean)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    name = "irof"
    about = "area over the share of the probability that is left while superpixels are covered"
    paper = "Rieger and Hansen, 2020"
    units = "mean share of the probability"
    better = "more"
    minimums: ClassVar = {"segments": 2}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        regions = superpixels(data.images, self.segments)
        ranks = region_ranks(data.maps.of_places(self.sign), regions, self.seed, mean=True)
        most = regions.flatten(1).amax(1) + 1
        # each photo has its own number of pieces; the curves of those with fewer stay at their end
        counts = torch.arange(int(most.max()) + 1, device=regions.device).expand(len(regions), -1)
        ends = torch.minimum(counts, most[:, None])
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, torch.zeros_like(ends), ends), self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        first = scores[0][:, :1]
        curve = scores[0] / torch.where(first == 0, 1, first)
        most = superpixels(data.images, self.segments).flatten(1).amax(1).tolist()
        areas = [area(row[None, : last + 2], range(last + 2)) for row, last in zip(curve, most, strict=True)]
        return MetricResult(
            by_original(self.name, data, self.score, 1 - torch.cat(areas), first[:, 0], scores[0]), curve
        )
