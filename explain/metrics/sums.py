"""Faithfulness by sums: do the values of pixels add up to what the score loses without them?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from explain._utils.random_numbers import normal
from explain.baselines import Noise, Zero
from explain.baselines.base import Baseline
from explain.metrics.base import MetricInput, MetricResult, Score, undefined
from explain.metrics.faithfulness import share_counts
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import Covers, PerturbedPhotos, ScoreMetric, ScoreRequest, covered_by_rank
from explain.metrics.rankings import by_region, correlation, grid_regions, mid_ranks, steps_of
from explain.metrics.registry import register

CORRELATION = "correlation"
VARIES = "the map's sums or the scores do not vary"


@dataclass(frozen=True, eq=False)
class RandomSubsets(PerturbedPhotos):
    """Photos with ``samples`` random subsets of so many pixels covered, the same ones for every image and method."""

    size: tuple[int, int]
    pixels: int
    samples: int
    seed: int
    baseline: Baseline

    @property
    def count(self) -> int:
        return self.samples

    def keys(self, image: int) -> list[Hashable]:
        return [(self.baseline, "drawn", self.seed, self.pixels, sample) for sample in range(self.samples)]

    def subset(self, sample: int) -> torch.Tensor:
        """Which pixels ``(H, W)`` the subset holds."""
        total = self.size[0] * self.size[1]
        generator = torch.Generator("cpu").manual_seed((self.seed * 1_000_003 + sample) % 2**63)
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[torch.randperm(total, generator=generator, device="cpu")[: self.pixels]] = True
        return chosen.reshape(self.size)

    def sums(self, maps: torch.Tensor) -> torch.Tensor:
        """What maps ``(N, H, W)`` add up to over each subset: ``(N, samples)``."""
        return torch.stack([maps[:, self.subset(sample).to(maps.device)].sum(1) for sample in range(self.samples)], 1)

    def keep(self, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return torch.stack([~self.subset(sample) for sample in numbers.tolist()])


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
    about = "correlation of random subsets' sums with what the score loses without them"
    paper = "Bhatt et al., IJCAI 2020"
    units = CORRELATION
    better = "more"
    minimums: ClassVar = {"samples": 2}
    percentages = ("share",)

    def _subsets(self, data: MetricInput) -> RandomSubsets:
        return RandomSubsets(data.size, share_counts(data, [self.share])[0], self.samples, self.seed, self.baseline)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(self._subsets(data), self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        lost = data.lost(self.score, scores[0])
        return _defined(self.name, data, correlation(self._subsets(data).sums(data.maps.of_inputs), lost))


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
    better = "more"
    minimums: ClassVar = {"samples": 2}
    percentages = ("shares",)

    def _subsets(self, data: MetricInput) -> list[RandomSubsets]:
        counts = share_counts(data, self.shares)
        return [RandomSubsets(data.size, count, self.samples, self.seed, self.baseline) for count in counts]

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(each, self.score) for each in self._subsets(data)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        maps = data.maps.of_inputs
        found = [
            correlation(each.sums(maps), data.lost(self.score, of_size))
            for each, of_size in zip(self._subsets(data), scores, strict=True)
        ]
        curve = torch.stack(found, 1)
        return replace(
            _defined(self.name, data, curve.mean(1)), curve=curve, at=torch.tensor(self.shares) / 100
        )  # fmt: skip


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
    about = "correlation of groups' sums, in the map's order, with what the score loses without each"
    paper = "Alvarez-Melis and Jaakkola, NeurIPS 2018"
    units = CORRELATION
    better = "more"
    minimums: ClassVar = {"groups": 2}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        ranks, ends = _groups(data, "signed", self.seed, self.groups)
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, ends[:-1], ends[1:]), self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        lost = data.lost(self.score, scores[0])
        ranks, ends = _groups(data, "signed", self.seed, self.groups)
        return _defined(self.name, data, correlation(_group_sums(data.maps.of_inputs, ranks, ends), lost))


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
    better = "more"
    minimums: ClassVar = {"steps": 1}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        counts = steps_of(data.pixels, self.steps)[::-1]
        ranks = data.ranks(self.sign, self.seed)
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, [0] * len(counts), counts), self.score)]

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
    better = "more"
    minimums: ClassVar = {"groups": 2, "samples": 1}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        ranks, ends = _groups(data, "absolute", self.seed, self.groups)
        baselines = [Noise(self.seed + sample) for sample in range(self.samples)]
        return [
            ScoreRequest(covered_by_rank(ranks, baseline, ends[:-1], ends[1:]), self.score) for baseline in baselines
        ]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        change = torch.stack([data.lost(self.score, sample) ** 2 for sample in scores]).mean(0)
        ranks, ends = _groups(data, "absolute", self.seed, self.groups)
        sums = _group_sums(data.maps.of_inputs, ranks, ends).abs()
        return _defined(self.name, data, correlation(mid_ranks(sums), mid_ranks(change)))


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
    about = "share of squares that are nothing to the map but not to the model, or the other way round"
    paper = "Nguyen and Martínez, 2020"
    units = "share of squares"
    better = "less"
    minimums: ClassVar = {"side": 1, "threshold": 0}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        regions = grid_regions(data.size, self.side, data.images)
        squares = list(range(int(regions.max()) + 1))
        return [ScoreRequest(covered_by_rank(regions, self.baseline, squares, [s + 1 for s in squares]), self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        change = data.lost(self.score, scores[0]).abs()
        regions = grid_regions(data.size, self.side, data.images)
        sums = by_region(data.maps.of_inputs.abs(), regions)
        nothing = [each <= self.threshold * each.amax(1, keepdim=True) for each in (sums, change)]
        return MetricResult((nothing[0] != nothing[1]).to(scores[0]).mean(1))


def _groups(data: MetricInput, sign: Sign, seed: int, groups: int) -> tuple[torch.Tensor, list[int]]:
    """The rank of each pixel, and where groups of them end."""
    return data.ranks(sign, seed), steps_of(data.pixels, groups)


def _group_sums(maps: torch.Tensor, ranks: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """What maps ``(N, H, W)`` add up to over each group of ranks: ``(N, groups)``."""
    group = torch.bucketize(ranks, torch.tensor(ends[1:], device=ranks.device), right=True)
    return by_region(maps, group)


def _defined(metric: str, data: MetricInput, value: torch.Tensor) -> MetricResult:
    return MetricResult(undefined(metric, data.maps.name, value, value.isnan(), VARIES).to(data.target_score.dtype))


@dataclass(frozen=True, eq=False)
class NoisyPhotos(PerturbedPhotos):
    """Photos less normal noise ``I``, drawn for each pixel and the same for all channels, images and methods."""

    size: tuple[int, int]
    samples: int
    sigma: float
    seed: int

    @property
    def count(self) -> int:
        return self.samples

    def keys(self, image: int) -> list[Hashable]:
        return [("noisy", self.sigma, self.seed, sample) for sample in range(self.samples)]

    def noise(self, sample: int) -> torch.Tensor:
        """``(H, W)`` float64; each sample is drawn for itself, so that none has to be kept."""
        generator = torch.Generator("cpu").manual_seed((self.seed * 1_000_003 + sample) % 2**63)
        return self.sigma * normal(self.size, generator).double()

    def build(self, images: torch.Tensor, covers: Covers, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        drawn = torch.stack([self.noise(sample) for sample in numbers.tolist()])
        return images[owners] - drawn[:, None].to(images)


@register
@dataclass(frozen=True)
class Infidelity(ScoreMetric):
    r"""By how much the map fails to foretell what noise takes from the score.

    :math:`\mathbb E_I\bigl[(I^\top a - (f(x) - f(x - I)))^2\bigr]`, where the noise I is normal, and the same for the
    channels of a pixel, so that maps without channels have an answer too: a is added up over them. Less is better.

    Args:
        samples: of the noise.
        sigma: its standard deviation in the units of the input.
        scaled: multiply the map by the factor that serves it best,
            :math:`\beta = \mathbb E[I^\top a\,\Delta]/\mathbb E[(I^\top a)^2]`, as maps without units need it. In
            ``parts``, "plain" and "scaled" are both there. A map of zeros foretells no change at all, in both.
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
    about = "mean square by which the map misses what noise takes from the score"
    paper = "Yeh et al., NeurIPS 2019"
    units = "square of the score"
    better = "less"
    minimums: ClassVar = {"samples": 1, "sigma": 1e-12}

    def _noisy(self, data: MetricInput) -> NoisyPhotos:
        return NoisyPhotos(data.size, self.samples, self.sigma, self.seed)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(self._noisy(data), self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        noisy, maps = self._noisy(data), data.maps.of_inputs.flatten(1)
        drawn = [noisy.noise(sample).flatten().to(maps) for sample in range(self.samples)]
        told = torch.stack([maps @ noise for noise in drawn], 1)
        lost = data.original(self.score)[:, None] - scores[0]
        squares = told.square().mean(1)
        factor = torch.where(squares > 0, (told * lost).mean(1) / torch.where(squares > 0, squares, 1), 0)
        plain = (told - lost).square().mean(1)
        best = (factor[:, None] * told - lost).square().mean(1)
        value = (best if self.scaled else plain).to(data.target_score.dtype)
        return MetricResult(value, parts={"plain": plain, "scaled": best, "factor": factor})
