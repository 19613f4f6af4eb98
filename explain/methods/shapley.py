"""Shapley values of regions: by weighted regression, and by permutations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch

from explain._utils.errors import MethodError
from explain._utils.random_numbers import uniform
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence
from explain.methods.bibliography import cited
from explain.methods.coalitions import CoalitionDesign, RegionMethod
from explain.methods.estimates import Guess, honest, widened
from explain.methods.masks import Score, blank_score, whole_score
from explain.methods.regions import Regions, Squares, region_values
from explain.methods.registry import register

THREES = (0.0, 0.01, 0.1, 0.3, 1.0)
REST = (1e-6, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""How large what regions do in threes, and all the rest, may be beside what each does on its own: variances that are
compared by their likelihood."""
ENOUGH = 512  # pairs that tell how large they are
PLAUSIBLE = 3.0  # variances whose log-likelihood is less than this below the best could as well be true
TESTED = 12  # pairs, at least, that a fit has to predict before its error is believed


def regress_pairs(seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
    r"""The Shapley values that are most likely, given how much more each coalition scores than its opposite.

    Half of this difference, :math:`D(z) = (y(z) - y(1 - z)) / 2`, knows nothing of what regions do in twos. It is the
    sum of what each region does on its own, of what they do in threes, and of a rest. Shapley values are linear in all
    of these, so the best linear estimate of them is known once their variances are: they are random, and of some
    variances those are taken that make the scores of the first pairs most likely. The whole photo and the blank one are
    a pair among the others, which makes the values add up. Where all pairs were run, the values are exact.

    The first M pairs are fitted without a miss, whatever the regions do together: they say nothing of the error. So
    there is none before as many pairs again, and at least 12, have put the fit to the test. It is the largest that any
    plausible variances lead to, each scaled to how well every pair is predicted from all others, and widened for the
    few pairs that tell this (see `widened`).

    KernelSHAP's own regression has single regions only, and takes all that they do together for noise.
    """
    regions, gain = seen.shape[1], whole - blank
    even = torch.full((regions,), gain / regions, dtype=torch.float64, device=seen.device)
    if regions == 1:
        return Guess(even, torch.zeros_like(even))
    if not len(seen):
        return Guess(even)
    signs = 2 * torch.cat([torch.ones_like(seen[:1]), seen[::2]]) - 1
    half = torch.cat([scores.new_full((1,), gain), scores[::2] - scores[1::2]]) / 2
    of_rest = coefficients(signs)
    if len(half) == 2 ** (regions - 1):
        values = half @ of_rest
        return Guess(values, torch.zeros_like(values))
    compared = list(_compared(signs[:ENOUGH], half[:ENOUGH], THREES))
    most = max(fit.likelihood for fit in compared)
    plausible = sorted((fit for fit in compared if most - fit.likelihood < PLAUSIBLE), key=lambda fit: -fit.likelihood)
    if len(half) > ENOUGH:
        plausible = [next(_compared(signs, half, (fit.threes,), fit.rest)) for fit in plausible]
    best, freedom = plausible[0], len(half) - regions
    values = best.across(signs).T @ torch.cholesky_solve(half[:, None], best.factor)[:, 0]
    error = None
    if freedom > max(regions, TESTED):
        factor = widened(freedom) * math.sqrt(len(half) / freedom)
        error = factor * torch.stack([fit.error(signs, half) for fit in plausible]).amax(0)
    return Guess(values + (gain - values.sum()) / regions, error)


@dataclass(frozen=True)
class _Fit:
    """What two variances lead to: their likelihood, and the factor of the covariance of what was observed."""

    likelihood: float
    threes: float
    rest: float
    factor: torch.Tensor

    def across(self, signs: torch.Tensor) -> torch.Tensor:
        """The covariance of each pair with each value."""
        return _single(signs) + self.threes * _in_threes(signs) + self.rest * coefficients(signs)

    def error(self, signs: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        """The standard deviation of what is not known of each value.

        Its scale is that of what was observed, or, if that is more, that by which pairs differ from what all others
        say of them.
        """
        known = torch.linalg.solve_triangular(self.factor, self.across(signs), upper=False).square().sum(0)
        inverse = torch.cholesky_inverse(self.factor)
        weighted = inverse @ half
        observed, left_out = (half * weighted).mean(), (weighted.square() / inverse.diagonal()).mean()
        left = (_before(signs.shape[1], self.threes, self.rest) - known).clamp(min=0)
        error: torch.Tensor = (torch.maximum(observed, left_out) * left).sqrt()
        return error


def _compared(
    signs: torch.Tensor, half: torch.Tensor, of_threes: tuple[float, ...], least: float = 0.0
) -> Iterator[_Fit]:
    """What each pair of variances leads to; rests are those from the ``least`` on."""
    alike = signs @ signs.T
    regions, eye = signs.shape[1], torch.eye(len(signs), dtype=signs.dtype, device=signs.device)
    single = alike / regions
    triples = (alike**3 - (3 * regions - 2) * alike) / 6 / max(1, math.comb(regions, 3))
    for threes in of_threes if regions > 2 else (0.0,):
        for rest in (each for each in REST if each >= least):
            factor, failed = torch.linalg.cholesky_ex(single + threes * triples + rest * eye)
            if int(failed):
                continue
            scale = torch.linalg.solve_triangular(factor, half[:, None], upper=False).square().mean()
            likelihood = -float(0.5 * len(half) * scale.clamp(min=1e-300).log() + factor.diagonal().log().sum())
            yield _Fit(likelihood, threes, rest, factor)


def coefficients(signs: torch.Tensor) -> torch.Tensor:
    """What the half difference of each pair ``(n, M)``, given as -1 and 1, counts in each region's Shapley value.

    >>> coefficients(torch.tensor([[1.0, 1.0], [1.0, -1.0]])).tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    regions = signs.shape[1]
    sizes = ((signs.sum(1) + regions) / 2).round().long().tolist()
    inside = [2 / regions / math.comb(regions - 1, size - 1) for size in sizes]
    outside = [-2 / regions / math.comb(regions - 1, min(size, regions - 1)) for size in sizes]
    within, without = (
        torch.tensor(each, dtype=signs.dtype, device=signs.device)[:, None] for each in (inside, outside)
    )
    return torch.where(signs > 0, within, without)


def _single(signs: torch.Tensor) -> torch.Tensor:
    """The covariance of each pair with each value, for what regions do on their own, of variance 1 in all."""
    return 2 * signs / signs.shape[1]


def _in_threes(signs: torch.Tensor) -> torch.Tensor:
    """The same for what they do in threes, of which each has a third."""
    regions = signs.shape[1]
    others = signs.sum(1, keepdim=True) - signs
    pairs = (others.square() - (regions - 1)) / 2
    return 2 / 3 * signs * pairs / max(1, math.comb(regions, 3))


def _before(regions: int, threes: float, rest: float) -> float:
    """The variance of a value before anything was observed."""
    of_rest = 4 / regions**2 * sum(1 / math.comb(regions - 1, size) for size in range(regions))
    in_threes = 4 / (3 * regions) * threes if regions > 2 else 0.0
    return 4 / regions + in_threes + rest * of_rest


AT_ONCE = 256  # coalitions that are drawn together
FEWEST = 3  # pairs of orders that say how far orders differ


@dataclass(frozen=True)
class Pairs(CoalitionDesign):
    """Coalitions of regions and their opposites; each pair once.

    The first ones are what a random order uncovers one after the other, which tells most while runs are few. The sizes
    k of the others are drawn in proportion to (M − 1) / (k (M − k)), the Shapley kernel. Where so many runs are enough
    for all coalitions, all of them are run, in random order.
    """

    samples: int
    seed: int

    def rows(self, regions: int) -> torch.Tensor:
        half = drawn_pairs(regions, self.samples // 2, self.seed)
        return torch.stack([half, ~half], 1).flatten(0, 1)

    def unit(self, regions: int) -> int:
        return 2

    def most(self, regions: int) -> int:
        return min(self.samples // 2 * 2, 2**regions - 2) if regions else self.samples // 2 * 2


@lru_cache(maxsize=8)
def drawn_pairs(regions: int, pairs: int, seed: int) -> torch.Tensor:
    """One coalition of each pair ``(n, M)``."""
    generator = torch.Generator("cpu").manual_seed(seed % 2**63)
    if regions <= 24 and pairs >= 2 ** (regions - 1) - 1:
        numbers = torch.arange(1, 2 ** (regions - 1), device="cpu")
        found = (numbers[:, None] >> torch.arange(regions, device="cpu")) & 1 == 1
        return found[torch.randperm(len(found), generator=generator, device="cpu")]
    seen, kept = set[bytes](), list[torch.Tensor]()
    for coalition in itertools.chain(_of_an_order(regions, generator), _by_kernel(regions, generator)):
        key = (coalition ^ coalition[0]).numpy().tobytes()  # the same for a coalition and its opposite
        if key not in seen:
            seen.add(key)
            kept.append(coalition)
        if len(kept) >= pairs:
            break
    return torch.stack(kept[:pairs]) if pairs else torch.zeros(0, regions, dtype=torch.bool, device="cpu")


def _of_an_order(regions: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """What a random order uncovers, one region after the other: the smallest and the largest first."""
    place = torch.randperm(regions, generator=generator, device="cpu").argsort()
    for size in sorted(range(1, regions), key=lambda size: min(size, regions - size)):
        yield place < size


def _by_kernel(regions: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Coalitions drawn by the Shapley kernel."""
    chances = torch.tensor([1 / (k * (regions - k)) for k in range(1, regions)], dtype=torch.float64, device="cpu")
    while True:
        sizes = torch.multinomial(chances, AT_ONCE, replacement=True, generator=generator) + 1
        ranks = uniform((AT_ONCE, regions), generator).argsort(1).argsort(1)
        yield from ranks < sizes[:, None]


@dataclass(frozen=True)
class ShapleyMethod(RegionMethod):
    """Options of methods for Shapley values, which add up to the score minus that of a fully covered photo."""

    samples: int = 500
    regions: Regions = field(default_factory=Squares)
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    style = "signed"

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values of the regions miss that difference ``(N,)``."""
        labels = self.regions(evidence.inputs)
        gain: torch.Tensor = evidence[whole_score(self.score)] - evidence[blank_score(self.baseline, self.score)]
        return torch.stack([each.sum() for each in region_values(values, labels)]) - gain


@register
@dataclass(frozen=True)
class KernelSHAP(ShapleyMethod):
    r"""The Shapley values of regions, by weighted regression on the scores of random coalitions.

    A region's value is what it adds to the score on average, over all orders in which regions may be uncovered; the
    values of all regions add up to :math:`y(x) - y(\text{baseline})`, exactly: this is a condition of the regression,
    not a sample with a large weight. Coalitions come in pairs with their opposites (Covert and Lee, 2021), none twice.
    Where ``samples`` are enough for all coalitions, these are run, and the values are exact. With fewer, the published
    regression takes all that regions do together for noise; here, what they do in threes is a random part of the
    regression (generalised least squares), which makes the error smaller.

    Args:
        samples: how many covered photos, at most; the photo itself and the blank one are not counted.
        regions: ``(H, W)`` whole numbers, the number of each pixel's region; `Squares`, `Quadtree` or `Superpixels`;
            or how many squares across.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the coalitions.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at most ``tolerance``,
            or after so many seconds.

    Returns:
        ``(N, H, W)``, in units of the score, with errors from 2 (M + max(M, 12)) runs on, and from all (which leave
        none). Each pixel has the whole value of its region, so the
        sum over pixels is not that over regions: `region_values` gives one value for each. ``delta`` is by how much
        these miss the difference of the scores.

    Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017 (arXiv:1705.07874).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, KernelSHAP(regions=2), target=1)  # four regions: exact
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1)), a.samples
    (True, 14)
    """

    name = "kernelshap"
    about = "Shapley values of regions by weighted regression"
    source = cited("lundberg2017shap")
    minimums: ClassVar[Mapping[str, float]] = {"samples": 2}

    @property
    def design(self) -> Pairs:
        return Pairs(self.samples, self.seed)

    def solve(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
        return regress_pairs(seen, scores, whole, blank)


@dataclass(frozen=True)
class Permutations(CoalitionDesign):
    """Regions uncovered one after the other in random orders, each order followed by its reverse."""

    samples: int
    seed: int

    def rows(self, regions: int) -> torch.Tensor:
        if regions < 2:
            return torch.zeros(0, regions, dtype=torch.bool, device="cpu")
        if self.samples < self.unit(regions):
            raise MethodError(
                f"samples of shapleysampling must be at least {self.unit(regions)} for {regions} regions (an order and "
                f"its reverse), got {self.samples}; give more, or fewer regions"
            )
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        found = []
        for _ in range(self.samples // self.unit(regions)):
            order = torch.randperm(regions, generator=generator, device="cpu")
            for each in (order, order.flip(0)):
                place = torch.empty_like(each)
                place[each] = torch.arange(regions, device="cpu")
                found.append(place < torch.arange(1, regions, device="cpu")[:, None])
        return torch.cat(found)

    def unit(self, regions: int) -> int:
        return max(1, 2 * (regions - 1))

    def most(self, regions: int) -> int:
        return self.samples // self.unit(regions) * self.unit(regions) if regions > 1 else 0


@register
@dataclass(frozen=True)
class ShapleySampling(ShapleyMethod):
    r"""The Shapley values of regions, by uncovering them one after the other in random orders.

    A region's value is the mean of what the score gains when it is uncovered. Each order is followed by its reverse,
    which makes the mean more exact. The values of all regions add up to :math:`y(x) - y(\text{baseline})`, exactly.

    Args:
        samples: how many covered photos, at most; an order and its reverse take 2 (M − 1) for M regions.
        regions: as for `KernelSHAP`.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the orders.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at most ``tolerance``,
            or after so many seconds.

    Returns:
        ``(N, H, W)``, in units of the score, with errors where there are at least three pairs of orders. Each
        pixel has the whole value of its region, so the sum over pixels is not that over regions: see `region_values`.

    Štrumbelj and Kononenko, "Explaining prediction models and individual predictions with feature contributions",
    Knowledge and Information Systems 2014.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, ShapleySampling(regions=2), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1))
    True
    """

    name = "shapleysampling"
    about = "Shapley values of regions by uncovering them in random orders"
    source = cited("strumbelj2014shapley")
    minimums: ClassVar[Mapping[str, float]] = {"samples": 1}

    @property
    def design(self) -> Permutations:
        return Permutations(self.samples, self.seed)

    def solve(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
        """The mean gain of each region over the orders, and its standard error over pairs of them.

        There is no error before three pairs (see `honest`). Where all pairs agree, they may do so by chance: values
        may be off by the gain of a region in one pair more.
        """
        regions = seen.shape[1]
        if regions == 1:
            values = torch.full((1,), whole - blank, dtype=torch.float64, device=seen.device)
            return Guess(values, torch.zeros_like(values))
        seen, scores = seen.reshape(-1, regions - 1, regions), scores.reshape(-1, regions - 1)
        steps = torch.cat([torch.zeros_like(seen[:, :1]), seen, torch.ones_like(seen[:, :1])], 1).diff(dim=1)
        ends = torch.ones_like(scores[:, :1])
        gains = torch.cat([blank * ends, scores, whole * ends], 1).diff(dim=1)
        each = (steps * gains[..., None]).sum(1).reshape(-1, 2, regions).mean(1)
        n = len(each)
        if n < FEWEST:
            return Guess(each.mean(0))
        variance, reach = each.var(0) / n, each.abs().max()
        agree = bool(variance.mean().sqrt() <= 1e-6 * reach)  # but for rounding
        return Guess(each.mean(0), (reach / n).expand(regions) if agree else honest(variance, n - 1))
