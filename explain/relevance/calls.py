"""Calls of functions: their arguments by name, the same call with other arguments; and the linear
maps among them: what is mapped, by which weights, and what is added."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from explain._utils import nested
from explain._utils.errors import MethodError
from explain.hooks.graph import differentiate
from explain.hooks.preserve import detached
from explain.relevance.table import OperationInfo, info, is_library_operator, is_opaque

_BY_OPERATOR = frozenset(
    name
    for name in dir(Tensor)
    if name == "__setitem__"
    or (name.startswith("__i") and hasattr(Tensor, name.replace("__i", "__", 1)))
)
"""The methods of statements that overwrite a tensor: ``x[i] = y``, ``x += y`` and their like."""


class Call:
    """A call of a function: the operation's name, and the arguments.

    ``flat`` are the positional arguments, then those by name in the order of the function's own
    parameters, with the elements of lists of tensors one by one. An argument's place is its index
    in it; ``tensor_places`` are those of tensors, and ``tensors`` what is there. ``info`` is what
    the table says of the operation. ``in_place`` says whether it is a function of PyTorch's that
    overwrites its first argument.
    """

    def __init__(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Sort the arguments of a call of ``function``, which is not made; ``name`` is its
        `operation_name`."""
        self.function = function
        self.name = name
        self.args = args
        self.info: OperationInfo = info(name)
        self.kwargs = _in_order(kwargs, self.info) if len(kwargs) > 1 else kwargs
        self.flat: list[Any] = []
        for value in (*args, *self.kwargs.values()):
            if isinstance(value, (list, tuple)) and _holds_tensors(value):
                self.flat += value
            else:
                self.flat.append(value)
        self.tensor_places = [i for i, value in enumerate(self.flat) if isinstance(value, Tensor)]
        self.tensors = [self.flat[i] for i in self.tensor_places]
        by_name, place = _overwriting(function)
        option = args[place] if 0 <= place < len(args) else kwargs.get("inplace")
        overwrites = by_name or (place >= 0 and bool(option))
        tensor_first = self.tensor_places[:1] == [0]
        self.in_place = overwrites and tensor_first and not is_library_operator(name)

    @property
    def overwritten(self) -> list[Tensor]:
        """The tensors that the call overwrites in place; a library's operator names them in its
        schema.

        Recorders copy them first.
        """
        if not is_library_operator(self.name):
            return self.flat[:1] if self.in_place else []
        arguments = operator_schema(self.function).arguments
        values = {
            **dict(zip((argument.name for argument in arguments), self.args, strict=False)),
            **self.kwargs,
        }
        names = [
            argument.name
            for argument in arguments
            if argument.alias_info and argument.alias_info.is_write
        ]
        return [tensor for name in names for _, tensor in nested.paths(values.get(name))]

    def results(self, result: Any) -> list[Tensor]:
        """The tensors that hold a call's results: what it returned, what it has overwritten, and
        the bases of overwritten views.

        ``result`` is the value that the call returned.
        """
        bases_of_views = [tensor._base for tensor in self.overwritten if tensor._base is not None]
        return [*(tensor for _, tensor in nested.paths(result)), *self.overwritten, *bases_of_views]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name, as far as the table knows the names of positional ones."""
        names = self.info.arguments
        first = next(iter(self.args), None)
        if self.name == "where" and getattr(first, "dtype", None) != torch.bool:
            names = ("input", "condition", "other")
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def options(self) -> dict[str, Any]:
        """The arguments by name as in `named`, with tensors detached from their graphs."""
        return {name: detach(value) for name, value in self.named.items()}

    def make(self, replaced: Mapping[int, Tensor] | None = None) -> Any:
        """Call the function again and return its result; ``replaced`` are other tensors for some
        places of ``flat``."""
        if not replaced:
            return self.function(*self.args, **self.kwargs)
        values = iter([replaced.get(i, value) for i, value in enumerate(self.flat)])
        args = [_gathered(value, values) for value in self.args]
        kwargs = {name: _gathered(value, values) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs)

    def out_of_place(self) -> "Call | None":
        """The same call without overwriting its first argument, so that autograd keeps its Node;
        None where no such function is known.

        Only for calls that are ``in_place``. ``x[i] = y`` returns a changed copy of x.
        """
        name = str(getattr(self.function, "__name__", ""))
        if name == "__setitem__":
            return Call(_assigned, self.name, self.args, self.kwargs)
        if _overwriting(self.function)[1] >= 0:
            names = self.function.__code__.co_varnames
            arguments = {
                **dict(zip(names, self.args, strict=False)),
                **self.kwargs,
                "inplace": False,
            }
            return Call(self.function, self.name, (arguments.pop(names[0]),), arguments)
        name = name[3:-2] if name in _BY_OPERATOR else name[:-1]
        plain = getattr(torch, {"truediv": "div"}.get(name, name), None) or getattr(F, name, None)
        plain = plain or getattr(torch._C._nn, name, None)
        return None if plain is None else Call(plain, self.name, self.args, self.kwargs)


def _in_order(kwargs: Mapping[str, Any], row: OperationInfo) -> dict[str, Any]:
    """The arguments by name in the order of the operation's own parameters, as far as the table
    names them; what it is computed from comes first."""
    names = ("self", *(row.arguments or ("input",)))
    places = {name: place for place, name in enumerate(names)}
    return dict(sorted(kwargs.items(), key=lambda item: places.get(item[0], len(names))))


@functools.lru_cache(1024)
def _overwriting(function: Any) -> tuple[bool, int]:
    """Whether a function's name says that it overwrites its first argument, and the index of its
    parameter ``inplace``, or -1."""
    name = str(getattr(function, "__name__", ""))
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_varnames", ())
    inplace_index = names.index("inplace") if "inplace" in names else -1
    return (name.endswith("_") and not name.endswith("__")) or name in _BY_OPERATOR, inplace_index


def operator_schema(operator: OpOverload | OpOverloadPacket) -> Any:
    """The schema of a registered operator; of several overloads, that of the first."""
    if isinstance(operator, OpOverloadPacket):
        names = operator.overloads()  # type: ignore[no-untyped-call]
        return getattr(operator, names[0])._schema
    return operator._schema


def as_batch_norm(call: Call) -> Call:
    """The call itself, or for an instance normalisation by running statistics the equal call of
    `torch.batch_norm`.

    So that rules need to know one of the two.
    """
    if call.name != "instance_norm":
        return call
    options = call.named
    mean = options.get("running_mean")
    variance = options.get("running_var")
    if mean is None or variance is None or options.get("use_input_stats", True):
        return call
    affine = options["input"], options.get("weight"), options.get("bias")
    return Call(
        torch.batch_norm,
        "batch_norm",
        (*affine, mean, variance, False, 0.0, options.get("eps", 1e-5), True),
        {},
    )


def _assigned(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of the tensor after ``tensor[index] = value``: the out-of-place form of an
    assignment."""
    changed = tensor.clone()
    changed[index] = value
    return changed


def _gathered(value: Any, values: Iterator[Any]) -> Any:
    """An argument of a call, rebuilt from the next values of a flat list, one for each tensor if it
    is a list.

    The reverse of how ``Call.flat`` is filled. ``values`` is consumed in the order of ``flat``.
    """
    if not _holds_tensors(value):
        return next(values)
    tensors = [next(values) for _ in value]
    # a list as an index means something else than a tuple
    return tuple(tensors) if type(value) is tuple else tensors


def _holds_tensors(value: Any) -> bool:
    """Whether an argument is a list or tuple with a tensor among its elements."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(element, Tensor) for element in value
    )


def storage_of(tensor: Tensor) -> int:
    """A number for a tensor's memory, the same for all views of it: its address, or an identity
    where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    # sparse tensors, and those within a transform, have no storage
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def inside_transform(must: str, what: str, module: str | None, remedy: str) -> MethodError:
    """The `MethodError` for an operation that a method must see but that runs inside a transform of
    `torch.func`, which hides the values of tensors.

    ``must`` says what has to run outside, ``what`` names the operation, ``module`` its layer.
    """
    return MethodError(
        f"{must} outside torch.vmap and the other transforms of torch.func, but {what} in "
        f"layer {module or 'model'!r} runs inside one; {remedy}"
    )


_PLAIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
"""The types of functions that PyTorch has not written in Python."""
_OPERATORS = frozenset(["pow", "ipow", "rpow", "rdiv", "rtruediv"])
"""Methods of `Tensor` that PyTorch has written in Python, and that are one operation."""
_WRITTEN = ("torch.functional", "torch.nn.functional")
"""The modules with all other functions that are."""


def is_watched(call: Call) -> bool:
    """Whether a call that no LRP rule covers is noted as a step "other", so that the relevance it
    loses is counted.

    It is one of PyTorch's own functions that may lose relevance and can be made out of place, a
    registered operator, or a gradient that the model itself takes.
    """
    if is_library_operator(call.name) or is_opaque(call.name):
        return True
    if (
        call.info.traits & {"linear", "effect"}
        or "out" in call.kwargs
        or (call.in_place and not call.out_of_place())
    ):
        return False
    written = getattr(call.function, "__module__", None) in _WRITTEN or call.name in _OPERATORS
    return written or isinstance(call.function, _PLAIN)


Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Back = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """``function(x, weight, bias)``; ``place`` is that of x among the call's arguments.

    ``call_weight`` is the weight of the call. The result's channels run along dimension
    ``channels``. ``back(gradient, x, weight)`` is the gradient in x, without a forward pass before
    it; None lets autograd find it. ``scaled`` gives the weights of the call times a number for each
    output channel, ``(K,)``; None where it is not known which these are. ``alike`` says that every
    input and output channel of a convolution sees the others in the same way. ``factor`` ``(K,)``
    is what a normalisation behind the map multiplies its channels by.
    """

    place: int
    function: Run
    call_weight: Tensor
    bias: Tensor | None
    channels: int
    back: Back | None = None
    scaled: Callable[[Tensor], Tensor] | None = None
    alike: bool = False
    factor: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The weights of the map, times ``factor`` of a normalisation that is merged with it;
        computed at each call, as keeping those of all maps would take as much memory as the
        model."""
        if self.factor is None or self.scaled is None:
            return self.call_weight
        return self.scaled(self.factor)

    def then(self, factor: Tensor, shift: Tensor | None) -> "LinearMap | None":
        """This map followed by a batch normalisation, as one linear map for LRP; None where the
        output channels are not known.

        ``factor`` and ``shift`` are the normalisation's weight and bias, and broadcast to the
        result. Used by `with_merged_maps`.
        """
        if self.scaled is None:
            return None
        bias = shift
        if self.bias is not None:
            bias = self.bias * factor if shift is None else self.bias * factor + shift
        factors = factor.flatten()
        if self.factor is not None:
            factors = factors * self.factor
        return replace(self, bias=bias, factor=factors)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The map with another input, weight or bias, such as absolute values for an LRP rule; in
        the widest of their types."""
        x, weight, bias = in_one_type(x, weight, bias)
        return self.function(x, weight, bias)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient in x of the sum of ``gradient * run(x, weight)``, in the shape of x.

        LRP rules use it to bring shares from the result to the input.
        """
        gradient, x, weight = in_one_type(gradient, x, weight)
        if self.back is not None:
            return self.back(gradient, x, weight)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x.clone() if x.requires_grad else x.detach().requires_grad_()
            (gradient_of_x,) = differentiate(
                self.run(x, weight, None), [x], gradient, create_graph=create_graph
            )
        assert gradient_of_x is not None
        return gradient_of_x


def in_one_type(*tensors: Any) -> Any:
    """The same tensors, converted to the widest of their types; None stays None.

    Under mixed precision, weights and signals differ.
    """
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return tensors
    widest = functools.reduce(torch.promote_types, dtypes)
    return tuple(None if tensor is None else tensor.to(widest) for tensor in tensors)


def linear_map(call: Call, places: Sequence[int]) -> LinearMap | None:
    """The linear map that a call computes, of its one signal argument; None where it is none, or
    cannot be repeated.

    ``places`` are the places of the signals; with more than one, the call is no linear map.
    """
    if len(places) != 1:
        return None
    place = places[0]
    if call.name == "addmm" and place == 1:
        options = call.named
        scale = options.get("alpha", 1)
        bias = detached(options["input"]) * options.get("beta", 1)
        return LinearMap(
            1,
            lambda x, w, b: scale * (x @ w) + (0 if b is None else b),
            detach(options["mat2"]),
            bias,
            -1,
        )
    if call.info.kind == "matrixproduct":
        return _product(call, place)
    if place != 0 or "weight" not in call.info.arguments:
        return None
    return _batch_norm(call) if call.name == "batch_norm" else _weighted(call)


def detach(value: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    return detached(value) if isinstance(value, Tensor) else value


def along(values: Tensor, ndim: int, dim: int = 0) -> Tensor:
    """Values ``(K,)`` reshaped to ``ndim`` dimensions, with K along dimension ``dim`` and 1
    elsewhere, so that they broadcast."""
    shape = [1] * ndim
    shape[dim] = -1
    return values.reshape(shape)


def _weighted(call: Call) -> LinearMap:
    """The linear map of a call of a linear layer or convolution, by its weight.

    For a deformed convolution, offsets and mask are constants, and the sign of a contribution is
    that of the kernel's weight.
    """
    options = call.options
    weight = _plain(options["weight"])
    bias = options.get("bias")
    deformed = "offset" in options
    transposed = "transpose" in call.name
    groups = 1 if deformed else options.get("groups", 1)
    spatial = weight.ndim - 2
    batched = options["input"].ndim == weight.ndim
    if (
        spatial
        and weight.shape[2:].numel() == 1
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    ):
        # With one thread, PyTorch takes a plain matrix product for few photos, which oneDNN needs
        # half the time for; it takes oneDNN where the kernel is dilated, and to a kernel of one
        # place that makes no difference.
        options["dilation"] = 2

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The linear layer or convolution of a call with another input, weight and bias ``(K, 1,
        ...)``: a `LinearMap.function`.

        A deformed convolution gets its own offsets and mask, and needs a bias.
        """
        replaced_options = {
            "input": x,
            "weight": weight,
            "bias": None if bias is None else bias.flatten(),
        }
        if deformed:
            replaced_options["bias"] = x.new_zeros(len(weight)) if bias is None else bias.flatten()
            replaced_options |= {name: options[name].to(x) for name in ("offset", "mask")}
        result: Tensor = call.function(**(options | replaced_options))
        return result

    def scaled(factor: Tensor) -> Tensor:
        """The weight, times one number for each output channel: ``factor`` ``(K,)``."""
        if not transposed:
            return torch.mul(weight, along(factor, spatial + 2))
        grouped_weight = weight.reshape((groups, -1, *weight.shape[1:]))
        return torch.mul(grouped_weight, factor.reshape([groups, 1, -1] + [1] * spatial)).reshape(
            weight.shape
        )

    back: Back | None = None
    if not spatial:
        back = _dense_back
    elif batched and not deformed and not isinstance(options.get("padding"), str):
        back = _convolution_back(options, transposed)
    bias = None if bias is None else along(bias, spatial + 1)
    return LinearMap(
        0,
        run,
        weight,
        bias,
        -spatial - 1,
        back,
        scaled,
        alike=groups == 1 and batched and not deformed,
    )


def _plain(weight: Tensor) -> Tensor:
    """A weight that rules can compute with: dense, and the numbers that a quantised one stands
    for."""
    if weight.layout != torch.strided:
        return weight.to_dense()
    is_quantised = type(weight).dequantize is not Tensor.dequantize
    return weight.dequantize() if is_quantised else weight


def _dense_back(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient in the input of a linear layer, from that in its result: a `LinearMap.back`."""
    return gradient @ weight


def _convolution_back(options: Mapping[str, Any], transposed: bool) -> Back:
    """A `LinearMap.back` for a convolution with these options: it computes the gradient in the
    input without a forward pass."""

    def sizes(name: str, default: int) -> list[int]:
        """An option as a list of numbers; its length is 1 or the number of spatial dimensions."""
        size = options.get(name, default)
        return [size] if isinstance(size, int) else list(size)

    stride = sizes("stride", 1)
    padding = sizes("padding", 0)
    dilation = sizes("dilation", 1)
    output_padding = sizes("output_padding", 0)
    groups = options.get("groups", 1)

    def back(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        gradients = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            (True, False, False),
        )
        return gradients[0]  # type: ignore[no-any-return]

    return back


def _batch_norm(call: Call) -> LinearMap | None:
    """The linear map of a batch normalisation by running statistics: multiply each channel, and add
    to it.

    None for one by the statistics of the batch, which depend on x.
    """
    options = call.options
    mean = options.get("running_mean")
    variance = options.get("running_var")
    if options.get("training", False) or mean is None or variance is None:
        return None
    ndim = options["input"].ndim - 1
    weight = options.get("weight")
    bias = options.get("bias")
    factor = (variance + options.get("eps", 1e-5)).rsqrt_()
    factor = factor if weight is None else factor * weight
    shift = -mean * factor if bias is None else torch.addcmul(bias, mean, factor, value=-1)
    factor = along(factor, ndim)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The batch normalisation with another input, weight and bias, which broadcast to it: a
        `LinearMap.function`."""
        return x * weight if bias is None else (x * weight).add_(bias)

    def back(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient * weight

    def scaled(channel_factor: Tensor) -> Tensor:
        return along(channel_factor, ndim).mul(factor)

    return LinearMap(0, run, factor, along(shift, ndim), -ndim, back, scaled)


def _product(call: Call, place: int) -> LinearMap | None:
    """The linear map of a matrix product, in the argument at ``place``; the only other tensor is
    its weight.

    None where there are several other tensors.
    """
    weight_places = [i for i in call.tensor_places if i != place]
    if len(weight_places) != 1:
        return None
    weight_place = weight_places[0]
    weight = _plain(detached(call.flat[weight_place]))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The matrix product of a call with another input and weight: a `LinearMap.function`, whose
        ``bias`` is always None."""
        assert bias is None  # a matrix product has no bias
        result: Tensor = call.make({place: x, weight_place: weight})
        return result

    return LinearMap(place, run, weight, None, -1)
