"""Between which bounds the values of a recording lie, whatever the input: what softmaxes, sigmoids
and their like made, however they are written."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from explain.recording import Step, Value

_KEEPING = frozenset(["moves", "permutes", "selects"])
"""The traits of operations that give nothing outside of the range of what they are given."""


class Range(NamedTuple):
    """The least and the greatest value that a tensor may have."""

    low: float
    high: float
    classes: int = 0
    """The number of values that a softmax made to add up to one, of which these are some or all; 0
    for a sigmoid."""


def ranges_of(steps: Iterable[Step], *, blind: bool = False) -> dict[Value, Range]:
    """Follow the ranges of values from softmaxes, sigmoids and exponentials on; others may have any
    value. In a ``blind`` recording, the constants may be anything."""
    ranges: dict[Value, Range] = {}
    for step in steps:
        arguments = _ranges_of_arguments(step, ranges, blind)
        of_step = _range_of_share(step, ranges) or _range_of(step, arguments)
        for value in step.outputs:
            # neither constants, nor the indices of maxima
            if of_step and value.depends and value.dtype.is_floating_point:
                ranges[value] = of_step
    return ranges


def _ranges_of_arguments(
    step: Step, ranges: Mapping[Value, Range], blind: bool
) -> dict[Value, Range]:
    """The ranges of the arguments of a step; none at all if one of them may have any value. That of
    a constant is the range of its values."""
    signals = step.inputs
    if not step.operation.has("monotone"):  # others take indices and masks
        signals = [value for value in signals if value.dtype.is_floating_point]
    if ranges.keys().isdisjoint(signals):  # no range to follow
        return {}
    arguments: dict[Value, Range] = {}
    for value in signals:
        if value in ranges:
            arguments[value] = ranges[value]
        elif value.depends or blind or not value.numel:
            return {}
        else:
            tensor = value.tensor.detach()
            arguments[value] = Range(float(tensor.min()), float(tensor.max()))
    return arguments


def _range_of(step: Step, arguments: Mapping[Value, Range]) -> Range | None:
    """The range of the results of a step, by those of its arguments or else by the table."""
    operation = step.operation
    if arguments and operation.has("monotone"):
        return _at_extremes(step, arguments)
    if arguments and (operation.traits & _KEEPING or step.name == "sum"):
        # of a sum, how many values each one adds up
        terms = step.inputs[0].numel / step.output.numel if step.name == "sum" else 1
        low = min(argument.low for argument in arguments.values())
        high = max(argument.high for argument in arguments.values())
        return Range(low * terms, high * terms, _classes(arguments))
    if operation.range is None:
        return None
    classes = 0
    # as many as the dimension has that a softmax is over; a scalar has none
    if operation.kind == "softmax" and step.args[0].shape:
        classes = step.args[0].shape[step.args[1]]
    return Range(*operation.range, classes)


def _at_extremes(step: Step, arguments: Mapping[Value, Range]) -> Range | None:
    """The range of a monotone step, which is run where its arguments have their least and greatest
    values and 0, in all combinations."""
    ends: list[Sequence[float]] = []
    for low, high, _ in arguments.values():
        # 0 from both sides, where a quotient leaps
        ends.append((low, -0.0, 0.0, high) if low < 0 < high else (low, high))
    results: list[float] = []
    for numbers in itertools.product(*ends):
        tensors = [torch.tensor(number, dtype=torch.float64) for number in numbers]
        run = step.run(dict(zip(arguments, tensors, strict=True)).__getitem__)
        results.append(float(next(iter(run.values()))))
    if any(map(math.isnan, results)):
        return None
    low, high = min(results), max(results)
    # the first is that of all least values; 1 - p, which falls, adds up to something else
    rises = results[0] == low and results[-1] == high
    return Range(low, high, _classes(arguments) if rises else 0)


def _classes(arguments: Mapping[Value, Range]) -> int:
    """Among how many values those of several arguments share one; 0 if these differ."""
    counts = {argument.classes for value, argument in arguments.items() if value.depends}
    return counts.pop() if len(counts) == 1 else 0


def _range_of_share(step: Step, ranges: Mapping[Value, Range]) -> Range | None:
    """The range of what is divided by its own sum, as a softmax is, or by one more than itself, as
    a sigmoid is; or of the logarithm of a share. None for all else."""
    part, whole = (*step.args, None, None)[:2]  # None where fewer are given
    if step.kwargs or not (isinstance(part, Value) and isinstance(whole, Value)):
        return None
    is_quotient = step.name == "div" and part in ranges and ranges[part].low >= 0
    # x - x.logsumexp(dim), which is nowhere above 0
    is_log = step.name == "sub" and whole.numel < part.numel
    if not (is_quotient or (is_log and bool((part.tensor <= whole.tensor).all()))):
        return None
    # whether it is its own sum, and along which dimension, is seen in the recorded values
    parts, wholes = part.tensor.double(), whole.tensor.double()
    rounding = 1e-2 if part.dtype.itemsize == 2 else 1e-4
    absolute_rounding = rounding if is_log else 0
    for dim, size in enumerate(parts.shape):
        sums = parts.logsumexp(dim, True) if is_log else parts.sum(dim, True)
        if torch.allclose(wholes, sums, rtol=rounding, atol=absolute_rounding):
            return Range(-math.inf, 0.0, size) if is_log else Range(0.0, 1.0, size)
    is_sigmoid = is_quotient and torch.allclose(wholes, parts + 1, rtol=rounding, atol=0)
    return Range(0.0, 1.0) if is_sigmoid else None
