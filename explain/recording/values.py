"""What a recording is made of: values, and the steps that computed them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from explain.recording.operations import KnownOperation
from explain.recording.torch_internals import facts_of

Kind = Literal["input", "parameter", "buffer", "constant", "result"]
"""Where a value comes from: the caller, the model, elsewhere, or a step."""


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of a recorded pass, as it was when it was made.

    ``number`` counts the values of a recording from 0. ``kind`` says where the value comes from,
    and ``name`` is that of a parameter or buffer.
    """

    number: int
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    depends: bool
    """Whether it was computed from an input, through whatever operations."""
    name: str | None = None
    step: "Step | None" = None
    """The step that computed it; None for inputs, parameters, buffers and constants."""
    kept: Tensor | None = field(default=None, repr=False)
    """The tensor; None once it has been overwritten, if no other step had read it before."""
    is_read: bool = False
    """Whether an operation that is no view has read it."""

    @property
    def tensor(self) -> Tensor:
        """The tensor of this shape and type, detached; one that was overwritten is computed again.

        Parameters are themselves.
        """
        if self.kept is not None:
            return self.kept
        assert self.step is not None
        return self.step.run(lambda value: value.tensor)[self]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return self.name or f"%{self.number}"


Argument: TypeAlias = Any
"""An argument of a step: a `Value`, a number, a list of these, …"""


@dataclass(eq=False)
class Step:
    """One operation of a recorded pass.

    ``args`` and ``kwargs`` are the operator's arguments, with a `Value` in the place of each
    tensor. ``results`` are the tensors that the operator returns, then those that it writes into:
    a write is a new value, and `run` writes into copies.
    """

    operator: Any
    """The ATen operator, an operator of a library, or a subclass of `torch.autograd.Function`."""
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    module: str
    """The dotted path of the innermost module that ran it; "" outside of all parts of the model."""
    call: int
    """Which call of that module it was, counted from 0."""
    has_gradient: bool
    """Whether gradients were recorded: neither under ``no_grad`` nor behind ``detach``."""
    writes: tuple[int | str, ...] = ()
    """The arguments that the operator writes into: positions, or names of keyword arguments."""
    results: tuple[Value | None, ...] = ()
    """A result that nothing reads may be None."""

    name: str = field(init=False)
    """The operation's name in the table: that of the operator, the same for its in-place form.

    Operators of libraries have their namespace: ``torchvision::nms``.
    """
    operation: KnownOperation = field(init=False)
    """What the table says of the operation."""

    def __post_init__(self) -> None:
        """Look up what is known of the operator."""
        facts = facts_of(self.operator)
        self.name = facts.name
        self.operation = facts.operation

    @property
    def is_opaque(self) -> bool:
        """Whether nothing is known of it: a function with a derivative of its own, or an operator
        of a library that the table does not know."""
        is_of_library = "::" in self.name and self.operation.kind is None
        return is_of_library or isinstance(self.operator, type)

    @property
    def is_pointwise(self) -> bool:
        """Whether it computes value by value, as PyTorch says; functions that are no operators do
        not say."""
        return torch.Tag.pointwise in getattr(self.operator, "tags", ())

    @cached_property
    def inputs(self) -> list[Value]:
        """The values among the arguments, in their order."""
        return list(values_in((self.args, self.kwargs)))

    @cached_property
    def outputs(self) -> list[Value]:
        """The results that are read, each once."""
        return [value for value in dict.fromkeys(self.results) if value is not None]

    @property
    def output(self) -> Value:
        """The first of the results that are read."""
        return self.outputs[0]

    @cached_property
    def options(self) -> dict[str, Argument]:
        """The arguments by their names; the operator's default for one that was not given."""
        defaults = facts_of(self.operator).defaults
        arguments = dict(zip(defaults, self.args, strict=False))
        return {**defaults, **arguments, **self.kwargs}

    def run(self, tensor_of: Callable[[Value], Tensor]) -> dict[Value, Tensor]:
        """Compute the results from other tensors: ``tensor_of`` gives the tensor of each argument.

        Nothing is written into the tensors that it gives.
        """
        function = getattr(self.operator, "apply", None)
        if function is not None:  # a `torch.autograd.Function` may write into any argument
            args = with_tensors(self.args, lambda value: tensor_of(value).clone())
            return self._named(list(tensors_of(function(*args))))
        args, kwargs = with_tensors((self.args, self.kwargs), tensor_of)
        written: list[Tensor] = []
        args = list(args)
        for position in self.writes:
            holder: Any = kwargs if isinstance(position, str) else args
            holder[position] = _copied(holder[position])
            written += tensors_of(holder[position])
        returned = self.operator(*args, **kwargs)
        return self._named([*tensors_of(returned), *written])

    def replaced(self, tensors: Mapping[Value, Tensor]) -> "Step":
        """The same operation of other tensors in the place of some values. Its results stay those
        that were recorded."""

        def changed(part: Any) -> Any:
            """An argument, a new value in the place of one with another tensor."""
            if not (isinstance(part, Value) and part in tensors):
                return part
            tensor = tensors[part]
            return replace(part, kept=tensor, shape=tuple(tensor.shape), dtype=tensor.dtype)

        args, kwargs = mapped((self.args, self.kwargs), changed)
        return replace(self, args=args, kwargs=kwargs)

    def _named(self, tensors: list[Tensor]) -> dict[Value, Tensor]:
        """The tensors that the operator has given, by their values."""
        pairs = zip(self.results, tensors, strict=True)
        return {value: tensor for value, tensor in pairs if value is not None}

    def __repr__(self) -> str:
        results = ", ".join(str(value) for value in self.outputs)
        shown = [_shown(argument) for argument in self.args]
        shown += [f"{name}={_shown(argument)}" for name, argument in self.kwargs.items()]
        return f"{results} = {self.name}({', '.join(shown)})"


def _copied(argument: Any) -> Any:
    """A copy of a tensor, or of each in a list, to write into."""
    if isinstance(argument, list):
        return [tensor.clone() for tensor in argument]
    return argument.clone()


def _shown(argument: Argument) -> str:
    """An argument, as the table of a recording shows it."""
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_shown, argument))}]"
    if isinstance(argument, dict):
        return _shown(list(argument.values()))
    return str(argument)


def values_in(argument: Argument) -> Iterator[Value]:
    """Yield the values in the arguments of a step, in their order."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for part in argument:
            yield from values_in(part)
    elif isinstance(argument, dict):
        yield from values_in(list(argument.values()))


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Yield the tensors in what an operator takes or returns, in their order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from tensors_of(part)
    elif isinstance(result, dict):
        yield from tensors_of(list(result.values()))


def mapped(argument: Any, change: Callable[[Any], Any]) -> Any:
    """An operator's arguments with ``change`` applied to all that is no list, tuple or dict."""
    if isinstance(argument, (list, tuple)):
        parts = [mapped(part, change) for part in argument]
        return parts if isinstance(argument, list) else tuple(parts)
    if isinstance(argument, dict):
        return {key: mapped(part, change) for key, part in argument.items()}
    return change(argument)


def with_tensors(argument: Argument, tensor_of: Callable[[Value], Tensor]) -> Any:
    """The arguments of a step with tensors in the place of values."""
    return mapped(argument, lambda part: tensor_of(part) if isinstance(part, Value) else part)


def last_uses(steps: Iterable[Step]) -> dict[Value, Step]:
    """For each value, the last step that reads it."""
    return {value: step for step in steps for value in step.inputs}
