"""Back-propagated differences from a reference: DeepLIFT's multipliers, as gradients that are
changed at each step.

The network has been run on a reference too. At each step, the change of the result is shared out
among the changes of what it was given: linear maps by the plain gradient, functions of one number
by the slope between the two points (rescale), products by the mean of the other factor, maxima by
who held them. So the multipliers times the differences of the input add up to the difference of the
scores.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from explain._utils.errors import MethodError
from explain.hooks import HookGroup
from explain.hooks.graph import consumers
from explain.relevance.nonlinear_rules import (
    attention_scores,
    epsilon_of,
    normalised_rows,
    parameter_of,
)
from explain.relevance.propagation import Answer, RelevanceFlow
from explain.relevance.steps import Step


class StepPair(NamedTuple):
    """A step and the same step of the run on the reference: the values that both were given."""

    step: Step
    of_reference: Step

    def inputs_at(self, place: int) -> tuple[Tensor, Tensor]:
        return self.step.values[place].tensor, self.of_reference.values[place].tensor


def propagate_differences(
    group: HookGroup, score: Tensor, steps: Sequence[Step], of_reference: Sequence[Step], count: int
) -> RelevanceFlow:
    """Make the next backward pass propagate differences, for as long as ``group`` lasts.

    Raises:
        MethodError: the network takes another way for the reference, or with another number of
            values.
    """
    refusal = MethodError(
        "baseline of deeplift must run the operations of the photo, on as many values, but does "
        "not; choose another"
    )
    if [step.function for step in steps] != [step.function for step in of_reference]:
        raise refusal
    nodes = consumers(score)
    flow = RelevanceFlow(group, count, ())
    for step, other in zip(steps, of_reference, strict=True):
        if step.node in nodes and step.entrances:
            if _shapes(step) != _shapes(other):
                raise refusal
            flow.attach(step, partial(_BACK[step.kind], StepPair(step, other)))
    return flow


def _shapes(step: Step) -> list[torch.Size]:
    """The shapes of what a step was given."""
    return [value.tensor.shape for value in step.values.values()]


def _slope(x: Tensor, x0: Tensor, y: Tensor, y0: Tensor) -> Tensor:
    """(y - y0) / (x - x0); NaN where x and its reference are as good as equal."""
    change = x - x0
    rounding = torch.finfo(x.dtype).eps
    # in half precision, nothing is left of smaller changes
    least = 1e-7 if rounding < 1e-6 else 8 * rounding
    near = change.abs() <= least * torch.maximum(x.abs(), x0.abs())
    return torch.where(near, torch.nan, (y - y0) / torch.where(near, 1, change))


def _rescale(pair: StepPair, gradient: Tensor) -> dict[int, Answer]:
    """A function of one number: the slope between the two points, and the plain gradient where they
    coincide."""
    x, x0 = pair.inputs_at(0)
    slope = _slope(x, x0, pair.step.result.tensor, pair.of_reference.result.tensor).conj()
    of_point = slope.isnan()

    def rescaled(plain: Tensor) -> Tensor:
        if torch.is_grad_enabled() and bool(of_point.any()):
            # As the two points part, the slope between them changes with both.
            plain = (plain + _through(pair.of_reference, gradient)) / 2
        # Nothing is multiplied by NaN: the choice would hide that from the values, and not from
        # their derivative.
        return torch.where(of_point, plain, gradient * slope.masked_fill(of_point, 0))

    return {0: rescaled}


def _through(step: Step, arrived: Tensor) -> Tensor:
    """The plain gradient in a step's first input, with its graph."""
    parent, output = step.node.next_functions[0]
    assert parent is not None  # a rule acts where a gradient leads on
    result = GradientEdge(step.node, step.output)
    first_input = GradientEdge(parent, output)
    return torch.autograd.grad(result, first_input, arrived, create_graph=True)[0]


def _product(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """Each factor changes by the mean of the other one."""
    a, a0 = pair.inputs_at(0)
    b, b0 = pair.inputs_at(1)
    return {0: _meeting(gradient * _mean(b, b0), a), 1: _meeting(gradient * _mean(a, a0), b)}


def _quotient(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """The product with one over the denominator."""
    above, below = (1, 0) if pair.step.function.startswith("r") else (0, 1)
    a, a0 = pair.inputs_at(above)
    b, b0 = pair.inputs_at(below)
    of_a = gradient * _mean(1 / b, 1 / b0)
    of_b = -gradient * _mean(a, a0) / (b * b0).conj()
    return {above: _meeting(of_a, a), below: _meeting(of_b, b)}


def _matrix_product(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """As a product: each matrix by the mean of the other one."""
    a, a0 = pair.inputs_at(0)
    b, b0 = pair.inputs_at(1)
    of_a = gradient @ _mean(b, b0).transpose(-2, -1)
    of_b = _mean(a, a0).transpose(-2, -1) @ gradient
    return {0: _meeting(of_a, a), 1: _meeting(of_b, b)}


def _mean(factor: Tensor, of_reference: Tensor) -> Tensor:
    """What gradients are multiplied by: the mean of a factor and the reference's, of complex
    numbers its conjugate."""
    return (factor + of_reference).conj() / 2


def _meeting(gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient of what was broadcast or made complex, for the value as it was."""
    summed = gradient.sum_to_size(value.shape)
    return summed.real if summed.is_complex() and not value.is_complex() else summed


def _of_softmax(x: Tensor, x0: Tensor, dim: int, gradient: Tensor) -> Tensor:
    """The exponential of x less L, the logarithm of the sum of all exponentials: a function of one
    number.

    Its slopes m are the logarithmic means of the two softmaxes. Softmaxes sum to one, so that the
    differences of x times m add up to that of L times the sum of m: L shares itself out in
    proportion to m.
    """
    s = x.softmax(dim)
    s0 = x0.softmax(dim)
    change = x.log_softmax(dim) - x0.log_softmax(dim)
    ratio = torch.where(change.isnan(), 0, change).abs()  # of what is masked, NaN
    slope = torch.maximum(s, s0) * torch.where(
        ratio == 0, 1, -torch.expm1(-ratio) / torch.where(ratio == 0, 1, ratio)
    )
    sent = gradient * slope
    return sent - slope / slope.sum(dim, keepdim=True) * sent.sum(dim, keepdim=True)


def _softmax(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    x, x0 = pair.inputs_at(0)
    return {0: _of_softmax(x, x0, pair.step.options["dim"], gradient)}


def _attention(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """Two matrix products, with a softmax between them."""
    (q, q0), (k, k0), (v, v0) = (pair.inputs_at(i) for i in range(3))
    scores, scale = attention_scores(pair.step, q, k)
    scores0, _ = attention_scores(pair.step, q0, k0)
    weights = (scores.softmax(-1) + scores0.softmax(-1)) / 2
    of_scores = (
        _of_softmax(scores, scores0, -1, gradient @ ((v + v0) / 2).transpose(-2, -1)) * scale
    )
    of_query = of_scores @ (k + k0) / 2
    of_key = of_scores.transpose(-2, -1) @ (q + q0) / 2
    return {0: of_query, 1: of_key, 2: weights.transpose(-2, -1) @ gradient}


def _deviation(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """The mean is taken off, which is linear; then a product with the inverse root of the mean
    square."""
    step = pair.step
    x, x0 = pair.inputs_at(0)
    shape, dims = normalised_rows(step, x)
    weight = parameter_of(step, "weight")
    centred = step.function != "rms_norm"
    epsilon = epsilon_of(step, x)
    arrived = (gradient if weight is None else gradient * weight).reshape(shape)
    rows = x.reshape(shape)
    rows0 = x0.reshape(shape)
    if centred:
        rows, rows0 = (r - r.mean(dims, keepdim=True) for r in (rows, rows0))
    square, square0 = (r.square().mean(dims, keepdim=True) + epsilon for r in (rows, rows0))
    inverse = square.rsqrt()
    inverse0 = square0.rsqrt()
    # of the inverse root, between the two squares
    slope = -(inverse * inverse0).square() / (inverse + inverse0)
    size = rows.numel() // square.numel()
    of_square = (arrived * (rows + rows0) / 2).sum(dims, keepdim=True) * slope
    sent = arrived * (inverse + inverse0) / 2 + of_square * (rows + rows0) / size
    return {0: (sent - sent.mean(dims, keepdim=True) if centred else sent).reshape(x.shape)}


def _maximum(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """Where the maximum rose, who holds it now made it so; where it fell, who held it for the
    reference."""
    x, x0 = pair.inputs_at(0)
    if pair.step.function == "amax":
        return {0: _over_dimensions(x, x0, pair.step.options, gradient)}
    pool = getattr(F, pair.step.function)
    options = {
        name: value
        for name, value in pair.step.options.items()
        if name not in ("input", "return_indices")
    }
    (y, at), (y0, at0) = (pool(signal, **options, return_indices=True) for signal in (x, x0))
    flat = x.flatten(2)
    flat0 = x0.flatten(2)
    held = y.flatten(2), at.flatten(2)
    held0 = y0.flatten(2), at0.flatten(2)
    return {0: _to_holders(flat, flat0, held, held0, gradient.flatten(2)).reshape(x.shape)}


def _over_dimensions(x: Tensor, x0: Tensor, options: Mapping[str, Any], gradient: Any) -> Tensor:
    """The maximum over some dimensions, brought to the end."""
    dims = options.get("dim", ())
    dims = ((dims,) if isinstance(dims, int) else tuple(dims)) or tuple(range(x.ndim))
    ends = tuple(range(-len(dims), 0))
    rows, rows0 = (signal.movedim(dims, ends).flatten(ends[0]) for signal in (x, x0))
    held, held0 = (tuple(signal.max(-1, keepdim=True)) for signal in (rows, rows0))
    multipliers = _to_holders(rows, rows0, held, held0, gradient.reshape(held[0].shape))
    sizes = [*rows.shape[:-1], *(x.shape[dim] for dim in dims)]
    return multipliers.reshape(sizes).movedim(ends, dims)


def _to_holders(
    x: Tensor, x0: Tensor, held: Sequence[Any], held0: Sequence[Any], gradient: Tensor
) -> Tensor:
    """From the maxima's values and places, along the last dimension."""
    y, at = held
    y0, at0 = held0
    places = torch.where(y >= y0, at, at0)
    slope = _slope(x.gather(-1, places), x0.gather(-1, places), y, y0)
    return torch.zeros_like(x).scatter_add(
        -1, places, gradient * torch.where(slope.isnan(), 1, slope)
    )


_BACK: dict[str, Callable[[StepPair, Tensor], Mapping[int, Any]]] = {
    "rectifier": _rescale,
    "activation": _rescale,
    "product": _product,
    "quotient": _quotient,
    "matrixproduct": _matrix_product,
    "softmax": _softmax,
    "attention": _attention,
    "deviation": _deviation,
    "maximum": _maximum,
}
"""What leaves a step by its entrances, in the place of autograd's gradient, by the step's kind."""
