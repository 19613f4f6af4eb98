"""Shapley values from the scores of coalitions and their opposites, by generalised least squares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from explain.methods.coalitions import Solved
from explain.methods.estimates import widened

THREES = (0.0, 0.01, 0.1, 0.3, 1.0)
REST = (1e-6, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""How large what regions do in threes, and all the rest, may be beside what each does on its own: variances that are
compared by their likelihood."""
ENOUGH = 512  # pairs that tell how large they are
PLAUSIBLE = 3.0  # variances whose log-likelihood is less than this below the best could as well be true
TESTED = 12  # pairs, at least, that a fit has to predict before its error is believed


@dataclass(frozen=True)
class PairRegression:
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

    compares: ClassVar[bool] = True

    def __call__(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Solved:
        regions, gain = seen.shape[1], whole - blank
        even = torch.full((regions,), gain / regions, dtype=torch.float64, device=seen.device)
        if regions == 1:
            return Solved(even, torch.zeros_like(even))
        if not len(seen):
            return Solved(even)
        signs = 2 * torch.cat([torch.ones_like(seen[:1]), seen[::2]]) - 1
        half = torch.cat([scores.new_full((1,), gain), scores[::2] - scores[1::2]]) / 2
        of_rest = coefficients(signs)
        if len(half) == 2 ** (regions - 1):
            values = half @ of_rest
            return Solved(values, torch.zeros_like(values))
        compared = list(_compared(signs[:ENOUGH], half[:ENOUGH], THREES))
        most = max(fit.likelihood for fit in compared)
        plausible = sorted(
            (fit for fit in compared if most - fit.likelihood < PLAUSIBLE), key=lambda fit: -fit.likelihood
        )
        if len(half) > ENOUGH:
            plausible = [next(_compared(signs, half, (fit.threes,), fit.rest)) for fit in plausible]
        best, freedom = plausible[0], len(half) - regions
        values = best.across(signs).T @ torch.cholesky_solve(half[:, None], best.factor)[:, 0]
        error = None
        if freedom > max(regions, TESTED):
            factor = widened(freedom) * math.sqrt(len(half) / freedom)
            error = factor * torch.stack([fit.error(signs, half) for fit in plausible]).amax(0)
        return Solved(values + (gain - values.sum()) / regions, error)


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
