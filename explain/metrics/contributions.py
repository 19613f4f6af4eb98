"""Do the values of a map add up? Correlations of sums with the loss of score, infidelity,
completeness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from explain._utils.random_numbers import normal, permutation, seeded
from explain.baselines import Noise, Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.engine.perturbations import one_by_one, samples_of
from explain.methods.base import ratio
from explain.methods.masking import MaskedInputs, Score
from explain.metrics import base
from explain.metrics.base import (
    Metric,
    MetricInput,
    MetricResult,
    ScoreMetric,
    ScoreRequest,
    register,
)
from explain.metrics.faithfulness import least, share_counts
from explain.metrics.maps import Sign, by_region, correlation, grid_regions, mid_ranks, steps_of

CORRELATION = "correlation"
VARIES = "the map's sums or the scores do not vary"


@dataclass(frozen=True)
class RandomSubsets(MaskedInputs):
    """Images of which random subsets of so many ``pixels`` are covered, the same ones for every
    image."""

    baseline: Baseline
    samples: int
    pixels: int
    seed: int

    covered_by = "random subsets of the pixels"

    def subset(self, size: tuple[int, ...], sample: int) -> torch.Tensor:
        """Which pixels the subset number ``sample`` holds: truth values ``(H, W)``, from the seed
        alone. The metric adds the map up over the same pixels."""
        order = permutation(math.prod(size), self.seed * 1_000_003 + sample)
        return order.argsort().reshape(size) < self.pixels

    def masks(self, evidence: Evidence) -> PerturbedRows:
        """The masks ``(b, 1, H, W)``: 0 in the subset of the image, whose pixels are covered, 1
        elsewhere; the same for every image.
        """
        x = evidence.inputs

        without = one_by_one(lambda image, sample: ~self.subset(evidence.size, sample)[None])
        return samples_of([self.samples] * len(x), x.device, without)


class _SubsetCorrelation(ScoreMetric):
    """The correlation of random subsets' sums with the loss of score without them, for subsets of
    some sizes. The subsets are the same ones for every image and method.
    """

    samples: int
    baseline: Baseline
    score: Score
    seed: int

    units = CORRELATION
    minimums: ClassVar = {"samples": 2}

    @property
    def sizes(self) -> tuple[float, ...]:
        """The sizes of subsets, in per cent of the pixels."""
        raise NotImplementedError

    def _subsets(self, data: MetricInput) -> list[RandomSubsets]:
        """The perturbations that cover random subsets, one for each of `sizes`; `requests` and
        `__call__` go through them in this order.
        """
        counts = share_counts(data, self.sizes)
        return [RandomSubsets(self.baseline, self.samples, pixels, self.seed) for pixels in counts]

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(subsets, self.score) for subsets in self._subsets(data)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The correlation ``(N,)`` of the map's sums over subsets with the loss of score without
        them, on average over the sizes of the curve; NaN where either does not vary.
        """
        maps = data.maps.contributions
        correlations = []
        for subsets, size_scores in zip(self._subsets(data), scores, strict=True):
            # drawn again, one at a time: all of them would need much memory
            covered_pixels = (
                subsets.subset(data.size, sample).to(maps.device) for sample in range(self.samples)
            )
            sums = torch.stack([maps[:, pixels].sum(1) for pixels in covered_pixels], 1)
            correlations.append(correlation(sums, data.loss(self.score, size_scores)))
        curve = torch.stack(correlations, 1)
        value = _warn_of_nan(self, data, curve.mean(1))
        return MetricResult(value, curve, torch.tensor(self.sizes) / 100)


@register
class FaithfulnessCorrelation(_SubsetCorrelation):
    r"""Correlation of random subsets' sums with the drop of the score without them.

    Pearson's :math:`\mathrm{corr}_S\bigl(\sum_{i \in S} a_i,\; f(x) - f(x_{\setminus S})\bigr)`
    over random subsets. More is better. Values for each pixel and channel are added up over the
    channels.

    Args:
        samples: the number of subsets.
        share: of the pixels in each, in per cent.
        baseline: zeros, as in the paper.
        score: the target's own "logit" (default), of which contributions are parts, or
            "probability".
        seed: of the subsets, which are the same for every image and method.

    Bhatt et al., "Evaluating and Aggregating Feature-based Model Explanations", IJCAI 2020.

    >>> import explain, torch
    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).double()
    >>> x = torch.rand(1, 3, 4, 4).double()
    >>> table = explain.evaluate(
    ...     linear, x, "inputxgradient", FaithfulnessCorrelation(samples=9, share=20)
    ... )
    >>> round(table["inputxgradient"]["faithfulnesscorrelation"].item(), 6)
    1.0
    """

    samples: int = 100
    share: float = 5
    baseline: Baseline = Zero()
    score: Score = "logit"
    seed: int = 0

    below = {"share": 100}

    @property
    def sizes(self) -> tuple[float, ...]:
        return (self.share,)


@register
class SensitivityN(_SubsetCorrelation):
    r"""Faithfulness correlation on average over subsets of several sizes.

    :math:`\frac{1}{|n|}\sum_n \mathrm{corr}_{|S|=n}\bigl(\sum_{i \in S} a_i,\; f(x) -
    f(x_{\setminus S})\bigr)`; the ``curve`` has each size's. More is better.

    Args:
        shares: the sizes, in per cent of the pixels.
        samples: the number of subsets of each size.
        baseline, score, seed: as for `FaithfulnessCorrelation`.

    Ancona et al., "Towards better understanding of gradient-based attribution methods for Deep
    Neural Networks", ICLR 2018.

    >>> SensitivityN(shares=(10,)).shares
    (10,)
    """

    shares: tuple[float, ...] = (1, 5, 20, 50)
    samples: int = 30
    baseline: Baseline = Zero()
    score: Score = "logit"
    seed: int = 0

    below = {"shares": 100}

    @property
    def sizes(self) -> tuple[float, ...]:
        return self.shares


class _GroupCorrelation(ScoreMetric):
    """A correlation over groups of pixels that neighbour in the map's order, by the ``order`` of
    its values."""

    groups: int
    score: Score
    seed: int

    order: ClassVar[Sign]

    def without_groups(self, data: MetricInput, baseline: Baseline) -> ScoreRequest:
        """The scores ``(N, groups)`` of the photos without one group each."""
        ranks = data.ranks(self.order, self.seed)
        ends = steps_of(data.pixels, self.groups)
        return base.cover_ranks(ranks, ends[:-1], ends[1:], baseline, self.score)

    def group_sums(self, data: MetricInput) -> torch.Tensor:
        """The sums ``(N, groups)`` of contributions over the groups."""
        ranks = data.ranks(self.order, self.seed)
        ends = torch.tensor(steps_of(data.pixels, self.groups)[1:], device=ranks.device)
        return by_region(data.maps.contributions, torch.bucketize(ranks, ends, right=True))


@register
class FaithfulnessEstimate(_GroupCorrelation):
    r"""Correlation of groups' sums, in the map's order, with the drop of the score without each.

    The pixels are cut into groups in the order of the map. Pearson's
    :math:`\mathrm{corr}_g\bigl(\sum_{i \in g} a_i,\; f(x) - f(x_{\setminus g})\bigr)`. More is
    better.

    Args:
        groups: how many groups, of one size but for rounding.
        baseline, score: as for `FaithfulnessCorrelation`.
        seed: of the order of equal values.

    Alvarez-Melis and Jaakkola, "Towards Robust Interpretability with Self-Explaining Neural
    Networks", NeurIPS 2018.

    >>> FaithfulnessEstimate(groups=10).better
    'more'
    """

    groups: int = 64
    baseline: Baseline = Zero()
    score: Score = "logit"
    seed: int = 0

    units = CORRELATION
    order = "signed"
    minimums: ClassVar = {"groups": 2}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [self.without_groups(data, self.baseline)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `FaithfulnessEstimate`: Pearson's correlation ``(N,)`` of the groups' sums
        of the map with the loss of score without each group."""
        value = correlation(self.group_sums(data), data.loss(self.score, scores[0]))
        return MetricResult(_warn_of_nan(self, data, value))


@register
class MonotonicityCorrelation(_GroupCorrelation):
    r"""Rank correlation of groups' magnitudes with how much noise in each changes the score.

    Spearman's
    :math:`\mathrm{corr}_g\bigl(|\sum_{i \in g} a_i|,\; \mathbb E[(f(x) - f(x_{g \sim
    \text{noise}}))^2]\bigr)` over groups in the order of the map's magnitude. More is better.

    Args:
        groups: how many groups.
        samples: of the noise, which covers a group alone: `explain.baselines.Noise` with the seeds
            from ``seed`` on.
        score: as for `FaithfulnessCorrelation`.
        seed: of the noise, and of the order of equal values.

    Nguyen and Martínez, "On quantitative aspects of model interpretability", 2020
    (arXiv:2007.07584).

    >>> MonotonicityCorrelation(groups=4).samples
    8
    """

    groups: int = 32
    samples: int = 8
    score: Score = "logit"
    seed: int = 0

    units = "rank correlation"
    order = "absolute"
    minimums: ClassVar = {"groups": 2, "samples": 1}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """For each of ``samples`` noises, the photos with one group of pixels replaced by that
        noise.
        """
        seeds = range(self.seed, self.seed + self.samples)
        return [self.without_groups(data, Noise(seed)) for seed in seeds]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """Spearman's correlation ``(N,)`` of the magnitude of each group's sum in the map with the
        mean squared change of the score that noise in the group makes."""
        change = torch.stack([data.loss(self.score, sample) ** 2 for sample in scores]).mean(0)
        sums = self.group_sums(data).abs()
        return MetricResult(
            _warn_of_nan(self, data, correlation(mid_ranks(sums), mid_ranks(change)))
        )


@register
class NonSensitivity(ScoreMetric):
    """Share of squares that are zero in the map but matter to the model, or the reverse.

    A square is nothing to the map where its magnitudes add up to no more than ``threshold`` of the
    largest square's, and nothing to the model where the score changes by no more than ``threshold``
    of the largest change. Less is better. To a map of zeros, all squares are nothing, and so they
    are to a model that none of them changes. (The paper asks this of every pixel.)

    Args:
        side: of the squares in pixels.
        threshold: what counts as nothing.
        baseline, score: as for `FaithfulnessCorrelation`.

    Nguyen and Martínez, "On quantitative aspects of model interpretability", 2020
    (arXiv:2007.07584).

    >>> NonSensitivity(side=4).threshold
    0.001
    """

    side: int = 16
    threshold: float = 1e-3
    baseline: Baseline = Zero()
    score: Score = "logit"

    units = "share of squares"
    better = "less"
    minimums: ClassVar = {"side": 1, "threshold": 0}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """The photos without one square of the grid each, in the order of the squares' numbers."""
        regions = grid_regions(data.size, self.side, data.images)
        ends = range(int(regions.max()) + 2)
        return [base.cover_ranks(regions, ends[:-1], ends[1:], self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `NonSensitivity`: the share ``(N,)`` of squares that are nothing to the map
        but not to the model, or the reverse."""
        change = data.loss(self.score, scores[0]).abs()
        regions = grid_regions(data.size, self.side, data.images)
        sums = by_region(data.maps.contributions.abs(), regions)
        differs = self._is_nothing(sums) != self._is_nothing(change)
        return MetricResult(differs.to(scores[0]).mean(1))

    def _is_nothing(self, sizes: torch.Tensor) -> torch.Tensor:
        """Which squares ``(N, R)`` are nothing beside the largest one."""
        return sizes <= self.threshold * sizes.amax(1, keepdim=True)


def _warn_of_nan(metric: Metric, data: MetricInput, value: torch.Tensor) -> torch.Tensor:
    """Warn of correlations ``value`` ``(N,)`` that are NaN, since sums or scores do not vary, and
    return them in the dtype of scores."""
    return data.undefined(metric, value, value.isnan(), VARIES).to(data.target_score.dtype)


@dataclass(frozen=True)
class LessNoise(Perturbation):
    """Images less normal noise, which is the same for the channels of a pixel, and for every
    image."""

    samples: int
    sigma: float
    seed: int

    words = "photos less noise"

    def noise(self, size: tuple[int, ...], sample: int) -> torch.Tensor:
        """``(H, W)`` float64; each sample is drawn for itself, so that none has to be stored."""
        return self.sigma * normal(size, seeded(self.seed, sample)).double()

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """The images less each of ``samples`` noises, which `Infidelity` draws again for its
        products with the map."""
        x = evidence.inputs

        noisy = one_by_one(lambda image, sample: x[image] - self.noise(evidence.size, sample).to(x))
        return samples_of([self.samples] * len(x), x.device, noisy)


@register
class Infidelity(ScoreMetric):
    r"""Mean squared error of the change of the score that the map predicts for noise.

    :math:`\mathbb E_I\bigl[(I^\top a - (f(x) - f(x - I)))^2\bigr]`, where the noise I is normal,
    and the same for the channels of a pixel, so that it is defined for maps without channels too: a
    is summed over them. Less is better.

    Args:
        samples: of the noise.
        sigma: its standard deviation in the units of the input.
        scaled: multiply the map by the factor that serves it best,
            :math:`\beta = \mathbb E[I^\top a\,\Delta]/\mathbb E[(I^\top a)^2]`, as maps without
            units need it. In ``parts``, "plain" and "scaled" are both there. A map of
            zeros predicts no change at all, in both.
        score: the target's own "logit", or "probability".
        seed: of the noise.

    Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019.

    >>> import explain, torch
    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).double()
    >>> gradient = explain.methods.Saliency(absolute=False)
    >>> table = explain.evaluate(
    ...     linear, torch.rand(1, 3, 4, 4).double(), gradient, Infidelity(samples=9)
    ... )
    >>> table["saliency"]["infidelity"].item() < 1e-12
    True
    """

    samples: int = 64
    sigma: float = 0.2
    scaled: bool = True
    score: Score = "logit"
    seed: int = 0

    units = "square of the score"
    better = "less"
    minimums: ClassVar = {"samples": 1, "sigma": 1e-12}

    @property
    def _noisy(self) -> LessNoise:
        return LessNoise(self.samples, self.sigma, self.seed)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(self._noisy, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The mean squared error ``(N,)`` between the change of score that the map predicts for
        noise and the real one; ``parts`` has it with and without the best factor."""
        maps = data.maps.contributions.flatten(1)
        # the same draws that the photos were run without
        noise = torch.stack(
            [self._noisy.noise(data.size, sample).flatten() for sample in range(self.samples)]
        ).to(maps)
        predicted = maps @ noise.T
        loss = data.original(self.score)[:, None] - scores[0]
        factor = ratio((predicted * loss).mean(1), predicted.square().mean(1))
        plain = (predicted - loss).square().mean(1)
        best = (factor[:, None] * predicted - loss).square().mean(1)
        value = (best if self.scaled else plain).to(data.target_score.dtype)
        return MetricResult(value, parts={"plain": plain, "scaled": best, "factor": factor})


@register
class Completeness(ScoreMetric):
    r"""Difference between the sum of the values and the difference of scores that they should add
    up to.

    :math:`\bigl|\sum_i a_i - (f(x) - f(x'))\bigr|`, x' being the covered photo; ``parts`` has the
    "relative" one, by
    :math:`|f(x) - f(x')|`. Less is better. Values are added up as they are, of maps at the layer's
    resolution; it says something of contributions only, such as input times gradient. A map of
    zeros misses all of the difference.

    Args:
        baseline: what covers x'.
        score: the target's own "logit" (default), or "probability".

    Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017.

    >>> Completeness().better
    'less'
    """

    baseline: Baseline = Zero()
    score: Score = "logit"

    units = "score"
    better = "less"

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [base.cover_softly(torch.zeros_like(data.images[:, 0]), self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """How far the map's sum misses the photo's score less the covered photo's, ``(N,)`` from 0;
        ``parts`` has its share of that difference, NaN where this is next to nothing."""
        difference = data.original(self.score) - scores[0][:, 0]
        miss = (data.maps.values.flatten(1).sum(1) - difference).abs()
        nothing = difference.abs() <= least(self.score, data.original(self.score), scores[0])
        relative = torch.where(nothing, torch.nan, miss / difference.abs())
        return MetricResult(miss, parts={"relative": relative, "difference": difference})
