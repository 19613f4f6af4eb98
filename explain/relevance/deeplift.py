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
        """The argument at ``place``, in the run on the photo and in that on the reference."""
        return self.step.values[place].tensor, self.of_reference.values[place].tensor


def propagate_differences(
    group: HookGroup,
    score: Tensor,
    steps: Sequence[Step],
    reference_steps: Sequence[Step],
    count: int,
) -> RelevanceFlow:
    """Attach DeepLIFT's rules to the graph of ``score``, so that its next backward pass gives
    multipliers instead of gradients.

    The engine calls this before it differentiates; the hooks last as long as ``group``. ``steps``
    and ``reference_steps`` are those of the photo's and of the reference's forward pass, in order;
    ``count`` is the number of images.

    Raises:
        MethodError: the network takes another way for the reference, or with another number of
            values.
    """
    refusal = MethodError(
        "baseline of deeplift must run the operations of the photo, on as many values, but does "
        "not; choose another"
    )
    if [step.function for step in steps] != [step.function for step in reference_steps]:
        raise refusal
    nodes = consumers(score)
    flow = RelevanceFlow(group, count, ())
    for step, reference_step in zip(steps, reference_steps, strict=True):
        if step.node in nodes and step.entrances:
            if _shapes(step) != _shapes(reference_step):
                raise refusal
            flow.attach(step, partial(_BACK[step.kind], StepPair(step, reference_step)))
    return flow


def _shapes(step: Step) -> list[torch.Size]:
    """The shapes of a step's arguments, to compare a photo's step with its reference."""
    return [value.tensor.shape for value in step.values.values()]


def _slope(x: Tensor, x0: Tensor, y: Tensor, y0: Tensor) -> Tensor:
    """DeepLIFT's slope (y - y0) / (x - x0) between photo and reference; NaN where x and x0 are as
    good as equal."""
    change = x - x0
    rounding = torch.finfo(x.dtype).eps
    # in half precision, smaller changes are rounding errors
    smallest_change = 1e-7 if rounding < 1e-6 else 8 * rounding
    near = change.abs() <= smallest_change * torch.maximum(x.abs(), x0.abs())
    return torch.where(near, torch.nan, (y - y0) / torch.where(near, 1, change))


def _rescale(pair: StepPair, gradient: Tensor) -> dict[int, Answer]:
    """DeepLIFT's rescale rule for an activation: multiply the gradient by the slope between photo
    and reference, or leave autograd's where they coincide.

    Returns the answer for the step's input, by its place (0), as `_BACK` does for all kinds of
    steps.
    """
    x, x0 = pair.inputs_at(0)
    slope = _slope(x, x0, pair.step.result.tensor, pair.of_reference.result.tensor).conj()
    is_same_point = slope.isnan()

    def rescaled(plain: Tensor) -> Tensor:
        """The multiplier of x, from autograd's gradient ``plain``."""
        if torch.is_grad_enabled() and bool(is_same_point.any()):
            # The slope between two points depends on both: its derivative is the mean of theirs.
            plain = (plain + _through(pair.of_reference, gradient)) / 2
        # NaN is masked before the product: `torch.where` would hide it in the values, but not in
        # their derivative.
        return torch.where(is_same_point, plain, gradient * slope.masked_fill(is_same_point, 0))

    return {0: rescaled}


def _through(step: Step, arrived: Tensor) -> Tensor:
    """Autograd's own gradient in a step's first input, from the gradient ``arrived`` in its result,
    with a graph for second derivatives.

    For DeepLIFT, where photo and reference coincide.
    """
    parent, output = step.node.next_functions[0]
    assert parent is not None  # a rule acts where a gradient leads on
    result = GradientEdge(step.node, step.output)
    first_input = GradientEdge(parent, output)
    return torch.autograd.grad(result, first_input, arrived, create_graph=True)[0]


def _product(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """DeepLIFT at a product a b: each factor's gradient is that of the result, times the mean of
    the other factor in photo and reference."""
    a, a0 = pair.inputs_at(0)
    b, b0 = pair.inputs_at(1)
    return {0: _meeting(gradient * _mean(b, b0), a), 1: _meeting(gradient * _mean(a, a0), b)}


def _quotient(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """DeepLIFT at a quotient a / b, as a product of a and 1 / b. Returns the gradients by the
    factors' places."""
    above, below = (1, 0) if pair.step.function.startswith("r") else (0, 1)
    a, a0 = pair.inputs_at(above)
    b, b0 = pair.inputs_at(below)
    of_a = gradient * _mean(1 / b, 1 / b0)
    of_b = -gradient * _mean(a, a0) / (b * b0).conj()
    return {above: _meeting(of_a, a), below: _meeting(of_b, b)}


def _matrix_product(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """DeepLIFT at a matrix product: as for a product, each matrix by the mean of the other one."""
    a, a0 = pair.inputs_at(0)
    b, b0 = pair.inputs_at(1)
    of_a = gradient @ _mean(b, b0).transpose(-2, -1)
    of_b = _mean(a, a0).transpose(-2, -1) @ gradient
    return {0: _meeting(of_a, a), 1: _meeting(of_b, b)}


def _mean(factor: Tensor, of_reference: Tensor) -> Tensor:
    """The mean of a factor in photo and reference, to multiply gradients with (conjugate if
    complex)."""
    return (factor + of_reference).conj() / 2


def _meeting(gradient: Tensor, value: Tensor) -> Tensor:
    """A gradient summed to the shape of the factor ``value``, which was broadcast; real if
    ``value`` is."""
    summed = gradient.sum_to_size(value.shape)
    return summed.real if summed.is_complex() and not value.is_complex() else summed


def _of_softmax(x: Tensor, x0: Tensor, dim: int, gradient: Tensor) -> Tensor:
    """DeepLIFT's gradient in the input of a softmax along ``dim``, for photo x and reference x0.

    The softmax is the exponential of x less L, L being the logarithm of the sum of all
    exponentials: a function of one number. Its slopes m are the logarithmic means of the two
    softmaxes. Softmaxes sum to one, so that the differences of x times m add up to that of L times
    the sum of m: L shares itself out in proportion to m.
    """
    s = x.softmax(dim)
    s0 = x0.softmax(dim)
    change = x.log_softmax(dim) - x0.log_softmax(dim)
    ratio = torch.where(change.isnan(), 0, change).abs()  # NaN where both are masked
    slope = torch.maximum(s, s0) * torch.where(
        ratio == 0, 1, -torch.expm1(-ratio) / torch.where(ratio == 0, 1, ratio)
    )
    sent = gradient * slope
    return sent - slope / slope.sum(dim, keepdim=True) * sent.sum(dim, keepdim=True)


def _softmax(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """DeepLIFT at a softmax step: its gradient by the place of the input."""
    x, x0 = pair.inputs_at(0)
    return {0: _of_softmax(x, x0, pair.step.options["dim"], gradient)}


def _attention(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """DeepLIFT at a fused attention: two matrix products with a softmax between them. Returns the
    gradients of query, key and value (places 0 to 2)."""
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
    """DeepLIFT at a normalisation: subtract the mean, which is linear, then multiply by the inverse
    root of the mean square."""
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
    # the slope of 1 / sqrt between the two squares
    slope = -(inverse * inverse0).square() / (inverse + inverse0)
    count = rows.numel() // square.numel()
    of_square = (arrived * (rows + rows0) / 2).sum(dims, keepdim=True) * slope
    gradient_of_rows = arrived * (inverse + inverse0) / 2 + of_square * (rows + rows0) / count
    return {
        0: (
            gradient_of_rows - gradient_of_rows.mean(dims, keepdim=True)
            if centred
            else gradient_of_rows
        ).reshape(x.shape)
    }


def _maximum(pair: StepPair, gradient: Tensor) -> dict[int, Tensor]:
    """DeepLIFT at a max pooling or ``amax``: where the maximum rose, the value that holds it now
    gets the difference; where it fell, the one that held it in the reference."""
    x, x0 = pair.inputs_at(0)
    if pair.step.function == "amax":
        return {0: _over_dimensions(x, x0, pair.step.options, gradient)}
    pooling = getattr(F, pair.step.function)
    options = {
        name: value
        for name, value in pair.step.options.items()
        if name not in ("input", "return_indices")
    }
    (y, at), (y0, at0) = (pooling(signal, **options, return_indices=True) for signal in (x, x0))
    first_place = -int(pair.step.function[-2])  # of "max_pool2d": the last two dimensions
    flat_x = x.flatten(first_place)
    flat_reference = x0.flatten(first_place)
    maxima = y.flatten(first_place), at.flatten(first_place)
    reference_maxima = y0.flatten(first_place), at0.flatten(first_place)
    flat_gradient = gradient.flatten(first_place)
    multipliers = _to_holders(flat_x, flat_reference, maxima, reference_maxima, flat_gradient)
    return {0: multipliers.reshape(x.shape)}


def _over_dimensions(x: Tensor, x0: Tensor, options: Mapping[str, Any], gradient: Any) -> Tensor:
    """DeepLIFT's gradient in x for the maximum over the dimensions in ``options["dim"]``.

    ``gradient`` is that in the maxima, with or without the reduced dimensions.
    """
    dims = options.get("dim", ())
    dims = ((dims,) if isinstance(dims, int) else tuple(dims)) or tuple(range(x.ndim))
    ends = tuple(range(-len(dims), 0))
    rows, rows0 = (signal.movedim(dims, ends).flatten(ends[0]) for signal in (x, x0))
    maxima, reference_maxima = (tuple(signal.max(-1, keepdim=True)) for signal in (rows, rows0))
    multipliers = _to_holders(
        rows, rows0, maxima, reference_maxima, gradient.reshape(maxima[0].shape)
    )
    sizes = [*rows.shape[:-1], *(x.shape[dim] for dim in dims)]
    return multipliers.reshape(sizes).movedim(ends, dims)


def _to_holders(
    x: Tensor, x0: Tensor, maxima: Sequence[Any], reference_maxima: Sequence[Any], gradient: Tensor
) -> Tensor:
    """DeepLIFT's gradient in x for maxima over its last dimension: sent to the places that hold
    them.

    ``maxima`` and ``reference_maxima`` are (values, indices) of x and of the reference x0.
    """
    y, at = maxima
    y0, at0 = reference_maxima
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
