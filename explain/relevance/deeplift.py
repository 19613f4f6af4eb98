"""Back-propagated differences from a reference: DeepLIFT's multipliers, as gradients that are changed at each step.

The network has been run on a reference too. At each step, the change of the result is shared out among the changes of
what it was given: linear maps by the plain gradient, functions of one number by the slope between the two points
(rescale), products by the mean of the other factor, maxima by who held them. So the multipliers times the differences
of the input add up to the difference of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain.hooks import HookGroup
from explain.relevance.propagation import Gradients, RelevanceFlow, consumers
from explain.tracing.steps import Step


@dataclass(eq=False)
class StepPair:
    """A step and the same step of the run on the reference: the values that both were given, and gave."""

    step: Step
    of_reference: Step

    def given(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step.values[place].tensor, self.of_reference.values[place].tensor

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.step.result is not None
        assert self.of_reference.result is not None
        return self.step.result.tensor, self.of_reference.result.tensor


@dataclass(eq=False)
class StepComparison:
    """The steps of a forward pass, and those of passes on references, by what these are of."""

    steps: Sequence[Step]
    of_reference: dict[Any, Sequence[Step]] = field(default_factory=dict)


def propagate_differences(
    group: HookGroup, score: torch.Tensor, steps: Sequence[Step], of_reference: Sequence[Step], count: int
) -> RelevanceFlow:
    """Make the next backward pass propagate differences, for as long as ``group`` lasts.

    Raises:
        MethodError: the network takes another way for the reference.
    """
    if [step.function for step in steps] != [step.function for step in of_reference]:
        raise MethodError(
            "baseline of deeplift must take the same way through the network as the photo, but other operations ran "
            "for it; choose another baseline, or integratedgradients"
        )
    nodes, flow = consumers(score), RelevanceFlow(group, count, ())
    for step, other in zip(steps, of_reference, strict=True):
        if step.node not in nodes or not step.values or step.linear is not None:
            continue
        pair, back = StepPair(step, other), _BACK.get(step.kind)
        if step.kind in ("rectifier", "activation"):
            _rescale(pair, flow)
        elif back is not None and step.entrances:
            flow.replace_gradient(step, partial(back, pair))
    return flow


def _slope(x: torch.Tensor, x0: torch.Tensor, y: torch.Tensor, y0: torch.Tensor) -> torch.Tensor:
    """(y - y0) / (x - x0); NaN where x and its reference are as good as equal."""
    change = x - x0
    near = change.abs() <= 1e-7 * torch.maximum(x.abs(), x0.abs())
    return torch.where(near, torch.nan, (y - y0) / torch.where(near, 1, change))


def _rescale(pair: StepPair, flow: RelevanceFlow) -> None:
    """A function of one number: the slope between the two points, and the plain gradient where they coincide."""
    slope = _slope(*pair.given(0), *pair.results)

    def after(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        arrived, plain = grad_outputs[pair.step.output], grad_inputs[0]
        if arrived is None or plain is None:
            return grad_inputs
        return (torch.where(slope.isnan(), plain, arrived * slope), *grad_inputs[1:])

    flow.at(pair.step, after)


def _product(pair: StepPair, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    (a, a0), (b, b0) = pair.given(0), pair.given(1)
    return {0: _like(gradient * (b + b0) / 2, a), 1: _like(gradient * (a + a0) / 2, b)}


def _quotient(pair: StepPair, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    above, below = (1, 0) if pair.step.function.startswith("r") else (0, 1)
    (a, a0), (b, b0) = pair.given(above), pair.given(below)
    return {
        above: _like(gradient * (1 / b + 1 / b0) / 2, a),
        below: _like(-gradient * (a + a0) / 2 / (b * b0), b),
    }


def _matrix_product(pair: StepPair, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    (a, a0), (b, b0) = pair.given(0), pair.given(1)
    return {
        0: _like(gradient @ ((b + b0) / 2).transpose(-2, -1), a),
        1: _like(((a + a0) / 2).transpose(-2, -1) @ gradient, b),
    }


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Undo broadcasting."""
    return gradient.sum_to_size(tensor.shape) if gradient.shape != tensor.shape else gradient


def _of_softmax(x: torch.Tensor, x0: torch.Tensor, dim: int, gradient: torch.Tensor) -> torch.Tensor:
    """The exponential of x less L, the logarithm of the sum of all exponentials: a function of one number.

    Its slopes m are the logarithmic means of the two softmaxes. Softmaxes sum to one, so that the differences of x
    times m add up to that of L times the sum of m: L shares itself out in proportion to m.
    """
    s, s0 = x.softmax(dim), x0.softmax(dim)
    ratio = (x.log_softmax(dim) - x0.log_softmax(dim)).abs().nan_to_num(0, posinf=torch.inf)  # of what is masked, NaN
    slope = torch.maximum(s, s0) * torch.where(ratio == 0, 1, -torch.expm1(-ratio) / torch.where(ratio == 0, 1, ratio))
    sent = gradient * slope
    return sent - slope / slope.sum(dim, keepdim=True) * sent.sum(dim, keepdim=True)


def _softmax(pair: StepPair, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    return {0: _of_softmax(*pair.given(0), pair.step.options["dim"], gradient)}


def _attention(pair: StepPair, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    (q, q0), (k, k0), (v, v0) = (pair.given(i) for i in range(3))
    options: Any = pair.step.options
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    bias = options.get("attn_mask")
    if options.get("is_causal"):
        bias = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill(~bias, -1e30)
    scores, scores0 = (a @ b.transpose(-2, -1) * scale + (0 if bias is None else bias) for a, b in ((q, k), (q0, k0)))
    weights = (scores.softmax(-1) + scores0.softmax(-1)) / 2
    of_scores = _of_softmax(scores, scores0, -1, gradient @ ((v + v0) / 2).transpose(-2, -1)) * scale
    return {
        0: of_scores @ (k + k0) / 2,
        1: of_scores.transpose(-2, -1) @ (q + q0) / 2,
        2: weights.transpose(-2, -1) @ gradient,
    }


def _deviation(pair: StepPair, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    """The mean is taken off, which is linear; then a product with the inverse root of the mean square."""
    step, (x, x0) = pair.step, pair.given(0)
    options: Any = step.options
    epsilon, weight = options.get("eps"), options.get("weight")
    centred = step.function != "rms_norm"
    if step.function in ("layer_norm", "rms_norm"):
        dims, shape = tuple(range(-len(options["normalized_shape"]), 0)), x.shape
        epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    else:
        groups = options.get("num_groups", x.shape[1])
        dims, shape = (2,), torch.Size((len(x), groups, x.numel() // len(x) // groups))
        weight = None if weight is None else weight.reshape(-1, *[1] * (x.ndim - 2))
    arrived = (gradient if weight is None else gradient * weight.detach()).reshape(shape)
    rows, rows0 = x.reshape(shape), x0.reshape(shape)
    if centred:
        rows, rows0 = (r - r.mean(dims, keepdim=True) for r in (rows, rows0))
    square, square0 = (
        r.square().mean(dims, keepdim=True) + (1e-5 if epsilon is None else epsilon) for r in (rows, rows0)
    )
    inverse, inverse0 = square.rsqrt(), square0.rsqrt()
    slope = -(inverse * inverse0).square() / (inverse + inverse0)  # of the inverse root, between the two squares
    size = rows.numel() // square.numel()
    of_square = (arrived * (rows + rows0) / 2).sum(dims, keepdim=True) * slope
    sent = arrived * (inverse + inverse0) / 2 + of_square * (rows + rows0) / size
    return {0: (sent - sent.mean(dims, keepdim=True) if centred else sent).reshape(x.shape)}


def _maximum(pair: StepPair, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    """Where the maximum rose, who holds it now made it so; where it fell, who held it for the reference."""
    x, x0 = pair.given(0)
    if pair.step.function == "amax":
        return {0: _over_dimensions(x, x0, pair.step.options, gradient)}
    pool = getattr(F, pair.step.function)
    options = {name: value for name, value in pair.step.options.items() if name not in ("input", "return_indices")}
    (y, at), (y0, at0) = (pool(each, **options, return_indices=True) for each in (x, x0))
    flat, flat0 = x.flatten(2), x0.flatten(2)
    held = (y.flatten(2), at.flatten(2)), (y0.flatten(2), at0.flatten(2))
    return {0: _to_holders(flat, flat0, *held, gradient.flatten(2)).reshape(x.shape)}


def _over_dimensions(x: torch.Tensor, x0: torch.Tensor, options: Mapping[str, Any], gradient: Any) -> torch.Tensor:
    """The maximum over some dimensions, brought to the end."""
    dims = options.get("dim", ())
    dims = [d % x.ndim for d in ((dims,) if isinstance(dims, int) else dims)] or range(x.ndim)
    kept = [d for d in range(x.ndim) if d not in dims]
    order, shape = [*kept, *dims], [*(x.shape[d] for d in kept), -1]
    rows, rows0 = (each.permute(order).reshape(shape) for each in (x, x0))
    held, held0 = (tuple(each.max(-1, keepdim=True)) for each in (rows, rows0))
    found = _to_holders(rows, rows0, held, held0, gradient.reshape(*shape[:-1], 1))
    back = sorted(range(x.ndim), key=order.__getitem__)
    return found.reshape([x.shape[d] for d in order]).permute(back)


def _to_holders(
    x: torch.Tensor, x0: torch.Tensor, held: Sequence[Any], held0: Sequence[Any], gradient: torch.Tensor
) -> torch.Tensor:
    """From the maxima's values and places, along the last dimension."""
    (y, at), (y0, at0) = held, held0
    places = torch.where(y >= y0, at, at0)
    slope = _slope(x.gather(-1, places), x0.gather(-1, places), y, y0)
    sent = gradient * torch.where(slope.isnan(), 1, slope)
    return torch.zeros_like(x).scatter_add(-1, places, sent)


_BACK: dict[str, Callable[[StepPair, torch.Tensor], dict[int, torch.Tensor]]] = {
    "product": _product,
    "quotient": _quotient,
    "matrixproduct": _matrix_product,
    "softmax": _softmax,
    "attention": _attention,
    "deviation": _deviation,
    "maximum": _maximum,
}
"""What leaves a step by its entrances, in the place of autograd's gradient, by the step's kind."""
