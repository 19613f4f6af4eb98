"""`MeanInterval`: the mean of figures over images, with its 95 % interval."""

import math
from dataclasses import dataclass

import torch

from explain.methods.estimates import NORMAL, student_factor


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
        mean, error, count = mean_and_error(figures)
        half = NORMAL * student_factor(count - 1) * error if count > 1 else math.nan
        return cls(mean, half, count)

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
        if not 0 < self.half < 5e-4:  # three decimals show it
            return f"{rounded(self.mean)} ± {rounded(self.half)}"
        decimals = math.ceil(-math.log10(self.half))  # down to the first digit of the half
        return f"{self.mean:.{decimals}f} ± {self.half:.{decimals}f}"


def mean_and_error(figures: torch.Tensor) -> tuple[float, float, int]:
    """The mean of those figures ``(N,)`` that are not NaN, its standard error, and how many they
    are; NaN without any, and the error with a single one."""
    defined = figures[~figures.isnan()].double()
    count = len(defined)
    error = float(defined.std()) / math.sqrt(count) if count > 1 else math.nan
    return float(defined.mean()), error, count


def rounded(value: float) -> str:
    """The text of a figure in a printed table: three decimals, four digits of tiny ones, a dash for
    NaN."""
    if math.isnan(value):
        return "–"
    return f"{value:.4g}" if value and abs(value) < 1e-3 else f"{value:.3f}"
