"""Extremal perturbations again, slowly: each mask pixel by pixel, and the ascent by autograd and
torch's own SGD."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def smooth_mask(values: Tensor, step: int, sigma: float) -> Tensor:
    """The mask of values ``(h, w)`` on a lattice, with what lies beyond the photo: for each pixel
    the smooth maximum of the points around, which are 0 outside; differentiable."""
    beyond = math.ceil(sigma / step)
    most = beyond + 1
    kernel = torch.zeros(1, dtype=values.dtype)
    near = torch.ones(1, dtype=torch.bool)
    for axis, count in enumerate(values.shape):
        pixels = torch.arange(-beyond * step, step * (count - 1 + beyond) + 1)[:, None]
        points = torch.arange(-2 * most, count + 2 * most)
        shape = [(-1, 1, len(points), 1), (1, -1, 1, len(points))][axis]
        kernel = kernel + ((pixels - step * points).double() ** 2).reshape(shape)
        near = near & ((pixels // step - points).abs() <= most).reshape(shape)
    kernel = torch.exp(-2 * (kernel.sqrt() / sigma - 0.5).clamp(min=0) ** 2)
    each = kernel * F.pad(values, [2 * most] * 4)
    weights = torch.exp(20 * each) * near
    return (each * weights).sum((2, 3)) / weights.sum((2, 3))


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
