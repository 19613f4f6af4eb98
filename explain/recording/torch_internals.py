"""What a recording needs of PyTorch that has no public name, of PyTorch 2.6 to 2.15."""

import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten
_MODULE_CALL = nn.Module._call_impl.__code__
_NO_CONTEXT = torch.autograd.Function.setup_context
"""What functions have whose ``forward`` takes the context."""


@dataclass(frozen=True)
class OperatorFacts:
    """What an operator's schema says about it."""

    writes: tuple[int | str, ...] = ()
    """The arguments that it writes into: positions, or names of keyword arguments."""
    is_view: bool = False
    """Whether its results share the memory of its arguments."""
    is_random: bool = False
    is_composite: bool = False
    """Whether it is made of others, by its definition."""
    moves_itself: bool = False
    """Whether it changes the shape of a tensor in place, as ``t_``, and writes no values."""


@cache
def facts_of(operator: Any) -> OperatorFacts:
    """What an operator writes into and shares memory with, by its schema."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return OperatorFacts()
    writes: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else position)
    returned = [result.alias_info for result in schema.returns if result.alias_info is not None]
    is_view = schema.name == "aten::_unsafe_view" or any(not info.is_write for info in returned)
    return OperatorFacts(
        writes=tuple(writes),
        is_view=is_view,
        is_composite=_has_kernel(operator, "CompositeImplicitAutograd"),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags,
        moves_itself=torch.Tag.inplace_view in operator.tags,
    )


def _has_kernel(operator: Any, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


_HIDDEN_WRITES = {
    # running statistics; in training mode alone
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
    "aten::miopen_batch_norm": ((3, 4), 5),
}
"""Operators that write into arguments without a word in their schema, and the flag that decides."""


def writes_of(operator: Any, args: tuple[Any, ...]) -> tuple[int | str, ...]:
    """The arguments that a call of an operator writes into, those that its schema hides too."""
    writes = facts_of(operator).writes
    hidden = _HIDDEN_WRITES.get(getattr(getattr(operator, "_schema", None), "name", ""))
    if hidden is None:
        return writes
    positions, flag = hidden
    if not args[flag]:
        return writes
    return (*writes, *(position for position in positions if args[position] is not None))


def fills(operator: Any) -> bool:
    """Whether an operator makes a tensor of which only the shape and the type depend on its
    arguments."""
    name = operator._schema.name if hasattr(operator, "_schema") else ""
    stem = name.removeprefix("aten::")
    return stem.startswith("new_") or stem.endswith("_like")


# Operators that are fused, or draw random numbers: what they compute, in operators of the table.


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention by its definition: a softmax between two products."""
    attended: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, is_causal, scale=scale
    )[0]
    return attended


def _attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    result = _attention(query, key, value, attn_mask, dropout, is_causal, scale)
    return result, query.new_zeros(query.shape[:-1])


def _attention_on_gpu(original: Any) -> Callable[..., Any]:
    """The definition in the place of a fused kernel, with empty results beside it."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        options = original._schema.arguments[3:]
        named = {option.name: option.default_value for option in options}
        named |= dict(zip([option.name for option in options], args, strict=False))
        named |= kwargs
        result = _attention(
            query,
            key,
            value,
            named.get("attn_bias"),
            named["dropout_p"],
            named["is_causal"],
            named.get("scale"),
        )
        rest = [query.new_zeros(()) for _ in original._schema.returns[1:]]
        return (result, *rest)

    return attention


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout as a product with a mask that the kernel has drawn."""
    scale = 1 if train is False else 1 / (1 - p) if p < 1 else 0
    result = torch.empty_like(x)
    mask = torch.empty_like(x, dtype=torch.bool)
    aten.native_dropout.out(x, p, train, out0=result, out1=mask)
    return x * (mask * scale), mask


def _random_leaky_relu(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A leaky ReLU as a product with slopes that the kernel has drawn and keeps in ``noise``."""
    if not training:
        sloped: Tensor = aten.leaky_relu(x, (lower + upper) / 2)
        return sloped
    result = torch.empty_like(x)
    aten.rrelu_with_noise.out(x, noise, lower, upper, training, generator, out=result)
    return x * noise


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The operators that are recorded as others, each with a function that calls those."""
    operators: dict[Any, Callable[..., Any]] = {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_on_cpu,
        aten.native_dropout.default: _dropout,
        aten.rrelu_with_noise.default: _random_leaky_relu,
    }
    for name in ("flash", "efficient", "cudnn"):
        operator = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        operators[operator] = _attention_on_gpu(operator)
    return operators


# Which module runs


@dataclass(eq=False)
class _Running:
    """A call that is under way, by its frame on Python's stack."""

    frame: types.FrameType
    module: str
    number: int
    function: "FunctionCall | None" = None
    """The outermost `torch.autograd.Function` around it."""


class CallStack:
    """Tells which module of a model runs, and which of its calls it is, from Python's stack.

    No hooks are registered: other threads may run the model meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._functions = dict(_forward_codes(torch.autograd.Function))
        self._numbers = Counter[str]()
        self._running: list[_Running] = []

    def now(self) -> "tuple[str, int, FunctionCall | None]":
        """The innermost module's path and call, and the `torch.autograd.Function` around all, if
        one runs."""
        frames = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _MODULE_CALL or frame.f_code in self._functions:
                frames.append(frame)
            frame = frame.f_back
        frames.reverse()
        still_running = 0
        for running, call_frame in zip(self._running, frames, strict=False):
            if running.frame is not call_frame:
                break
            still_running += 1
        del self._running[still_running:]
        for call_frame in frames[still_running:]:
            self._running.append(self._entered(call_frame))
        if not self._running:
            return "", 0, None
        innermost = self._running[-1]
        return innermost.module, innermost.number, innermost.function

    def _entered(self, frame: types.FrameType) -> _Running:
        """The call of a frame that was not there before; what is no part of the model belongs to
        the call around it."""
        around = self._running[-1] if self._running else _Running(frame, "", 0)
        if frame.f_code in self._functions:
            function = around.function or _function_call(frame, self._functions[frame.f_code])
            return _Running(frame, around.module, around.number, function)
        name = self._names.get(frame.f_locals["self"])
        if name is None:
            return _Running(frame, around.module, around.number, around.function)
        number = self._numbers[name]
        self._numbers[name] += 1
        return _Running(frame, name, number, around.function)

    def close(self) -> None:
        """Let go of the frames."""
        self._running.clear()


@dataclass(eq=False)
class FunctionCall:
    """A call of a function with a derivative of its own."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]


def _forward_codes(
    parent: type[torch.autograd.Function],
) -> Iterator[tuple[types.CodeType, type[torch.autograd.Function]]]:
    """Yield the code of ``forward`` of each function with a derivative of its own."""
    for function in parent.__subclasses__():
        code = getattr(inspect.unwrap(function.forward), "__code__", None)
        if code is not None:
            yield code, function
        yield from _forward_codes(function)


def _function_call(frame: types.FrameType, function: type[torch.autograd.Function]) -> FunctionCall:
    """The call of a function with a derivative of its own, from the frame of its ``forward``."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    args = [frame.f_locals[name] for name in names]
    if code.co_flags & inspect.CO_VARARGS:
        args += frame.f_locals[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
    if function.setup_context is _NO_CONTEXT:
        context = args.pop(0)
        function = getattr(type(context), "_forward_cls", function)
    return FunctionCall(function, tuple(args))
