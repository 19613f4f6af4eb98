"""What a caller may give for a target, and the `Target` that it stands for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from explain.errors import TargetError, did_you_mean
from explain.targets.base import Composable, Labels, Picked, Sum, Target, label
from explain.targets.classes import Category, ClassTarget, ScoreTarget, TopClass

TargetLike: TypeAlias = "int | str | torch.Tensor | Sequence[int] | Callable[[Any], torch.Tensor] | Target | None"


def as_target(target: TargetLike, categories: Sequence[str] | None = None) -> Target:
    """Turn what a caller gives for a target into a `Target`.

    None is each image's top class; an int or a label is that class for every image; a tensor or sequence of N ints is
    a class for each image; a callable takes the model's output and returns ``(N,)`` scores. A model with one number for
    each image (a regression, or one logit for yes) has a single "class", 0, which None stands for too.

    Raises:
        TargetError: an unknown label, or something that is no target.

    >>> as_target("tabby", ["tabby cat", "golden retriever"])
    ClassTarget(index=0)
    """
    if target is None:
        return TopClass()
    if isinstance(target, bool):
        raise TargetError(
            f"target must be a class index, a label or a callable, got {target!r}; for a yes or no take "
            f"explain.targets.BinaryLogit({'' if target else 'positive=False'})"
        )
    if isinstance(target, str):
        return Label(target).labelled(categories)
    if isinstance(target, Target):
        return label(target, categories)
    if isinstance(target, torch.Tensor) or hasattr(target, "tolist"):
        return _from_numbers(target.tolist(), target)
    if isinstance(target, (int, Sequence)):
        return _from_numbers(target, target)
    if callable(target):
        return ScoreTarget(target)
    raise TargetError(
        f"target must be a class index, a label, N class indices or a callable, got {target!r}; give the index of a "
        "class as a whole number"
    )


class Difference(Sum):
    """Why this rather than that: the score of one target less that of another.

    Args:
        this: whatever can be a target: a class index, a label, a callable, a `Target`; None is each image's top class.
        that: likewise.

    >>> why = Difference(2, 0)
    >>> why.name, why.pick(torch.tensor([[1.0, 0.0, 4.0]]), 1)[0]
    ('2 − 0', tensor([3.]))
    """

    def __init__(self, this: TargetLike, that: TargetLike) -> None:
        super().__init__(((1.0, _part(this)), (-1.0, _part(that))))


@dataclass(frozen=True)
class Label(Composable):
    """A class that goes by its label, until somebody knows which index that is."""

    name: str

    def pick(self, output: Any, count: int) -> Picked:
        return self.labelled(None).pick(output, count)

    def labelled(self, categories: Labels) -> ClassTarget:
        return ClassTarget(find_category(self.name, categories))


def _part(target: TargetLike) -> Target:
    return Label(target) if isinstance(target, str) else as_target(target)


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


def find_category(given: int | str, categories: Labels) -> int:
    """Return a class index as it is, and for a label the index that goes by it."""
    if not isinstance(given, str):
        return given
    index = find_label(given, categories)
    return Category(index, given if categories is None else categories[index])


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
