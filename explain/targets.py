"""Targets: from a model's output to the one number per image that is explained.

A target is a frozen value with a ``name`` and a ``pick`` that takes the model's output and gives the score ``(N,)`` and
what was picked: the class indices ``(N,)``, or None for scores that are not a class.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from explain.errors import ModelError, TargetError, did_you_mean

TargetLike: TypeAlias = "int | str | torch.Tensor | Sequence[int] | Callable[[Any], torch.Tensor] | Target | None"
Picked: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


@runtime_checkable
class Target(Protocol):
    """What a model is asked to explain."""

    @property
    def name(self) -> str: ...

    def pick(self, output: Any, count: int) -> Picked:
        """Return the scores ``(count,)`` and the class indices ``(count,)`` that they belong to, if they do."""
        ...


@dataclass(frozen=True)
class ClassTarget:
    """The logit of a class: one index for every image, or one index for each."""

    index: int | tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.index)

    def pick(self, output: Any, count: int) -> Picked:
        scores = find_logits(output, count)
        if isinstance(self.index, tuple) and len(self.index) != count:
            raise TargetError(
                f"target must hold one class for each of the {count} images, got {len(self.index)}; "
                "give a single class to use it for all"
            )
        indices = [self.index] * count if isinstance(self.index, int) else list(self.index)
        classes = scores.shape[1]
        for index in indices:
            if not 0 <= index < classes:
                raise TargetError(
                    f"target must be a class from 0 to {classes - 1} for this model, got {index}; "
                    "leave it out to explain the top prediction"
                )
        chosen = torch.tensor(indices, device=scores.device)
        return scores.gather(1, chosen[:, None])[:, 0], chosen


@dataclass(frozen=True)
class TopClass:
    """Each image's own best class, or with ``rank`` its second best (1), third best (2) and so on."""

    rank: int = 0

    @property
    def name(self) -> str:
        return f"top-{self.rank + 1}"

    def pick(self, output: Any, count: int) -> Picked:
        scores = find_logits(output, count)
        if not 0 <= self.rank < scores.shape[1]:
            raise TargetError(
                f"target asks for the top {self.rank + 1} classes, but the model has {scores.shape[1]}; ask for fewer"
            )
        chosen = scores.detach().topk(self.rank + 1, dim=1).indices[:, self.rank]
        return scores.gather(1, chosen[:, None])[:, 0], chosen


@dataclass(frozen=True)
class ScoreTarget:
    """Any function of the model's output that gives one score per image."""

    function: Callable[[Any], torch.Tensor]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def pick(self, output: Any, count: int) -> Picked:
        score = self.function(output)
        if not isinstance(score, torch.Tensor):
            raise TargetError(f"target {self.name} must return a tensor of {count} scores, got {type(score).__name__}")
        if score.ndim == 0 and count == 1:
            score = score[None]
        if tuple(score.shape) != (count,):
            raise TargetError(
                f"target {self.name} must return one score per image, shape ({count},), got {tuple(score.shape)}"
            )
        return score, None


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

    def __call__(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        own = logits.gather(1, classes[:, None])
        distance = (logits - own).detach().abs().scatter(1, classes[:, None], float("inf"))
        count = min(self.references, logits.shape[1] - 1)
        if count < 1:
            raise TargetError("a contrast must have another class to compare with, but the model has only one")
        similar = distance.topk(count, dim=1, largest=False).indices
        gaps = own - self.alpha * logits.gather(1, similar)
        if self.kind == "mean":
            return gaps.mean(1)
        weights = logits.softmax(1).gather(1, similar)
        return (weights * gaps).sum(1) / weights.sum(1)


def find_logits(output: Any, count: int) -> torch.Tensor:
    """Return the class scores ``(count, K)`` in a model's output: a tensor, or the main one of a tuple or mapping."""
    found = output
    if isinstance(output, Mapping):
        found = next((output[key] for key in ("logits", "out") if key in output), next(iter(output.values()), None))
    elif isinstance(getattr(output, "logits", None), torch.Tensor):
        found = output.logits
    elif isinstance(output, (tuple, list)):
        found = next((value for value in output if isinstance(value, torch.Tensor)), None)
    if not isinstance(found, torch.Tensor):
        raise ModelError(
            f"model must return class scores (N, K), got {type(output).__name__}; pass a callable as target"
        )
    if found.ndim != 2 or found.shape[0] != count:
        raise ModelError(
            f"model must return class scores ({count}, K), got shape {tuple(found.shape)}; pass a callable as target"
        )
    return found


def as_target(target: TargetLike, categories: Sequence[str] | None = None) -> Target:
    """Turn what a caller gives for a target into a `Target`.

    None is each image's top class; an int or a label is that class for every image; a tensor or sequence of N ints is
    a class for each image; a callable takes the model's output and returns ``(N,)`` scores.

    Raises:
        TargetError: an unknown label, or something that is no target.

    >>> as_target("tabby", ["tabby cat", "golden retriever"])
    ClassTarget(index=0)
    """
    if target is None:
        return TopClass()
    if isinstance(target, bool):
        raise TargetError(f"target must be a class index, a label or a callable, got {target!r}")
    if isinstance(target, str):
        return ClassTarget(find_label(target, categories))
    if isinstance(target, Target):
        return target
    if isinstance(target, torch.Tensor) or hasattr(target, "tolist"):
        return _from_numbers(target.tolist(), target)
    if isinstance(target, (int, Sequence)):
        return _from_numbers(target, target)
    if callable(target):
        return ScoreTarget(target)
    raise TargetError(f"target must be a class index, a label, N class indices or a callable, got {target!r}")


def _from_numbers(numbers: Any, given: object) -> Target:
    several = isinstance(numbers, Sequence)
    try:
        whole = tuple(_index(number) for number in (numbers if several else [numbers]))
    except TypeError:
        whole = ()
    if not whole:
        raise TargetError(f"target must hold whole class indices, one per image, got {given!r}")
    return ClassTarget(whole if several else whole[0])


def _index(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError("a truth value is no class index")
    return operator.index(number)


def find_label(label: str, categories: Sequence[str] | None) -> int:
    """Return the class that a label names: the label itself whatever its case, or a whole word that only one label has.

    Raises:
        TargetError: no label, or more than one, fits; the message suggests.
    """
    if categories is None:
        raise TargetError(
            f"target {label!r} is a label, but the labels are not known; pass categories= or give the class index"
        )
    wanted = _words(label)
    folded = [_words(category) for category in categories]
    exact = [i for i, words in enumerate(folded) if words == wanted]
    within = [i for i, words in enumerate(folded) if f" {wanted} " in f" {words} "] if wanted else []
    found = exact or within
    if len(found) == 1:
        return found[0]
    if exact:
        raise TargetError(
            f"target {label!r} is the label of classes {', '.join(map(str, exact))}; give the class index"
        )
    if within:
        several = ", ".join(repr(categories[i]) for i in within[:6])
        raise TargetError(f"target {label!r} fits {len(within)} labels: {several}; name one of them")
    raise TargetError(f"target {label!r} is not a label of this model; {did_you_mean(label, categories)}")


def _words(label: str) -> str:
    return " ".join(label.casefold().replace("_", " ").replace(",", " ").split())
