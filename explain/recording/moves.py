"""Steps that move values: run again with numbers in the place of the values, such as where each
lies or which image it belongs to."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from explain.recording.values import Step, Value, values_in

_INDICES = ("index", "indices", "mask")


def is_move(step: Step) -> bool:
    """Whether a step moves, repeats or selects values, rather than computing new ones."""
    return step.operation.has("moves") or step.operation.has("permutes")


def values_moved(step: Step) -> list[Value]:
    """The values that a step moves, of those that it takes: not its indices."""
    indices = _indices(step)
    return [value for value in step.inputs if value not in indices]


def moved(
    step: Step, number_of: Callable[[Value], Tensor | None], device: torch.device | str = "cpu"
) -> dict[Value, Tensor]:
    """Run a step that moves values, with numbers on a ``device`` in the place of these:
    ``number_of`` a value, such as its position, of size 1 where they do not change, or None for 0.
    """
    indices = _indices(step)  # they stay as they are

    def written_out(value: Value) -> Tensor:
        """The numbers of an argument, in the shape that the step takes it in."""
        if value in indices:
            return value.tensor.to(device)
        numbers = number_of(value)
        if numbers is None:
            numbers = torch.zeros([1] * len(value.shape), device=device)
        if step.operation.has("permutes"):  # it does so whatever the sizes
            return numbers
        return numbers.expand(value.shape).contiguous()  # a view of the value may be none of these

    results = _with_zeros(step).run(written_out)  # padding counts as 0
    return {value: compact(numbers) for value, numbers in results.items()}


def _indices(step: Step) -> set[Value]:
    """The values that say where a step moves others."""
    return set(values_in([step.options.get(name) for name in _INDICES]))


def _with_zeros(step: Step) -> Step:
    """The step, with 0 in the place of a number, its ``value``, that it puts between the values."""
    names = list(step.options)
    position = names.index("value") if "value" in names else len(step.args)
    if position >= len(step.args) or isinstance(step.args[position], Value):
        return step
    return replace(step, args=(*step.args[:position], 0.0, *step.args[position + 1 :]))


def compact(numbers: Tensor) -> Tensor:
    """The same numbers of a tensor's values (of images, or positions in an image), shrunk to size 1
    along dimensions in which they do not change."""
    for d in reversed(range(numbers.ndim)):  # the last ones are the nearest in memory
        first_slice = numbers.narrow(d, 0, min(numbers.shape[d], 1))
        if numbers.stride(d) == 0 or bool((numbers == first_slice).all()):
            numbers = first_slice
    return numbers


def fits(numbers: Tensor, shape: torch.Size) -> bool:
    """Whether numbers broadcast to ``shape`` without another dimension."""
    return numbers.ndim == len(shape) and all(
        n in (1, size) for n, size in zip(numbers.shape, shape, strict=True)
    )
