"""Perturbation methods again, slowly and plainly: loops over covered photos, written from the papers' formulas.

``score`` takes one photo ``(C, H, W)`` and gives a number; a covered photo is filled with zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

ScoreOf = Callable[[torch.Tensor], float]


def occlusion(score: ScoreOf, x: torch.Tensor, window: int, stride: int) -> torch.Tensor:
    """The mean drop over the windows that cover each pixel."""
    _, height, width = x.shape
    total, times = torch.zeros(height, width).double(), torch.zeros(height, width).double()
    rows = [i for i in range(0, height, stride) if i == 0 or i - stride + window < height]
    columns = [j for j in range(0, width, stride) if j == 0 or j - stride + window < width]
    for i in rows:
        for j in columns:
            covered = x.clone()
            covered[:, i : i + window, j : j + window] = 0
            total[i : i + window, j : j + window] += score(x) - score(covered)
            times[i : i + window, j : j + window] += 1
    return total / times


def seen(x: torch.Tensor, labels: torch.Tensor, regions: Sequence[int]) -> torch.Tensor:
    """The photo with these regions, and zeros elsewhere."""
    return x * torch.isin(labels, torch.tensor(list(regions), dtype=torch.long)).to(x)


def on_pixels(labels: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor([[values[int(label)] for label in row] for row in labels], dtype=torch.float64)


def ablation(score: ScoreOf, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    regions = range(int(labels.max()) + 1)
    return on_pixels(labels, [score(x) - score(seen(x, labels, [r for r in regions if r != k])) for k in regions])


def shapley(score: ScoreOf, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """By definition: over all coalitions without the region."""
    regions = range(int(labels.max()) + 1)
    values = []
    for k in regions:
        others = [r for r in regions if r != k]
        value = 0.0
        for size in range(len(others) + 1):
            weight = math.factorial(size) * math.factorial(len(others) - size) / math.factorial(len(regions))
            for coalition in itertools.combinations(others, size):
                gain = score(seen(x, labels, [*coalition, k])) - score(seen(x, labels, coalition))
                value += weight * gain
        values.append(value)
    return on_pixels(labels, values)


def permutations(
    score: ScoreOf, x: torch.Tensor, labels: torch.Tensor, orders: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The mean gain of each region when it is uncovered, over these orders."""
    values = [0.0] * (int(labels.max()) + 1)
    for order in orders:
        for place, region in enumerate(order):
            gain = score(seen(x, labels, order[: place + 1])) - score(seen(x, labels, order[:place]))
            values[region] += gain / len(orders)
    return on_pixels(labels, values)


def rise(score: ScoreOf, x: torch.Tensor, masks: Sequence[torch.Tensor], probability: float) -> torch.Tensor:
    total = torch.zeros(x.shape[1:]).double()
    for mask in masks:
        total += score(x * mask) * mask
    return total / (len(masks) * probability)


def lime(
    score: ScoreOf,
    x: torch.Tensor,
    labels: torch.Tensor,
    coalitions: Sequence[Sequence[int]],
    width: float,
    ridge: float,
) -> tuple[torch.Tensor, float]:
    """Weighted ridge regression with a free intercept, solved as one linear system; and its R²."""
    count = int(labels.max()) + 1
    rows, targets, weights = [], [], []
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


def kernel_regression(
    score: ScoreOf,
    x: torch.Tensor,
    labels: torch.Tensor,
    coalitions: Sequence[Sequence[int]],
    weights: Sequence[float],
    ridge: float,
) -> torch.Tensor:
    """Least squares over coalitions and their opposites, under the condition that the values add up to the gain.

    Solved by Lagrange's multipliers; ``ridge`` draws the values towards their mean.
    """
    count = int(labels.max()) + 1
    everything = set(range(count))
    blank, gain = score(seen(x, labels, [])), score(x) - score(seen(x, labels, []))
    system, right = torch.zeros(count + 1, count + 1).double(), torch.zeros(count + 1).double()
    for coalition, weight in zip(coalitions, weights, strict=True):
        for part in (set(coalition), everything - set(coalition)):
            z = torch.tensor([float(r in part) for r in range(count)]).double()
            system[:count, :count] += weight / 2 * torch.outer(z, z)
            right[:count] += weight / 2 * z * (score(seen(x, labels, sorted(part))) - blank)
    # under the condition, z and its opposite see the same deviations
    system[:count, :count] += ridge * (torch.eye(count) - 1 / count)
    system[count, :count] = system[:count, count] = 1
    right[count] = gain
    return on_pixels(labels, torch.linalg.solve(system, right)[:count].tolist())
