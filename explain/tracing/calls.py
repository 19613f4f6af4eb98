"""Calls of functions: their arguments by name, made again with others; values by tensor identity."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F

from explain.tracing.table import OperationInfo, info

Value = TypeVar("Value")


class TensorMap(Generic[Value]):
    """Values by tensors, which are compared by identity and not kept alive.

    >>> known, x = TensorMap[str](), torch.ones(2)
    >>> known[x] = "ones"
    >>> known.get(x), known.get(torch.ones(2)), x in known
    ('ones', None, True)
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = {}

    def __setitem__(self, tensor: torch.Tensor, value: Value) -> None:
        self._found[id(tensor)] = weakref.ref(tensor), value

    def get(self, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor; None if it has none."""
        found = self._found.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def __contains__(self, tensor: torch.Tensor) -> bool:
        found = self._found.get(id(tensor))
        return found is not None and found[0]() is tensor

    def discard(self, tensor: torch.Tensor) -> None:
        self._found.pop(id(tensor), None)


_MODE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_BY_OPERATOR = frozenset(["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"])
_opened: dict[Any, Any] = {}


@dataclass(eq=False)
class Call:
    """A call: its function, the operation's name, and the arguments; places count those inside of lists of tensors."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    flat: list[Any] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    in_place: bool = field(init=False)
    """Whether it overwrites its first argument."""

    def __post_init__(self) -> None:
        self.flat = []
        for value in (*self.args, *self.kwargs.values()):
            if _holds_tensors(value):
                self.flat += value
            else:
                self.flat.append(value)
        self.tensors = [value for value in self.flat if isinstance(value, torch.Tensor)]
        first = self.flat[0] if self.flat else None
        name = str(getattr(self.function, "__name__", ""))
        overwrites = (name.endswith("_") and not name.endswith("__")) or name in _BY_OPERATOR
        self.in_place = isinstance(first, torch.Tensor) and (overwrites or self._inplace)

    @property
    def _inplace(self) -> bool:
        """The ``inplace`` option of a function that is written in Python."""
        names: tuple[str, ...] = getattr(getattr(self.function, "__code__", None), "co_varnames", ())
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs} if "inplace" in names else {}
        return bool(given.get("inplace"))

    @property
    def info(self) -> OperationInfo:
        """What the table says of the operation."""
        return info(self.name)

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name, where the names are known; a tensor's method calls its own ``self``."""
        names = self.info.arguments
        args = self.args
        if self.name == "where" and args and not (isinstance(args[0], torch.Tensor) and args[0].dtype == torch.bool):
            names = ("input", "condition", "other")
        return {**dict(zip(names, args, strict=False)), **self.kwargs}

    def made(self, replaced: Mapping[int, torch.Tensor] | None = None) -> Any:
        """Make it, with some arguments replaced, by place."""
        if not replaced:
            return self.function(*self.args, **self.kwargs)
        values = iter([replaced.get(i, value) for i, value in enumerate(self.flat)])
        args = [_gathered(value, values) for value in self.args]
        kwargs = {name: _gathered(value, values) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs)

    def out_of_place(self) -> Call | None:
        """The call out of place, for an in-place one; None where that is not known."""
        name = str(getattr(self.function, "__name__", ""))
        if name == "__setitem__":
            return Call(_assigned, self.name, self.args, self.kwargs)
        if self._inplace:
            names = self.function.__code__.co_varnames
            given = {**dict(zip(names, self.args, strict=False)), **self.kwargs, "inplace": False}
            return Call(self.function, self.name, (given.pop(names[0]),), given)
        name = name[3:-2] if name in _BY_OPERATOR else name[:-1]
        plain = getattr(torch, {"truediv": "div"}.get(name, name), None) or getattr(F, name, None)
        plain = plain or getattr(torch._C._nn, name, None)
        return None if plain is None else Call(plain, self.name, self.args, self.kwargs)


def plain(call: Call) -> Call:
    """The call; of an instance normalisation by running statistics, that of the batch normalisation which it equals."""
    if call.name != "instance_norm":
        return call
    given = call.named
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None or given.get("use_input_stats", True):
        return call
    affine = given["input"], given.get("weight"), given.get("bias")
    return Call(torch.batch_norm, "batch_norm", (*affine, mean, variance, False, 0.0, given.get("eps", 1e-5), True), {})


def _assigned(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """The tensor with some of its values replaced."""
    found = tensor.clone()
    found[index] = value
    return found


def _gathered(value: Any, values: Iterator[Any]) -> Any:
    if not _holds_tensors(value):
        return next(values)
    found = [next(values) for _ in value]
    return tuple(found) if type(value) is tuple else found  # an index that is a list means something else


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value)


def opened(function: Any) -> Callable[..., Any] | None:
    """A function of `torch.nn.functional` that shows the calls inside it to modes; None where it is no such function.

    PyTorch shows a mode the function alone: the function checks for a mode, and passes the call to it. A copy of the
    function without that check shows the calls inside.

    >>> opened(F.multi_head_attention_forward).__name__, opened(F.conv2d)
    ('multi_head_attention_forward', None)
    """
    if not isinstance(function, types.FunctionType) or function.__module__ != "torch.nn.functional":
        return None
    if function not in _opened:
        asks = any(name in _MODE_CHECKS for name in function.__code__.co_names) and function.__name__ not in _CLOSED
        _opened[function] = _copy(function) if asks else None
    found: Callable[..., Any] | None = _opened[function]
    return found


_CLOSED = frozenset(["softsign", "gumbel_softmax", "interpolate", "grid_sample", "embedding"])


def _copy(function: types.FunctionType) -> Callable[..., Any]:
    scope = {**function.__globals__, **dict.fromkeys(_MODE_CHECKS, _no)}
    found = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _no(*values: Any) -> bool:
    return False


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; of one that has none, its identity."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one within a transform, has none
        return id(tensor)


def places(call: Call, wanted: Callable[[torch.Tensor], bool]) -> Sequence[int]:
    """Where the tensors are that are wanted."""
    return [i for i, value in enumerate(call.flat) if isinstance(value, torch.Tensor) and wanted(value)]


_PLAIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OPERATORS = frozenset(["pow", "ipow", "rpow", "rdiv", "rtruediv"])
"""What `Tensor` has in Python, around a function of its own."""
_WRITTEN = ("torch.functional", "torch.nn.functional")


def is_watched(call: Call) -> bool:
    """Whether a call is one of PyTorch's functions of tensors that may lose relevance, and can be made out of place."""
    function = call.function
    if (
        (call.in_place and call.out_of_place() is None)
        or call.info.has("linear")
        or call.info.has("effect")
        or "out" in call.kwargs
    ):
        return False
    written = getattr(function, "__module__", None) in _WRITTEN or call.name in _OPERATORS
    return written or isinstance(function, _PLAIN)
