"""What a caller may give for a target, and the `Target` that it stands for."""

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from explain._utils.errors import LabelsError, ModelError, TargetError, python_or_command, shown
from explain.targets import detections, per_image
from explain.targets.base import Labels, Sum, Target
from explain.targets.classes import PREDICTED, ClassTarget, Predicted, TopClass
from explain.targets.functions import ScoreTarget
from explain.targets.labels import Categories

One: TypeAlias = int | str | tuple[int, ...] | Callable[..., torch.Tensor] | Target | None
TargetLike: TypeAlias = One | torch.Tensor | Sequence[One]
ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def as_target(target: TargetLike, categories: Sequence[str] | None = None) -> Target:
    """Turn what a caller gives for a target into a `Target`.

    None means each image's top class; an int or a label means that class for all images; a tensor
    or list of N ints or labels is a class for each image. A model with one number for each image (a
    regression, or one logit for yes) has a single "class", 0, which None stands for too.

    A callable takes the model's output and returns ``(N,)`` scores. Methods that alter images call
    it on other numbers of samples too; what needs to know whose samples they are takes them as a
    second argument (see `ScoreTarget`). A list of N callables, or of other targets, has one for
    each image; each callable is given the whole output, and returns a score for every sample.

    A text may say where something is in what the model detects or segments: "cup" is all cups that
    it detects, "cup@2" the second best cup, "person@320,200" the person at this point, and "box
    120,40,300,380" or "cup box 120,40,300,380" what is in this rectangle, in pixels of the model's
    input (for an `Explainer`, of the photo). "yes" and "no" are the answers of a model with one
    output and no labels; with the label "pneumonia", "not pneumonia" is the second. "predicted" and
    "all" stand for `Predicted`.

    A tuple such as ``(3, 2, 1)`` is the place ``output[:, 3, 2, 1]`` of an output with more
    dimensions than class scores have; a list of N tuples, or a tensor ``(N, D)``, is a place for
    each image.

    Raises:
        TargetError: an unknown label, or something that is no target.

    >>> as_target("tabby", ["tabby cat", "golden retriever"])
    ClassTarget(index=0)
    >>> as_target([(3, 2, 1), (0, 1, 1)]).name
    '(3, 2, 1), (0, 1, 1)'
    """
    if type(target) is int and categories is None:  # most targets, which need no other check
        return ClassTarget(target)
    categories = check_categories(categories)
    if target is None:
        return TopClass()
    if isinstance(target, bool):
        raise TargetError(
            f"target must be a class, not {target!r}; explain.targets.BinaryLogit is a yes or a no"
        )
    if isinstance(target, type):  # which could be called, as a function can
        raise TargetError(
            f"target must be an object, got the class {target.__name__}; use {target.__name__}(...)"
        )
    if isinstance(target, str):
        # a class may have the label "all"
        if target in PREDICTED and target not in (categories or ()):
            return Predicted()
        return (detections.as_place(target) or ClassTarget(target)).labelled(categories)
    if isinstance(target, Target):
        return target.labelled(categories)
    if isinstance(target, (*ARRAYS, int, Sequence)):
        numbers = target.tolist() if isinstance(target, ARRAYS) else target
        return _from_numbers(numbers, target, categories).labelled(categories)
    if callable(target):
        return ScoreTarget(target)
    raise TargetError(
        f"target must be a class index, a label or a callable, or N of them, got {shown(target)}"
    )


def as_targets(
    target: TargetLike = None,
    targets: Sequence[TargetLike] | None = None,
    top_k: int | None = None,
    categories: Sequence[str] | None = None,
) -> list[Target]:
    """Return a list of targets, each for every image, from one ``target``, several ``targets``, or
    the ``top_k`` best classes."""
    if targets is None and top_k is None:
        return [as_target(target, categories)]
    if target is not None or (targets is not None and top_k is not None):
        raise TargetError("only one of target, targets and top_k can be given; leave the others")
    if top_k is not None:
        if isinstance(top_k, bool) or not hasattr(top_k, "__index__") or operator.index(top_k) < 1:
            raise TargetError(
                f"top_k must be a whole number from 1, got {shown(top_k)}; None is the top class"
            )
        return [TopClass(rank, top_k=top_k) for rank in range(top_k)]
    target_list = targets.tolist() if isinstance(targets, ARRAYS) else targets
    if not isinstance(target_list, list | tuple):
        raise TargetError(
            f"targets must be a list of targets for every image, got {shown(targets)}; target= "
            "takes one"
        )
    if not target_list:
        raise TargetError(
            "targets must hold at least one target, got none; leave it out for the top class"
        )
    return [as_target(target, categories) for target in target_list]


def one_per_image(target: Any) -> list[TargetLike] | None:
    """Return the targets of a list, array or tensor with one for each image; None for one target of
    all images, such as the tuple (3, 2, 1)."""
    targets = target.tolist() if isinstance(target, ARRAYS) else target
    if not isinstance(targets, list | tuple) or _is_place(targets):
        return None
    return [tuple(place) if isinstance(place, list) else place for place in targets]


def _is_place(target: object) -> bool:
    """Whether a tuple is a place in an output of several dimensions, a number for each, rather than
    something for each image."""
    if not isinstance(target, tuple) or len(target) < 2:
        return False
    return all(isinstance(number, int) for number in target)


class Difference(Sum):
    """Why this rather than that: the score of one target less that of another.

    Args:
        this: anything that can be a target: a class index, a label, a callable, a `Target`; None is
            each image's top class.
        that: the same.

    >>> why = Difference(2, 0)
    >>> why.name, why.pick(torch.tensor([[1.0, 0.0, 4.0]]), 1)[0]
    ('2 − 0', tensor([3.]))
    """

    def __init__(self, this: TargetLike, that: TargetLike) -> None:
        """Make the sum of ``this`` and minus ``that``, each converted to a target."""
        terms = []
        for weight, target in ((1.0, this), (-1.0, that)):
            # a label is kept until the model's labels are known
            target_of_term = ClassTarget(target) if isinstance(target, str) else as_target(target)
            terms.append((weight, target_of_term))
        super().__init__(tuple(terms))


def _from_numbers(numbers: Any, target: object, categories: Labels) -> Target:
    """The target for a caller's numbers (plain Python values): a class, a class or target for each
    image, or a place in the output. ``target`` is what the caller gave: a tuple may be a place, a
    list is one for each image.
    """
    if not isinstance(numbers, Sequence):
        return ClassTarget(_whole([numbers], target)[0])
    if not numbers:
        raise _no_classes(target)
    # the tuple (3, 5) is a place, or a class for each of two images: the output decides
    if _is_place(target):
        return per_image.Element(_whole(numbers, target), or_classes=True)
    targets = tuple(_for_one_image(item, target, categories) for item in numbers)
    classes = tuple(
        item_target.index
        for item_target in targets
        if isinstance(item_target, ClassTarget) and isinstance(item_target.index, int)
    )
    return ClassTarget(classes) if len(classes) == len(targets) else per_image.Separate(targets)


def _for_one_image(item: Any, targets: object, categories: Labels) -> Target:
    """The target for one item of a caller's list with one for each image; ``targets`` is the list,
    for messages.
    """
    if isinstance(item, (list, tuple)):
        index = _whole(item, targets)
        return ClassTarget(index[0]) if len(index) == 1 else per_image.Element(index)
    if isinstance(item, (*ARRAYS, bool, float)):  # what is no whole number is refused
        return ClassTarget(_whole([item], targets)[0])
    target = as_target(item, categories)
    if isinstance(target, ScoreTarget) and target.takes_images:
        raise TargetError(
            f"a target of one image must be a function of the output alone, but {target.name} is "
            "not"
        )
    return target


def _whole(numbers: Sequence[Any], target: object) -> tuple[int, ...]:
    """The caller's numbers as plain ints."""
    if any(isinstance(number, bool) or not hasattr(number, "__index__") for number in numbers):
        raise _no_classes(target)
    return tuple(operator.index(number) for number in numbers)


def _no_classes(target: object) -> TargetError:
    """The `TargetError` for numbers that are no class indices."""
    return TargetError(f"target must hold whole class indices, one per image, got {shown(target)}")


def read_labels(path: str | os.PathLike[str]) -> list[str]:
    """Return the labels of the classes from a text file, one a line."""
    name = f"{python_or_command('categories', '--labels')} {shown(os.fspath(path))}"
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LabelsError(
            f"{name} cannot be read: {reason}; give a text file with a label a line"
        ) from None
    labels = [line.strip() for line in text.rstrip().splitlines()]
    if "" in labels:
        line = labels.index("") + 1
        raise LabelsError(
            f"{name} must have a label on every line, but line {line} is empty; fill it"
        )
    return labels


def check_categories(categories: object) -> Labels:
    """Return the labels of the classes as a list; None stays None, and a path is read by
    `read_labels`."""
    if categories is None or isinstance(categories, Categories):
        return categories
    if isinstance(categories, (str, os.PathLike)):
        return read_labels(categories)
    got = f"a {type(categories).__name__}"
    if isinstance(categories, Iterable) and not isinstance(categories, (str, bytes, Mapping, Set)):
        labels = list(categories)
        wrong = [label for label in labels if not isinstance(label, str)]
        if not wrong:
            return labels
        got = f"{shown(wrong[0])} among them"
    raise ModelError(f"categories must be a list with a text for each class, in order, got {got}")
