"""Extremal perturbations again, slowly: each mask pixel by pixel, and the ascent by autograd and
torch's own SGD."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def smooth_mask(values: Tensor, step: int, sigma: float) -> Tensor:
    """The mask of values ``(h, w)`` on a lattice, with what lies beyond the photo;
    differentiable."""
    (height, width), kernels, points = _around(tuple(values.shape), step, sigma)
    outside = torch.zeros(1, dtype=values.dtype)
    each = kernels * torch.cat([values.flatten(), outside])[points]
    weights = torch.exp(20 * each)
    return ((each * weights).sum(1) / weights.sum(1)).reshape(height, width)


@cache
def _around(
    lattice: tuple[int, int], step: int, sigma: float
) -> tuple[tuple[int, int], Tensor, Tensor]:
    """For each pixel, the kernel of each point around it, and the number of the point; the last one
    is outside."""
    beyond = math.ceil(sigma / step)
    rows, columns = (range(-beyond * step, step * (n - 1 + beyond) + 1) for n in lattice)
    kernels = []
    points = []
    reach = range(-beyond - 1, beyond + 2)
    for y, x in itertools.product(rows, columns):
        near = [(y // step + i, x // step + j) for i in reach for j in reach]
        apart = [math.hypot(y - step * i, x - step * j) / sigma for i, j in near]
        kernels.append([math.exp(-2 * max(0.0, distance - 0.5) ** 2) for distance in apart])
        inside = [0 <= i < lattice[0] and 0 <= j < lattice[1] for i, j in near]
        points.append(
            [i * lattice[1] + j if ok else -1 for (i, j), ok in zip(near, inside, strict=True)]
        )
    return (
        (len(rows), len(columns)),
        torch.tensor(kernels, dtype=torch.float64),
        torch.tensor(points),
    )


def wanted(full: Tensor, area: float) -> Tensor:
    """What each value is drawn to: 1 where it is among the largest share, 0 elsewhere; equal ones
    to their mean."""
    ranked = sorted((round(value, 9), place) for place, value in enumerate(full.flatten().tolist()))
    zeros = int(len(ranked) * (1 - area))
    of_value: dict[float, list[float]] = {}
    for rank, (value, _) in enumerate(ranked):
        of_value.setdefault(value, []).append(float(rank >= zeros))
    found = torch.zeros(len(ranked), dtype=torch.float64)
    for value, place in ranked:
        found[place] = sum(of_value[value]) / len(of_value[value])
    return found


def extremal(
    score: Callable[[Tensor], Tensor], x: Tensor, area: float, steps: int, step: int, sigma: float
) -> Tensor:
    """The mask of one photo ``(C, H, W)`` that fades to zero, as it was seen last."""
    size = (x.shape[1], x.shape[2])
    values = torch.ones(
        math.ceil(size[0] / step), math.ceil(size[1] / step), dtype=x.dtype, requires_grad=True
    )
    descent = torch.optim.SGD([values], lr=0.01, momentum=0.9, dampening=0.9)
    beyond = math.ceil(sigma / step) * step
    for t in range(steps):
        full = smooth_mask(values, step, sigma)
        mask = full[beyond : beyond + size[0], beyond : beyond + size[1]]
        seen = x * mask
        apart = ((full.flatten() - wanted(full.detach(), area)) ** 2).mean()
        loss = 300 * 1.0035**t * apart - score(seen.flip(2) if t % 2 == 0 else seen)
        descent.zero_grad()
        loss.backward()
        descent.step()
        with torch.no_grad():
            values.clamp_(0, 1)
    return mask.detach()
