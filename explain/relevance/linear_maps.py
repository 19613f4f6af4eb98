"""The linear maps among the steps of a pass: what is mapped, by which weights, and what is
added."""

import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from explain.recording import Step, Value
from explain.recording.gradients import is_by_batch, walk_back

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A map of the value ``x``, by a weight and a bias."""

    x: Value
    constant: Value
    """The value of the weight, or of what it is made of, in the steps."""
    steps: Sequence[Step]
    """What computes the map without its bias, from ``x`` and the weight."""
    step_weight: Tensor
    """The weight of the steps, without ``factor``."""
    bias: Tensor | None
    channels: int
    """The dimension of the result that channels run along, from the end: it may have no batch."""
    weight_channels: int | None = None
    """The dimension of the weight that the channels of the result run along; None where it is not
    known."""
    groups: int = 1
    """How many groups the first dimension of the weight has, each with channels of its own."""
    factor: Tensor | None = None
    """What a normalisation behind the map multiplies its channels by, ``(K,)``."""

    @property
    def weight(self) -> Tensor:
        """The weights of the map, times ``factor`` of a normalisation that is merged with it."""
        if self.factor is None or self.weight_channels is None:
            return self.step_weight
        # computed at each call: those of all maps would take as much memory as the model
        weight = self.step_weight
        by_group = weight.reshape(self.groups, -1, *weight.shape[1:])
        shape = [self.groups] + [1] * weight.ndim
        shape[self.weight_channels + 1] = -1  # the groups are one dimension more
        return (by_group * self.factor.reshape(shape)).reshape(weight.shape)

    def weight_of_sign(self, sign: int) -> Tensor:
        """The positive (sign 1) or negative (sign -1) part of the weights, with zeros elsewhere."""
        weight = self.weight
        if weight is self.step_weight or torch.is_grad_enabled():
            return signed(weight, sign)
        return weight.clamp_(min=0) if sign > 0 else weight.clamp_(max=0)

    def then(self, factor: Tensor | None, shift: Tensor) -> "LinearMap | None":
        """This map with its channels multiplied by ``factor`` (None for 1) and moved by ``shift``,
        which broadcast to the result; None where the output channels are not known."""
        if self.weight_channels is None:
            return None
        if factor is None:
            return replace(self, bias=shift if self.bias is None else self.bias + shift)
        bias = shift if self.bias is None else self.bias * factor + shift
        factors = factor.flatten() if self.factor is None else factor.flatten() * self.factor
        return replace(self, bias=bias, factor=factors)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map with another input, weight or bias, such as absolute values for an LRP rule; in
        the widest of their types."""
        x, weight, bias = in_one_type(x, weight, bias)
        tensors = {self.x: x, self.constant: weight}
        for step in self.steps:
            tensors |= step.replaced(tensors).run(lambda value: value.tensor)
        result = tensors[self.steps[-1].output]
        return result if bias is None else result.add_(bias)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient in x of the sum of ``gradient * run(x, weight)``, in the shape of x."""
        gradient, x, weight = in_one_type(gradient, x, weight)
        first = self.steps[0].replaced({self.x: x, self.constant: weight})
        # the value that now stands in the place of x
        source = first.inputs[self.steps[0].inputs.index(self.x)]
        arrived = {self.steps[-1].output: gradient}
        steps = [first, *self.steps[1:]]
        signals = {source, first.output}  # not the weight, whose gradient nobody asks for
        return walk_back(steps, arrived, {source}, signals)[source]


def signed(tensor: Tensor, sign: int) -> Tensor:
    """The positive (sign 1) or negative (sign -1) part of a tensor, with zeros elsewhere."""
    return tensor.clamp(min=0) if sign > 0 else tensor.clamp(max=0)


def in_one_type(*tensors: Any) -> Any:
    """The same tensors in the widest of their types, which differ under mixed precision; None stays
    None."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return tensors
    widest = functools.reduce(torch.promote_types, dtypes)
    return tuple(None if tensor is None else tensor.to(widest) for tensor in tensors)


def along(values: Tensor, ndim: int) -> Tensor:
    """Values ``(K,)`` reshaped to ``ndim`` dimensions, with K along the first and 1 elsewhere, so
    that they broadcast."""
    return values.reshape([-1] + [1] * (ndim - 1))


def linear_map(step: Step, signals: AbstractSet[Value]) -> LinearMap | None:
    """The linear map that a step computes of the one signal among its inputs; None where it is
    none."""
    signals_of_step = [value for value in step.inputs if value in signals]
    if len(signals_of_step) != 1 or step.name not in _MAPS:
        return None
    return _MAPS[step.name](step, signals_of_step[0])


def _convolution(step: Step, x: Value) -> LinearMap | None:
    """The map of a convolution, by its weight."""
    signal, constant, bias = step.args[:3]
    if x is not signal:  # the weight or bias is computed from the input
        return None
    weight = _plain(constant.tensor)
    # the result has as many dimensions as the weight, and channels behind the batch
    channels = 1 - weight.ndim
    unbiased = replace(step, args=(x, constant, None, *step.args[3:]))
    bias_by_channel = None if bias is None else along(bias.tensor, -channels)
    is_transposed = step.options["transposed"]
    return LinearMap(
        x,
        constant,
        steps=[unbiased],
        step_weight=weight,
        bias=bias_by_channel,
        channels=channels,
        # (out, in / groups, ...), or transposed (in, out / groups, ...)
        weight_channels=1 if is_transposed else 0,
        # a first dimension of output channels has those of all groups, which is as one group
        groups=step.options["groups"] if is_transposed else 1,
    )


def _deformed_convolution(step: Step, x: Value) -> LinearMap | None:
    """The map of a deformed convolution: its offsets and mask are constants, and the sign of a
    contribution is that of the kernel's weight."""
    signal, constant, _, mask, bias = step.args[:5]
    # with a negative mask, signs of weights would not be those of contributions
    if x is not signal or bool((mask.tensor < 0).any()):
        return None
    unbiased = step.replaced({bias: torch.zeros_like(bias.tensor)})
    bias_by_channel = along(bias.tensor, 3)
    return LinearMap(
        x,
        constant,
        steps=[unbiased],
        step_weight=constant.tensor,
        bias=bias_by_channel,
        channels=-3,
        weight_channels=0,
    )


def _matrix_product(step: Step, x: Value) -> LinearMap | None:
    """The map of a product of two matrices or vectors, one of them a constant, which a constant may
    be added to."""
    *added, first, second = step.inputs
    if x in added or first is second:  # a sum with x, or a square
        return None
    constant = second if x is first else first
    weight = _plain(constant.tensor)
    alpha = step.kwargs.get("alpha", 1)  # which `unbiased` does not multiply by
    if alpha != 1:
        weight = weight * alpha
    are_batches = len(first.shape) == 3
    product = aten.bmm.default if are_batches else aten.mm.default
    if min(len(first.shape), len(second.shape)) < 2:
        product = aten.matmul.default
    unbiased = replace(
        step, operator=product, args=(first, second), kwargs={}, writes=(), results=(step.output,)
    )
    bias = None if not added else added[0].tensor * step.kwargs.get("beta", 1)
    # of W x, the last dimension is that of x: its channels are none of W's
    weight_channels = weight.ndim - 1 if x is first else None
    return LinearMap(
        x,
        constant,
        steps=[unbiased],
        step_weight=weight,
        bias=bias,
        channels=-1,
        weight_channels=weight_channels,
    )


def weighted_sum(product: Step, x: Value, reader: Step) -> LinearMap | None:
    """The map of ``(x * weight).sum(dims)``; None if all that is summed up has one weight."""
    (other,) = [value for value in product.inputs if value is not x]
    weight = other.tensor
    dims: Any = reader.options.get("dim") or range(len(x.shape))
    missing_dims = len(x.shape) - weight.ndim
    if missing_dims < 0:  # x is broadcast to the weight
        return None
    sizes = [1] * missing_dims + list(weight.shape)
    if all(sizes[dim] == 1 for dim in dims):
        return None
    steps = [product, reader]
    return LinearMap(x, other, steps=steps, step_weight=weight, bias=None, channels=-1)


def _batch_norm(step: Step, x: Value) -> LinearMap | None:
    """The map of a batch normalisation by running statistics: multiply each channel, and add to
    it; None for one by the statistics of the batch, which depend on x."""
    if is_by_batch(step):
        return None
    sample_ndim = len(x.shape) - 1
    bias = step.options["bias"]
    variance = step.options["running_var"]
    factor = (variance.tensor + step.args[-1]).rsqrt_()  # the last argument is epsilon
    weight = step.options["weight"]
    factor = factor if weight is None else factor * weight.tensor
    shift = -step.options["running_mean"].tensor * factor
    if bias is not None:
        shift = shift + bias.tensor
    # the factor is no value of the pass: `LinearMap.run` gives it in the place of the variance
    product = replace(
        step, operator=aten.mul.Tensor, args=(x, variance), kwargs={}, results=step.results[:1]
    )
    weight_by_channel = along(factor, sample_ndim)
    bias_by_channel = along(shift, sample_ndim)
    return LinearMap(
        x,
        variance,
        steps=[product],
        step_weight=weight_by_channel,
        bias=bias_by_channel,
        channels=-sample_ndim,
        weight_channels=0,
    )


_MAPS: dict[str, Callable[[Step, Value], LinearMap | None]] = {
    "convolution": _convolution,
    "torchvision::deform_conv2d": _deformed_convolution,
    "mm": _matrix_product,
    "bmm": _matrix_product,
    "mv": _matrix_product,
    "dot": _matrix_product,
    "addmm": _matrix_product,
    "baddbmm": _matrix_product,
    "_sparse_addmm": _matrix_product,
    "_sparse_mm": _matrix_product,
    "addmv": _matrix_product,
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
}


def _plain(weight: Tensor) -> Tensor:
    """A weight that rules can compute with: dense, and the numbers that a quantised one stands
    for."""
    if weight.layout != torch.strided:
        return weight.to_dense()
    is_quantised = type(weight).dequantize is not Tensor.dequantize
    return weight.dequantize() if is_quantised else weight
