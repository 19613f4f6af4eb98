"""Whether two groups of numbers differ by more than chance: Welch's test, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

TINY = 1e-300
STEPS, TOLERANCE = 500, 1e-14


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """The probability that the means of two groups differ by so much or more if they are truly the same.

    Two-sided, without the assumption of equal variances (Welch, 1947). Groups that do not vary at all have 1 if they
    are the same, and 0 if not.

    Args:
        one, other: at least two numbers each.

    >>> round(welch([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]), 4)
    0.2879
    """
    means = [math.fsum(each) / len(each) for each in (one, other)]
    noise = [
        math.fsum((value - mean) ** 2 for value in each) / (len(each) - 1) / len(each)
        for each, mean in zip((one, other), means, strict=True)
    ]
    total = sum(noise)
    if total == 0:
        return 1.0 if means[0] == means[1] else 0.0
    t = (means[0] - means[1]) / math.sqrt(total)
    freedom = total**2 / sum(part**2 / (len(each) - 1) for part, each in zip(noise, (one, other), strict=True))
    return beta_share(freedom / 2, 0.5, freedom / (freedom + t * t))


def beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function: the share of the distribution Beta(a, b) below ``x``.

    By its continued fraction (DLMF 8.17.22).

    >>> round(beta_share(2.0, 3.0, 0.5), 6)
    0.6875
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction would converge slowly
        return 1 - beta_share(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    value, above, below = 1.0, 1.0, 0.0
    for step in range(STEPS):
        half = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        below = 1 / _not_zero(1 + term * below)
        above = _not_zero(1 + term / above)
        change = above * below
        value *= change
        if abs(change - 1) < TOLERANCE:
            break
    return front * (value - 1) / a


def _not_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY
