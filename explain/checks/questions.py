"""What a check is: a metric with a judgement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from explain.checks.answers import Answer
from explain.metrics.base import Metric, MetricInput, MetricResult
from explain.metrics.variants import ModelContext, VariantResult

SAME = 0.5**0.5
"""The correlation from which on half of a map's variation, or more, is that of another."""


@dataclass(frozen=True)
class Question(Metric):
    """A metric with a judgement: a frozen value that says what is run, what figure comes of it, and when it passes.

    ``word`` stands for it under a picture. What it runs, it says as a `ScoreMetric` or a `ReattributionMetric`.
    """

    word: ClassVar[str] = ""

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        """Why it cannot be answered here; empty where it can."""
        return ""

    @property
    def reduced(self) -> Self:
        """The same with the fewest samples, for methods that take long."""
        return self

    def judge(self, result: MetricResult) -> Answer:
        """Judge the figure of the first image; this looks at nothing else."""
        raise NotImplementedError

    def answer(self, figure: float, passed: bool | None, reason: str) -> Answer:
        return Answer(self.name, self.word, figure, passed, reason)


def with_zeros(alike: torch.Tensor, found: VariantResult) -> torch.Tensor:
    """Similarities ``(N,)``, and which of the maps are zero everywhere: ``(N, 2)``."""
    zeros = (found.maps.values == 0).flatten(1).all(1)
    return torch.stack([alike.double(), zeros.double()], 1)


def of_zeros(result: MetricResult) -> str:
    """What is said of other maps that are zero everywhere, which count as not alike."""
    zeros = int(result.parts["zeros"][0].sum())
    return f", {zeros} of which are zero everywhere" if zeros else ""
