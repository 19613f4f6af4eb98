"""Records a forward pass: the operations that a network really computes, below Python's names."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from explain.recording.aliases import Aliases
from explain.recording.functions import FunctionSteps
from explain.recording.torch_internals import (
    CallStack,
    FunctionCall,
    decompositions,
    facts_of,
    fills,
    writes_of,
)
from explain.recording.values import Kind, Step, Value, tensors_of

aten = torch.ops.aten
_COPIES = frozenset(["clone", "roll", "constant_pad_nd"])
"""Operations whose results are not kept: copying again is cheaper than the memory."""
_OVERWRITE = frozenset(["copy", "fill", "zero"])
"""Operations whose result does not depend on what they write over."""


_OUTSIDE = frozenset(
    getattr(Tensor, name) for name in ("numpy", "__array__", "__dlpack__", "tolist", "storage")
)
"""What gives the values of a tensor to somebody else than PyTorch."""


class Watcher(TorchFunctionMode):
    """Names what leaves the record, for as long as its ``with`` block lasts.

    Besides, the fused kernels of transformer layers are not used where a function mode sees calls.
    """

    def __init__(self, recorder: "PassRecorder") -> None:
        """Begin to watch the pass that ``recorder`` notes."""
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make a call of PyTorch, and name it if it gives values to somebody else."""
        if func in _OUTSIDE and self._recorder.value_of(args[0]).depends:
            self._recorder.leave(f"{func.__name__}()")
        return func(*args, **(kwargs or {}))


class PassRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation of this thread, from what and by which module of the model, for as long
    as its ``with`` block lasts.

    Operations on constants alone are not noted, and what is drawn at random is a constant.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        """Prepare to record a pass of ``model``, whose parameters and buffers have names."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.inputs: list[Value] = []
        self.draws = False
        """Whether random numbers were drawn."""
        self.unseen: dict[str, None] = {}
        """What left the record and may have come back as a constant, with its module."""
        self._aliases = Aliases(self._note, self._constant)
        self._calls = CallStack(model)
        self._functions: dict[FunctionCall, FunctionSteps] = {}
        self._named: dict[int, tuple[Kind, str, Tensor]] = {}
        for name, tensor in model.named_buffers():
            self._named[id(tensor)] = ("buffer", name, tensor)
        for name, tensor in model.named_parameters():
            self._named[id(tensor)] = ("parameter", name, tensor)

    def add_input(self, tensor: Tensor) -> Value:
        """Let a tensor be an input of the pass: what is computed from it depends on the input."""
        value = self._new("input", tensor, depends=True)
        self._aliases.bind(tensor, value)
        self.inputs.append(value)
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """The value that a tensor holds now; of one that was not seen before, a constant."""
        return self._known(tensor) or self._constant(tensor)

    @property
    def functions(self) -> list[FunctionSteps]:
        """The calls of functions with a derivative of their own."""
        return list(self._functions.values())

    @property
    def with_gradient(self) -> set[Value]:
        """The values that autograd has a gradient of."""
        return self._aliases.with_gradient

    def leave(self, call: str) -> None:
        """Name a call that gave values to somebody else: they may come back as constants."""
        module = self._calls.now()[0] or "the model"
        self.unseen[f"{call} in {module}"] = None

    def close(self) -> None:
        """Let go of all tensors that were only kept to tell them from each other."""
        self._calls.close()
        del self._aliases, self._named

    # What an operator does

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator of the pass, and note it."""
        kwargs = kwargs or {}
        decomposition = decompositions().get(operator)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        facts = facts_of(operator)
        if facts.is_composite:
            with self:
                return operator.decompose(*args, **kwargs)
        module, number, function = self._calls.now()
        if function is not None:
            self._enter(function)
        values: list[Value] = []
        noted_args = self._arguments(args, values)
        noted_kwargs = self._arguments(kwargs, values)
        writes = writes_of(operator, args)
        written = _written(writes, args, kwargs) if writes else []
        self.draws |= facts.is_random
        are_constants = all(value.kind == "constant" for value in values)
        if are_constants or fills(operator) or facts.is_random:
            return self._run_unrecorded(operator, args, kwargs, written)
        if operator is aten._local_scalar_dense.default:
            if values[0].depends:
                self.leave("item()")
            return operator(*args, **kwargs)
        noted_args = self._arguments(noted_args, values, constants=True)
        noted_kwargs = self._arguments(noted_kwargs, values, constants=True)
        has_gradient = torch.is_grad_enabled()
        step = Step(operator, noted_args, noted_kwargs, module, number, has_gradient, writes)
        overwritten = self._values_of(written)
        if not facts.is_view and step.name != "clone":
            for value in values:
                value.is_read |= value not in overwritten
        if not facts.moves_itself:
            for tensor in written:
                self._aliases.before_write(tensor)
        result = operator(*args, **kwargs)
        self._add(step, function)
        if step.name in _OVERWRITE:
            values = [value for value in values if value not in overwritten]
        self._bind_results(step, result, written, any(value.depends for value in values))
        return result

    def _enter(self, call: FunctionCall) -> None:
        """Note the arguments of a function with a derivative of its own, before it computes."""
        if call not in self._functions:
            args = self._arguments(call.args, [], constants=True)
            self._functions[call] = FunctionSteps(call.function, args)

    def _add(self, step: Step, function: FunctionCall | None) -> None:
        """Append a step to the record, and to the function that it is inside of."""
        self.steps.append(step)
        if function is not None:
            self._functions[function].steps.append(step)

    def _arguments(self, argument: Any, values: list[Value], *, constants: bool = False) -> Any:
        """An operator's arguments with values in the place of tensors; ``values`` gets them.

        Tensors that were not seen before stay, or are new ``constants``.
        """
        if isinstance(argument, Tensor):
            value = self.value_of(argument) if constants else self._known(argument)
            if value is None:
                return argument
            values.append(value)
            return value
        if isinstance(argument, (list, tuple)):
            parts = [self._arguments(part, values, constants=constants) for part in argument]
            return parts if isinstance(argument, list) else tuple(parts)
        if isinstance(argument, dict):
            named = argument.items()
            return {
                name: self._arguments(part, values, constants=constants) for name, part in named
            }
        return argument

    def _values_of(self, written: list[Tensor]) -> set[Value]:
        """The values that written tensors hold before the write."""
        values = [self._known(tensor) for tensor in written]
        return {value for value in values if value is not None}

    def _run_unrecorded(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Run an operator whose results are constants."""
        overwritten = [self._known(tensor) for tensor in written]
        for tensor in written:
            self._aliases.before_write(tensor)
        result = operator(*args, **kwargs)
        for tensor, value in zip(written, overwritten, strict=True):
            if value is not None and value.kind == "constant":
                self._aliases.changed_outside(tensor)
            elif value is not None:
                self._aliases.written(tensor, self._new("constant", tensor.detach().clone()))
        return result

    def _bind_results(self, step: Step, result: Any, written: list[Tensor], depends: bool) -> None:
        """Give the tensors that a step has made or written their values."""
        moves_itself = facts_of(step.operator).moves_itself
        values: dict[int, Value] = {}
        for tensor in written:
            value = values[id(tensor)] = self._new("result", tensor, depends=depends)
            if moves_itself:
                self._aliases.bind(tensor, value)
            else:
                self._aliases.written(tensor, value)
        returned = list(tensors_of(result))
        for tensor in returned:
            if id(tensor) not in values:
                value = values[id(tensor)] = self._new("result", tensor, depends=depends)
                self._aliases.bind(tensor, value)
        is_view = facts_of(step.operator).is_view
        is_copy = step.name in _COPIES or (is_view and step.inputs[0].kept is None)
        for value in values.values():
            value.step = step
            if is_copy:
                value.kept = None
        step.results = tuple(values[id(tensor)] for tensor in [*returned, *written])

    # Values

    def _known(self, tensor: Tensor) -> Value | None:
        """The value of a tensor that was seen before, or belongs to the model."""
        value = self._aliases.read(tensor)
        if value is not None:
            return value
        named = self._named.get(id(tensor))
        if named is None:
            return None
        kind, name, _ = named
        value = self._new(kind, tensor)
        value.name = name
        self._aliases.bind(tensor, value)
        return value

    def _constant(self, tensor: Tensor) -> Value:
        """The value of a tensor that comes from elsewhere."""
        value = self._new("constant", tensor)
        self._aliases.bind(tensor, value)
        return value

    def _new(self, kind: Kind, tensor: Tensor, *, depends: bool = False) -> Value:
        """A new value that a tensor holds."""
        kept = tensor if kind in ("parameter", "buffer") else tensor.detach()
        value = Value(len(self.values), kind, tuple(tensor.shape), tensor.dtype, depends, kept=kept)
        self.values.append(value)
        return value

    def _note(
        self, operator: Any, *args: Any, shape: tuple[int, ...], dtype: torch.dtype, **kwargs: Any
    ) -> Value:
        """Note a step that only moves values about, without running it."""
        module, number, function = self._calls.now()
        step = Step(operator, args, kwargs, module, number, torch.is_grad_enabled())
        depends = False
        for source in step.inputs:
            source.is_read = True
            depends |= source.depends
        value = Value(len(self.values), "result", shape, dtype, depends, step=step)
        self.values.append(value)
        step.results = (value,)
        self._add(step, function)
        return value


def _written(
    writes: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The tensors that an operator writes into, in the order of its arguments."""
    written: list[Tensor] = []
    for place in writes:
        if isinstance(place, str):
            written += tensors_of(kwargs.get(place))
        elif place < len(args):
            written += tensors_of(args[place])
    return written
