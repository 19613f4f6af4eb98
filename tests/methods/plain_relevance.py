"""Relevance slowly: a linear map as a matrix, and each rule as its paper's formula, one pair of
units at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Rule = Callable[..., Tensor]


def matrix(function: Function, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A linear map of ``(1, *shape)`` as a matrix ``(outputs, inputs)``, and what it adds."""
    size = int(torch.tensor(shape).prod())
    zero = torch.zeros(size, dtype=torch.float64)
    added = function(zero.reshape(1, *shape)).flatten().detach()
    columns = []
    for j in range(size):
        one = zero.clone()
        one[j] = 1
        columns.append(function(one.reshape(1, *shape)).flatten().detach() - added)
    return torch.stack(columns, 1), added


def stable(z: float, epsilon: float) -> float:
    return z + (epsilon if z >= 0 else -epsilon)


ABSOLUTE = False
"""Whether an epsilon is added as it is, or times the mean size of all denominators."""


def unit(denominators: list[float], rectified: bool = False) -> float:
    """The mean size; behind a rectifier, that of the positive ones among all."""
    sizes = [max(each, 0.0) if rectified else abs(each) for each in denominators]
    return 1.0 if ABSOLUTE else sum(sizes) / len(sizes)


def shared(
    contributions: Tensor, below: Tensor, relevance: Tensor, epsilon: float, rectified: bool = False
) -> Tensor:
    """``R_j = sum_k c_kj / z_k R_k``, where nobody gets anything if z_k is zero."""
    total = torch.zeros(contributions.shape[1], dtype=contributions.dtype)
    denominators = [float(row.sum() + more) for row, more in zip(contributions, below, strict=True)]
    for k, z in enumerate(denominators):
        if z != 0:
            total += (
                contributions[k] / stable(z, epsilon * unit(denominators, rectified)) * relevance[k]
            )
    return total


def epsilon(
    w: Tensor, b: Tensor, x: Tensor, r: Tensor, eps: float = 1e-6, rectified: bool = False
) -> Tensor:
    return shared(w * x, b, r, eps, rectified)


def gradient(w: Tensor, b: Tensor, x: Tensor, r: Tensor) -> Tensor:
    return shared(w * x, b, r, 0)


def alphabeta(
    w: Tensor, b: Tensor, x: Tensor, r: Tensor, alpha: float = 1, beta: float = 0
) -> Tensor:
    c = w * x
    above = shared(c.clamp(min=0), b.clamp(min=0), alpha * r, 1e-6)
    return above - shared(c.clamp(max=0), b.clamp(max=0), beta * r, 1e-6)


def gamma(
    w: Tensor, b: Tensor, x: Tensor, r: Tensor, g: float = 0.25, rectified: bool = False
) -> Tensor:
    c = w * x
    shares = torch.zeros_like(w)
    added = torch.zeros_like(b)
    for k in range(len(w)):
        z = float(c[k].sum() + b[k])
        part = (lambda t: t.clamp(min=0)) if z >= 0 or rectified else (lambda t: t.clamp(max=0))
        shares[k], added[k] = c[k] + g * part(c[k]), b[k] + g * part(b[k])
    return shared(shares, added, r, 1e-6, rectified)


def zplus_without_bias(w: Tensor, b: Tensor, x: Tensor, r: Tensor) -> Tensor:
    return alphabeta(w, torch.zeros_like(b), x, r)


def flat(w: Tensor, b: Tensor, x: Tensor, r: Tensor, inside: Tensor) -> Tensor:
    """``inside`` says which input each output looks at, and how often."""
    return shared(inside, torch.zeros_like(b), r, 1e-6)


def wsquare(w: Tensor, b: Tensor, x: Tensor, r: Tensor) -> Tensor:
    return shared(w * w, torch.zeros_like(b), r, 1e-6)


def zbox(w: Tensor, b: Tensor, x: Tensor, r: Tensor, low: Tensor, high: Tensor) -> Tensor:
    c = w * x - w.clamp(min=0) * low - w.clamp(max=0) * high
    return shared(c, torch.zeros_like(b), r, 1e-6)
