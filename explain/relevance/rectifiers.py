"""The rectifiers of a recorded pass, in whatever words they are written.

``clamp(x, min=0)``, ``maximum(x, 0)``, ``where(x > 0, x, ...)``, ``x * (x > 0)``, ``x[x < 0] = 0``,
``x - min(x, 0)`` and ``x + |x|`` rectify as a ReLU does. Those with a mask are recognised by where
the mask comes from: it must be the sign of what is kept, so a mask of tokens does not count, even
if it happens to agree with the sign. ``minimum(x, 0)`` is a negated rectifier, -relu(-x).
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from explain.recording import Step, Value

_STEPS = 16
"""From how many steps ago a value counts as computed from another."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation that a rule for gradients covers, or cannot look into."""

    name: str
    """That of a step."""
    rectifies: bool = False
    inputs: tuple[int, ...] = (0,)
    """Which of its inputs are what is rectified."""
    negated: bool = False
    """Whether it keeps the negative part: -relu(-x)."""
    by_parts: bool = False
    """Whether it takes the negative part from a value: x - min(x, 0)."""

    @property
    def kind(self) -> str:
        """The operation's name: ``"relu"``, ``"where"``."""
        return self.name.lstrip("_").removesuffix("_kernel")


class _Selection(NamedTuple):
    """A value that is kept where a mask is true, or with ``side`` -1 where it is false; and what
    stands elsewhere. ``inputs`` are the places of these two."""

    kept: Any
    mask: Any
    side: int
    inputs: tuple[int, ...]
    elsewhere: Any = 0


def operations_of(
    steps: Sequence[Step], signals: AbstractSet[Value], leading: AbstractSet[Value]
) -> Iterator[tuple[Step, Operation]]:
    """Yield the rectifiers between the inputs and a score, and what cannot be looked into: own
    derivatives, unknown operators, derivatives that the model takes itself; each with its step."""
    for step in steps:
        if leading.isdisjoint(step.results) or signals.isdisjoint(step.inputs):
            continue
        if step.is_opaque or step.name.endswith("_backward"):
            yield step, Operation(step.name)
        else:
            rectifier = _rectifier(step, signals)
            if rectifier is not None:
                yield step, rectifier


def _rectifier(step: Step, signals: AbstractSet[Value]) -> Operation | None:
    """The rectifier that a step is; None if it is none."""
    if step.operation.has("rectifies"):
        return Operation(step.name, True)
    if step.name in _READERS:
        return _READERS[step.name](step, signals)
    for selection in _selections(step):
        side = _side(selection, signals)
        if side is None:
            continue
        if _is_zero(selection.elsewhere, signals):
            negated = side != selection.side
            return Operation(step.name, True, selection.inputs, negated=negated)
        is_leaky = side == selection.side and _comes_from(
            selection.elsewhere, selection.kept, signals
        )
        if is_leaky:
            return Operation(step.name, True, selection.inputs)
    return None


def _bounded(step: Step, signals: AbstractSet[Value]) -> Operation | None:
    """The rectifier that a clamp, maximum or minimum is, if one of its bounds is zero."""
    x, *bounds = step.args
    if step.name in ("maximum", "minimum"):
        for position, other in ((0, bounds[0]), (1, x)):
            if step.inputs[position] in signals and _is_zero(other, signals):
                return Operation(step.name, True, (position,), negated=step.name == "minimum")
        return None
    least = step.kwargs.get("min", bounds[0] if bounds else None)
    most = step.kwargs.get("max", bounds[1] if len(bounds) > 1 else None)
    if step.name == "clamp_max":
        most = least
        least = None
    if least is not None:
        return Operation(step.name, True) if _is_zero(least, signals) else None
    return Operation(step.name, True, negated=True) if _is_zero(most, signals) else None


def _without_negative_part(step: Step, signals: AbstractSet[Value]) -> Operation | None:
    """The rectifier that a sum of a value and its negated negative part, or its size, is:
    x - min(x, 0), x + relu(-x), x + |x|."""
    terms = [value for value in step.inputs if value in signals]
    if len(terms) != 2 or terms[0].shape != terms[1].shape:
        return None
    for position in (0,) if step.name == "sub" else (0, 1):
        x = terms[position]
        other = terms[1 - position]
        if not _comes_from(other, x, signals):
            continue
        added = -other.tensor if step.name == "sub" else other.tensor
        if bool((added < 0).any()):
            continue
        negative_part = x.tensor.clamp(max=0)
        rectifies = torch.equal(added, -negative_part) or torch.equal(added, x.tensor.abs())
        if rectifies and bool(negative_part.any()):
            return Operation(step.name, True, (position, 1 - position), by_parts=True)
    return None


def _selections(step: Step) -> list[_Selection]:
    """The values that a step keeps where a mask says so, for each way to read it: x * mask,
    `torch.where`, `masked_fill`, x[mask] = value."""
    values = step.args
    if step.name == "mul" and len(step.inputs) == 2:
        first, second = values[:2]
        return [_Selection(first, second, 1, (0,)), _Selection(second, first, 1, (1,))]
    if step.name == "where" and len(values) == 3:
        mask, first, second = values
        return [
            _Selection(first, mask, 1, (1, 2), second),
            _Selection(second, mask, -1, (2, 1), first),
        ]
    if step.name == "masked_fill":
        return [_Selection(values[0], values[1], -1, (0,), values[2])]
    if step.name == "index_put" and len(values[1]) == 1:
        return [_Selection(values[0], values[1][0], -1, (0,), values[2])]
    return []


def _side(selection: _Selection, signals: AbstractSet[Value]) -> int | None:
    """1 if the mask is true where the kept value is positive, -1 if where it is negative, None if
    it is not the sign of that value."""
    kept = selection.kept
    mask = selection.mask
    if not isinstance(kept, Value) or not isinstance(mask, Value) or kept not in signals:
        return None
    source, side = _sign(mask)
    if source is None or not kept.shape == mask.shape == source.shape:
        return None
    values = kept.tensor
    alike = (values, values.clamp(min=0))
    if not any(torch.equal(tensor, source.tensor) for tensor in alike):
        return None
    is_kept = mask.tensor.bool() if side > 0 else ~mask.tensor.bool()
    agrees = bool(((is_kept == (values > 0)) | (values == 0)).all())
    return side if agrees else None


_SIDES = {"gt": 1, "ge": 1, "lt": -1, "le": -1}


def _sign(mask: Value) -> tuple[Value | None, int]:
    """The value that a mask is the sign of, and which side it is true on; None for other masks."""
    side = 1
    step = mask.step
    while step is not None and step.name in ("_to_copy", "logical_not", "bitwise_not"):
        side = side if step.name == "_to_copy" else -side
        step = step.inputs[0].step
    if step is None or step.name not in _SIDES:
        return None, side
    first, second = step.args
    side *= _SIDES[step.name]
    if _is_zero(second, frozenset()):
        return first, side
    return (second, -side) if _is_zero(first, frozenset()) else (None, side)


def _is_zero(value: Any, signals: AbstractSet[Value]) -> bool:
    """Whether a value is a constant zero: a number, or a tensor of zeros that no gradient leads
    from."""
    if isinstance(value, Value):
        tensor: Tensor = value.tensor
        return value not in signals and not value.depends and not bool(tensor.any())
    return isinstance(value, (int, float)) and value == 0


def _comes_from(value: Any, source: Value, signals: AbstractSet[Value]) -> bool:
    """Whether ``value`` is a number, or was computed from ``source`` at most `_STEPS` steps ago, as
    in ``where(x > 0, x, 0.1 * x)``."""
    if not isinstance(value, Value):
        return True
    if value not in signals:
        return value.numel == 1 and not value.depends
    waiting = [value]
    for _ in range(_STEPS):
        if not waiting:
            return False
        earlier = waiting.pop(0)
        if earlier is source:
            return True
        if earlier.step is not None:
            waiting += [argument for argument in earlier.step.inputs if argument in signals]
    return False


_READERS: dict[str, Callable[[Step, AbstractSet[Value]], Operation | None]] = {
    "clamp": _bounded,
    "clamp_min": _bounded,
    "clamp_max": _bounded,
    "maximum": _bounded,
    "minimum": _bounded,
    "add": _without_negative_part,
    "sub": _without_negative_part,
}
"""What may be a rectifier by its bounds, or by its two terms."""
