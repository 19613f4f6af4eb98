"""`MeanInterval`: the mean of figures over images, with its 95 % interval."""

import math
from dataclasses import dataclass

import torch

Z = 1.959964
T = (12.706, 4.303, 3.182, 2.776)
"""The 97.5 % quantiles of Student's t with 1 to 4 degrees of freedom."""


@dataclass(frozen=True)
class MeanInterval:
    """The ``mean`` of ``count`` figures, and ``half`` the width of its 95 % interval by Student's
    t; NaN without any figure, and ``half`` with a single one.

    >>> print(MeanInterval.of(torch.tensor([0.1, 0.2, 0.3, torch.nan])))
    0.200 ± 0.248
    """

    mean: float
    half: float
    count: int

    @classmethod
    def of(cls, figures: torch.Tensor) -> "MeanInterval":
        """The interval of figures ``(N,)``; those that are NaN are left out."""
        defined = figures.double()[~figures.isnan()]
        count = len(defined)
        mean = float(defined.mean()) if count else math.nan
        if count < 2:
            return cls(mean, math.nan, count)
        return cls(mean, quantile(count - 1) * float(defined.std()) / math.sqrt(count), count)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        """The mean ± half of the interval, or the mean alone where there is none."""
        if self.count < 2:
            return rounded(self.mean)
        if not 0 < self.half < 5e-4:
            return f"{rounded(self.mean)} ± {rounded(self.half)}"
        decimals = math.ceil(-math.log10(self.half))  # down to the first digit of the half
        return f"{self.mean:.{decimals}f} ± {self.half:.{decimals}f}"


def quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by Abramowitz and Stegun's expansion (26.7.5)."""
    if freedom <= len(T):
        return T[freedom - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def rounded(value: float) -> str:
    """The text of a figure in a printed table: three decimals, four digits of tiny ones, a dash for
    NaN."""
    if math.isnan(value):
        return "–"
    return f"{value:.4g}" if value and abs(value) < 1e-3 else f"{value:.3f}"
