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
        return Operation(step.name, rectifies=True)
    read_rectifier = _RECTIFIER_READERS.get(step.name)
    if read_rectifier is not None:
        return read_rectifier(step, signals)
    for selection in _selections(step):
        sign_where_true = _sign_where_true(selection, signals)
        if sign_where_true is None:
            continue
        # whether positive values are kept: `side` is 1 where the mask keeps what it is true at
        keeps_positive = sign_where_true == selection.side
        if _is_zero(selection.elsewhere, signals):
            return Operation(
                step.name, rectifies=True, inputs=selection.inputs, negated=not keeps_positive
            )
        if keeps_positive and _comes_from(selection.elsewhere, selection.kept, signals):  # leaky
            return Operation(step.name, rectifies=True, inputs=selection.inputs)
    return None


def _bounded(step: Step, signals: AbstractSet[Value]) -> Operation | None:
    """The rectifier that a clamp, maximum or minimum is, if one of its bounds is zero."""
    name = step.name
    if name in ("maximum", "minimum"):
        first, second = step.args
        for position, other in ((0, second), (1, first)):
            if step.inputs[position] in signals and _is_zero(other, signals):
                return Operation(
                    name, rectifies=True, inputs=(position,), negated=name == "minimum"
                )
        return None
    least = step.options.get("min")  # of `clamp_max`, there is only "max"
    if least is not None:
        return Operation(name, rectifies=True) if _is_zero(least, signals) else None
    is_negated = _is_zero(step.options.get("max"), signals)
    return Operation(name, rectifies=True, negated=True) if is_negated else None


def _without_negative_part(step: Step, signals: AbstractSet[Value]) -> Operation | None:
    """The rectifier that a sum of a value and its negated negative part, or its size, is:
    x - min(x, 0), x + relu(-x), x + |x|."""
    terms = [value for value in step.inputs if value in signals]
    if len(terms) != 2 or terms[0].shape != terms[1].shape:
        return None
    # of a sum, either term may be x; of a difference, the first
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
        # without negative values, adding nothing at all would look the same
        if rectifies and bool(negative_part.any()):
            inputs = (position, 1 - position)
            return Operation(step.name, rectifies=True, inputs=inputs, by_parts=True)
    return None


def _selections(step: Step) -> list[_Selection]:
    """The values that a step keeps where a mask says so, for each way to read it: x * mask,
    `torch.where`, `masked_fill`, x[mask] = value."""
    values = step.args
    if step.name == "mul" and len(step.inputs) == 2:
        first, second = values[:2]
        return [
            _Selection(first, mask=second, side=1, inputs=(0,)),
            _Selection(second, mask=first, side=1, inputs=(1,)),
        ]
    if step.name == "where" and len(values) == 3:
        mask, first, second = values
        return [
            _Selection(first, mask, side=1, inputs=(1, 2), elsewhere=second),
            _Selection(second, mask, side=-1, inputs=(2, 1), elsewhere=first),
        ]
    if step.name == "masked_fill":
        kept, mask, filled = values
        return [_Selection(kept, mask, side=-1, inputs=(0,), elsewhere=filled)]
    if step.name == "index_put" and len(values[1]) == 1:
        kept, (mask,), assigned, *_ = values
        return [_Selection(kept, mask, side=-1, inputs=(0,), elsewhere=assigned)]
    return []


def _sign_where_true(selection: _Selection, signals: AbstractSet[Value]) -> int | None:
    """1 if the mask is true where the kept value is positive, -1 if where it is negative, None if
    it is not the sign of that value."""
    kept = selection.kept
    mask = selection.mask
    if not isinstance(kept, Value) or not isinstance(mask, Value) or kept not in signals:
        return None
    source, sign = _sign(mask)
    if source is None or not kept.shape == mask.shape == source.shape:
        return None
    values = kept.tensor
    # the mask may also be made of what a rectifier gave for the same values
    possible_sources = (values, values.clamp(min=0))
    if not any(torch.equal(tensor, source.tensor) for tensor in possible_sources):
        return None
    is_positive = mask.tensor.bool() if sign > 0 else ~mask.tensor.bool()
    agrees = bool(((is_positive == (values > 0)) | (values == 0)).all())
    return sign if agrees else None


_SIGNS = {"gt": 1, "ge": 1, "lt": -1, "le": -1}
"""Which sign the first of two compared values has where the result is true, the second being 0."""


def _sign(mask: Value) -> tuple[Value | None, int]:
    """The value that a mask is the sign of, and the sign, 1 or -1, where it is true; a value of
    None for other masks."""
    sign = 1
    step = mask.step
    while step is not None and step.name in ("_to_copy", "logical_not", "bitwise_not"):
        sign = sign if step.name == "_to_copy" else -sign
        step = step.inputs[0].step
    if step is None or step.name not in _SIGNS:
        return None, sign
    first, second = step.args
    sign *= _SIGNS[step.name]
    if _is_zero(second, frozenset()):
        return first, sign
    return (second, -sign) if _is_zero(first, frozenset()) else (None, sign)


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
    if value not in signals:  # a number as a tensor
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


_RECTIFIER_READERS: dict[str, Callable[[Step, AbstractSet[Value]], Operation | None]] = {
    "clamp": _bounded,
    "clamp_min": _bounded,
    "clamp_max": _bounded,
    "maximum": _bounded,
    "minimum": _bounded,
    "add": _without_negative_part,
    "sub": _without_negative_part,
}
"""What may be a rectifier by its bounds, or by its two terms."""
