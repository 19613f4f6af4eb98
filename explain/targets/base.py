"""What a target is, how targets add up, and the class scores in a model's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from explain._utils import nested
from explain._utils.errors import ModelError, TargetError

Picked: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
Labels: TypeAlias = "Sequence[str] | None"


class Target:
    """What a model is asked to explain: one score for each image. Targets add up: ``a + b``, ``a - b``, ``2 * a``.

    A target of your own is a frozen dataclass with a ``name`` and a ``pick``; all else has a default. One that reads a
    choice from the output (a class, a region, a box) makes it in ``settled``, on the images as they are, so that it is
    the same for every perturbed image. One that holds something for each image has ``rows``.
    """

    if TYPE_CHECKING:  # a class attribute here would be the default of fields called name

        @property
        def name(self) -> str: ...

    def pick(self, output: Any, count: int) -> Picked:
        """Return the scores ``(count,)`` and the class indices ``(count,)`` that they belong to, if they do."""
        raise NotImplementedError

    def settled(self, output: Any, count: int) -> Target:
        """Return the target with its choices made, on the output ``model(images)`` for the images as they are."""
        return self

    def rows(self, images: torch.Tensor) -> Target:
        """Return the settled target for rows that are perturbed copies of the images ``(P,)``, counted from 0."""
        return self

    def labelled(self, categories: Labels) -> Target:
        """Return the target with labels replaced by class indices."""
        return self

    @property
    def may_ignore_rows(self) -> bool:
        """Whether it has to prove that its scores follow their rows, as code of the caller's must without ``rows``."""
        return not type(self).__module__.startswith("explain.") and type(self).rows is Target.rows

    def __add__(self, other: Target) -> Sum:
        return Sum(_terms(self) + _terms(other))

    def __sub__(self, other: Target) -> Sum:
        return self + -1.0 * Sum(_terms(other))

    def __neg__(self) -> Sum:
        return -1.0 * self

    def __mul__(self, factor: float) -> Sum:
        if not isinstance(factor, Real):
            return NotImplemented
        return Sum(tuple((factor * weight, target) for weight, target in _terms(self)))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Sum(Target):
    """Several targets as one: the sum of ``weight * score``.

    >>> from explain.targets import ClassTarget
    >>> both = 2 * ClassTarget(3) - ClassTarget(0)
    >>> both.name, both.pick(torch.tensor([[1.0, 0.0, 0.0, 4.0]]), 1)
    ('2 × 3 − 0', (tensor([7.]), None))
    """

    terms: tuple[tuple[float, Target], ...]

    @property
    def name(self) -> str:
        words = []
        for weight, target in self.terms:
            factor = "" if abs(weight) == 1 else f"{abs(weight):g} × "
            words.append(f"{'−' if weight < 0 else '+'} {factor}{target.name}")
        return " ".join(words).removeprefix("+ ")

    @property
    def may_ignore_rows(self) -> bool:
        return any(target.may_ignore_rows for _, target in self.terms)

    def pick(self, output: Any, count: int) -> Picked:
        scores = [weight * target.pick(output, count)[0] for weight, target in self.terms]
        return torch.stack(scores).sum(0), None

    def settled(self, output: Any, count: int) -> Sum:
        return Sum(tuple((weight, target.settled(output, count)) for weight, target in self.terms))

    def rows(self, images: torch.Tensor) -> Sum:
        return Sum(tuple((weight, target.rows(images)) for weight, target in self.terms))

    def labelled(self, categories: Labels) -> Sum:
        return Sum(tuple((weight, target.labelled(categories)) for weight, target in self.terms))


def _terms(target: Any) -> tuple[tuple[float, Target], ...]:
    if isinstance(target, Sum):
        return target.terms
    if isinstance(target, Target):
        return ((1.0, target),)
    raise TargetError(f"targets add up with targets only, got {target!r}; use explain.targets.as_target({target!r})")


def find_tensor(output: Any, count: int, dims: Sequence[int], names: Sequence[str] = ("logits", "out")) -> Any:
    """Return the tensor in a model's output that has ``count`` rows and one of ``dims`` dimensions; None without any.

    An output may be a tensor, a tuple, a list, a mapping or a dataclass. Earlier ``dims`` and ``names`` are preferred.

    >>> find_tensor((None, {"not": "looked into"}, torch.zeros(2, 5)), 2, [2]).shape
    torch.Size([2, 5])
    """
    tensors = _tensors(output, names)
    return next((t for n in dims for t in tensors if t.ndim == n and len(t) == count), None)


def find_logits(output: Any, count: int) -> torch.Tensor:
    """Return the class scores ``(count, K)`` in a model's output: a tensor, or one in a tuple, mapping or dataclass.

    One number for each image, ``(count,)``, counts as the score of a single class.
    """
    names = ("logits", "out")
    found: torch.Tensor | None = find_tensor(output, count, (2,), names)
    if found is not None:
        return found
    first = next(iter(_tensors(output, names)), None)
    if first is not None and first.ndim < 2 and first.numel() == count:
        return first.reshape(count, 1)
    raise ModelError(
        f"model must return class scores ({count}, K), got {described(output)}; {_remedy(output)}pass a callable as "
        "target"
    )


def _tensors(output: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """The tensors in an output: those with one of the names, then the others in their order."""
    if isinstance(output, torch.Tensor):
        return [output]
    inside = dict(nested.items(output))
    outside = None if isinstance(output, Mapping) else output  # the attributes of a mapping may be its keys again
    named = [inside[name] if name in inside else getattr(outside, name, None) for name in names]
    return [value for value in (*named, *inside.values()) if isinstance(value, torch.Tensor)]


def described(output: Any) -> str:
    """Say in a few words what a model returned.

    >>> described({"out": torch.zeros(1, 2)}), described([3])
    ("dict with 'out' (1, 2)", 'list of int')
    """
    if isinstance(output, torch.Tensor):
        return f"shape {tuple(output.shape)}"
    kind = type(output).__name__

    def brief(value: Any) -> str:
        return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__

    if isinstance(output, Mapping) and output:
        return f"{kind} with {', '.join(f'{key!r} {brief(value)}' for key, value in list(output.items())[:4])}"
    if isinstance(output, (tuple, list)) and output:
        return f"{kind} of {', '.join(brief(value) for value in output[:4])}"
    return kind


def _remedy(output: Any) -> str:
    """What to ask instead of a class of the whole image, where the output shows it."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(first, Mapping) and {"boxes", "scores"} <= set(first):
        return "for a detector take explain.targets.Detection(category), or "
    maps = first.get("out", first.get("logits")) if isinstance(first, Mapping) else first
    if isinstance(maps, torch.Tensor) and maps.ndim == 4:
        return "for a map of classes take explain.targets.Segmentation(category), or "
    return ""


def check_class(index: int, classes: int) -> None:
    """Refuse an index outside of the model's ``classes``."""
    if not 0 <= index < classes:
        raise TargetError(
            f"target must be a class from 0 to {classes - 1} for this model, got {index}; "
            "leave it out to explain the top prediction"
        )
