"""Faithfulness by curves over regions: squares of a grid, or superpixels (SLIC), covered one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain.baselines import Mean, Noise, Zero
from explain.baselines.base import Baseline
from explain.metrics.base import MetricInput, MetricResult, Score, register
from explain.metrics.faithfulness import PROBABILITY, by_original
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import ScoreMetric, ScoreRequest, cover_ranks
from explain.metrics.rankings import area, grid_regions, region_ranks, steps_of


@dataclass(frozen=True)
class _GridCurve(ScoreMetric):
    """The curve of the scores while squares are covered in the order of the map's sums."""

    side: int = 8
    steps: int = 64
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    units = PROBABILITY
    minimums: ClassVar = {"side": 1, "steps": 1}

    def squares(self, data: MetricInput) -> int:
        """How many squares a photo has."""
        return -(-data.size[0] // self.side) * -(-data.size[1] // self.side)

    def counts(self, squares: int) -> list[int]:
        """How many squares are covered at each step."""
        return steps_of(squares, self.steps)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        regions = grid_regions(data.size, self.side, data.images)
        ranks = region_ranks(data.maps.per_pixel(self.sign), regions, self.seed)
        counts = self.counts(self.squares(data))
        return [cover_ranks(ranks, [0] * len(counts), counts, self.baseline, self.score)]


@register
@dataclass(frozen=True)
class RegionPerturbation(_GridCurve):
    r"""The area over the MoRF perturbation curve (AOPC): the loss of score while squares are covered.

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

    name = "regionperturbation"
    about = "mean drop of the probability while squares are covered, largest first (AOPC)"
    paper = "Samek et al., TNNLS 2017"

    def counts(self, squares: int) -> list[int]:
        return list(range(min(self.steps, squares) + 1))

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        curve, squares = scores[0][:, :1] - scores[0], self.squares(data)
        return MetricResult(curve.mean(1), scores[0], torch.tensor(self.counts(squares)) / squares)


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

    name = "selectivity"
    about = "area under the probability while squares are covered, largest first"
    paper = "Montavon et al., DSP 2018"
    better = "less"

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        counts = self.counts(self.squares(data))
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
    about = "area over the curve of the probability while superpixels are covered"
    paper = "Rieger and Hansen, 2020"
    units = "mean share of the probability"
    minimums: ClassVar = {"segments": 2}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        regions = superpixels(data.images, self.segments)
        ranks = region_ranks(data.maps.per_pixel(self.sign), regions, self.seed, mean=True)
        most = regions.flatten(1).amax(1) + 1
        # Photos have different numbers of superpixels; the curves of those with fewer stay at their end.
        counts = torch.arange(int(most.max()) + 1, device=regions.device).expand(len(regions), -1)
        ends = torch.minimum(counts, most[:, None])
        return [cover_ranks(ranks, torch.zeros_like(ends), ends, self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        first = scores[0][:, :1]
        curve = scores[0] / torch.where(first == 0, 1, first)
        most = superpixels(data.images, self.segments).flatten(1).amax(1).tolist()
        areas = [area(row[None, : last + 2], range(last + 2)) for row, last in zip(curve, most, strict=True)]
        value = by_original(self, self.score, data, 1 - torch.cat(areas), first[:, 0], scores[0])
        return MetricResult(value, curve)


def superpixels(images: torch.Tensor, count: int, compactness: float = 1.0, rounds: int = 5) -> torch.Tensor:
    """Cut photos into about ``count`` pieces of like colour: ``(N, H, W)`` whole numbers from 0, without gaps.

    Every pixel goes to the nearest of the nine centres around it, in colour and position together; then each centre
    moves to the mean of its pixels, ``rounds`` times. Colours are measured in each photo's own deviation, and
    positions in widths of a piece times ``compactness``. A piece need not hang together.

    Achanta et al., "SLIC Superpixels Compared to State-of-the-Art Superpixel Methods", TPAMI 2012; the colours here are
    those of the model's input.

    >>> two = torch.zeros(1, 3, 4, 8)
    >>> two[..., 4:] = 1.0
    >>> superpixels(two, 2)[0, 0]
    tensor([0, 0, 0, 0, 1, 1, 1, 1])
    """
    return torch.stack([_of_photo(image.float(), count, compactness, rounds) for image in images])


def _of_photo(photo: torch.Tensor, count: int, compactness: float, rounds: int) -> torch.Tensor:
    height, width = photo.shape[1:]
    side = max(1.0, (height * width / count) ** 0.5)
    down, across = max(1, round(height / side)), max(1, round(width / side))
    rows, columns = (torch.arange(length, device=photo.device) for length in (height, width))
    own = (rows * down // height)[:, None], (columns * across // width)[None]
    centred = photo - photo.mean((1, 2), keepdim=True)
    colours = centred / centred.pow(2).mean().sqrt().clamp(min=torch.finfo(photo.dtype).tiny)
    positions = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).to(photo) * (compactness / side)
    features = torch.cat([colours, positions]).flatten(1)  # (F, H * W)
    labels = (own[0] * across + own[1]).flatten()
    for _ in range(rounds):
        labels = _nearest(features, _centres(features, labels, down * across), own, (down, across))
    return torch.unique(labels, return_inverse=True)[1].reshape(height, width)  # type: ignore[no-any-return]


def _centres(features: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of each piece's pixels ``(F, count)``; one without pixels is out of reach."""
    sums = features.new_zeros(len(features), count).index_add_(1, labels, features)
    sizes = torch.bincount(labels, minlength=count)
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), 1e6)


def _nearest(
    features: torch.Tensor, centres: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor], cells: tuple[int, int]
) -> torch.Tensor:
    best = features.new_full((features.shape[1],), torch.inf)
    labels = torch.zeros_like(best, dtype=torch.long)
    for below in (-1, 0, 1):
        for right in (-1, 0, 1):
            row, column = (own[0] + below).clamp(0, cells[0] - 1), (own[1] + right).clamp(0, cells[1] - 1)
            candidate = (row * cells[1] + column).flatten()
            distance = (features - centres[:, candidate]).pow(2).sum(0)
            labels = torch.where(distance < best, candidate, labels)
            best = torch.minimum(best, distance)
    return labels
