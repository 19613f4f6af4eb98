"""Shapley values from the scores of coalitions and their opposites, by generalised least squares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from explain.methods.coalitions import Solved

THREES = (0.0, 0.01, 0.1, 0.3, 1.0)
REST = (1e-6, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""How large what regions do in threes, and all the rest, may be beside what each does on its own: variances that are
compared by their likelihood."""
ENOUGH = 512  # pairs that tell how large they are


@dataclass(frozen=True)
class PairRegression:
    r"""The Shapley values that are most likely, given how much more each coalition scores than its opposite.

    Half of this difference, :math:`D(z) = (y(z) - y(1 - z)) / 2`, knows nothing of what regions do in twos. It is the
    sum of what each region does on its own, of what they do in threes, and of a rest. Shapley values are linear in all
    of these, so the best linear estimate of them is known once their variances are: they are random, and of some
    variances those are taken that make the scores of the first pairs most likely. The whole photo and the blank one are
    a pair among the others, which makes the values add up. Where all pairs were run, the values are exact. The standard
    error is that of the estimate.

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
        first = signs[:ENOUGH]
        _, threes, rest, factor = max(_compared(first, half[:ENOUGH], THREES), key=lambda each: each[0])
        if len(half) > ENOUGH:
            _, threes, rest, factor = next(_compared(signs, half, (threes,), rest))
        across = _single(signs) + threes * _in_threes(signs) + rest * of_rest
        values = across.T @ torch.cholesky_solve(half[:, None], factor)[:, 0]
        known = torch.linalg.solve_triangular(factor, across, upper=False).square().sum(0)
        scale = torch.linalg.solve_triangular(factor, half[:, None], upper=False).square().mean()
        error = (scale * (_before(regions, threes, rest) - known)).clamp(min=0).sqrt()
        return Solved(values + (gain - values.sum()) / regions, error if len(half) > 2 else None)


def _compared(
    signs: torch.Tensor, half: torch.Tensor, of_threes: tuple[float, ...], least: float = 0.0
) -> Iterator[tuple[float, float, float, torch.Tensor]]:
    """For each pair of variances its likelihood, and the factor of the covariance of what was observed.

    Rests are those from the ``least`` on.
    """
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
            yield likelihood, threes, rest, factor


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
