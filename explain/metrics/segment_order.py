"""Faithfulness by curves over regions: squares of a grid, or superpixels, covered one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain.baselines import Baseline, Mean, Noise, Zero
from explain.metrics.base import Better, MetricInput, MetricResult, Reading, check
from explain.metrics.faithfulness import FAITHFUL, by_original
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import ScoreRequest, covered_by_rank
from explain.metrics.rankings import area, grid_regions, region_ranks, steps_of
from explain.metrics.superpixels import superpixels


@dataclass(frozen=True)
class RegionPerturbation:
    r"""The area over the MoRF perturbation curve (AOPC): what the score loses while squares are covered.

    :math:`\mathrm{AOPC} = \frac{1}{L+1}\sum_{k=0}^{L} \bigl(f(x^{(0)}) - f(x^{(k)})\bigr)`, the square with the largest
    sum of the map first. More is better.

    Args:
        side: of the squares in pixels; the paper's are 9 × 9 at 224 pixels.
        steps: L, or as many as there are squares.
        baseline: noise as in the paper, which is here normal with the photo's own mean and deviation.
        reading, sign, seed: as for `explain.metrics.Deletion`.

    Samek et al., "Evaluating the Visualization of What a Deep Neural Network Has Learned", TNNLS 2017.

    >>> RegionPerturbation(side=4).steps
    100
    """

    side: int = 9
    steps: int = 100
    baseline: Baseline = field(default_factory=Noise)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    name: ClassVar[str] = "regionperturbation"
    about: ClassVar[str] = "what the probability loses on average while squares are covered, largest first (AOPC)"
    paper: ClassVar[str] = "Samek et al., TNNLS 2017"
    units: ClassVar[str] = FAITHFUL
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self, side=1, steps=1)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        regions = grid_regions(case.size, self.side, case.images)
        ranks = region_ranks(case.maps.of_places(self.sign), regions, self.seed)
        counts = list(range(min(self.steps, int(regions.max()) + 1) + 1))
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, [0] * len(counts), counts), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        curve = scores[0][:, :1] - scores[0]
        squares = int(grid_regions(case.size, self.side, case.images[:1]).max()) + 1
        return MetricResult(curve.mean(1), scores[0], torch.arange(curve.shape[1]) / squares)


@dataclass(frozen=True)
class Selectivity:
    """The area under the score's curve while all squares of the photo are covered, the largest sum of the map first.

    The formula is that of `explain.metrics.Deletion`, over the share of the squares. Less is better.

    Args:
        side: of the squares in pixels.
        steps: in how many steps all of them are covered, or as many as there are squares.
        baseline, reading, sign, seed: as for `explain.metrics.Deletion`.

    Montavon et al., "Methods for interpreting and understanding deep neural networks", DSP 2018.

    >>> Selectivity(side=4).better
    'less'
    """

    side: int = 8
    steps: int = 64
    baseline: Baseline = field(default_factory=Zero)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    name: ClassVar[str] = "selectivity"
    about: ClassVar[str] = "area under the probability while squares are covered, largest first"
    paper: ClassVar[str] = "Montavon et al., DSP 2018"
    units: ClassVar[str] = FAITHFUL
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self, side=1, steps=1)

    def _counts(self, case: MetricInput) -> list[int]:
        return steps_of(int(grid_regions(case.size, self.side, case.images[:1]).max()) + 1, self.steps)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        regions = grid_regions(case.size, self.side, case.images)
        ranks = region_ranks(case.maps.of_places(self.sign), regions, self.seed)
        counts = self._counts(case)
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, [0] * len(counts), counts), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        counts = self._counts(case)
        return MetricResult(area(scores[0], counts), scores[0], torch.tensor(counts) / counts[-1])


@dataclass(frozen=True)
class IROF:
    r"""Iterative removal of features: the area over the curve of the score's share that is left, over superpixels.

    :math:`1 - \mathrm{AUC}\bigl(p_k / p_0\bigr)`, where the first k superpixels by the mean of the map in each are
    covered. More is better. Not defined where :math:`p_0` is next to nothing.

    Args:
        segments: about how many superpixels there are, see `explain.metrics.superpixels`.
        baseline: the photo's mean colour, as in the paper.
        reading, sign, seed: as for `explain.metrics.Deletion`.

    Rieger and Hansen, "IROF: a low resource evaluation metric for explanation methods", 2020 (arXiv:2003.08747).

    >>> IROF().better
    'more'
    """

    segments: int = 100
    baseline: Baseline = field(default_factory=Mean)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    name: ClassVar[str] = "irof"
    about: ClassVar[str] = "area over the share of the probability that is left while superpixels are covered"
    paper: ClassVar[str] = "Rieger and Hansen, 2020"
    units: ClassVar[str] = "mean share of the probability"
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self, segments=2)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        regions = superpixels(case.images, self.segments)
        ranks = region_ranks(case.maps.of_places(self.sign), regions, self.seed, mean=True)
        most = regions.flatten(1).amax(1) + 1
        # each photo has its own number of pieces; the curves of those with fewer stay at their end
        counts = torch.arange(int(most.max()) + 1, device=regions.device).expand(len(regions), -1)
        ends = torch.minimum(counts, most[:, None])
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, torch.zeros_like(ends), ends), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        first = scores[0][:, :1]
        curve = scores[0] / torch.where(first == 0, 1, first)
        most = superpixels(case.images, self.segments).flatten(1).amax(1).tolist()
        areas = [area(row[None, : last + 2], range(last + 2)) for row, last in zip(curve, most, strict=True)]
        return MetricResult(
            by_original(self.name, case, self.reading, 1 - torch.cat(areas), first[:, 0], scores[0]), curve
        )
