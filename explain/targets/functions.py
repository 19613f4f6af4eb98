"""Scores by any function of the output, and other numbers to differentiate than the target's score."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from explain._utils.errors import TargetError
from explain._utils.nested import find
from explain.targets.base import Picked, Target


@dataclass(frozen=True)
class ScoreTarget(Target):
    """Any function of the model's output that gives one score per row.

    Methods that alter images call it on pieces of perturbed rows. A function that wants something else of each image
    takes a second argument, ``images`` ``(P,)``: for each row, which of the original images it belongs to, counted from
    0. A second argument is one without a default, or one called ``images``.

    Args:
        function: ``output -> (P,)``, or ``output, images -> (P,)``.
        images: whose rows the output has; None is a row for each image in turn.

    Raises:
        TargetError: no function, or one that takes neither one argument nor two.

    >>> labels = torch.tensor([2, 0])
    >>> target = ScoreTarget(lambda output, images: output[torch.arange(len(images)), labels[images]])
    >>> output = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> target.pick(output, 2)[0], target.rows(torch.tensor([1, 1])).pick(output, 2)[0]
    (tensor([3., 4.]), tensor([1., 4.]))
    """

    function: Callable[..., torch.Tensor]
    images: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TargetError(
                f"function must be callable, as output -> (N,), got {self.function!r}; use explain.targets.as_target"
            )
        _needed(self.function, self.name)

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def takes_images(self) -> bool:
        """Whether the function takes the images that its rows belong to."""
        return _needed(self.function, self.name) is not None

    @property
    def may_ignore_rows(self) -> bool:
        return self.images is None and not self.takes_images  # of perturbed rows, it was asked before

    def pick(self, output: Any, count: int) -> Picked:
        score = self._score(output, count)
        if not isinstance(score, torch.Tensor):
            raise TargetError(
                f"target {self.name} must return a tensor of {count} scores, got {type(score).__name__}; pick a "
                "class as in output[:, 0]"
            )
        if score.ndim == 0 and count == 1:
            score = score[None]
        if tuple(score.shape) != (count,):
            raise TargetError(
                f"target {self.name} must return one score per image, shape ({count},), got {tuple(score.shape)}; pick "
                "a class as in output[:, 0], and sum over no images"
            )
        return score, None

    def rows(self, images: torch.Tensor) -> ScoreTarget:
        """The target for altered copies of these rows."""
        rows = images.tolist()
        return replace(self, images=tuple(rows if self.images is None else (self.images[row] for row in rows)))

    def _score(self, output: Any, count: int) -> Any:
        needed = _needed(self.function, self.name)
        if needed is None:
            return self.function(output)
        first = find(output)
        device = None if first is None else first[1].device
        images = torch.tensor(range(count) if self.images is None else self.images, device=device)
        return self.function(output, images) if needed == "" else self.function(output, **{needed: images})


def _needed(function: Callable[..., Any], name: str) -> str | None:
    """How a function takes the images of the rows: by this keyword, at the second place (""), or not at all (None)."""
    try:
        found = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters.values()
    except (TypeError, ValueError):  # a function of another language may not say what it takes
        return None
    if any(each.name == "images" and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) for each in found):
        return "images"
    placed = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    taken = len(placed) + 2 * any(each.kind == each.VAR_POSITIONAL for each in found)
    needed = [each for each in found if each.default is each.empty]
    needed = [each for each in needed if each in placed or each.kind == each.KEYWORD_ONLY]
    if not taken or len(needed) > 2 or any(each not in placed for each in needed):
        raise TargetError(
            f"target {name} must be a function of the output, or of the output and its rows' images, got "
            f"{inspect.signature(function)}; bind other arguments with functools.partial"
        )
    return "" if len(needed) == 2 else None


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
