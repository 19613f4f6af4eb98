"""Gradients along a recorded pass: a walk over its steps, from the results back to the inputs.

Each step turns the gradients in its results into those in its inputs: by its own derivative, or by
a rule in the place of it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

import torch
from torch import Tensor

from explain.recording.values import Step, Value

aten = torch.ops.aten
Gradients: TypeAlias = dict[Value, Tensor]
OfInputs: TypeAlias = Sequence[Tensor | None]
"""The gradients in the inputs of a step, in the order of `Step.inputs`."""
Rule: TypeAlias = Callable[[Gradients], Iterable[tuple[Value, Tensor | None]]]
"""From the gradients in a step's results to those in earlier values."""


def reached_from(steps: Iterable[Step], sources: Iterable[Value]) -> set[Value]:
    """The sources, and all values from which a gradient leads back to one of them."""
    reached = set(sources)
    for step in steps:
        if passes_gradient(step) and not reached.isdisjoint(step.inputs):
            reached.update(value for value in _of_numbers(step.outputs) if value.depends)
    return reached


def paths_to(
    results: Iterable[Value], until: Callable[[Value], bool] = lambda value: False
) -> set[Value]:
    """The results, and all values through which a gradient comes from one of them; nothing behind
    one for which ``until`` is true."""
    waiting = list(results)
    leading: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value in leading:
            continue
        leading.add(value)
        if value.step is not None and passes_gradient(value.step) and not until(value):
            waiting += _of_numbers(value.step.inputs)
    return leading


def passes_gradient(step: Step) -> bool:
    """Whether a gradient goes on through a step."""
    return step.has_gradient and step.name != "detach"


def _of_numbers(values: Iterable[Value]) -> Iterator[Value]:
    """Yield the values of types that have gradients."""
    for value in values:
        if value.dtype.is_floating_point or value.dtype.is_complex:
            yield value


def walk_back(
    steps: Sequence[Step],
    gradients: Mapping[Value, Tensor],
    wanted: AbstractSet[Value],
    through: AbstractSet[Value],
    rules: Mapping[Step, Rule] | None = None,
) -> Gradients:
    """The gradients in ``wanted`` values, those that are reached, from those in the results of a
    pass, ``through`` these values alone; by the steps' ``rules`` or their derivatives."""
    rules = rules or {}
    waiting = dict(gradients)
    of_wanted: Gradients = {}
    for step in reversed(steps):
        arrived: Gradients = {}
        for result in step.outputs:
            if result in waiting:
                arrived[result] = waiting.pop(result)
        of_wanted |= {value: arrived[value] for value in arrived if value in wanted}
        if not arrived or not passes_gradient(step) or through.isdisjoint(step.inputs):
            continue
        rule = rules.get(step)
        if rule is None:
            sent: Iterable[tuple[Value, Tensor | None]] = zip(
                step.inputs, derivative(step, arrived, through), strict=True
            )
        else:
            sent = rule(arrived)
        for value, gradient in sent:
            if gradient is not None and value in through:
                gradient = _in_type(gradient, value.dtype)
                earlier = waiting.get(value)
                waiting[value] = gradient if earlier is None else earlier + gradient
    # what is left waits in values that no step made, such as inputs
    of_wanted |= {value: waiting[value] for value in waiting if value in wanted}
    return of_wanted


def derivative(
    step: Step, arrived: Mapping[Value, Tensor], through: AbstractSet[Value]
) -> OfInputs:
    """The gradients in the inputs of a step that are in ``through``, by its own derivative;
    differentiable itself where gradients are on."""
    # formulas are for the first result alone, and for gradients without a graph
    create_graph = torch.is_grad_enabled()
    formula = None if create_graph else _FORMULAS.get(step.name)
    if formula is not None and len(arrived) == 1 and step.results[0] in arrived:
        (gradient,) = arrived.values()
        of_inputs = formula(step, gradient, through)
        if of_inputs is not None:
            return of_inputs
    with torch.enable_grad():
        sources = [_source(value.tensor) if value in through else None for value in step.inputs]
        # `run` asks for the inputs in their order; one that is read twice has two sources
        remaining = iter(sources)

        def tensor_of(value: Value) -> Tensor:
            """The source in the place of the next input; what is no source as it was."""
            source = next(remaining)
            return value.tensor if source is None else source

        results = step.run(tensor_of)
    differentiated: list[Tensor] = []
    gradients: list[Tensor] = []
    for value, gradient in arrived.items():
        if results[value].requires_grad:
            differentiated.append(results[value])
            gradients.append(_laid_out(gradient, results[value], step))
    if not differentiated:
        return [None] * len(sources)
    of_sources = iter(
        torch.autograd.grad(
            differentiated,
            [source for source in sources if source is not None],
            gradients,
            allow_unused=True,
            create_graph=create_graph,
        )
    )
    return [None if source is None else next(of_sources) for source in sources]


def _in_type(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient in the type of its value: the real part of a complex one for a real value."""
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient.to(dtype)


def _laid_out(gradient: Tensor, result: Tensor, step: Step) -> Tensor:
    """A gradient as PyTorch's derivative of a step takes it: for batch normalisations laid out as
    the result, which PyTorch (2.13, 2.14) is wrong about otherwise where there is one sample."""
    if "batch_norm" not in step.name or gradient.stride() == result.stride():
        return gradient
    return torch.empty_like(result).copy_(gradient)


def _source(tensor: Tensor) -> Tensor:
    """A tensor to differentiate with respect to: an alias, which keeps its graph where gradients
    are created."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


# The derivatives that walks meet most, written out so that nothing is computed again


def _of_convolution(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    x, weight, bias = step.args[:3]
    wanted = [value in through for value in (x, weight, bias)]
    bias_sizes = None if bias is None else bias.shape
    # stride, padding and so on come behind the three, in the same order for both operators
    gradients = aten.convolution_backward(
        gradient, x.tensor, weight.tensor, bias_sizes, *step.args[3:], wanted
    )
    inputs = [x, weight] if bias is None else [x, weight, bias]
    return [gradients[i] if wanted[i] else None for i in range(len(inputs))]


def is_by_batch(step: Step) -> bool:
    """Whether a batch normalisation takes the statistics of the batch."""
    return bool(step.options.get("training")) or step.options.get("running_var") is None


def _of_batch_norm(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs | None:
    """None, for the general derivative, if statistics are those of the batch, or a weight is among
    the values ``through`` which gradients are wanted."""
    if is_by_batch(step) or not through.isdisjoint(step.inputs[1:]):
        return None
    weight, _, mean, variance = (value and value.tensor for value in step.args[1:5])
    x = step.inputs[0].tensor
    epsilon = step.args[-1]
    of_x, _, _ = aten.native_batch_norm_backward(
        _laid_out(gradient, x, step),
        x,
        weight,
        mean,
        variance,
        None,  # the mean of the batch, and its deviation
        None,
        False,  # not in training mode
        epsilon,
        (True, False, False),  # of the input alone, not of weight and bias
    )
    return [of_x, *[None] * len(step.inputs[1:])]


def _before_reduction(step: Step, gradient: Tensor) -> tuple[Tensor, list[int]]:
    """The gradient in the results of a reduction with the reduced dimensions, of size 1; and which
    these are."""
    count = len(step.inputs[0].shape)
    dims = sorted(dim % count for dim in step.options.get("dim") or range(count))
    if not step.options.get("keepdim"):
        for dim in dims:
            gradient = gradient.unsqueeze(dim)
    return gradient, dims


def _of_mean(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    x = step.inputs[0]
    gradient, dims = _before_reduction(step, gradient)
    count = math.prod(x.shape[dim] for dim in dims)
    return [(gradient / count).expand(x.shape)]


def _of_amax(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    """Values that are equally large share the gradient."""
    x = step.inputs[0].tensor
    gradient, dims = _before_reduction(step, gradient)
    is_largest = x == x.amax(dims, keepdim=True)
    return [gradient * is_largest / is_largest.sum(dims, keepdim=True)]


def _of_hardtanh(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    ends = (step.options["min_val"], step.options["max_val"])
    return [aten.hardtanh_backward(gradient, step.inputs[0].tensor, *ends)]


def _of_product(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    first, second = step.inputs
    of_first = gradient @ second.tensor.mH if first in through else None
    of_second = first.tensor.mH @ gradient if second in through else None
    return [of_first, of_second]


def _of_addmm(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    added, first, second = step.inputs
    beta = step.kwargs.get("beta", 1)
    alpha = step.kwargs.get("alpha", 1)
    of_added = beta * gradient.sum_to_size(added.shape) if added in through else None
    of_first = alpha * gradient @ second.tensor.mH if first in through else None
    of_second = alpha * first.tensor.mH @ gradient if second in through else None
    return [of_added, of_first, of_second]


def _of_layer_norm(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs | None:
    """None, for the general derivative, as in `_of_batch_norm`; or if the statistics are not
    kept."""
    if None in step.results or not through.isdisjoint(step.inputs[1:]):
        return None
    x, sizes, weight, bias, _ = step.args
    affine = [part and part.tensor for part in (weight, bias)]
    mean = _result(step, 1)
    rstd = _result(step, 2)
    # of the input alone, not of weight and bias
    of_x, _, _ = aten.native_layer_norm_backward(
        gradient, x.tensor, sizes, mean, rstd, *affine, (True, False, False)
    )
    return [of_x, *[None] * len(step.inputs[1:])]


def _of_relu(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    return [aten.threshold_backward(gradient, _result(step, 0), 0)]


def _of_sigmoid(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    return [aten.sigmoid_backward(gradient, _result(step, 0))]


def _by_operator(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    """By the operator that PyTorch has for the derivative, which takes the gradient before the
    operation's own arguments."""
    backward = getattr(aten, f"{step.name}_backward")
    x, *options = step.args
    return [backward(gradient, x.tensor, *options, **step.kwargs)]


def _of_select(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    x, *place = step.args
    return [aten.select_backward(gradient, x.shape, *place)]


def _of_cat(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs | None:
    """None, for the general derivative, where an empty tensor of one dimension counts as none."""
    dim = step.options["dim"]
    if any(len(part.shape) != gradient.ndim for part in step.inputs):
        return None
    return gradient.split_with_sizes([part.shape[dim] for part in step.inputs], dim)


def _of_sum(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    factors: list[float] = [1, step.kwargs.get("alpha", 1)]  # x + alpha * y
    shares: list[Tensor | None] = []
    for term, factor in zip(step.args[:2], factors, strict=True):
        if isinstance(term, Value):
            share = gradient if factor == 1 else factor * gradient
            shares.append(share.sum_to_size(term.shape) if term in through else None)
    return shares


def _of_elementwise_product(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    first, second = step.args
    shares: list[Tensor | None] = []
    for factor, other in ((first, second), (second, first)):
        if not isinstance(factor, Value):
            continue
        if factor not in through:
            shares.append(None)
            continue
        multiplier = other.tensor.conj() if isinstance(other, Value) else complex(other).conjugate()
        if isinstance(multiplier, complex) and not multiplier.imag:
            multiplier = multiplier.real  # else the gradient of real values would be complex
        shares.append((gradient * multiplier).sum_to_size(factor.shape))
    return shares


def _of_reshape(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    return [gradient.reshape(step.inputs[0].shape)]


def _of_expand(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    return [gradient.sum_to_size(step.inputs[0].shape)]


def _of_transpose(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    return [gradient.transpose(*step.args[1:])]


def _of_permute(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    dims = [dim % gradient.ndim for dim in step.args[1]]
    return [gradient.permute(sorted(range(len(dims)), key=dims.__getitem__))]


def _of_max_pool(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    defaults = [[], [0, 0], [1, 1], False]  # of stride, padding, dilation and ceil_mode
    # the first two arguments, input and kernel size, are always given
    options = [*step.args[1:], *defaults[len(step.args) - 2 :]]
    x = step.inputs[0].tensor
    return [aten.max_pool2d_with_indices_backward(gradient, x, *options, _result(step, 1))]


def _of_softmax(step: Step, gradient: Tensor, through: AbstractSet[Value]) -> OfInputs:
    result = _result(step, 0)
    return [aten._softmax_backward_data(gradient, result, step.args[1], result.dtype)]


def _result(step: Step, position: int) -> Tensor:
    """One of the results of a step."""
    value = step.results[position]
    assert value is not None
    return value.tensor


_FORMULAS: dict[str, Callable[[Step, Tensor, AbstractSet[Value]], OfInputs | None]] = {
    "convolution": _of_convolution,
    "native_batch_norm": _of_batch_norm,
    "cudnn_batch_norm": _of_batch_norm,
    "mean": _of_mean,
    "amax": _of_amax,
    "mm": _of_product,
    "bmm": _of_product,
    "addmm": _of_addmm,
    "native_layer_norm": _of_layer_norm,
    "relu": _of_relu,
    "sigmoid": _of_sigmoid,
    "gelu": _by_operator,
    "hardsigmoid": _by_operator,
    "hardtanh": _of_hardtanh,
    "hardswish": _by_operator,
    "mish": _by_operator,
    "silu": _by_operator,
    "add": _of_sum,
    "mul": _of_elementwise_product,
    "view": _of_reshape,
    "_unsafe_view": _of_reshape,
    "unsqueeze": _of_reshape,
    "squeeze": _of_reshape,
    "expand": _of_expand,
    "clone": _of_expand,
    "alias": _of_expand,
    "transpose": _of_transpose,
    "permute": _of_permute,
    "select": _of_select,
    "cat": _of_cat,
    "max_pool2d_with_indices": _of_max_pool,
    "_softmax": _of_softmax,
    "_safe_softmax": _of_softmax,
}
