"""What a question is: how a map is asked it, and how the figure is judged."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from explain.checks.answers import Answer
from explain.metrics.base import Metric, MetricInput, MetricResult
from explain.metrics.variants import ModelContext, VariantResult

SAME = 0.5**0.5
"""The correlation from which on half of a map's variation, or more, is that of another."""


@runtime_checkable
class Question(Metric, Protocol):
    """A metric with a judgement: a frozen value that says what is run, what figure comes of it, and when it passes.

    ``word`` stands for it under a picture. Its passes are what it asks for as a metric: altered photos (`OfScores`), or
    the method in other settings (`OfMethod`).
    """

    @property
    def word(self) -> str: ...

    def unasked(self, world: ModelContext, case: MetricInput) -> str:
        """Why it cannot be asked here; nothing where it can."""
        ...

    @property
    def brief(self) -> Question:
        """The same question with the fewest samples, for methods that take long."""
        ...

    def judge(self, judged: MetricResult) -> Answer:
        """Judge the figure of the first image; this looks at nothing else."""
        ...


def answered(question: Question, figure: float, passed: bool | None, reason: str) -> Answer:
    """The answer to a question."""
    return Answer(question.name, question.word, figure, passed, reason)


def figure_of(judged: MetricResult) -> float:
    """The figure of the first image."""
    return float(judged.value[0])


def with_zeros(alike: torch.Tensor, found: VariantResult) -> torch.Tensor:
    """Similarities ``(N,)``, and which of the maps are zero everywhere: ``(N, 2)``."""
    zeros = (found.maps.values == 0).flatten(1).all(1)
    return torch.stack([alike.double(), zeros.double()], 1)


def of_zeros(judged: MetricResult) -> str:
    """What is said of other maps that are zero everywhere, which count as not alike."""
    zeros = int(judged.parts["zeros"][0].sum())
    return f", {zeros} of which are zero everywhere" if zeros else ""
