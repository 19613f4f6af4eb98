"""What is read of an altered photo, as targets: the probability of a class, and by how much it is the best."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from explain.errors import TargetError
from explain.targets import Outputs, Target, find_logits


@dataclass(frozen=True)
class ClassReading:
    """Another number than the logit of each image's class: its ``probability``, or its ``margin`` over all others.

    >>> ClassReading("margin", (1,)).pick(torch.tensor([[1.0, 5.0, 3.0]]), 1)[0]
    tensor([2.])
    """

    of: Literal["probability", "margin"]
    classes: tuple[int, ...]
    outputs: Outputs = field(default_factory=Outputs)

    @property
    def name(self) -> str:
        return f"{self.of} of {self.classes}"

    def pick(self, output: Any, count: int) -> tuple[torch.Tensor, None]:
        logits = find_logits(output, count)
        if logits.shape[1] < 2:
            raise TargetError(
                "model must score at least two classes for a metric to read their probabilities, got one; choose "
                "reading='score'"
            )
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        chosen = torch.tensor(self.classes, device=logits.device)[:, None]
        if self.of == "probability":
            return self.outputs.of_classes(logits, chosen[:, 0]), None
        others = logits.scatter(1, chosen, -torch.inf)
        return logits.gather(1, chosen)[:, 0] - others.amax(1), None

    def rows(self, images: torch.Tensor) -> Target:
        return replace(self, classes=tuple(self.classes[image] for image in images.tolist()))
