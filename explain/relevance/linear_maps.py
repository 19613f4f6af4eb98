"""The linear maps among the steps of a pass: what is mapped, by which weights, and what is
added."""

import functools
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from explain.recording import Step, Value
from explain.recording.gradients import is_by_batch

aten = torch.ops.aten
Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Back = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A map ``function(x, weight, bias)`` of the value ``x``."""

    x: Value
    function: Run
    step_weight: Tensor
    """The weight of the step, without ``factor``."""
    bias: Tensor | None
    channels: int
    """The dimension of the result that its channels run along."""
    back: Back | None = None
    """``back(gradient, x, weight)`` is the gradient in x; None lets autograd find it."""
    scaled: Callable[[Tensor], Tensor] | None = None
    """The weights of the step times a number for each output channel, ``(K,)``; None where it is
    not known which these are."""
    alike: bool = False
    """Whether every input and output channel of a convolution sees the others in the same way."""
    factor: Tensor | None = None
    """What a normalisation behind the map multiplies its channels by, ``(K,)``."""

    @property
    def weight(self) -> Tensor:
        """The weights of the map, times ``factor`` of a normalisation that is merged with it."""
        if self.factor is None or self.scaled is None:
            return self.step_weight
        # computed at each call: those of all maps would take as much memory as the model
        return self.scaled(self.factor)

    def weight_of_sign(self, sign: int) -> Tensor:
        """The positive (sign 1) or negative (sign -1) part of the weights, with zeros elsewhere."""
        weight = self.weight
        if weight is self.step_weight or torch.is_grad_enabled():
            return signed(weight, sign)
        return weight.clamp_(min=0) if sign > 0 else weight.clamp_(max=0)

    def then(self, factor: Tensor | None, shift: Tensor | None) -> "LinearMap | None":
        """This map with its channels multiplied by ``factor`` and moved by ``shift``, which
        broadcast to the result; None where the output channels are not known."""
        if self.scaled is None:
            return None
        bias = self.bias
        if factor is not None and bias is not None:
            bias = bias * factor
        if shift is not None:
            bias = shift if bias is None else bias + shift
        factors = self.factor
        if factor is not None:
            factors = factor.flatten() if factors is None else factor.flatten() * factors
        return replace(self, bias=bias, factor=factors)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map with another input, weight or bias, such as absolute values for an LRP rule; in
        the widest of their types."""
        x, weight, bias = in_one_type(x, weight, bias)
        return self.function(x, weight, bias)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient in x of the sum of ``gradient * run(x, weight)``, in the shape of x."""
        gradient, x, weight = in_one_type(gradient, x, weight)
        if self.back is not None:
            return self.back(gradient, x, weight)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x.clone() if x.requires_grad else x.detach().requires_grad_()
            result = self.run(x, weight, None)
            (gradient_of_x,) = torch.autograd.grad(result, [x], gradient, create_graph=create_graph)
        return gradient_of_x


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


def along(values: Tensor, ndim: int, dim: int = 0) -> Tensor:
    """Values ``(K,)`` reshaped to ``ndim`` dimensions, with K along dimension ``dim`` and 1
    elsewhere, so that they broadcast."""
    shape = [1] * ndim
    shape[dim] = -1
    return values.reshape(shape)


def linear_map(step: Step, signals: AbstractSet[Value]) -> LinearMap | None:
    """The linear map that a step computes of the one signal among its inputs; None where it is
    none."""
    signals_of_step = [value for value in step.inputs if value in signals]
    if len(signals_of_step) != 1:
        return None
    (x,) = signals_of_step
    if step.name in _MAPS:
        return _MAPS[step.name](step, x)
    return None


def _convolution(step: Step, x: Value) -> LinearMap | None:
    """The map of a convolution, by its weight."""
    signal, weight_value, bias_value = step.args[:3]
    if x is not signal:
        return None
    weight = _plain(weight_value.tensor)
    stride, padding, dilation, transposed, output_padding, groups = step.args[3:9]
    spatial = weight.ndim - 2
    options = (stride, padding, dilation, transposed, output_padding, groups)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = None if bias is None else bias.flatten()
        result: Tensor = aten.convolution(x, weight, flat, *options)
        return result

    def back(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        wanted = (True, False, False)
        gradients = aten.convolution_backward(gradient, x, weight, None, *options, wanted)
        return gradients[0]  # type: ignore[no-any-return]

    def scaled(factor: Tensor) -> Tensor:
        if not transposed:
            return weight * along(factor, spatial + 2)
        by_group = weight.reshape((groups, -1, *weight.shape[1:]))
        return (by_group * factor.reshape([groups, 1, -1] + [1] * spatial)).reshape(weight.shape)

    bias = None if bias_value is None else along(bias_value.tensor, spatial + 1)
    channels = -spatial - 1
    return LinearMap(x, run, weight, bias, channels, back, scaled, alike=groups == 1)


def _deformed_convolution(step: Step, x: Value) -> LinearMap | None:
    """The map of a deformed convolution: its offsets and mask are constants, and the sign of a
    contribution is that of the kernel's weight."""
    signal, weight_value, offset, mask, bias_value = step.args[:5]
    if x is not signal or bool((mask.tensor < 0).any()):
        return None  # signs of weights would not be those of contributions
    weight = weight_value.tensor

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.new_zeros(len(weight)) if bias is None else bias.flatten()
        positions = (offset.tensor.to(x), mask.tensor.to(x))
        result: Tensor = step.operator(x, weight, *positions, flat, *step.args[5:])
        return result

    def scaled(factor: Tensor) -> Tensor:
        return torch.mul(weight, along(factor, 4))

    return LinearMap(x, run, weight, along(bias_value.tensor, 3), -3, None, scaled)


def _matrix_product(step: Step, x: Value) -> LinearMap | None:
    """The map of a product of two matrices, one of them a constant."""
    first, second = step.inputs
    return _product(x, first, second, None, 1)


def _matrix_product_and_sum(step: Step, x: Value) -> LinearMap | None:
    """The map of a constant plus a product of two matrices, one of them a constant."""
    added, first, second = step.inputs
    if x is added:
        return None
    bias = added.tensor * step.kwargs.get("beta", 1)
    return _product(x, first, second, bias, step.kwargs.get("alpha", 1))


def _product(
    x: Value, first: Value, second: Value, bias: Tensor | None, alpha: Any
) -> LinearMap | None:
    """The map of ``alpha`` times a product of two matrices, one of them ``x``."""
    if first is second:
        return None
    is_first = x is first
    weight = _plain((second if is_first else first).tensor)
    are_matrices = len(first.shape) > 1 and len(second.shape) > 1
    if alpha != 1:
        weight = weight * alpha

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = x @ weight if is_first else weight @ x
        return result if bias is None else result.add_(bias)

    def back(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight.mT if is_first else weight.mT @ gradient

    def scaled(factor: Tensor) -> Tensor:
        return weight * factor

    scales = scaled if is_first else None
    return LinearMap(x, run, weight, bias, -1, back if are_matrices else None, scales)


def weighted_sum(product: Step, x: Value, reader: Step) -> LinearMap | None:
    """The map of ``(x * weight).sum(dims)``; None if all that is summed up has one weight."""
    (other,) = [value for value in product.inputs if value is not x] or [x]
    weight = other.tensor
    options = reader.options
    dims: Any = options.get("dim") or range(len(x.shape))
    missing_dims = len(x.shape) - weight.ndim
    if missing_dims < 0:
        return None
    sizes = [1] * missing_dims + list(weight.shape)
    if all(sizes[dim] == 1 for dim in dims):
        return None
    keepdim = options.get("keepdim", False)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None  # nothing is added
        summed: Tensor = (x * weight).sum(tuple(dims), keepdim=keepdim)
        return summed

    return LinearMap(x, run, weight, None, -1)


def _batch_norm(step: Step, x: Value) -> LinearMap | None:
    """The map of a batch normalisation by running statistics: multiply each channel, and add to
    it; None for one by the statistics of the batch, which depend on x."""
    if is_by_batch(step):
        return None
    ndim = len(x.shape) - 1
    bias = step.options["bias"]
    factor = (step.options["running_var"].tensor + step.args[-1]).rsqrt_()
    weight = step.options["weight"]
    factor = factor if weight is None else factor * weight.tensor
    shift = -step.options["running_mean"].tensor * factor
    if bias is not None:
        shift = shift + bias.tensor
    factor = along(factor, ndim)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x * weight if bias is None else (x * weight).add_(bias)

    def back(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient * weight

    def scaled(channel_factor: Tensor) -> Tensor:
        return along(channel_factor, ndim).mul(factor)

    return LinearMap(x, run, factor, along(shift, ndim), -ndim, back, scaled)


_MAPS: dict[str, Callable[[Step, Value], LinearMap | None]] = {
    "convolution": _convolution,
    "torchvision::deform_conv2d": _deformed_convolution,
    "mm": _matrix_product,
    "bmm": _matrix_product,
    "mv": _matrix_product,
    "dot": _matrix_product,
    "addmm": _matrix_product_and_sum,
    "baddbmm": _matrix_product_and_sum,
    "_sparse_addmm": _matrix_product_and_sum,
    "_sparse_mm": _matrix_product,
    "addmv": _matrix_product_and_sum,
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
