"""A target of its own for each image, and single numbers of an output; whether scores follow the rows of an output."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ExplainError, TargetError, raised
from explain._utils.nested import items, with_items
from explain.targets.base import Labels, Picked, Target, check_count, find_tensor, images_of_rows, need_tensor
from explain.targets.classes import ClassTarget


@dataclass(frozen=True)
class Element(Target):
    """One number for each image of an output with several dimensions: ``output[:, 3, 2, 1]``.

    Args:
        index: where it is, behind the dimension of the images.

    Raises:
        TargetError: not whole numbers; or, when it is picked, outside of the output.

    >>> Element((1, 0)).pick(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 1)[0]
    tensor([3.])
    """

    index: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.index or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in self.index):
            raise TargetError(f"index must hold whole numbers from 0, got {self.index!r}; (3, 2) is output[:, 3, 2]")

    @property
    def name(self) -> str:
        return str(self.index)

    def pick(self, output: Any, count: int) -> Picked:
        dimensions = len(self.index) + 1
        found = need_tensor(output, count, (dimensions,), self, f"{dimensions} dimensions")
        if any(i >= size for i, size in zip(self.index, found.shape[1:], strict=True)):
            got = tuple(found.shape)
            raise TargetError(f"target {self.name} must lie within the output, got one of shape {got}; count from 0")
        place: Any = (slice(None), *self.index)
        return found[place], None


@dataclass(frozen=True)
class Tuple(Target):
    """Whole numbers that are a class for each image where the output has class scores, and else an `Element`."""

    index: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.index)

    def settled(self, output: Any, count: int) -> Target:
        place = find_tensor(output, count, (len(self.index) + 1,)) is not None
        scores = find_tensor(output, count, (2,)) is not None
        return Element(self.index) if place and not scores else ClassTarget(self.index)


@dataclass(frozen=True)
class Separate(Target):
    """A target of its own for each image.

    Each reads the output of the whole batch, and the score in the row of its own image counts.

    Args:
        targets: N of them, in the order of the images.
        images: whose rows the output has; None is a row for each image in turn.

    >>> from explain.targets import ClassTarget, Difference
    >>> both = Separate((ClassTarget(2), Difference(0, 1)))
    >>> both.name, both.pick(torch.tensor([[1.0, 2.0, 3.0], [4.0, 6.0, 8.0]]), 2)[0]
    ('2, 0 − 1', tensor([ 3., -2.]))
    """

    targets: tuple[Target, ...]
    images: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        names = [target.name for target in self.targets]
        return ", ".join(names[:4]) + f", ... ({len(names)})" * (len(names) > 4)

    @property
    def may_ignore_rows(self) -> bool:
        return self.images is None and any(target.may_ignore_rows for target in self.targets)

    def pick(self, output: Any, count: int) -> Picked:
        images = self._images(count)
        used = sorted(set(images))
        first = torch.zeros(count, dtype=torch.long)  # each target is settled for one image, and scores all rows
        found = [self.targets[image].rows(first).pick(output, count) for image in used]
        scores = torch.stack([score for score, _ in found])
        row = torch.tensor([[used.index(image) for image in images]], device=scores.device)
        classes = [own for _, own in found if own is not None]
        picked = torch.stack(classes).gather(0, row)[0] if len(classes) == len(found) else None
        return scores.gather(0, row)[0], picked

    def settled(self, output: Any, count: int) -> "Separate":
        if self.images is not None:
            return self
        self._images(count)
        chosen = []
        for image, target in enumerate(self.targets):  # each makes its choices on the rows of its image alone
            alone = (output, count) if target.may_ignore_rows else (take(output, count, [image]), 1)
            chosen.append(target.settled(*alone))
            if not target.may_ignore_rows:
                chosen[-1].pick(*alone)  # one that holds something for several images is refused here
        must_follow_rows(made := replace(self, targets=tuple(chosen)), output, count)
        return made

    def rows(self, images: torch.Tensor) -> "Separate":
        return replace(self, images=images_of_rows(self.images, images))

    def sized(self, size: tuple[int, ...]) -> "Separate":
        return replace(self, targets=tuple(target.sized(size) for target in self.targets))

    def labelled(self, categories: Labels) -> "Separate":
        return replace(self, targets=tuple(target.labelled(categories) for target in self.targets))

    def _images(self, count: int) -> Sequence[int]:
        images = range(len(self.targets)) if self.images is None else self.images
        check_count("target", len(images), count)
        return images


def must_follow_rows(target: Target, output: Any, count: int) -> None:
    """Refuse a target whose scores do not go with the rows of the output.

    Methods that alter images score them in batches with other orders and numbers of rows than the images. A function
    such as ``lambda output: output[torch.arange(2), labels]`` gives wrong scores there. So it is called on rows of the
    unaltered output in another order, on one more row, and on one alone. Targets of this package, and functions that
    take the rows' images, need no such proof.

    Where the shape of the output leaves open what belongs to single images, it is enough if one way to cut it fits.

    Args:
        target: a settled target.
        output: what the model returned for the ``count`` images as they are.

    Raises:
        TargetError: the scores of the same rows in another order or number are not the same.

    >>> from explain.targets import as_target
    >>> scores = torch.tensor([[1.0, 2.0], [5.0, 3.0]])
    >>> must_follow_rows(as_target(lambda output: output[:, 1]), scores, 2)
    >>> try:
    ...     must_follow_rows(as_target(lambda output: output[[0, 1], [0, 1]]), scores, 2)
    ... except TargetError as error:
    ...     print(str(error)[:72])
    target <lambda> must give each row its own score, whatever the others, b
    """
    if not target.may_ignore_rows:
        return
    first = None
    with torch.no_grad():
        scores = target.pick(output, count)[0]
        for vectors, lists in product((True, False), repeat=2):
            wrong = _wrong(target, output, count, scores, vectors=vectors, lists=lists)
            if wrong is None:
                return
            first = first or wrong
    remedy = "take the images as an argument: lambda output, images: output[range(len(images)), labels[images]]"
    wrong = f"must give each row its own score, whatever the others, but {first}"
    raise TargetError(f"target {target.name} {wrong}; {remedy}")


def take(value: Any, count: int, rows: Sequence[int], *, vectors: bool = True, lists: bool = True) -> Any:
    """Return an output with these rows, in this order, instead of its ``count`` rows.

    Tensors may be anywhere in it. What has no row for each image stays as it is.

    Args:
        value: the output.
        count: how many images it is of.
        rows: their numbers.
        vectors: whether a tensor with one dimension, or with its only dimension of this size behind the first, has an
            item for each image.
        lists: whether a list as long as the batch, of other things than tensors, has one.

    >>> take((torch.tensor([[1.0], [2.0]]), "kept"), 2, [1, 0, 0])
    (tensor([[2.],
            [1.],
            [1.]]), 'kept')
    """
    if isinstance(value, torch.Tensor):
        dim = _dimension(value, count, vectors=vectors)
        return value if dim is None else value.index_select(dim, torch.tensor(rows, device=value.device))
    inside = [item for _, item in items(value)]
    if inside:
        has_tensors = any(isinstance(item, torch.Tensor) for item in inside)
        if lists and not has_tensors and len(inside) == count and type(value) in (list, tuple):
            return type(value)(inside[row] for row in rows)
        return with_items(value, [take(item, count, rows, vectors=vectors, lists=lists) for item in inside])
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        made = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(made, name, take(item, count, rows, vectors=vectors, lists=lists))
        return made
    return value


def _dimension(tensor: torch.Tensor, count: int, *, vectors: bool) -> int | None:
    """The dimension of a tensor that goes over the images."""
    if tensor.ndim and len(tensor) == count and (tensor.ndim > 1 or vectors):
        return 0
    found = [dim for dim, size in enumerate(tensor.shape) if size == count] if vectors else []
    return found[0] if len(found) == 1 else None


def _wrong(target: Target, output: Any, count: int, scores: torch.Tensor, **cut: bool) -> str | None:
    """Say what goes wrong if the output is cut like this; None if the scores follow their rows."""
    turned = [*range(1, count), 0]  # each row moved to the place of the next
    for rows in (turned, [*turned, 0], [count - 1]):
        try:
            images = torch.tensor(rows, device=scores.device)
            found = target.rows(images).pick(take(output, count, rows, **cut), len(rows))[0]
        except torch.cuda.OutOfMemoryError:
            raise
        except TargetError:
            return f"of {len(rows)} rows it does not give {len(rows)} scores"
        except ExplainError:
            raise
        except (IndexError, RuntimeError, ValueError, TypeError, KeyError) as error:
            return f"of {len(rows)} rows it {raised(error)}"
        if not _close(found, scores[images]):
            return f"it gives other scores for the rows {', '.join(map(str, rows[:4]))}{', ...' * (len(rows) > 4)}"
    return None


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether scores are the same, up to the rounding that differs between batch sizes."""
    both = torch.stack([found, expected]) if found.shape == expected.shape else None
    if both is None or not both.is_floating_point():
        return torch.equal(found, expected)
    rounding = torch.finfo(both.dtype).eps ** 0.5
    return torch.allclose(both[0], both[1], rtol=rounding, atol=rounding * float(expected.abs().max()))
