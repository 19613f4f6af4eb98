"""Faithfulness by sums: do the values of pixels add up to the loss of score without them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain._utils.random_numbers import normal
from explain.baselines import Noise, Zero
from explain.baselines.base import Baseline
from explain.metrics.base import Metric, MetricInput, MetricResult, Score, register
from explain.metrics.faithfulness import share_counts
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import Covers, ScoreMetric, ScoreRequest, cover, cover_ranks
from explain.metrics.rankings import by_region, correlation, grid_regions, mid_ranks, steps_of

CORRELATION = "correlation"
VARIES = "the map's sums or the scores do not vary"


@dataclass(frozen=True, eq=False)
class RandomSubsets:
    """Random subsets of so many ``pixels``, the same ones for every image and method."""

    size: tuple[int, int]
    pixels: int
    samples: int
    seed: int

    def subset(self, sample: int) -> torch.Tensor:
        """Which pixels ``(H, W)`` the subset holds."""
        total = self.size[0] * self.size[1]
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[torch.randperm(total, generator=_generator(self.seed, sample), device="cpu")[: self.pixels]] = True
        return chosen.reshape(self.size)

    def sums(self, maps: torch.Tensor) -> torch.Tensor:
        """What maps ``(N, H, W)`` add up to over each subset: ``(N, samples)``."""
        return torch.stack([maps[:, self.subset(sample).to(maps.device)].sum(1) for sample in range(self.samples)], 1)

    def request(self, images: int, baseline: Baseline, score: Score) -> ScoreRequest:
        """Request photos with each subset covered."""
        keys = [(baseline, "subset", self.seed, self.pixels, sample) for sample in range(self.samples)]

        def keep(owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return torch.stack([~self.subset(sample) for sample in numbers.tolist()])

        return cover([keys] * images, keep, baseline, score)


def _generator(seed: int, sample: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed((seed * 1_000_003 + sample) % 2**63)


@register
@dataclass(frozen=True)
class FaithfulnessCorrelation(ScoreMetric):
    r"""How what subsets of pixels add up to goes with what the score loses without them.

    Pearson's :math:`\mathrm{corr}_S\bigl(\sum_{i \in S} a_i,\; f(x) - f(x_{\setminus S})\bigr)` over random subsets.
    More is better. Values for each pixel and channel are added up over the channels.

    Args:
        samples: the number of subsets.
        share: of the pixels in each, in per cent.
        baseline: zeros, as in the paper.
        score: the target's own "logit" (default), of which contributions are parts, or "probability".
        seed: of the subsets, which are the same for every image and method.

    Bhatt et al., "Evaluating and Aggregating Feature-based Model Explanations", IJCAI 2020.

    >>> import explain, torch
    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).double()
    >>> x = torch.rand(1, 3, 4, 4).double()
    >>> table = explain.evaluate(linear, x, "inputxgradient", FaithfulnessCorrelation(samples=9, share=20))
    >>> round(table["inputxgradient"]["faithfulnesscorrelation"].item(), 6)
    1.0
    """

    samples: int = 100
    share: float = 5
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"
    seed: int = 0

    name = "faithfulnesscorrelation"
    about = "correlation of random subsets' sums with the drop of the score without them"
    paper = "Bhatt et al., IJCAI 2020"
    units = CORRELATION
    minimums: ClassVar = {"samples": 2}
    percentages = ("share",)

    def _subsets(self, data: MetricInput) -> RandomSubsets:
        return RandomSubsets(data.size, share_counts(data, [self.share])[0], self.samples, self.seed)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [self._subsets(data).request(len(data), self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        return _correlated(
            self, data, self._subsets(data).sums(data.maps.contributions), data.loss(self.score, scores[0])
        )


@register
@dataclass(frozen=True)
class SensitivityN(ScoreMetric):
    r"""Faithfulness correlation for subsets of several sizes n, on average.

    :math:`\frac{1}{|n|}\sum_n \mathrm{corr}_{|S|=n}\bigl(\sum_{i \in S} a_i,\; f(x) - f(x_{\setminus S})\bigr)`; the
    ``curve`` has each size's. More is better.

    Args:
        shares: the sizes, in per cent of the pixels.
        samples: the number of subsets of each size.
        baseline, score, seed: as for `FaithfulnessCorrelation`.

    Ancona et al., "Towards better understanding of gradient-based attribution methods for Deep Neural Networks",
    ICLR 2018.

    >>> SensitivityN(shares=(10,)).shares
    (10,)
    """

    shares: tuple[float, ...] = (1, 5, 20, 50)
    samples: int = 30
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"
    seed: int = 0

    name = "sensitivityn"
    about = "faithfulness correlation on average over subsets of several sizes"
    paper = "Ancona et al., ICLR 2018"
    units = CORRELATION
    minimums: ClassVar = {"samples": 2}
    percentages = ("shares",)

    def _subsets(self, data: MetricInput) -> list[RandomSubsets]:
        counts = share_counts(data, self.shares)
        return [RandomSubsets(data.size, count, self.samples, self.seed) for count in counts]

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [each.request(len(data), self.baseline, self.score) for each in self._subsets(data)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        maps = data.maps.contributions
        found = [
            correlation(each.sums(maps), data.loss(self.score, of_size))
            for each, of_size in zip(self._subsets(data), scores, strict=True)
        ]
        curve = torch.stack(found, 1)
        return MetricResult(_defined(self, data, curve.mean(1)), curve, torch.tensor(self.shares) / 100)


@register
@dataclass(frozen=True)
class FaithfulnessEstimate(ScoreMetric):
    r"""How the values of groups of pixels go with what the score loses without each group.

    The pixels are cut into groups in the order of the map. Pearson's
    :math:`\mathrm{corr}_g\bigl(\sum_{i \in g} a_i,\; f(x) - f(x_{\setminus g})\bigr)`. More is better.

    Args:
        groups: how many groups, of one size but for rounding.
        baseline, score: as for `FaithfulnessCorrelation`.
        seed: of the order of equal values.

    Alvarez-Melis and Jaakkola, "Towards Robust Interpretability with Self-Explaining Neural Networks", NeurIPS 2018.

    >>> FaithfulnessEstimate(groups=10).better
    'more'
    """

    groups: int = 64
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"
    seed: int = 0

    name = "faithfulnessestimate"
    about = "correlation of groups' sums, in the map's order, with the drop of the score without each"
    paper = "Alvarez-Melis and Jaakkola, NeurIPS 2018"
    units = CORRELATION
    minimums: ClassVar = {"groups": 2}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        ends = steps_of(data.pixels, self.groups)
        return [cover_ranks(data.ranks("signed", self.seed), ends[:-1], ends[1:], self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        return _correlated(
            self, data, _group_sums(data, "signed", self.seed, self.groups), data.loss(self.score, scores[0])
        )


@register
@dataclass(frozen=True)
class Monotonicity(ScoreMetric):
    """Whether the score never falls while pixels are shown on a covered photo, the least relevant first.

    1 where it never falls, else 0; ``parts`` has the "share" of the steps in which it does not. More is better.

    Args:
        steps: in how many steps all pixels are shown.
        baseline, score, sign, seed: as for `explain.metrics.Deletion`.

    Arya et al., "One Explanation Does Not Fit All", 2019 (arXiv:1909.03012).

    >>> Monotonicity(steps=8).better
    'more'
    """

    steps: int = 64
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    name = "monotonicity"
    about = "whether the probability never falls while pixels are shown, the least relevant first"
    paper = "Arya et al., 2019"
    units = "0 or 1"
    minimums: ClassVar = {"steps": 1}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        counts = steps_of(data.pixels, self.steps)[::-1]
        ranks = data.ranks(self.sign, self.seed)
        return [cover_ranks(ranks, [0] * len(counts), counts, self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        kept = (scores[0].diff(dim=1) >= 0).to(scores[0])
        shares = 1 - torch.tensor(steps_of(data.pixels, self.steps)[::-1]) / data.pixels
        return MetricResult(kept.amin(1), scores[0], shares, {"share": kept.mean(1)})


@register
@dataclass(frozen=True)
class MonotonicityCorrelation(ScoreMetric):
    r"""Whether groups of pixels with larger values are those whose noise changes the score more.

    Spearman's
    :math:`\mathrm{corr}_g\bigl(|\sum_{i \in g} a_i|,\; \mathbb E[(f(x) - f(x_{g \sim \text{noise}}))^2]\bigr)`
    over groups in the order of the map's magnitude. More is better.

    Args:
        groups: how many groups.
        samples: of the noise, which covers a group alone: `explain.baselines.Noise` with the seeds from ``seed`` on.
        score: as for `FaithfulnessCorrelation`.
        seed: of the noise, and of the order of equal values.

    Nguyen and Martínez, "On quantitative aspects of model interpretability", 2020 (arXiv:2007.07584).

    >>> MonotonicityCorrelation(groups=4).samples
    8
    """

    groups: int = 32
    samples: int = 8
    score: Score = "logit"
    seed: int = 0

    name = "monotonicitycorrelation"
    about = "rank correlation of groups' magnitudes with how much noise in each changes the score"
    paper = "Nguyen and Martínez, 2020"
    units = "rank correlation"
    minimums: ClassVar = {"groups": 2, "samples": 1}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        ranks, ends = data.ranks("absolute", self.seed), steps_of(data.pixels, self.groups)
        baselines = [Noise(self.seed + sample) for sample in range(self.samples)]
        return [cover_ranks(ranks, ends[:-1], ends[1:], baseline, self.score) for baseline in baselines]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        change = torch.stack([data.loss(self.score, sample) ** 2 for sample in scores]).mean(0)
        sums = _group_sums(data, "absolute", self.seed, self.groups).abs()
        return _correlated(self, data, mid_ranks(sums), mid_ranks(change))


@register
@dataclass(frozen=True)
class NonSensitivity(ScoreMetric):
    """The share of squares that the map and the model disagree about: one says that they are nothing, the other not.

    A square is nothing to the map where its magnitudes add up to no more than ``threshold`` of the largest square's,
    and nothing to the model where the score changes by no more than ``threshold`` of the largest change. Less is
    better. To a map of zeros, all squares are nothing, and so they are to a model that none of them changes. (The paper
    asks this of every pixel.)

    Args:
        side: of the squares in pixels.
        threshold: what counts as nothing.
        baseline, score: as for `FaithfulnessCorrelation`.

    Nguyen and Martínez, "On quantitative aspects of model interpretability", 2020 (arXiv:2007.07584).

    >>> NonSensitivity(side=4).threshold
    0.001
    """

    side: int = 16
    threshold: float = 1e-3
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"

    name = "nonsensitivity"
    about = "share of squares that are zero in the map but matter to the model, or the reverse"
    paper = "Nguyen and Martínez, 2020"
    units = "share of squares"
    better = "less"
    minimums: ClassVar = {"side": 1, "threshold": 0}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        regions = grid_regions(data.size, self.side, data.images)
        squares = list(range(int(regions.max()) + 1))
        return [cover_ranks(regions, squares, [square + 1 for square in squares], self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        change = data.loss(self.score, scores[0]).abs()
        regions = grid_regions(data.size, self.side, data.images)
        sums = by_region(data.maps.contributions.abs(), regions)
        nothing = [each <= self.threshold * each.amax(1, keepdim=True) for each in (sums, change)]
        return MetricResult((nothing[0] != nothing[1]).to(scores[0]).mean(1))


def _group_sums(data: MetricInput, sign: Sign, seed: int, groups: int) -> torch.Tensor:
    """What the maps add up to over each group of pixels, in the order of their ranks: ``(N, groups)``."""
    ranks = data.ranks(sign, seed)
    ends = torch.tensor(steps_of(data.pixels, groups)[1:], device=ranks.device)
    return by_region(data.maps.contributions, torch.bucketize(ranks, ends, right=True))


def _correlated(metric: Metric, data: MetricInput, sums: torch.Tensor, loss: torch.Tensor) -> MetricResult:
    return MetricResult(_defined(metric, data, correlation(sums, loss)))


def _defined(metric: Metric, data: MetricInput, value: torch.Tensor) -> torch.Tensor:
    return data.undefined(metric, value, value.isnan(), VARIES).to(data.target_score.dtype)


@register
@dataclass(frozen=True)
class Infidelity(ScoreMetric):
    r"""The mean squared error of the map as a prediction of the loss of score by noise.

    :math:`\mathbb E_I\bigl[(I^\top a - (f(x) - f(x - I)))^2\bigr]`, where the noise I is normal, and the same for the
    channels of a pixel, so that it is defined for maps without channels too: a is summed over them. Less is better.

    Args:
        samples: of the noise.
        sigma: its standard deviation in the units of the input.
        scaled: multiply the map by the factor that serves it best,
            :math:`\beta = \mathbb E[I^\top a\,\Delta]/\mathbb E[(I^\top a)^2]`, as maps without units need it. In
            ``parts``, "plain" and "scaled" are both there. A map of zeros predicts no change at all, in both.
        score: the target's own "logit", or "probability".
        seed: of the noise.

    Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019.

    >>> import explain, torch
    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).double()
    >>> gradient = explain.methods.Saliency(absolute=False)
    >>> table = explain.evaluate(linear, torch.rand(1, 3, 4, 4).double(), gradient, Infidelity(samples=9))
    >>> table["saliency"]["infidelity"].item() < 1e-12
    True
    """

    samples: int = 64
    sigma: float = 0.2
    scaled: bool = True
    score: Score = "logit"
    seed: int = 0

    name = "infidelity"
    about = "mean squared error of the change of the score that the map predicts for noise"
    paper = "Yeh et al., NeurIPS 2019"
    units = "square of the score"
    better = "less"
    minimums: ClassVar = {"samples": 1, "sigma": 1e-12}

    def _noise(self, size: tuple[int, int], sample: int) -> torch.Tensor:
        """``(H, W)`` float64; each sample is drawn for itself, so that none has to be stored."""
        return self.sigma * normal(size, _generator(self.seed, sample)).double()

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        keys = [("noisy", self.sigma, self.seed, sample) for sample in range(self.samples)]

        def build(images: torch.Tensor, covers: Covers, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            drawn = torch.stack([self._noise(data.size, sample) for sample in numbers.tolist()])
            return images[owners] - drawn[:, None].to(images)

        return [ScoreRequest([keys] * len(data), build, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        maps = data.maps.contributions.flatten(1)
        drawn = (self._noise(data.size, sample).flatten().to(maps) for sample in range(self.samples))
        predicted = torch.stack([maps @ noise for noise in drawn], 1)
        loss = data.original(self.score)[:, None] - scores[0]
        squares = predicted.square().mean(1)
        factor = torch.where(squares > 0, (predicted * loss).mean(1) / torch.where(squares > 0, squares, 1), 0)
        plain = (predicted - loss).square().mean(1)
        best = (factor[:, None] * predicted - loss).square().mean(1)
        value = (best if self.scaled else plain).to(data.target_score.dtype)
        return MetricResult(value, parts={"plain": plain, "scaled": best, "factor": factor})
