"""Objectives: other numbers to differentiate than the score of the target's class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from explain.errors import TargetError


@runtime_checkable
class Objective(Protocol):
    """Another number to differentiate than the score: a function of all class scores and of the target's class."""

    def __call__(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """From ``(N, K)`` scores and ``(N,)`` classes to ``(N,)`` numbers."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class ResidualSoftmax:
    """The logit and its log-probability together: ``y_c + log softmax(y)_c`` (Cai, 2025, "ReST")."""

    def __str__(self) -> str:
        return "the score and its log-probability"

    def __call__(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        both = logits + logits.log_softmax(1)
        return both.gather(1, classes[:, None])[:, 0]


@dataclass(frozen=True)
class Contrast:
    """The target's logit against those of the classes that score most like it (Zhang et al., CVPR 2025).

    ``mean`` is ``y_c - alpha mean_d y_d``; ``weighted`` averages ``y_c - alpha y_d`` with the classes' probabilities.
    """

    kind: Literal["mean", "weighted"] = "mean"
    alpha: float = 0.6
    references: int = 3

    def __str__(self) -> str:
        return f"the score against the {self.references} classes that score most like it"

    def __call__(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        own = logits.gather(1, classes[:, None])
        distance = (logits - own).detach().abs().scatter(1, classes[:, None], float("inf"))
        count = min(self.references, logits.shape[1] - 1)
        if count < 1:
            raise TargetError(
                "target must have another class to be compared with, but the model has only one; use gradcam"
            )
        similar = distance.topk(count, dim=1, largest=False).indices
        gaps = own - self.alpha * logits.gather(1, similar)
        if self.kind == "mean":
            return gaps.mean(1)
        # Probabilities that add up to one among these classes; next to the best class, all of them may be nothing.
        return (logits.gather(1, similar).softmax(1) * gaps).sum(1)
