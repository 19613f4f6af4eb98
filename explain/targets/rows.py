"""Rows of a model's output: those of some images taken out of it, and whether scores follow their rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ExplainError, TargetError, raised
from explain._utils.nested import items, with_items
from explain.targets.base import Target


def must_follow_rows(target: Target, output: Any, count: int) -> None:
    """Refuse a target whose scores do not go with the rows of the output.

    Methods that alter images ask a target about pieces: rows in other orders and numbers than the images. A function
    such as ``lambda output: output[torch.arange(2), labels]`` gives wrong scores there. So it is called on rows of the
    unaltered output in another order, on one more row, and on one alone. Targets of this package, and functions that
    take the rows' images, need no such proof.

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
    target <lambda> must give each row of the output its own score, whatever
    """
    if not target.may_ignore_rows:
        return
    first = None
    with torch.no_grad():
        scores = target.pick(output, count)[0]
        for reading in _READINGS:
            wrong = _wrong(target, output, count, scores, reading)
            if wrong is None:
                return
            first = first or wrong
    raise TargetError(
        f"target {target.name} must give each row of the output its own score, whatever rows stand beside it (altered "
        f"images are asked about in batches of other sizes), but {first}; give it a second argument for the images "
        "that the rows belong to, as in lambda output, images: output[range(len(images)), labels[images]], or give N "
        "class indices"
    )


def take(output: Any, count: int, rows: Sequence[int]) -> Any:
    """Return an output with these rows, in this order, instead of its ``count`` rows.

    Tensors may be anywhere in it. What has no row for each image stays as it is.

    >>> take((torch.tensor([[1.0], [2.0]]), "kept"), 2, [1, 0, 0])
    (tensor([[2.],
            [1.],
            [1.]]), 'kept')
    """
    return _take(output, count, rows, _READINGS[0])


@dataclass(frozen=True)
class _Reading:
    """What of an output belongs to single images, where its shape leaves that open."""

    lists: bool = True
    """A list as long as the batch, of other things than tensors, has an item for each image."""
    vectors: bool = True
    """So does a tensor with one dimension, or with its only dimension of this size behind the first."""


_READINGS = [_Reading(), _Reading(lists=False), _Reading(vectors=False), _Reading(lists=False, vectors=False)]


def _wrong(target: Target, output: Any, count: int, scores: torch.Tensor, reading: _Reading) -> str | None:
    """Say what goes wrong if the output is read like this; None if the scores follow their rows."""
    for rows in _orders(count):
        try:
            images = torch.tensor(rows, device=scores.device)
            found = target.rows(images).pick(_take(output, count, rows, reading), len(rows))[0]
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


def _orders(count: int) -> Iterator[list[int]]:
    """Each row moved to the place of the next, one more row, and a row alone."""
    turned = [*range(1, count), 0]
    yield turned
    yield [*turned, 0]
    yield [count - 1]


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether scores are the same, up to the rounding that differs between batch sizes."""
    both = torch.stack([found, expected]) if found.shape == expected.shape else None
    if both is None or not both.is_floating_point():
        return torch.equal(found, expected)
    rounding = torch.finfo(both.dtype).eps ** 0.5
    return torch.allclose(both[0], both[1], rtol=rounding, atol=rounding * float(expected.abs().max()))


def _take(value: Any, count: int, rows: Sequence[int], reading: _Reading) -> Any:
    if isinstance(value, torch.Tensor):
        dim = _dimension(value, count, reading)
        return value if dim is None else value.index_select(dim, torch.tensor(rows, device=value.device))
    inside = [item for _, item in items(value)]
    if inside:
        each_an_image = reading.lists and len(inside) == count and type(value) in (list, tuple)
        if each_an_image and not any(isinstance(item, torch.Tensor) for item in inside):
            return type(value)(inside[row] for row in rows)
        return with_items(value, [_take(item, count, rows, reading) for item in inside])
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        made = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(made, name, _take(item, count, rows, reading))
        return made
    return value


def _dimension(tensor: torch.Tensor, count: int, reading: _Reading) -> int | None:
    """The dimension of a tensor that goes over the images."""
    if tensor.ndim and len(tensor) == count and (tensor.ndim > 1 or reading.vectors):
        return 0
    found = [dim for dim, size in enumerate(tensor.shape) if size == count] if reading.vectors else []
    return found[0] if len(found) == 1 else None
