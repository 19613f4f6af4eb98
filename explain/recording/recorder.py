"""Records a forward pass: the operations that a network really computes, below Python's names."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from explain._utils.errors import HookError
from explain._utils.modules import modules_of
from explain.recording.aliases import Aliases
from explain.recording.functions import FunctionSteps
from explain.recording.modes import GIVING_VALUES
from explain.recording.torch_internals import (
    CallStack,
    FunctionCall,
    NotForCompilers,
    OperatorFacts,
    Running,
    computed_from,
    facts_of,
    function_behind,
    tensors_by_name,
    writes_of,
)
from explain.recording.values import Kind, Step, Value, tensors_of

aten = torch.ops.aten


class PassRecorder(NotForCompilers, TorchDispatchMode):
    """Within its block, notes each operation of this thread, from what and by which module, but for
    those on constants alone, such as what is drawn at random."""

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
        self._aliases = Aliases(self._note, self._constant, self.leave)
        modules = modules_of(model)
        self._calls = CallStack(modules)
        self.has_lstm = any(isinstance(module, nn.LSTM) for module in modules)
        self.scripts = {
            path: module
            for module, path in modules.items()
            if isinstance(module, torch.jit.ScriptModule)
        }
        """Scripted modules, whose parts are not seen, by their paths."""
        self._functions: dict[FunctionCall, FunctionSteps] = {}
        """The steps inside of each call of a function with a derivative of its own."""
        self._sources: list[torch.autograd.graph.Node] = []
        """The Nodes of the inputs that gradients are recorded of."""
        self._named: dict[int, tuple[Kind, str, Tensor]] = {}
        """Parameters and buffers by their ids, with their names; kept, so that ids stay theirs."""
        for name, tensor in tensors_by_name(modules, "parameter"):
            self._named.setdefault(id(tensor), ("parameter", name, tensor))
        for name, tensor in tensors_by_name(modules, "buffer"):
            self._named.setdefault(id(tensor), ("buffer", name, tensor))

    def add_input(self, tensor: Tensor) -> Value:
        """Let a tensor be an input of the pass: what is computed from it depends on the input."""
        value = self._new("input", tensor, depends=True)
        if tensor.requires_grad and torch.is_grad_enabled():
            self._sources.append(torch.autograd.graph.get_gradient_edge(tensor).node)
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
    def tensors(self) -> dict[Value, Tensor]:
        """The tensors that hold values, in their graph."""
        return dict(self._aliases.bound)

    @property
    def with_gradient(self) -> set[Value]:
        """The values that autograd has a gradient of."""
        return {value for value, tensor in self._aliases.bound if tensor.requires_grad}

    def name_derivatives(self) -> None:
        """Name the functions with a derivative of their own that compute nothing: no step is
        theirs."""
        for value, tensor in self._aliases.bound:
            function = function_behind(tensor) if value.depends else None
            if function is not None and value.step and value.step.operator is not function:
                self.unseen[f"the derivative of {function.__name__}"] = None

    def watched(self, name: str, tensor: Tensor) -> None:
        """Name a call that a `Watcher` tells of, if it gives values of the pass to somebody
        else."""
        if name in GIVING_VALUES and _can_be_lost(self.value_of(tensor)):
            self.leave(f"{name}()")

    def leave(self, call: str) -> None:
        """Name a call that gave values to somebody else: they may come back as constants."""
        module = self._calls.now().module or "the model"
        self.unseen[f"{call} in {module}"] = None

    def close(self) -> None:
        """Let go of all tensors that were only kept to tell them from each other; calling it again
        does nothing."""
        self._calls.close()
        for name in ("_aliases", "_named"):
            vars(self).pop(name, None)

    def release(self) -> None:
        """Let go of a record that nobody reads any more: its values and steps know each other, and
        would wait for the garbage collector."""
        for value in self.values:
            value.step = None
        self.values.clear()

    # What an operator does

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator of the pass, and note it."""
        kwargs = kwargs or {}
        facts = facts_of(operator)
        if facts.definition is not None:
            with self:  # the operators that it calls are recorded instead
                return facts.definition(*args, **kwargs)
        self.draws |= facts.is_random
        if facts.tensors == ():  # what it makes of no tensor is a constant, once it is read
            return operator(*args, **kwargs)
        running = self._calls.now()
        if running.function is not None:
            self._enter(running.function)
        noted = self._noted(facts, args, kwargs)
        values = noted.values
        writes = writes_of(facts, args)
        written = written_tensors(writes, args, kwargs) if writes else []
        leaves = facts.leaves
        if facts.name == "to_mkldnn" and running.module in self.scripts:
            leaves = "to_mkldnn()"  # what follows are no operators
        if leaves is not None and any(_can_be_lost(value) for value in values):
            self.leave(leaves)
        # drawn at random or the like, or made of constants alone
        if facts.is_constant or {value.kind for value in values} <= {"constant"}:
            return self._run_unrecorded(operator, args, kwargs, written)
        if noted.unknown:  # constants, which become values only where a step reads them
            for tensor in noted.unknown:
                self.value_of(tensor)
            noted = self._noted(facts, args, kwargs)
            values = noted.values
        step = self._step(operator, noted.args, noted.kwargs, running, writes)
        step.inputs = values  # what the property would look for again
        overwritten = self._values_of(written) if written else set()
        # what only views and copies have read need not be kept when it is overwritten
        if not facts.is_view and facts.name != "clone":
            for value in values:
                value.is_read |= value not in overwritten
        if not facts.moves_itself:
            for tensor in written:
                self._aliases.before_write(tensor)
        result = operator(*args, **kwargs)
        # a write that autograd does not see leaves a tensor the gradient of what it held before
        if written and not step.has_gradient and any(tensor.requires_grad for tensor in written):
            self.leave("a write past autograd")
        self._add(step, running)
        if step.operation.has("overwrites"):  # nothing is computed from what was there
            values = [value for value in values if value not in overwritten]
        depends = any(value.depends for value in values)
        self._bind_results(step, facts, result, written, depends)
        return result

    def _enter(self, call: FunctionCall) -> None:
        """Note the arguments of a function with a derivative of its own, before it computes."""
        if call not in self._functions:
            for tensor in tensors_of(call.args):
                self.value_of(tensor)
            args = self._argument(call.args, noted=_Noted())  # none is unknown any more
            self._functions[call] = FunctionSteps(call.function, args)

    @staticmethod
    def _step(
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        running: Running,
        writes: tuple[int | str, ...] = (),
    ) -> Step:
        """A step that is about to run."""
        return Step(
            operator=operator,
            args=args,
            kwargs=kwargs,
            module=running.module,
            call=running.number,
            has_gradient=running.has_gradient or torch.is_grad_enabled(),
            writes=writes,
        )

    def _add(self, step: Step, running: Running) -> None:
        """Append a step to the record, and to the function that it is inside of."""
        self.steps.append(step)
        if running.function is not None:
            self._functions[running.function].steps.append(step)

    def _noted(
        self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "_Noted":
        """An operator's arguments with values in the place of tensors that are known."""
        noted = _Noted()
        if facts.tensors is None:  # no schema says which arguments may hold tensors
            noted.args = self._argument(args, noted)
            noted.kwargs = self._argument(kwargs, noted)
            return noted
        noted_args = list(args)
        noted.kwargs = kwargs.copy()
        for position in facts.tensors:
            if isinstance(position, str):
                if position in kwargs:
                    noted.kwargs[position] = self._argument(kwargs[position], noted)
            elif position < len(args):
                noted_args[position] = self._argument(args[position], noted)
        noted.args = tuple(noted_args)
        return noted

    def _argument(self, argument: Any, noted: "_Noted") -> Any:
        """An argument with values in the place of tensors that are known."""
        if isinstance(argument, Tensor):
            value = self._known(argument)
            if value is None:
                noted.unknown.append(argument)
                return argument
            noted.values.append(value)
            return value
        if isinstance(argument, (list, tuple)):
            parts = [self._argument(part, noted) for part in argument]
            return parts if isinstance(argument, list) else tuple(parts)
        if isinstance(argument, dict):
            return {name: self._argument(part, noted) for name, part in argument.items()}
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
                # it gets a value again once it is read
                self._aliases.changed_outside(tensor)
            elif value is not None:
                self._aliases.written(tensor, self._new("constant", tensor.detach().clone()))
        return result

    def _bind_results(
        self, step: Step, facts: OperatorFacts, result: Any, written: list[Tensor], depends: bool
    ) -> None:
        """Give the tensors that a step has made or written their values."""
        # what is cheap to compute, or would keep the memory of a lost value, is run again if needed
        is_view_of_lost = facts.is_view and step.inputs[0].kept is None
        is_run_again = is_view_of_lost or step.operation.has("cheap")
        # a tensor may be written into and returned, or returned twice: it has one value
        values: dict[int, Value] = {}
        for tensor in written:
            value = values[id(tensor)] = self._new("result", tensor, step, depends)
            if facts.moves_itself:
                self._aliases.bind(tensor, value)
            else:
                self._aliases.written(tensor, value)
        tensors = [*tensors_of(result), *written]
        for tensor in tensors:
            if id(tensor) not in values:
                value = values[id(tensor)] = self._new("result", tensor, step, depends)
                self._aliases.bind(tensor, value)
        if is_run_again:
            for value in values.values():
                value.kept = None
        step.results = tuple([values[id(tensor)] for tensor in tensors])

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
        # autograd knows that it is computed from an input, and the record does not
        if computed_from(tensor, self._sources):
            function = function_behind(tensor)
            unseen = "a tensor of another thread"
            self.leave(f"the derivative of {function.__name__}" if function else unseen)
        value = self._new("constant", tensor)
        self._aliases.bind(tensor, value)
        return value

    def _new(
        self, kind: Kind, tensor: Tensor, step: Step | None = None, depends: bool = False
    ) -> Value:
        """A new value that a tensor holds."""
        if tensor.is_nested:
            raise HookError("tensors of a recorded pass must not be nested; pad them")
        kept = tensor if kind in ("parameter", "buffer") else tensor.detach()
        value = Value(
            number=len(self.values),
            kind=kind,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            depends=depends,
            step=step,
            kept=kept,
        )
        self.values.append(value)
        return value

    def _note(
        self, operator: Any, *args: Any, shape: tuple[int, ...], dtype: torch.dtype, **kwargs: Any
    ) -> Value:
        """Note a step that only moves values about, without running it."""
        running = self._calls.now()
        step = self._step(operator, args, kwargs, running)
        for source in step.inputs:
            source.is_read = True
        depends = any(source.depends for source in step.inputs)
        value = Value(len(self.values), "result", shape, dtype, depends, step=step)
        self.values.append(value)
        step.results = (value,)
        self._add(step, running)
        return value


@dataclass(eq=False)
class _Noted:
    """The arguments of an operator: values in the place of tensors."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    """The values among them, in their order."""
    unknown: list[Tensor] = field(default_factory=list)
    """The tensors that were not seen before."""


def _can_be_lost(value: Value) -> bool:
    """Whether something is lost where a value leaves the record: what is chosen by whole numbers
    and truth values has no derivative anyway."""
    return value.depends and (value.dtype.is_floating_point or value.dtype.is_complex)


def written_tensors(
    writes: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The tensors that an operator writes into, in the order of its arguments."""
    written: list[Tensor] = []
    for position in writes:
        if isinstance(position, str):
            written += tensors_of(kwargs.get(position))
        elif position < len(args):
            written += tensors_of(args[position])
    return written
