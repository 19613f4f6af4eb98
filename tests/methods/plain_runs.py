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

STUDENT = {14: 2.144787, 15: 2.131450, 20: 2.085963, 25: 2.059539}
"""The 97.5 % points of Student's t, from any table."""

ScoreOf = Callable[[Tensor], float]


def occlusion(score: ScoreOf, x: Tensor, window: int, stride: int) -> Tensor:
    """The mean drop over the windows that cover each pixel."""
    _, height, width = x.shape
    total = torch.zeros(height, width).double()
    times = torch.zeros(height, width).double()
    rows = [i for i in range(0, height, stride) if i == 0 or i - stride + window < height]
    columns = [j for j in range(0, width, stride) if j == 0 or j - stride + window < width]
    for i in rows:
        for j in columns:
            covered = x.clone()
            covered[:, i : i + window, j : j + window] = 0
            total[i : i + window, j : j + window] += score(x) - score(covered)
            times[i : i + window, j : j + window] += 1
    return total / times


def seen(x: Tensor, labels: Tensor, regions: Sequence[int]) -> Tensor:
    """The photo with these regions, and zeros elsewhere."""
    return x * torch.isin(labels, torch.tensor(list(regions), dtype=torch.long)).to(x)


def on_pixels(labels: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(
        [[values[int(label)] for label in row] for row in labels], dtype=torch.float64
    )


def ablation(score: ScoreOf, x: Tensor, labels: Tensor) -> Tensor:
    regions = range(int(labels.max()) + 1)
    return on_pixels(
        labels, [score(x) - score(seen(x, labels, [r for r in regions if r != k])) for k in regions]
    )


def shapley(score: ScoreOf, x: Tensor, labels: Tensor) -> Tensor:
    """By definition: over all coalitions without the region."""
    regions = range(int(labels.max()) + 1)
    values = []
    for k in regions:
        others = [r for r in regions if r != k]
        value = 0.0
        for size in range(len(others) + 1):
            weight = (
                math.factorial(size)
                * math.factorial(len(others) - size)
                / math.factorial(len(regions))
            )
            for coalition in itertools.combinations(others, size):
                gain = score(seen(x, labels, [*coalition, k])) - score(seen(x, labels, coalition))
                value += weight * gain
        values.append(value)
    return on_pixels(labels, values)


def permutations(
    score: ScoreOf, x: Tensor, labels: Tensor, orders: Sequence[Sequence[int]]
) -> Tensor:
    """The mean gain of each region when it is uncovered, over these orders."""
    values = [0.0] * (int(labels.max()) + 1)
    for order in orders:
        for place, region in enumerate(order):
            gain = score(seen(x, labels, order[: place + 1])) - score(
                seen(x, labels, order[:place])
            )
            values[region] += gain / len(orders)
    return on_pixels(labels, values)


def rise(score: ScoreOf, x: Tensor, masks: Sequence[Tensor], probability: float) -> Tensor:
    total = torch.zeros(x.shape[1:]).double()
    for mask in masks:
        total += score(x * mask) * mask
    return total / (len(masks) * probability)


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
    rows = []
    targets = []
    weights = []
    for coalition in [tuple(range(count)), *coalitions]:
        rows.append([1.0] + [float(r in coalition) for r in range(count)])
        targets.append(score(seen(x, labels, coalition)))
        cosine = math.sqrt(len(coalition) / count)
        weights.append(math.exp(-((1 - cosine) ** 2) / width**2))
    a, y, w = (torch.tensor(each, dtype=torch.float64) for each in (rows, targets, weights))
    penalty = ridge * torch.eye(count + 1).double()
    penalty[0, 0] = 0
    fitted = torch.linalg.solve(a.T @ (w[:, None] * a) + penalty, a.T @ (w * y))
    mean = (w * y).sum() / w.sum()
    r2 = 1 - (w * (y - a @ fitted) ** 2).sum() / (w * (y - mean) ** 2).sum()
    return on_pixels(labels, fitted[1:].tolist()), float(r2)


def pair_regression(
    score: ScoreOf,
    x: Tensor,
    labels: Tensor,
    coalitions: Sequence[Sequence[int]],
    variances: Sequence[tuple[float, float]],
) -> tuple[list[float], list[float]]:
    """The best linear estimates of Shapley values, and their errors, by a table of all coalitions.

    The score is a sum over sets of regions of a random number times a product of signs. Sets of one
    region have the variance 1 in all, sets of three ``threes``, and each pair of coalitions has a
    rest of the variance ``rest``. Of the ``variances``, the most likely ones are taken. Errors are
    the largest of all that are hardly less likely, by how well each pair is predicted from all
    others.
    """
    count = int(labels.max()) + 1
    whole = (1 << count) - 1
    # one of each pair, the whole photo among them
    pairs = [number for number in range(1 << count) if number & 1]
    signs = torch.tensor(
        [[1.0 if number >> r & 1 else -1.0 for r in range(count)] for number in pairs]
    ).double()
    shapley_of = torch.zeros(count, len(pairs)).double()
    for column, number in enumerate(pairs):
        # half a difference, once up and once down
        for part, sign in ((number, 1.0), (whole ^ number, -1.0)):
            size = part.bit_count()
            for r in range(count):
                before = size - (part >> r & 1)
                weight = (
                    math.factorial(before)
                    * math.factorial(count - before - 1)
                    / math.factorial(count)
                )
                shapley_of[r, column] += sign * weight * (1 if part >> r & 1 else -1)
    numbers = [whole, *(sum(1 << r for r in coalition) for coalition in coalitions)]
    observed = [
        (pairs.index(number), 1.0) if number & 1 else (pairs.index(whole ^ number), -1.0)
        for number in numbers
    ]

    def scored(number: int) -> float:
        return score(seen(x, labels, [r for r in range(count) if number >> r & 1]))

    differences = [(scored(number) - scored(whole ^ number)) / 2 for number in numbers]
    half = torch.tensor(differences, dtype=torch.float64)
    found = []
    for threes, rest in variances:
        prior = rest * torch.eye(len(pairs)).double()
        for size, variance in ((1, 1.0), (3, threes)):
            for regions in itertools.combinations(range(count), size):
                product = signs[:, list(regions)].prod(1)
                prior += variance / math.comb(count, size) * torch.outer(product, product)
        rows = torch.stack([sign * prior[place] for place, sign in observed])
        covariance = torch.stack([sign * rows[:, place] for place, sign in observed], 1)
        solved = torch.linalg.solve(covariance, half)
        scale = float(half @ solved) / len(half)
        likelihood = -0.5 * (len(half) * math.log(scale) + float(torch.logdet(covariance)))
        missed = 0.0
        for one in range(len(half)):
            others = [k for k in range(len(half)) if k != one]
            weights = torch.linalg.solve(covariance[others][:, others], covariance[others, one])
            left = float(covariance[one, one] - weights @ covariance[others, one])
            missed += float(half[one] - weights @ half[others]) ** 2 / left / len(half)
        after = prior - rows.T @ torch.linalg.solve(covariance, rows)
        spread = (shapley_of @ after @ shapley_of.T).diagonal().clamp(min=0)
        error = (max(scale, missed) * spread).sqrt()
        found.append((likelihood, shapley_of @ rows.T @ solved, error))
    likelihood, values, _ = max(found, key=lambda each: each[0])
    errors = [error for other, _, error in found if likelihood - other < 3]
    freedom = len(half) - count
    factor = (
        STUDENT[freedom] / 1.959964 * math.sqrt(len(half) / freedom)
        if freedom > max(count, 12)
        else math.nan
    )
    return values.tolist(), (factor * torch.stack(errors).amax(0)).tolist()
