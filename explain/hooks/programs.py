"""Programs whose layers are closed (scripted, traced and exported networks), with a module for each
layer of what they compute."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from explain._utils import nested
from explain._utils.errors import LayerError
from explain.hooks.preserve import untouched
from explain.recording.record import record
from explain.recording.recording import Recording, layer_names_of
from explain.recording.values import Step, Value

Tensors = dict[Value, Tensor]
Shape = tuple[int | None, ...]


def is_program(model: object) -> bool:
    """Whether a model runs as a whole, and calls no modules that could be hooked."""
    if isinstance(model, torch.fx.GraphModule):
        calls = {node.target for node in model.graph.nodes if node.op == "call_module"}
        return calls <= {"_guards_fn"}  # of torch.export, which checks the inputs
    return isinstance(model, torch.jit.ScriptModule)


class OtherLayersError(LayerError):
    """A program has computed other layers than in the pass that its layers were found in."""


class ProgramLayer(nn.Module):
    """A layer of a program: a call of it computes the steps that were recorded there."""

    def forward(self, *inputs: Tensor, run: Callable[..., Any]) -> Any:
        return run(*inputs)


class OpenProgram(nn.Module):
    """A program with modules for its layers, named as `layer_names_of` says. As long as these have
    hooks, each pass is recorded and its steps are computed again as calls of the modules."""

    def __init__(self, program: nn.Module) -> None:
        """Take a program; its layers are not known before `open`."""
        super().__init__()
        self.program = program
        self.shape = _shape_of(program)
        """Of the input that the program was exported for, None where any length is taken. A batch
        of another length than the first of them is given to it in parts."""
        self.opened_for: Any = None
        """The shapes of the inputs that the layers are those of."""
        self._layers: list[tuple[str, ...]] = []
        """The path to each layer."""

    def open(self, *args: Any, **kwargs: Any) -> None:
        """Find the layers in a pass of these inputs, unless they are those of inputs like these."""
        batch_length = self.shape[0]
        if batch_length is not None:
            args = (next(_parts(args[0], batch_length)), *args[1:])
        shapes = _shapes(args, kwargs)
        # one with branches may run other layers for other values
        if shapes == self.opened_for and not _may_branch(self.program):
            return
        with untouched(self):
            recording = self._recorded(args, kwargs)
        if recording.unseen:
            raise LayerError(
                f"layer must be of a program that can be recorded, but {recording.unseen[0]} "
                "leaves the record; use a method without layers, such as occlusion"
            )
        paths = _paths_of(recording)
        self._layers = _layers_of(paths)
        for step, names in paths.items():
            module: nn.Module = self
            for depth, name in enumerate(names, start=1):
                if name not in module._modules:
                    # as listings show the type of the layer itself, and of those around it
                    type_name = step.name if depth == len(names) else "Layers"
                    module.add_module(name, type(type_name, (ProgramLayer,), {})())
                module = module.get_submodule(name)
        self.opened_for = shapes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the program gives; a batch of another length than it was made for is run in parts,
        the last filled up with copies."""
        has_hooks = any(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
            for module in self.modules()
            if isinstance(module, ProgramLayer)
        )
        batch_length = self.shape[0]
        if batch_length is None or batch_length == len(args[0]):
            if not has_hooks:
                return self.program(*args, **kwargs)
            recording = self._recorded(args, kwargs)
            return self._replayed(recording, nested.paths((args, kwargs)))
        (x,) = args
        if not has_hooks:
            parts = [self.program(part) for part in _parts(x, batch_length)]
            return torch.cat(parts)[: len(x)]
        # one part is recorded, and its steps are computed again for the whole batch, part by part
        first = next(_parts(x, batch_length))
        recording = self._recorded((first,), {})
        return self._replayed(recording, [((0,), x)])

    def _recorded(self, args: Any, kwargs: Any) -> Recording:
        """A recorded pass, which nobody else records."""
        with _disable_current_modes(), torch.enable_grad():
            args, kwargs = nested.replace((args, kwargs), lambda _, tensor: tensor.detach())
            return record(self.program, *args, **kwargs)

    def _replayed(self, recording: Recording, inputs: Sequence[tuple[nested.Path, Tensor]]) -> Any:
        """Compute the steps of a recording again, as calls of the layers."""
        tensors: Tensors = {}
        for value, (_, tensor) in zip(recording.inputs, inputs, strict=True):
            tensors[value] = tensor
        paths = _paths_of(recording)
        if _layers_of(paths) != self._layers:
            raise OtherLayersError(
                "layer must be of a program that runs the same layers in each pass of an "
                "explanation, but they depend on the input; use a method without layers"
            )
        for step in recording.steps:
            if step not in paths:  # what is made of weights alone
                tensors |= _run(step, tensors)
        _Replay(recording).run(self, paths, 0, tensors)
        outputs = recording.outputs
        return nested.replace(recording.output, lambda path, _: _tensor(outputs[path], tensors))


class _Replay:
    """Computes the steps of a recording again, in the modules that they belong to."""

    def __init__(self, recording: Recording) -> None:
        self._paths = _paths_of(recording)
        self._places = {step: place for place, step in enumerate(recording.steps)}
        self._last: dict[Value, int] = {}
        """The place of the last step that reads each value."""
        for step, place in self._places.items():
            self._last |= dict.fromkeys(step.inputs, place)
        # outputs are read behind all steps
        self._last |= dict.fromkeys(recording.outputs.values(), len(self._places))

    def run(self, module: nn.Module, steps: Iterable[Step], depth: int, tensors: Tensors) -> None:
        """Run steps inside a module that lies so deep, and add what they compute to ``tensors``."""

        def part_of(step: Step) -> tuple[str, int]:
            """The part of the module that a step belongs to, if it is not the module's own, and the
            call of it."""
            names = self._paths[step][depth:]
            # the steps of one call of a layer are grouped; -1 where it is not the innermost one
            return ".".join(names[:1]), step.call if len(names) == 1 else -1

        for (part, _), group in groupby(steps, part_of):
            steps_of_part = list(group)
            if part:
                self._call(module.get_submodule(part), steps_of_part, depth + 1, tensors)
            else:
                for step in steps_of_part:
                    tensors |= _run(step, tensors)
            end = self._places[steps_of_part[-1]]
            # what no later step reads is freed
            for value in [value for value in tensors if self._last.get(value, -1) <= end]:
                del tensors[value]

    def _call(self, layer: nn.Module, steps: list[Step], depth: int, tensors: Tensors) -> None:
        """Run steps in a call of their layer, which gets what they read and gives what others read,
        the last first."""
        end = self._places[steps[-1]]
        results = [value for step in reversed(steps) for value in step.results if value]
        read = dict.fromkeys(value for step in steps for value in step.inputs)
        inner = {value: tensors[value] for value in read if value in tensors}
        entering = [value for value in inner if value.depends]
        leaving = [value for value in dict.fromkeys(results) if self._last.get(value, -1) > end]
        outside = {**inner}  # steps of the layer free what is in `inner`

        def run(*inputs: Tensor) -> Any:
            # hooks may have replaced them
            inner.update(zip(entering, inputs, strict=True))
            self.run(layer, steps, depth, inner)
            outputs = tuple(inner[value] for value in leaving)
            return outputs[0] if len(outputs) == 1 else outputs

        output = layer(*[outside[value] for value in entering], run=run)
        outputs = [output] if isinstance(output, Tensor) else output
        tensors.update(zip(leaving, outputs, strict=True))


def _may_branch(program: nn.Module) -> bool:
    """Whether a program may compute something else for another input of the same shape."""
    if not isinstance(program, torch.jit.ScriptModule):
        return False
    code = str(program.inlined_graph)
    return "prim::If" in code or "prim::Loop" in code


def _shapes(args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    """The shapes of all tensors among some inputs."""
    return [tuple(tensor.shape) for _, tensor in nested.paths((args, kwargs))]


def _shape_of(program: nn.Module) -> Shape:
    """The shape of the first input that a program was exported for, with None for the lengths that
    may vary, or are not known."""
    nodes = program.graph.nodes if isinstance(program, torch.fx.GraphModule) else ()
    values = (node.meta.get("val") for node in nodes if node.op == "placeholder")
    x = next(values, None)
    if not isinstance(x, Tensor):  # not exported: an image of any size
        return (None, None, None, None)
    return tuple(side if isinstance(side, int) else None for side in x.shape)


def _paths_of(recording: Recording) -> dict[Step, tuple[str, ...]]:
    """The names on the path to the layer of each step that depends on the input."""
    names = layer_names_of(recording)
    return {
        step: tuple(names[step].partition("@")[0].split("."))
        for step in recording.steps
        if any(value.depends for value in step.results if value)
    }


def _tensor(value: Value, tensors: Mapping[Value, Tensor]) -> Tensor:
    """What a value is now; a weight or constant is what was recorded."""
    tensor = tensors.get(value)
    return value.tensor if tensor is None else tensor


def _layers_of(paths: Mapping[Step, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The paths to the layers of a pass, in their order, each once."""
    return list(dict.fromkeys(paths.values()))


def _parts(tensor: Tensor, length: int) -> Iterator[Tensor]:
    """Yield a tensor in parts of this ``length``, the last filled up with copies of its last
    sample."""
    missing = -len(tensor) % length
    filled = tensor
    if missing:
        filled = torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
    yield from torch.split(filled, length)


def _run(step: Step, tensors: Mapping[Value, Tensor]) -> Tensors:
    """Compute a step again. Where a hook has given a layer's output more samples, the step is run
    for each part of as many samples as were recorded."""
    # where the program itself has turned gradients off, they stay off
    with torch.set_grad_enabled(torch.is_grad_enabled() and step.has_gradient):
        # how many times as many samples as were recorded
        growths = (
            Fraction(len(tensors[value]), value.shape[0])
            for value in step.inputs
            if value in tensors and value.numel and value.shape
        )
        growth = max(growths, default=Fraction(1))
        if growth == 1:
            return step.run(lambda value: _tensor(value, tensors))
        parts: dict[Value, list[Tensor]] = {}
        for value in step.inputs:
            tensor = _tensor(value, tensors)
            has_parts = tensor.shape != value.shape
            parts[value] = list(_parts(tensor, value.shape[0])) if has_parts else []
        results: list[Tensors] = []
        for part in range(math.ceil(growth)):

            def tensor_of(value: Value, part: int = part) -> Tensor:
                return parts[value][part] if parts[value] else _tensor(value, tensors)

            results.append(step.run(tensor_of))
        # without the copies that fill up the last part
        return {
            value: torch.cat([result[value] for result in results])[: int(growth * value.shape[0])]
            for value in results[0]
        }
