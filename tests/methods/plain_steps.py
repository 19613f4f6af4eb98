"""Paths other than the straight line, and what is shared out along the gradient: slowly and
plainly, value by value."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.methods.plain import Layers, backward, forward

Step = tuple[Tensor, Tensor]
"""Where a step begins, and where it ends."""


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Each pixel is the mean of all pixels, weighted by a Gaussian of their distance."""
    if sigma == 0:
        return x
    rows, columns = (torch.arange(size, dtype=x.dtype) for size in x.shape[1:])
    across = torch.exp(-((rows[:, None] - rows) ** 2) / (2 * sigma**2))
    along = torch.exp(-((columns[:, None] - columns) ** 2) / (2 * sigma**2))
    return across @ x @ along / across.sum(1)[:, None] / along.sum(1)


def blurintegratedgradients(
    layers: Layers, x: Tensor, target: int, *, steps: int, sigma: float
) -> Tensor:
    """The gradient at the middle of each step times what the step changes; ``sigma`` in pixels (Xu
    2020)."""
    x = x.detach()
    total = torch.zeros_like(x)
    for i in range(steps):
        begin, middle, end = (blurred(x, sigma * (1 - (i + part) / steps)) for part in (0, 0.5, 1))
        total += backward(layers, forward(layers, middle), target)[0] * (end - begin)
    return total


def straight(x: Tensor, baseline: Tensor, steps: int) -> Iterator[Step]:
    """A straight line in equal steps."""
    x = x.detach()
    for i in range(steps):
        yield baseline + i / steps * (x - baseline), baseline + (i + 1) / steps * (x - baseline)


def blurs(x: Tensor, sigma: float, steps: int) -> Iterator[Step]:
    """Less and less blurred."""
    x = x.detach()
    for i in range(steps):
        yield blurred(x, sigma * (1 - i / steps)), blurred(x, sigma * (1 - (i + 1) / steps))


def guided(
    layers: Layers,
    x: Tensor,
    target: int,
    *,
    baseline: Tensor,
    steps: int,
    fraction: float,
    distance: float,
) -> Iterator[Step]:
    """The path of guided integrated gradients: first algorithm of Kapishnikov 2021, never
    ``distance`` off the line."""
    x = x.detach()
    whole = float((x - baseline).abs().sum())
    now = baseline.clone()
    for i in range(steps):
        slopes = backward(layers, forward(layers, now), target)[0].abs()
        # what differs by less is equal
        unit = slopes.max() * torch.finfo(x.dtype).eps ** (2 / 3)
        slopes = (slopes / unit).round() if unit else slopes
        begin = now
        done = (i + 1) / steps
        least = baseline + max(done - distance, 0) * (x - baseline)
        most = baseline + min(done + distance, 1) * (x - baseline)
        now = torch.where(most >= least, torch.maximum(now, least), torch.minimum(now, least))
        while True:
            gap = float((x - now).abs().sum()) - whole * (1 - done)
            moving = (most - now).abs() > 1e-13
            if gap <= 1e-12 * whole or not moving.any():
                break
            ranked = torch.where(moving, slopes, math.inf).flatten().sort().values
            chosen = moving & (slopes <= ranked[int((len(ranked) - 1) * fraction)])
            rest = (most - now) * chosen
            gain = float(rest.abs().sum())
            now = now + min(1.0, gap / gain) * rest
            if gap < gain:
                break
        yield begin, now


def along(layers: Layers, target: int, path: Iterator[Step]) -> Tensor:
    """The gradient where each step begins, times the step."""
    return sum(
        backward(layers, forward(layers, begin), target)[0] * (end - begin) for begin, end in path
    )


def idgi(layers: Layers, target: int, path: Iterator[Step]) -> Tensor:
    """What each step changes of the score, times the squared gradient over its sum (Yang 2023)."""
    total: Tensor | float = 0.0
    for begin, end in path:
        square = backward(layers, forward(layers, begin), target)[0] ** 2
        change = forward(layers, end)[-1][target] - forward(layers, begin)[-1][target]
        total = total + square / square.sum() * change
    return total
