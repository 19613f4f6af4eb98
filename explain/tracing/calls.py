"""Calls of functions: their arguments by name, made again with others."""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from explain._utils.errors import MethodError
from explain.tracing.table import OperationInfo, info

_BY_OPERATOR = frozenset(["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"])


@dataclass(eq=False)
class Call:
    """A call: its function, the operation's name, and the arguments; places count those inside of lists of tensors."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    flat: list[Any] = field(init=False)
    tensors: list[Tensor] = field(init=False)
    in_place: bool = field(init=False)
    """Whether it overwrites its first argument."""

    def __post_init__(self) -> None:
        given = (*self.args, *self.kwargs.values())
        self.flat = [each for value in given for each in (value if _holds_tensors(value) else [value])]
        self.tensors = [value for value in self.flat if isinstance(value, Tensor)]
        name = str(getattr(self.function, "__name__", ""))
        overwrites = (name.endswith("_") and not name.endswith("__")) or name in _BY_OPERATOR
        self.in_place = isinstance(next(iter(self.flat), None), Tensor) and (overwrites or self._inplace)

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
        names, first = self.info.arguments, next(iter(self.args), None)
        if self.name == "where" and self.args and not (isinstance(first, Tensor) and first.dtype == torch.bool):
            names = ("input", "condition", "other")
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def made(self, replaced: Mapping[int, Tensor] | None = None) -> Any:
        """Make it, with some arguments replaced, by place."""
        if not replaced:
            return self.function(*self.args, **self.kwargs)
        values = iter([replaced.get(i, value) for i, value in enumerate(self.flat)])
        args = [_gathered(value, values) for value in self.args]
        kwargs = {name: _gathered(value, values) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs)

    def out_of_place(self) -> "Call | None":
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


def _assigned(tensor: Tensor, index: Any, value: Any) -> Tensor:
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
    return isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value)


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; of one that has none, its identity."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one within a transform, has none
        return id(tensor)


def places(call: Call, wanted: Callable[[Tensor], bool]) -> Sequence[int]:
    """Where the tensors are that are wanted."""
    return [i for i, value in enumerate(call.flat) if isinstance(value, Tensor) and wanted(value)]


def inside_transform(must: str, what: str, module: str | None, remedy: str) -> MethodError:
    """The error where something runs inside a transform of PyTorch, which hides the values of tensors."""
    where = "outside torch.vmap and the other transforms of torch.func"
    return MethodError(f"{must} {where}, but {what} in layer {module or 'model'!r} runs inside one; {remedy}")


_PLAIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OPERATORS = frozenset(["pow", "ipow", "rpow", "rdiv", "rtruediv"])
"""What `Tensor` has in Python, around a function of its own."""
_WRITTEN = ("torch.functional", "torch.nn.functional")


def is_watched(call: Call) -> bool:
    """Whether a call is one of PyTorch's functions of tensors that may lose relevance, and can be made out of place."""
    if call.info.traits & {"linear", "effect"} or "out" in call.kwargs or (call.in_place and not call.out_of_place()):
        return False
    written = getattr(call.function, "__module__", None) in _WRITTEN or call.name in _OPERATORS
    return written or isinstance(call.function, _PLAIN)
