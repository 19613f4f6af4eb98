"""Perturbation methods again, slowly and plainly: loops over covered photos, written from the
papers' formulas.

``score`` takes one photo ``(C, H, W)`` and gives a number; a covered photo is filled with zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from explain.baselines import Zero
from explain.baselines.base import Baseline

ZERO = Zero()
STUDENT = {14: 2.144787, 15: 2.131450, 20: 2.085963, 25: 2.059539}
"""The 97.5 % points of Student's t, from any table."""

ScoreOf = Callable[[Tensor], float]


def occlusion(
    score: ScoreOf, x: Tensor, window: int, stride: int, baseline: Baseline = ZERO
) -> Tensor:
    """The mean drop over the windows that cover each pixel."""
    _, height, width = x.shape
    total = torch.zeros(height, width).double()
    times = torch.zeros(height, width).double()
    rows = [i for i in range(0, height, stride) if i == 0 or i - stride + window < height]
    columns = [j for j in range(0, width, stride) if j == 0 or j - stride + window < width]
    for i, j in itertools.product(rows, columns):
        hidden = torch.zeros(height, width).double()
        hidden[i : i + window, j : j + window] = 1
        covered = baseline(x[None], 1 - hidden[None, None])[0]
        total += (score(x) - score(covered)) * hidden
        times += hidden
    return total / times


def seen(x: Tensor, labels: Tensor, regions: Sequence[int]) -> Tensor:
    """The photo with these regions, and zeros elsewhere."""
    return x * torch.isin(labels, torch.tensor(list(regions), dtype=torch.long)).to(x)


def on_pixels(labels: Tensor, values: Tensor | Sequence[float]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)[labels]


def ablation(score: ScoreOf, x: Tensor, labels: Tensor) -> Tensor:
    regions = range(int(labels.max()) + 1)
    without = [[r for r in regions if r != k] for k in regions]
    return on_pixels(labels, score(x) - scores_of(score, x, labels, without))


def shown_in_each(count: int) -> Tensor:
    """Which of some regions each coalition shows, ``(2**count, count)``."""
    return (torch.arange(2**count)[:, None] >> torch.arange(count) & 1).double()


def shapley_weights(count: int) -> Tensor:
    """What Shapley values are made of by definition, ``(count, 2**count)``: with each coalition
    that shows the region, and without that."""
    shown = shown_in_each(count)
    sizes = [math.factorial(k) * math.factorial(count - 1 - k) for k in range(count)]
    others = (shown.sum(1, keepdim=True) - shown).long()
    return ((2 * shown - 1) * torch.tensor(sizes)[others] / math.factorial(count)).T


def scores_of(
    score: ScoreOf, x: Tensor, labels: Tensor, coalitions: Sequence[Sequence[int]]
) -> Tensor:
    scores = [score(seen(x, labels, coalition)) for coalition in coalitions]
    return torch.tensor(scores, dtype=torch.float64)


def shapley(score: ScoreOf, x: Tensor, labels: Tensor) -> Tensor:
    """By definition: over all coalitions without the region."""
    count = int(labels.max()) + 1
    coalitions = [row.nonzero()[:, 0].tolist() for row in shown_in_each(count)]
    return on_pixels(labels, shapley_weights(count) @ scores_of(score, x, labels, coalitions))


def permutations(
    score: ScoreOf, x: Tensor, labels: Tensor, orders: Sequence[Sequence[int]]
) -> Tensor:
    """The mean gain of each region when it is uncovered, over these orders."""
    values = torch.zeros(int(labels.max()) + 1).double()
    for order in orders:
        shown = [order[:place] for place in range(len(order) + 1)]
        values[order] += scores_of(score, x, labels, shown).diff() / len(orders)
    return on_pixels(labels, values)


def rise(score: ScoreOf, x: Tensor, masks: Sequence[Tensor], probability: float) -> Tensor:
    return sum(score(x * mask) * mask for mask in masks) / (len(masks) * probability)


def lime(
    score: ScoreOf,
    x: Tensor,
    labels: Tensor,
    coalitions: Sequence[Sequence[int]],
    width: float,
    ridge: float,
) -> tuple[Tensor, float]:
    """Weighted ridge regression with a free intercept, solved as one linear system; and its R²."""
    count = int(labels.max()) + 1
    every = [range(count), *coalitions]
    y = scores_of(score, x, labels, every)
    shown = torch.stack([torch.isin(torch.arange(count), torch.tensor(c)) for c in every]).double()
    w = torch.exp(-(((1 - shown.mean(1).sqrt()) / width) ** 2))
    a = torch.cat([torch.ones_like(y)[:, None], shown], 1)
    penalty = ridge * torch.eye(count + 1).double()
    penalty[0, 0] = 0
    fitted = torch.linalg.solve(a.T @ (w[:, None] * a) + penalty, a.T @ (w * y))
    mean = (w * y).sum() / w.sum()
    r2 = 1 - (w * (y - a @ fitted) ** 2).sum() / (w * (y - mean) ** 2).sum()
    return on_pixels(labels, fitted[1:]), float(r2)


def pair_regression(
    score: ScoreOf,
    x: Tensor,
    labels: Tensor,
    coalitions: Sequence[Sequence[int]],
    variances: Sequence[tuple[float, float]],
) -> tuple[Tensor, Tensor]:
    """The best linear estimates of Shapley values, and their errors, by a table of all coalitions.

    The score is a sum over sets of an odd number of regions of a random number times a product of
    signs. Sets of one region have the variance 1 in all; beside these, all sets have the variance
    ``together`` in all, those of s regions in proportion to ``reach ** s``; and each pair of a
    coalition and the rest has a variance of a millionth of its own. Of the ``variances``, the most
    likely ones are taken. The square of an error is the mean over all that are hardly less likely,
    by their likelihood, of the variance that is left.
    """
    count = int(labels.max()) + 1
    signs = 2 * shown_in_each(count) - 1
    pairs = torch.eye(2**count).double()
    pairs -= pairs.flip(0)  # what lacks is shown in the other one
    every = [range(count), *coalitions]
    without = [[r for r in range(count) if r not in coalition] for coalition in every]
    half = (scores_of(score, x, labels, every) - scores_of(score, x, labels, without)) / 2
    numbers = [sum(1 << r for r in coalition) for coalition in every]
    fits = []
    odd = range(1, count + 1, 2)
    for reach, together in variances:
        total = sum(reach**size * math.comb(count, size) for size in odd)
        prior = 1e-6 * pairs
        for size in odd:
            sets = itertools.combinations(range(count), size)
            products = torch.stack([signs[:, list(regions)].prod(1) for regions in sets], 1)
            variance = together * reach**size / total + (size == 1) / count
            prior = prior + variance * products @ products.T
        rows = prior[numbers]
        covariance = rows[:, numbers]
        solved = torch.linalg.solve(covariance, half)
        scale = float(half @ solved) / len(half)
        likelihood = -0.5 * (len(half) * math.log(scale) + float(torch.logdet(covariance)))
        after = prior - rows.T @ torch.linalg.solve(covariance, rows)
        contrast = shapley_weights(count)
        spread = (contrast @ after @ contrast.T).diagonal().clamp(min=0)
        fits.append((likelihood, contrast @ rows.T @ solved, scale * spread))
    likelihood, values, _ = max(fits, key=lambda fit: fit[0])
    plausible = [fit for fit in fits if likelihood - fit[0] < 3]
    weights = [math.exp(fit[0] - likelihood) for fit in plausible]
    terms = [weight * fit[2] for weight, fit in zip(weights, plausible, strict=True)]
    errors = (torch.stack(terms).sum(0) / sum(weights)).sqrt()
    freedom = len(half) - count
    if freedom <= max(count, 12):
        return values, torch.full_like(errors, math.nan)
    return values, STUDENT[freedom] / 1.959964 * errors
