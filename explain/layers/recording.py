"""What ran: the calls that a network makes of its modules, and what they return."""

from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from explain._utils import nested
from explain._utils.modules import modules_of
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.hooks import HookGroup
from explain.hooks.group import note_runs
from explain.hooks.layer_names import LayerPlace
from explain.hooks.preserve import calculating, untouched, without_proxy
from explain.hooks.unwrap import hookable, leaves, runs_in_order
from explain.layers import layouts
from explain.layers.layouts import Grid, LayoutReading, Size
from explain.recording import Value
from explain.recording.record import input_copy, record_until
from explain.recording.recorder import PassRecorder

CallKey: TypeAlias = tuple[str, int]
"""A call: the module's name, and which of its calls it is, counted from 0."""
Note: TypeAlias = Callable[[CallKey, nn.Module, Any, Tensor], None]
"""Called for each call with its key, the module, its output, and the tensor in that."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module during a forward pass: dotted name, class, output shape, and spatial
    grid if it has one."""

    name: str
    kind: str
    shape: Size
    grid: Grid | None
    passes_on: bool
    """Whether the output is the very tensor that the previous call returned, unaltered (containers,
    identities)."""
    again: bool = False
    """Whether the tensor is one of several in the output, and an earlier call than the previous one
    had returned it: then it may be handed on without being used."""
    number: int = 0
    """Which call of this module it is, counted from 0."""
    last: bool = True
    """Whether it is the module's last."""
    depends: bool = True
    """Whether the output depends on what is explained."""
    doubt: str = ""
    """How the output may be read, if neither its shape nor the network shows which grid it has."""

    @property
    def key(self) -> CallKey:
        """The module's name and the number of this call, by which calls of different passes are
        matched."""
        return self.name, self.number

    @property
    def label(self) -> str:
        """The layer's name for this call: the module's name stands for its last call,
        ``name@number`` for others."""
        return self.name if self.last else f"{self.name}@{self.number}"


def run_noting_calls(
    model: nn.Module, inputs: Inputs, note: Note, *, grad: bool = False, of: Set[str] | None = None
) -> tuple[Any, list[str]]:
    """Run a network, and call ``note``, which must not change tensors, for each call of its modules
    (or ``of`` some) that gives a tensor. Returns the output and the modules that ran."""
    numbers: Counter[str] = Counter()

    def note_call(name: str, module: nn.Module, args: Any, output: Any) -> None:
        path, tensor = nested.find(output) or ((), None)
        # tensors deeper down are no output of the module's own, and nested ones have no shape
        if tensor is not None and len(path) < 2 and not tensor.is_nested:
            note((name, numbers[name]), module, output, tensor)
            numbers[name] += 1

    with untouched(model, grad=grad), HookGroup(model) as group:
        for name in filter(None, hookable(model)):  # the model itself has the name ""
            if of is None or name in of:
                group.forward(name, partial(note_call, name))
        ran = executed_modules(group, model) if of is None else []
        return inputs.call(model), ran


def executed_modules(group: HookGroup, model: nn.Module) -> list[str]:
    """The names of the modules without parts that run while ``group`` is alive: the path of inputs
    through a network. The list fills up during the pass."""
    names = []
    for module, name in modules_of(model).items():
        if not module._modules:
            names.append(name)
        elif not runs_in_order(module):  # only the pass itself shows which parts run
            return note_runs(group, leaves(model))
    # all parts are in order: the path is known beforehand
    return names


T = TypeVar("T")


def last_of_place(by_call: Mapping[CallKey, T], place: LayerPlace) -> T | None:
    """The value in ``by_call``, which is in the order of the pass, of the call that a layer's name
    stands for: the named one, or else the last. None if the layer was not called."""
    values_of_layer = [
        value
        for (name, number), value in by_call.items()
        if name == place.layer and place.call in (None, number)
    ]
    return values_of_layer[-1] if values_of_layer else None


class RecordedCalls:
    """The calls of modules in a pass, and its operations, if they can be recorded. ``output`` is
    the network's, and ``ran`` names the modules without parts that ran."""

    def __init__(self, model: nn.Module, inputs: Inputs, *, operations: bool = True) -> None:
        """Run a network once, and record the calls of its modules; with gradients on, if
        ``operations`` are recorded."""
        self.calls: list[ModuleCall] = []
        self.open_layouts: dict[CallKey, LayoutReading] = {}
        """The layouts that an output may have, of calls where its shape leaves that open."""
        self.values: dict[CallKey, Value] = {}
        """What each call gave."""
        self.recorder = PassRecorder(model) if operations else None
        self._size: Size = tuple(inputs.x.shape[2:])
        self._count = len(inputs)
        self._previous: Any = None
        """What the latest call returned: a value, or without a record its tensor."""
        with ExitStack() as end_of_pass:
            if self.recorder is not None:
                with calculating(inputs.x.device.type, create_graph=True):
                    x = input_copy(inputs.x)  # the network may write into it
                    self.recorder.add_input(x)
                record_until(end_of_pass, self.recorder)
                inputs = inputs.replaced(x)
            self.output, self.ran = run_noting_calls(model, inputs, self._take, grad=operations)

    def release(self) -> None:
        """Let go of the operations."""
        if self.recorder is not None:
            self.recorder.close()
            self.recorder.release()

    def _take(self, key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        """Record one call of a module: its shape as for one image, how the output may be read, and
        whether it depends on the input. Called in the order of the pass."""
        returned: Any = tensor
        again = False
        depends = True
        if self.recorder is not None:
            returned = self.recorder.value_of(without_proxy(tensor))
            # among several tensors in an output, one may be handed on unused
            again = output is not tensor and returned in self.values.values()
            # what left the record may have come back as a constant
            depends = returned.depends or bool(self.recorder.unseen)
            self.values[key] = returned
        passes_on = returned is self._previous
        self._previous = returned
        shape = tuple(tensor.shape)  # as one image would have it
        frames = layouts.frames_in_batch(shape, self._size, self._count)
        if frames or shape[:1] == (self._count,):
            shape = (frames or 1, *shape[1:])
        elif len(shape) == 3 and shape[1] == self._count:  # tokens before images
            shape = (shape[0], 1, shape[2])
        # the values of a spectrum lie nowhere
        reading = LayoutReading() if tensor.is_complex() else layouts.read_shape(shape, self._size)
        if reading.open:
            channels_first = _has_channels_first(returned)
            self.open_layouts[key] = replace(reading, channels_first=channels_first)
        grid = None if reading.open else reading.likeliest  # open layouts are decided later
        name, number = key
        self.calls.append(
            ModuleCall(
                name=name,
                kind=type(module).__name__,
                shape=shape,
                grid=grid,
                passes_on=passes_on,
                again=again and not passes_on,
                number=number,
                depends=depends,
            )
        )


def _has_channels_first(value: Any) -> bool:
    """Whether a value was computed by a convolution or an interpolation, and by what keeps its
    layout. False without a record, where the value is a tensor."""
    while isinstance(value, Value) and value.step is not None:
        step = value.step
        operation = step.operation
        if operation.kind == "convolution" or operation.has("resizes"):
            return True
        keeps_layout = step.is_pointwise or operation.kind == "batchnorm"
        sides = slice(None)
        if operation.has("reshapes") and len(value.shape) > 3:
            # instance normalisation takes the channels of all images for those of one
            keeps_layout = True
            sides = slice(2, None)
        alike = [read for read in step.inputs if read.shape[sides] == value.shape[sides]]
        value = alike[0] if alike and keeps_layout else None
    return False


def record(model: nn.Module, inputs: Inputs) -> RecordedCalls:
    """Run a network once, and record its calls with their layouts and dependence on the input. Of a
    network that cannot be recorded, all calls may depend on it."""
    try:
        return RecordedCalls(model, inputs)
    except Exception as error:  # operators that no recorder sees; others come again
        if came_by_signal(error):
            raise
    return RecordedCalls(model, inputs, operations=False)


def tensors_in(output: Any, most: int | None = 1) -> list[Tensor]:
    """The tensors in a model's output: itself, or those on the first level of a container or
    object; down to level ``most``, or with None all."""
    container = (
        output
        if isinstance(output, Tensor) or nested.items(output)
        else getattr(output, "__dict__", {})
    )
    return [tensor for path, tensor in nested.paths(container) if most is None or len(path) <= most]
