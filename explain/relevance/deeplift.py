"""Back-propagated differences from a reference: DeepLIFT's multipliers, as gradients that are
changed at each step.

The network has been run on a reference too. At each step, the change of the result is shared out
among the changes of what it was given: linear maps by the plain gradient, functions of one number
by the slope between the two points (rescale), products by the mean of the other factor, maxima by
who held them. So the multipliers times the differences of the input add up to the difference of the
scores.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from explain._utils.errors import MethodError
from explain.recording import Recording, Value
from explain.recording import Step as RecordedStep
from explain.recording.gradients import Gradients, Rule, derivative, walk_back
from explain.relevance.nonlinear_rules import (
    epsilon_of,
    normalised_rows,
    parameter_of,
)
from explain.relevance.steps import Step, step_of


class StepPair(NamedTuple):
    """A step and the same step of the run on the reference."""

    step: Step
    of_reference: RecordedStep
    signals: AbstractSet[Value]

    def inputs_at(self, position: int) -> tuple[Tensor, Tensor]:
        """The input at ``position``, in the run on the image and in that on the reference."""
        return self.step.inputs[position].tensor, self.of_reference.inputs[position].tensor

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """The result, in the run on the image and in that on the reference."""
        return self.step.output.tensor, self.of_reference.output.tensor


BackOfPair: TypeAlias = Callable[[StepPair, Tensor], Sequence[Tensor | None]]
"""The multipliers of a step's signals, from those of its result."""


def multipliers(
    recording: Recording,
    reference: Recording,
    gradients: Gradients,
    signals: AbstractSet[Value],
    reference_signals: AbstractSet[Value],
    wanted: AbstractSet[Value],
) -> Gradients:
    """DeepLIFT's multipliers of ``wanted`` values, by a walk back over a recorded pass, beside that
    of the reference. Raises MethodError if the reference runs other operations."""
    # signals are the values that a gradient leads from to the explained inputs
    steps = _steps_of_signals(recording, signals)
    of_reference = _steps_of_signals(reference, reference_signals)
    if [_signature(step) for step in steps] != [_signature(step) for step in of_reference]:
        raise MethodError(
            "baseline of deeplift must run the operations of the image, on as many values, but "
            "does not; choose another"
        )
    rules: dict[RecordedStep, Rule] = {}
    for recorded, reference_step in zip(steps, of_reference, strict=True):
        step = step_of(recorded, signals, of_complex=True)
        rule = None if step is None else _rule_of(step)
        if step is not None and rule is not None:
            rules[recorded] = _walk_rule(StepPair(step, reference_step, signals), rule)
    return walk_back(recording.steps, gradients, wanted, signals, rules)


def _steps_of_signals(recording: Recording, signals: AbstractSet[Value]) -> list[RecordedStep]:
    """The steps that read what depends on the explained inputs, but for copies, which hooks add."""
    steps = [step for step in recording.steps if not step.operation.has("copies")]
    return [step for step in steps if not signals.isdisjoint(step.inputs)]


def _signature(step: RecordedStep) -> tuple[str, list[tuple[int, ...]]]:
    """What a step of the image and that of the reference have in common."""
    is_function = hasattr(step.operator, "apply")  # which may have memory of its own
    values = [value for value in step.inputs if value.depends or not is_function]
    return step.name, [value.shape for value in values]


def _rule_of(step: Step) -> BackOfPair | None:
    """How differences are shared out at a step, if otherwise than by its derivative: all functions
    of one number rescale; sums, products with constants and the like are linear."""
    if step.kind in ("product", "quotient", "matrixproduct") and len(step.signals) == 2:
        return _BACK[step.kind]
    # others of these, such as the maximum of two signals, keep their derivative
    if step.kind in ("softmax", "deviation", "maximum") and tuple(step.signals) == (0,):
        return _BACK[step.kind]
    is_linear = step.kind in ("sum", "product", "choice") or (
        step.kind == "quotient" and tuple(step.signals) == (0,)
    )
    is_of_one = len(step.signals) == 1 and step.x.shape == step.output.shape
    is_by_value = step.recorded.is_pointwise or step.kind in ("activation", "rectifier")
    return _rescale if is_by_value and is_of_one and not is_linear else None


def _walk_rule(pair: StepPair, rule: BackOfPair) -> Rule:
    """DeepLIFT's rule at one step, as `walk_back` takes it."""

    def back(arrived: Gradients) -> list[tuple[Value, Tensor | None]]:
        """The multipliers of the inputs that are signals."""
        step = pair.step
        gradient = arrived.get(step.output)
        if gradient is None:  # only another result of the step leads to the score
            plain = derivative(step.recorded, arrived, pair.signals)
            return list(zip(step.inputs, plain, strict=True))
        sent = rule(pair, gradient)
        return [(step.inputs[position], sent[i]) for i, position in enumerate(step.signals)]

    return back


def _slope(x: Tensor, x0: Tensor, y: Tensor, y0: Tensor) -> Tensor:
    """DeepLIFT's slope (y - y0) / (x - x0) between image and reference; NaN where x and x0 are as
    good as equal."""
    change = x - x0
    rounding = torch.finfo(x.dtype).eps
    # in half precision, smaller changes are rounding errors
    smallest_change = 1e-7 if rounding < 1e-6 else 8 * rounding
    near = change.abs() <= smallest_change * torch.maximum(x.abs(), x0.abs())
    return torch.where(near, torch.nan, (y - y0) / torch.where(near, 1, change))


def _rescale(pair: StepPair, gradient: Tensor) -> list[Tensor]:
    """DeepLIFT's rescale rule for an activation: multiply the gradient by the slope between image
    and reference, or take the derivative where they coincide."""
    position = pair.step.signals[0]
    x, x0 = pair.inputs_at(position)
    slope = _slope(x, x0, *pair.results).conj()
    is_same_point = slope.isnan()
    if not bool(is_same_point.any()):
        return [gradient * slope]
    step = pair.step
    plain = derivative(step.recorded, {step.output: gradient}, {step.x})[position]
    assert plain is not None
    if torch.is_grad_enabled():
        # The slope between two points depends on both: its derivative is the mean of theirs.
        arrived = {pair.of_reference.output: gradient}
        x0_value = pair.of_reference.inputs[position]
        of_reference = derivative(pair.of_reference, arrived, {x0_value})[position]
        assert of_reference is not None
        plain = (plain + of_reference) / 2
    # NaN is masked before the product: `torch.where` would hide it in the values, but not in
    # their derivative.
    slopes = slope.masked_fill(is_same_point, 0)
    return [torch.where(is_same_point, plain, gradient * slopes)]


def _midway(pair: StepPair, gradient: Tensor) -> Sequence[Tensor | None]:
    """DeepLIFT at a product of two numbers or matrices: each factor's gradient is by the mean of
    the other one in image and reference, as in the derivative midway between the two."""
    step = pair.step
    pairs = zip(step.inputs, pair.of_reference.inputs, strict=True)
    middle = step.recorded.replaced({v: (v.tensor + v0.tensor) / 2 for v, v0 in pairs})
    return derivative(middle, {step.output: gradient}, set(middle.inputs))


def _quotient(pair: StepPair, gradient: Tensor) -> list[Tensor]:
    """DeepLIFT at a quotient a / b, as a product of a and 1 / b."""
    a, a0 = pair.inputs_at(0)
    b, b0 = pair.inputs_at(1)
    of_a = gradient * ((1 / b + 1 / b0) / 2).conj()
    of_b = -gradient * ((a + a0) / (2 * b * b0)).conj()
    return [of_a.sum_to_size(a.shape), of_b.sum_to_size(b.shape)]


def _of_softmax(x: Tensor, x0: Tensor, dim: int, gradient: Tensor) -> Tensor:
    """DeepLIFT's gradient in the input of a softmax along ``dim``, for image x and reference x0."""
    # The softmax is the exponential of x less L, L being the logarithm of the sum of all
    # exponentials: a function of one number. Its slopes m are the logarithmic means of the two
    # softmaxes. Softmaxes sum to one, so that the differences of x times m add up to that of L
    # times the sum of m: L shares itself out in proportion to m.
    s = x.softmax(dim)
    s0 = x0.softmax(dim)
    change = x.log_softmax(dim) - x0.log_softmax(dim)
    size = torch.where(change.isnan(), 0, change).abs()  # NaN where both are masked
    # m = (s - s0) / change, written so that nothing overflows or cancels out
    share_of_larger = -torch.expm1(-size) / torch.where(size == 0, 1, size)
    slope = torch.maximum(s, s0) * torch.where(size == 0, 1, share_of_larger)
    sent = gradient * slope
    return sent - slope / slope.sum(dim, keepdim=True) * sent.sum(dim, keepdim=True)


def _softmax(pair: StepPair, gradient: Tensor) -> list[Tensor]:
    """DeepLIFT at a softmax."""
    x, x0 = pair.inputs_at(0)
    return [_of_softmax(x, x0, pair.step.recorded.options["dim"], gradient)]


def _deviation(pair: StepPair, gradient: Tensor) -> list[Tensor]:
    """DeepLIFT at a normalisation: subtract the mean, which is linear, then multiply by the inverse
    root of the mean square."""
    step = pair.step
    x, x0 = pair.inputs_at(0)
    weight = parameter_of(step, "weight")
    epsilon = epsilon_of(step, x)
    rows, dims = normalised_rows(step, x)
    rows0, _ = normalised_rows(step, x0)
    # less its mean, as the gradient of a value less the mean is
    arrived, _ = normalised_rows(step, gradient if weight is None else gradient * weight)
    square, square0 = (r.square().mean(dims, keepdim=True) + epsilon for r in (rows, rows0))
    inverse = square.rsqrt()
    inverse0 = square0.rsqrt()
    # the slope of 1 / sqrt between the two squares
    slope = -(inverse * inverse0).square() / (inverse + inverse0)
    count = rows.numel() // square.numel()
    # the product of rows and inverse: each gets the mean of the other; rows also by the square,
    # whose slope in each of them is their sum over the count
    of_square = (arrived * (rows + rows0) / 2).sum(dims, keepdim=True) * slope
    of_rows = arrived * (inverse + inverse0) / 2 + of_square * (rows + rows0) / count
    return [of_rows.reshape(x.shape)]


def _maximum(pair: StepPair, gradient: Tensor) -> list[Tensor]:
    """DeepLIFT at a max pooling or maximum over dimensions: where the maximum rose, the value that
    holds it now gets the difference; where it fell, the one that held it in the reference."""
    x, x0 = pair.inputs_at(0)
    if "pool" not in pair.step.name:
        return [_over_dimensions(x, x0, pair, gradient)]
    y, at = (value.tensor for value in pair.step.recorded.outputs)
    y0, at0 = (value.tensor for value in pair.of_reference.outputs)
    # a pooling counts the positions of a whole map in its indices
    first_position = -2 if "2d" in pair.step.name else -3
    maxima = y.flatten(first_position), at.flatten(first_position)
    reference_maxima = y0.flatten(first_position), at0.flatten(first_position)
    sent = _to_holders(
        x.flatten(first_position),
        x0.flatten(first_position),
        maxima,
        reference_maxima,
        gradient.flatten(first_position),
    )
    return [sent.reshape(x.shape)]


def _over_dimensions(x: Tensor, x0: Tensor, pair: StepPair, gradient: Tensor) -> Tensor:
    """DeepLIFT's gradient in x for a maximum or minimum over dimensions, from ``gradient`` in the
    maxima, with or without the reduced dimensions."""
    reduced = pair.step.recorded.options.get("dim", ())
    dims: tuple[int, ...] = (reduced,) if isinstance(reduced, int) else tuple(reduced)
    dims = dims or tuple(range(x.ndim))
    # a minimum is the maximum of the negative values; slopes are the same for both
    sign = -1 if "min" in pair.step.name else 1
    ends = tuple(range(-len(dims), 0))
    rows, rows0 = ((sign * s).movedim(dims, ends).flatten(ends[0]) for s in (x, x0))
    maxima, reference_maxima = (tuple(signal.max(-1, keepdim=True)) for signal in (rows, rows0))
    sent = _to_holders(rows, rows0, maxima, reference_maxima, gradient.reshape(maxima[0].shape))
    sizes = [*rows.shape[:-1], *(x.shape[dim] for dim in dims)]
    return sent.reshape(sizes).movedim(ends, dims)


def _to_holders(
    x: Tensor,
    x0: Tensor,
    maxima: Sequence[Tensor],
    reference_maxima: Sequence[Tensor],
    gradient: Tensor,
) -> Tensor:
    """DeepLIFT's gradient in x for maxima over its last dimension, sent to the positions that hold
    them: (values, indices) of x and of the reference x0."""
    y, at = maxima
    y0, at0 = reference_maxima
    positions = torch.where(y >= y0, at, at0)
    slope = _slope(x.gather(-1, positions), x0.gather(-1, positions), y, y0)
    # where nothing changes, by the derivative, which is 1 for the value that holds the maximum
    of_holders = gradient * torch.where(slope.isnan(), 1, slope)
    return torch.zeros_like(x).scatter_add(-1, positions, of_holders)


_BACK: dict[str, BackOfPair] = {
    "product": _midway,
    "quotient": _quotient,
    "matrixproduct": _midway,
    "softmax": _softmax,
    "deviation": _deviation,
    "maximum": _maximum,
}
"""The rules, by the step's kind."""
