"""Shapley values of regions, by weighted regression and by permutations; and Owen values along a
hierarchy of cells."""

import itertools
import math
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain._utils.random_numbers import seeded, uniform
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence, Need
from explain.engine.perturbations import ScoreOf, Scores, Search, Steps
from explain.methods.base import register
from explain.methods.coalitions import CoalitionDesign, SampledRegions
from explain.methods.estimates import Estimate, SearchMethod, floored_error, student_factor
from explain.methods.masking import Score, ShownParts, blank_score, box_mask, whole_score
from explain.methods.regions import Cell, Regions, Squares, pixels_of, region_values

CHOICES = (
    (1.0, 0.0),
    *itertools.product((0.02, 0.05, 0.1, 0.2, 0.4, 1.0), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
)
"""What is compared by its likelihood: the reach of what regions do together, as `_together` says,
and the variance of it in units of what they do alone."""
# the least variance of each pair on its own, without which covariances would have no inverse
REST = 1e-6
ENOUGH = 512  # pairs that tell which variances are likely
# variances whose log-likelihood is less than this below the best could as well be true
PLAUSIBLE = 3.0
TESTED = 12  # pairs, at least, that a fit has to predict before its error is believed


def regress_pairs(seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Estimate:
    """Estimate the Shapley value of each region ``(M,)`` from pairs of opposite coalitions,
    neighbours in ``seen`` ``(P, M)`` and ``scores`` ``(P,)``; exact if all pairs were run."""
    regions = seen.shape[1]
    whole_gain = whole - blank
    if regions == 1:
        values = seen.new_tensor([whole_gain])
        return Estimate(values, torch.zeros_like(values))
    # The whole and the blank image are a pair too, so that values add up.
    signs = 2 * torch.cat([torch.ones_like(seen[:1]), seen[::2]]) - 1
    # Half a pair's difference, D(z) = (y(z) - y(1 - z)) / 2, is the sum of what regions do alone
    # and together. Values are linear in these, so the best linear estimate follows from their
    # variances: those that make the first pairs most likely. (KernelSHAP's own regression takes all
    # but single regions for noise.)
    half_differences = (
        torch.cat([scores.new_full((1,), whole_gain), scores[::2] - scores[1::2]]) / 2
    )
    if len(half_differences) == 2 ** (regions - 1):  # all pairs were run
        values = half_differences @ coefficients(signs)
        return Estimate(values, torch.zeros_like(values))
    # the covariance of two pairs depends on how many regions they agree in
    agreement = signs @ signs.T
    first_agreement = agreement[:ENOUGH, :ENOUGH]
    first_differences = half_differences[:ENOUGH]
    fits = [
        _fit(first_agreement, first_differences, regions, reach=reach, together=together)
        for reach, together in CHOICES
    ]
    fits.sort(key=lambda fit: -fit.likelihood)
    plausible = [fit for fit in fits if fits[0].likelihood - fit.likelihood < PLAUSIBLE]
    # variances are compared by the first pairs; the fit is then made with all
    if len(half_differences) > ENOUGH:
        plausible = [
            _fit(agreement, half_differences, regions, reach=fit.reach, together=fit.together)
            for fit in plausible
        ]
    best = plausible[0]
    degrees_of_freedom = len(half_differences) - regions
    # the best linear estimate: covariances with the values, times the inverse of those of pairs
    values = (
        best.across(signs).T @ torch.cholesky_solve(half_differences[:, None], best.factor)[:, 0]
    )
    # The error is the mean of the variance that is left over all plausible variances, by
    # likelihood. The first M pairs are fitted without a miss, so there is none before M + max(M,
    # TESTED) pairs.
    error = None
    if degrees_of_freedom > max(regions, TESTED):
        likelihoods = signs.new_tensor([fit.likelihood - best.likelihood for fit in plausible])
        variances = torch.stack([fit.error(signs).square() for fit in plausible])
        error = student_factor(degrees_of_freedom) * (likelihoods.softmax(0) @ variances).sqrt()
    # values add up but for rounding errors, which are shared out equally
    missing = whole_gain - values.sum()
    return Estimate(values + missing / regions, error)


@dataclass(frozen=True)
class _Fit:
    """The likelihood of the observed scores under two variances, and the Cholesky factor of the
    covariance of these."""

    likelihood: float
    reach: float
    together: float
    factor: torch.Tensor
    scale: torch.Tensor
    """The variance of single regions that the scores show."""

    def across(self, signs: torch.Tensor) -> torch.Tensor:
        """The prior covariance of each pair's half difference with each region's value ``(n, M)``,
        in units of the variance of single regions; ``signs``: 1 seen, -1 covered.
        """
        regions = signs.shape[1]
        together_covariances, _ = _value_covariances(regions, self.reach)
        rest_covariances, _ = _value_covariances(regions, 1.0)
        # alone, a region adds w where it is seen, and -w where not, with a variance of 1 / M: its
        # value, the difference, is 2 w
        by_alike = [
            2 / regions + self.together * of_together + REST * of_rest
            for of_together, of_rest in zip(together_covariances, rest_covariances, strict=True)
        ]
        # how many regions of a pair are seen or covered as this one is, itself counted: from 1 on
        alike = (signs * signs.sum(1, keepdim=True) + regions) / 2
        return signs * signs.new_tensor(by_alike)[alike.round().long() - 1]

    def error(self, signs: torch.Tensor) -> torch.Tensor:
        """The posterior standard deviation of each value ``(M,)`` from pairs ``signs``
        ``(n, M)``."""
        whitened = torch.linalg.solve_triangular(self.factor, self.across(signs), upper=False)
        explained = whitened.square().sum(0)
        regions = signs.shape[1]
        _, together_variance = _value_covariances(regions, self.reach)
        _, rest_variance = _value_covariances(regions, 1.0)
        # the variance of a Shapley value before any pair has been run
        prior = 4 / regions + self.together * together_variance + REST * rest_variance
        # what the observed pairs leave of it
        unexplained = (prior - explained).clamp(min=0)
        return torch.sqrt(self.scale * unexplained)


def _fit(
    inner_products: torch.Tensor,
    differences: torch.Tensor,
    regions: int,
    *,
    reach: float,
    together: float,
) -> _Fit:
    """Fit half ``differences`` ``(n,)`` of pairs, whose signs have these ``inner_products`` ``(n,
    n)``, under prior variances of what regions do alone, 1, and ``together``."""
    covariance = inner_products / regions + together * _together(inner_products, regions, reach)
    covariance.diagonal().add_(REST)
    factor = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(factor, differences[:, None], upper=False)
    # both variances are in units of this one, with which the differences are most likely
    scale = whitened.square().mean()
    log_scale = scale.clamp(min=1e-300).log()  # the scale is 0 where all scores are equal
    log_determinant = factor.diagonal().log().sum()
    likelihood = -float(0.5 * len(differences) * log_scale + log_determinant)
    return _Fit(likelihood, reach=reach, together=together, factor=factor, scale=scale)


def _together(inner_products: torch.Tensor, regions: int, reach: float) -> torch.Tensor:
    """The covariance of what regions do together in two pairs, by the inner product of their signs.
    Each set of s regions, s odd, has a product of their signs, with a variance in proportion to
    reach^s: pairs that differ in few regions have nearly the same sum of these, unless the reach
    is 1, when pairs have nothing in common.
    """
    decay = (1 - reach) / (1 + reach)
    near = decay ** ((regions - inner_products) / 2)
    far = decay ** ((regions + inner_products) / 2)
    return (near - far) / (1 - decay**regions)


@lru_cache(maxsize=64)
def _value_covariances(regions: int, reach: float) -> tuple[list[float], float]:
    """The covariance under `_together` of a pair's half difference with the value of a region that
    is seen, by how many others are (``regions`` numbers), and the variance of a value.

    A set of s regions gives each of its own 2 / s of its product, and 1 / s is the integral of
    u^(s - 1): so both are integrals from 0 to the reach, of polynomials in u, exact by as many
    points of Gauss.
    """
    points, weights = np.polynomial.legendre.leggauss(regions // 2 + 1)
    u = reach * (points + 1) / 2
    # in units of the variance of a pair; in logarithms, as powers of many regions overflow
    decay = (1 - reach) / (1 + reach)
    unit = regions * math.log1p(reach) + math.log1p(-(decay**regions))
    seen_beside = np.arange(regions)[:, None]
    # the sum over all sets with the region is (1 + u)^seen (1 - u)^covered; with the same for -u,
    # the sets of even size fall out
    logs = seen_beside * np.log1p(u) + seen_beside[::-1] * np.log1p(-u) - unit
    of_all_sizes = np.exp(logs) @ (reach * weights)
    covariances = of_all_sizes + of_all_sizes[::-1]
    of_odd_sizes = np.exp(regions * np.log1p(u) - unit) - np.exp(regions * np.log1p(-u) - unit)
    variance = of_odd_sizes / u @ (reach * weights) * 2 / regions
    return covariances.tolist(), float(variance)


def coefficients(signs: torch.Tensor) -> torch.Tensor:
    """Return the exact weight of each pair's half difference in each region's Shapley value, ``(n,
    M)``, from the signs ``(n, M)`` of all pairs: 1 for a seen region, -1 for a covered one."""
    regions = signs.shape[1]
    sizes = ((signs.sum(1) + regions) / 2).round().long().tolist()
    # Shapley's weights, 1 / (M comb(M - 1, s)) for s other regions seen, twice for half differences
    weights_if_seen = [2 / regions / math.comb(regions - 1, size - 1) for size in sizes]
    # no region is covered where all are seen: that size only must not fail
    weights_if_covered = [
        -2 / regions / math.comb(regions - 1, min(size, regions - 1)) for size in sizes
    ]
    seen_part = signs.new_tensor(weights_if_seen)[:, None]
    return torch.where(signs > 0, seen_part, signs.new_tensor(weights_if_covered)[:, None])


AT_ONCE = 256  # coalitions that are drawn together
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fill a circle most evenly
FEWEST = 3  # pairs of orders that say how far orders differ


class Pairs(CoalitionDesign):
    """Random coalitions of regions, each once and with its opposite; all of them, in random order,
    where the runs suffice. Sizes k of M regions are in proportion to 1 / √(k (M − k)), between the
    Shapley kernel's and as many of each. With fewer than four runs for each region, the first
    ones are what a random order uncovers one after the other, which tells most then.
    """

    def rows(self, regions: int) -> torch.Tensor:
        """The coalitions of `KernelSHAP` ``(P, M)``, true for a region that is seen: each drawn
        coalition, and right after it its opposite.
        """
        half = drawn_pairs(regions, self.samples // 2, self.seed)
        return torch.stack([half, ~half], 1).flatten(0, 1)

    def unit(self, regions: int) -> int:
        return 2

    def most(self, regions: int) -> int:
        return min(self.samples // 2 * 2, 2**regions - 2) if regions else self.samples // 2 * 2


@lru_cache(maxsize=8)
def drawn_pairs(regions: int, pairs: int, seed: int) -> torch.Tensor:
    """One coalition of each pair of opposites ``(n, M)``, true for a region that is seen; none
    twice. All there are, in random order, if ``pairs`` is that many. Cached.
    """
    generator = seeded(seed)
    if regions <= 24 and pairs >= 2 ** (regions - 1) - 1:  # all of more would fill the memory
        # a bit for each region; the last one is never seen here: it is in the opposite coalition
        numbers = torch.arange(1, 2 ** (regions - 1), device="cpu")
        coalitions = (numbers[:, None] >> torch.arange(regions, device="cpu")) & 1 == 1
        return coalitions[torch.randperm(len(coalitions), generator=generator, device="cpu")]
    keys = set[bytes]()
    kept = list[torch.Tensor]()
    for coalition in _coalitions(regions, pairs, generator):
        # the same for a coalition and its opposite
        pair_key = (coalition ^ coalition[0]).numpy().tobytes()
        if pair_key not in keys:
            keys.add(pair_key)
            kept.append(coalition)
        if len(kept) >= pairs:
            break
    return torch.stack(kept)


def _coalitions(regions: int, pairs: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield coalitions of regions ``(M,)`` without end, maybe twice: first those of one random
    order, smallest and largest first, if ``pairs`` are few; then random ones, at most half of whose
    regions are seen. Their sizes are spread as evenly as can be by a sequence of equal gaps.
    """
    if pairs < 2 * regions:  # few pairs tell most where one order uncovers each region once
        positions = torch.randperm(regions, generator=generator, device="cpu").argsort()
        for size in sorted(range(1, regions), key=lambda size: min(size, regions - size)):
            yield positions < size
    sizes = range(1, regions // 2 + 1)
    # a size stands for its opposite's, M - size, too, and counts twice, unless both are the same
    weights = [(1 + (2 * size < regions)) / math.sqrt(size * (regions - size)) for size in sizes]
    # each size has an arc of a circle, as long as its weight
    arc_ends = [*itertools.accumulate(weights)]
    turn = float(uniform((), generator))
    while True:
        # ranks of random numbers: a random order of the regions in each row
        for positions in uniform((AT_ONCE, regions), generator).argsort(1).argsort(1):
            turn = (turn + GOLDEN) % 1
            size = 1 + bisect(arc_ends, turn * arc_ends[-1])
            yield positions < size


def score_gain(method: "ShapleyMethod | PartitionSHAP", evidence: Evidence) -> torch.Tensor:
    """The score of the image less that of a fully covered one ``(N,)``."""
    blank = evidence[blank_score(method.baseline, method.score)]
    return evidence[whole_score(method.score)] - blank  # type: ignore[no-any-return]


class ShapleyMethod(SampledRegions):
    """A method for Shapley values, which add up to the score minus that of a fully covered
    image."""

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the regions' values, read from the map ``(N, H, W)``, miss the image's score
        less a covered one's: ``(N,)``. Not the map's sum: each pixel has its region's whole value.
        """
        values_of_regions = region_values(values, self.regions(evidence.inputs))
        sums = torch.stack([image_values.sum() for image_values in values_of_regions])
        return sums - score_gain(self, evidence)


@register
class KernelSHAP(ShapleyMethod):
    r"""The Shapley values of regions, by weighted regression on the scores of random coalitions.

    A region's value is what it adds to the score on average, over all orders in which regions may
    be uncovered; the values of all regions add up to :math:`y(x) - y(\text{baseline})`, exactly:
    this is a condition of the regression, not a sample with a large weight. Coalitions come in
    pairs with their opposites (Covert and Lee, 2021), none twice. Where ``samples`` are enough for
    all coalitions, these are run, and the values are exact. With fewer, the published regression
    takes all that regions do together for noise; here, it is a random function, alike in coalitions
    that differ in few regions (generalised least squares), which makes the error smaller.

    Args:
        samples: how many covered photos, at most; the photo itself and the blank one are not
            counted.
        regions: ``(H, W)`` whole numbers, the number of each pixel's region; `Squares`, `Quadtree`
            or `Superpixels`; or how many squares across.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the coalitions.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at
            most ``tolerance``, or after so many seconds.

    Returns:
        ``(N, H, W)``, in units of the score, with errors from 2 (M + max(M, 12)) runs on, and from
        all (which leave none). Each pixel has the whole value of its region, so the sum over pixels
        is not that over regions: `region_values` gives one value for each. ``delta`` is by how much
        these miss the difference of the scores.

    Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017
    (arXiv:1705.07874).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, KernelSHAP(regions=2), target=1)  # four regions: exact
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1)), a.samples
    (True, 14)
    """

    summary = "Shapley values of regions by weighted regression"
    minimums = {"samples": 2}
    designed_by = Pairs

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        return regress_pairs(seen, scores, whole, blank)


class PairsForInteractions(Pairs):
    """The same, as many as there are interactions at least."""

    def rows(self, regions: int) -> torch.Tensor:
        """The coalitions ``(P, M)`` of `FaithSHAP`, true for a region that is seen."""
        unknown = regions * (regions + 1) // 2
        if self.samples < min(unknown, 2**regions - 2):
            raise MethodError(
                f"samples of faithshap must be at least {unknown} for {regions} regions, got "
                f"{self.samples}; run more, or take fewer regions"
            )
        return super().rows(regions)


def faithful_interactions(
    seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
) -> torch.Tensor:
    """Return what regions do alone and in pairs, ``(M, M)``, symmetric, in sums over seen regions
    nearest to ``scores`` ``(P,)`` under the Shapley kernel; exact for the whole and blank image."""
    regions = seen.shape[1]
    # the pairs of regions, each with itself among them
    first, second = torch.triu_indices(regions, regions, device=seen.device)
    both_seen = seen[:, first] * seen[:, second]
    # all pairs add up to the gain of the whole image: the last one follows from the others
    last_seen = both_seen[:, -1:]
    gain = whole - blank
    sizes = seen.sum(1).round().long()
    counts = sizes.bincount(minlength=regions + 1)
    # each size counts as much as in the kernel, however many of its coalitions were run
    weights = (regions - 1) / (sizes * (regions - sizes) * counts[sizes]).to(seen)
    # least squares with weights: both sides times their roots
    root = weights.sqrt()[:, None]
    unknown_part = both_seen[:, :-1] - last_seen
    gains_less_last = (scores - blank)[:, None] - gain * last_seen
    solved = torch.linalg.lstsq(root * unknown_part, root * gains_less_last).solution[:, 0]
    values = seen.new_zeros(regions, regions)
    values[first, second] = torch.cat([solved, (gain - solved.sum())[None]])
    return torch.triu(values) + torch.triu(values, 1).T


class Permutations(CoalitionDesign):
    """Regions uncovered one after the other in random orders, each order followed by its
    reverse."""

    def rows(self, regions: int) -> torch.Tensor:
        """The coalitions ``(P, M)``, true for a region that is seen: for each random order and then
        its reverse, the M - 1 coalitions that uncover regions one after the other.
        """
        if regions < 2:  # the value of a single region needs no run
            return torch.zeros(0, regions, dtype=torch.bool, device="cpu")
        if self.samples < (least := self.unit(regions)):
            raise MethodError(
                f"samples of shapleysampling must be at least {least} for this photo, got "
                f"{self.samples}"
            )
        generator = seeded(self.seed)
        orders = []
        for _ in range(self.samples // self.unit(regions)):
            order = torch.randperm(regions, generator=generator, device="cpu")
            # the position of each region in the order, and in its reverse
            positions = torch.stack([order, order.flip(0)]).argsort(1)
            sizes = torch.arange(1, regions, device="cpu")[:, None]
            # in a coalition of each size, the first regions of the order are seen
            orders.append((positions[:, None] < sizes).flatten(0, 1))
        return torch.cat(orders)

    def unit(self, regions: int) -> int:
        return max(1, 2 * (regions - 1))

    def most(self, regions: int) -> int:
        return super().most(regions) if regions > 1 else 0


@register
class ShapleySampling(ShapleyMethod):
    r"""The Shapley values of regions, by uncovering them one after the other in random orders.

    A region's value is the mean of what the score gains when it is uncovered. Each order is
    followed by its reverse, which makes the mean more exact. The values of all regions add up to
    :math:`y(x) - y(\text{baseline})`, exactly.

    Args:
        samples: how many covered photos, at most; an order and its reverse take 2 (M − 1) for M
            regions.
        regions: as for `KernelSHAP`.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the orders.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at
            most ``tolerance``, or after so many seconds.

    Returns:
        ``(N, H, W)``, in units of the score, with errors where there are at least three pairs of
        orders. Each pixel has the whole value of its region, so the sum over pixels is not that
        over regions: see `region_values`.

    Štrumbelj and Kononenko, "Explaining prediction models and individual predictions with feature
    contributions", Knowledge and Information Systems 2014.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, ShapleySampling(regions=2), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1))
    True
    """

    summary = "Shapley values of regions by uncovering them in random orders"
    minimums = {"samples": 1}
    designed_by = Permutations

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        """The estimate of `ShapleySampling`: the mean gain of the score when each region is
        uncovered ``(M,)``, and its standard error over pairs of an order and its reverse.

        ``seen`` ``(P, M)`` and ``scores`` ``(P,)`` are in the order of `Permutations.rows`. There
        is no error before three pairs (see `floored_error`). Where all pairs agree, they may do so
        by chance: values may be off by the gain of a region in one pair more.
        """
        regions = seen.shape[1]
        if regions == 1:
            values = seen.new_tensor([whole - blank])
            return Estimate(values, torch.zeros_like(values))
        orders = seen.reshape(-1, regions - 1, regions)
        # each order goes from nothing seen (blank) to all seen (whole)
        from_empty = F.pad(orders, (0, 0, 1, 0))
        # 1 for the region that a step uncovers
        uncovered = F.pad(from_empty, (0, 0, 0, 1), value=1.0).diff(dim=1)
        from_blank = F.pad(scores.reshape(-1, regions - 1), (1, 0), value=blank)
        gains_of_steps = F.pad(from_blank, (0, 1), value=whole).diff(dim=1)
        gains_of_orders = torch.einsum("nsm,ns->nm", uncovered, gains_of_steps)
        # an order and its reverse are not independent: their mean is one observation
        gains = gains_of_orders.reshape(-1, 2, regions).mean(1)
        values = gains.mean(0)
        pairs = len(gains)
        if pairs < FEWEST:
            return Estimate(values)
        variance = gains.var(0) / pairs
        largest_gain = gains.abs().max()
        if bool(variance.mean().sqrt() <= 1e-6 * largest_gain):  # all agree, but for rounding
            return Estimate(values, (largest_gain / pairs).expand(regions))
        return Estimate(values, floored_error(variance, pairs - 1))


@register
class FaithSHAP(ShapleyMethod):
    r"""What regions do for the score, alone and in pairs: the interactions of Faith-Shap.

    Of all sums of what each region does alone and what each pair does together, it is the one that
    is nearest to the scores of coalitions, weighted by the Shapley kernel, and exact for the photo
    and the covered one. A pair below zero says that two regions show the same thing, one above zero
    that they count only together.

    Args:
        samples: how many covered photos, at most; at least M (M + 1) / 2 for M regions. All
            coalitions give the exact values, as by default.
        regions: as for `KernelSHAP`, but 3 × 3 squares by default.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the coalitions.
        tolerance, max_seconds: there is no error, so that a tolerance ends nothing; stop after so
            many seconds.

    Returns:
        ``(N, H, W)``, in units of the score: each pixel has what its region does alone and half of
        what it does in pairs; regions add up to :math:`y(x) - y(\text{baseline})`. The result's
        ``interactions`` ``(N, M, M)`` has both, and pictures draw them as a network over the photo.

    Tsai et al., "Faith-Shap: The Faithful Shapley Interaction Index", JMLR 2023 (arXiv:2203.00870).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, FaithSHAP(regions=2), target=1)
    >>> alone = (model[1].weight[1].reshape(3, 2, 2) * x).sum(1).flatten()
    >>> torch.allclose(a.interactions, alone.diag())  # a linear model has no pairs
    True
    """

    samples: int = 510
    regions: Regions = Squares(3)

    summary = "what regions do alone and in pairs, by weighted regression"
    minimums = {"samples": 1}
    designed_by = PairsForInteractions

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        values = faithful_interactions(seen, scores, whole, blank)
        alone = values.diagonal()
        return Estimate(alone + (values.sum(1) - alone) / 2, interactions=values)


TOGETHER = 8  # cells that are cut in one go, so that their runs share full pieces


@dataclass(frozen=True)
class ValuedCell:
    """A cell, what else is seen while it is valued, and the scores without and with it.
    ``share`` is the part that this setting has in the cell's value.
    """

    cell: Cell
    seen: tuple[Cell, ...]
    without: float
    within: float
    share: float = 1.0

    @property
    def value(self) -> float:
        return self.share * (self.within - self.without)


def cut(cell: Cell) -> tuple[Cell, Cell] | None:
    """Cut a cell in two across its longest side, the first of equal ones, as the package shap does;
    None for a single pixel. The values of `PartitionSHAP` depend on this order."""
    sides = [end - start for start, end in cell]
    longest = sides.index(max(sides))
    start, end = cell[longest]
    middle = (start + end) // 2
    if middle == start:
        return None
    first_sides = cell[:longest]
    last_sides = cell[longest + 1 :]
    return (*first_sides, (start, middle), *last_sides), (*first_sides, (middle, end), *last_sides)


@register
class PartitionSHAP(SearchMethod):
    r"""Owen values along a hierarchy of cells, each cut in two across its longest side, down to
    pixels.

    A square is cut into an upper and a lower half first, as in shap; the values depend on it.

    What a cell adds is shared out between its halves as Shapley would with two players: the mean of
    what each half adds without and with the other. Each half is thus valued in two settings, and
    cut further in each of them where it adds most, so that runs are spent where they matter; a cell
    that is not cut any more spreads its value evenly over its pixels. With runs enough for all
    pixels, these are the Owen values. Nothing is drawn at random, and there is no standard error.

    Args:
        samples: how many covered photos, at most.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        max_seconds: stop after so many seconds, which the images share; each target has as many.

    Returns:
        ``(N, H, W)`` in units of the score; the values of all pixels add up to :math:`y(x) -
        y(\text{baseline})`.

    Owen, "Values of Games with a Priori Unions", 1977; the hierarchy on photos as in Lundberg's
    shap package.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, PartitionSHAP(), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1))
    True
    """

    samples: int = 500
    baseline: Baseline = Zero()
    score: Score = "logit"
    max_seconds: float | None = None

    summary = "Owen values along a hierarchy of cells, fine where it matters"
    minimums = {"samples": 2}
    style = "signed"

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return super().needs | {whole_score(self.score), blank_score(self.baseline, self.score)}

    def expected_sum(self, evidence: Evidence) -> torch.Tensor:
        return score_gain(self, evidence)

    def search(self, evidence: Evidence, image: int) -> "_Tree":
        return _Tree(self, evidence, image)


class _Tree(Search):
    """The search of `PartitionSHAP` in one image: its cells, cut further and further."""

    def __init__(self, method: PartitionSHAP, evidence: Evidence, image: int) -> None:
        """Begin with the whole image as the only cell, whose value is the score of the image less
        that of the covered one.
        """
        whole = float(evidence[whole_score(method.score)][image])
        blank = float(evidence[blank_score(method.baseline, method.score)][image])
        all_pixels = tuple((0, side) for side in evidence.size)
        self._method = method
        self._image = image
        # for the size, the type and the device of masks and of the map
        self._inputs = evidence.inputs
        # of images by the cells that are seen in them, in the order of ValuedCell.seen and its own
        self._scores: dict[tuple[Cell, ...], float] = {}
        # what the image is cut into by now, each cell in each of its settings
        self._parts = [ValuedCell(all_pixels, seen=(), without=blank, within=whole)]

    @property
    def planned(self) -> int:
        """The budget of runs, or the runs by now where no cell is left to cut or too few runs are
        left for one more."""
        can_go_on = self._to_cut(at_most=1) and self._method.samples - self.samples >= 2
        return self._method.samples if can_go_on else self.samples

    def steps(self) -> Steps:
        """Cut the cells of the largest values in two until the budget is spent: yields requests for
        the scores of halves. Scores are kept, so that no image is run twice.
        """
        while True:
            # each half of a cell takes a run
            affordable = (self._method.samples - self.samples) // 2
            # cut few cells at a time at first, when little is known
            chosen = self._to_cut(at_most=min(TOGETHER, 1 + self.samples // 8, affordable))
            if not chosen:
                return
            wanted = [(*part.seen, half) for part, halves in chosen for half in halves]
            unscored = [cells for cells in dict.fromkeys(wanted) if cells not in self._scores]
            if unscored:
                mask_of_cells = partial(box_mask, like=self._inputs)
                shown = ShownParts(
                    self._method.baseline, self._image, parts=unscored, mask=mask_of_cells
                )
                scores = yield Scores(shown, ScoreOf(self._method.score))
                self._scores.update(zip(unscored, scores.double().tolist(), strict=True))
            halved = [
                half for part, halves in chosen for half in _halved(part, halves, self._scores)
            ]
            cut_now = {id(part) for part, _ in chosen}
            self._parts = [part for part in self._parts if id(part) not in cut_now] + halved

    def _to_cut(self, *, at_most: int) -> list[tuple[ValuedCell, tuple[Cell, Cell]]]:
        """The cells to cut next, by the size of their values, each with its two halves; cells of a
        single pixel are passed over.
        """
        chosen: list[tuple[ValuedCell, tuple[Cell, Cell]]] = []
        for part in sorted(self._parts, key=lambda part: -abs(part.value)):
            if len(chosen) >= at_most:
                break
            halves = cut(part.cell)
            if halves is not None:
                chosen.append((part, halves))
        return chosen

    def map(self) -> torch.Tensor:
        """The map of `PartitionSHAP` ``(1, H, W)`` by now: the value of each cell, spread evenly
        over its pixels."""
        values = self._inputs.new_zeros(self._inputs.shape[2:])
        for part in self._parts:
            pixels = pixels_of(part.cell)
            values[pixels] += part.value / values[pixels].numel()
        return values[None]


def _halved(
    part: ValuedCell, halves: tuple[Cell, Cell], scores: Mapping[tuple[Cell, ...], float]
) -> list[ValuedCell]:
    """Replace a valued cell by its two halves, each valued without and with the other half, with
    half the share each; ``scores`` are by the cells that are seen.
    """
    parts = []
    for half, other in (halves, halves[::-1]):
        half_alone = replace(part, cell=half, within=scores[*part.seen, half], share=part.share / 2)
        seen_too = (*part.seen, other)
        beside_other = replace(
            half_alone, seen=seen_too, without=scores[seen_too], within=part.within
        )
        parts += [half_alone, beside_other]
    return parts
