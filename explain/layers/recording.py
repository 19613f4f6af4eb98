"""What ran: the calls that a network makes of its modules, and what they return."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from explain._utils import nested
from explain._utils.errors import ExplainError
from explain._utils.modules import modules_of
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.hooks import HookGroup
from explain.hooks.graph import Reach, keeping_values
from explain.hooks.group import note_runs
from explain.hooks.layer_names import LayerPlace
from explain.hooks.preserve import untouched, without_proxy
from explain.hooks.unwrap import hookable, leaves, runs_in_order
from explain.layers import layouts
from explain.layers.layouts import Grid, Layout, LayoutReading, Size

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
    model: nn.Module, inputs: Inputs, note: Note, *, grad: bool = False
) -> tuple[Any, list[str]]:
    """Run a network, and call ``note`` for each call of its modules that gives a tensor.

    Returns the output and the names of the modules that ran. Tensors deeper inside a module's
    output than its first level are no output of its own. ``note`` runs inside forward hooks, so it
    must not change the tensor.
    """
    numbers: Counter[str] = Counter()

    def note_call(name: str, module: nn.Module, args: Any, output: Any) -> None:
        path, tensor = nested.find(output) or ((), None)
        # tensors deeper down are no output of the module's own, and nested ones have no shape
        if tensor is not None and len(path) < 2 and not tensor.is_nested:
            note((name, numbers[name]), module, output, tensor)
            numbers[name] += 1

    with untouched(model, grad=grad), HookGroup(model) as group:
        for name in filter(None, hookable(model)):
            group.forward(name, partial(note_call, name))
        ran = executed_modules(group, model)
        return inputs.call(model), ran


_BY_ELEMENT = (
    nn.modules.dropout._DropoutNd,
    nn.Identity,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Hardswish,
    nn.Sigmoid,
    nn.Tanh,
)
"""Modules that keep the layout of their input."""


def executed_modules(group: HookGroup, model: nn.Module) -> list[str]:
    """The names of the modules without parts that run while ``group`` is alive: the path of inputs
    through a network.

    The list fills up during the pass. If all modules with parts are `nn.Sequential`, it is known
    beforehand.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> with HookGroup(model) as group:
    ...     ran = executed_modules(group, model)
    ...     _ = model(torch.ones(1, 1, 4, 4))
    >>> ran
    ['0', '1']
    """
    names = []
    for module, name in modules_of(model).items():
        if not module._modules:
            names.append(name)
        elif not runs_in_order(module):
            return note_runs(group, leaves(model))
    return names


T = TypeVar("T")


def last_of_place(by_call: Mapping[CallKey, T], place: LayerPlace) -> T | None:
    """The value in ``by_call`` of the module call that a layer's name stands for: the named call,
    or else the last.

    None if the layer was not called. ``by_call`` must be in the order of the pass.
    """
    values_of_layer = [
        value
        for (name, number), value in by_call.items()
        if name == place.layer and place.call in (None, number)
    ]
    return values_of_layer[-1] if values_of_layer else None


@dataclass(frozen=True)
class ForwardGraph:
    """The graph of one forward pass: its output, and where the tensor of each call is in it."""

    output: Any
    edges: Mapping[CallKey, GradientEdge]


class ModuleCallRecorder:
    """The calls of modules in a pass of ``count`` images of ``size``; of a ``source``, whether they
    depend on it."""

    def __init__(self, size: Size, source: Tensor | None, count: int = 1) -> None:
        """Begin a record of the calls of a network's modules in one pass, for its summary.

        ``size`` is that of the input in pixels, ``count`` the number of images in the batch;
        ``source`` is the leaf that the pass is run on, or None if no graph can be recorded. `take`
        fills the rest.
        """
        self.calls: list[ModuleCall] = []
        self.open: dict[CallKey, LayoutReading] = {}
        """The calls whose output may be read in several ways."""
        self.unreached: dict[CallKey, tuple[float, float]] = {}
        """The calls that no gradient leads from to ``source``, and what shows whether they change
        with it."""
        self.edges: dict[CallKey, GradientEdge] = {}
        """Where each call's tensor is in the graph."""
        self._size = size
        self._count = count
        self._previous: Tensor | None = None
        """The tensor that the latest call returned."""
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """The tensors that calls returned, by id, each with its version then."""
        self._layouts: dict[Size, Layout] = {}
        """The latest layout that a module's class told, by the shape of its output."""
        self._takes_frames = False
        """Whether a convolution has taken each frame of a video as an image."""
        self._reach = None if source is None else Reach([source])
        """What the graph leads back from to ``source``."""

    def run(self, model: nn.Module, inputs: Inputs, *, grad: bool = False) -> Self:
        """Run a network, and record the calls of its modules, its ``output``, and the names of the
        modules that ``ran``.

        With ``grad``, the graph is kept, which shows what calls depend on.
        """
        self.output, self.ran = run_noting_calls(model, inputs, self.take, grad=grad)
        return self

    def take(self, key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        """Record one call of a module: its shape as for one image, how the output may be read, and
        what it depends on.

        Called in the order of the pass. Weak references are kept to the tensors, to see when one is
        returned again. The network's summary, by which layers are listed and chosen, is made of
        these records.
        """
        reference, version = self._seen.get(id(tensor), (None, 0))
        returned = reference is not None and reference() is tensor and version == _version(tensor)
        passes_on = returned and tensor is self._previous
        again = returned and output is not tensor and not passes_on
        shape = tuple(tensor.shape)  # as one image would have it
        frames = layouts.frames_in_batch(shape, self._size, self._count)
        if frames or shape[:1] == (self._count,):
            shape = (frames or 1, *shape[1:])
        elif len(shape) == 3 and shape[1] == self._count:
            shape = (shape[0], 1, shape[2])
        # the values of a spectrum lie nowhere
        reading = LayoutReading() if tensor.is_complex() else self._read(module, shape)
        if reading.open:
            self.open[key] = reading
        grid = None if reading.open else reading.likeliest  # open layouts are decided later
        depends = self._reach is None or self._reach.of(tensor.grad_fn)
        if not depends:
            self.unreached[key] = _figures(tensor.detach())
        if tensor.requires_grad:
            self.edges[key] = get_gradient_edge(tensor)
        kind = type(module).__name__
        self.calls.append(
            ModuleCall(key[0], kind, shape, grid, passes_on, again, key[1], depends=depends)
        )
        self._previous = tensor
        self._seen[id(tensor)] = (weakref.ref(tensor), _version(tensor))

    def _read(self, module: nn.Module, shape: Size) -> LayoutReading:
        """How the output of a module's call may be read as a map; frames of a video alone, once a
        convolution took them so.

        Changes `_takes_frames`, so it depends on the order of the calls.
        """
        frames = layouts.frames_in_batch(shape, self._size)
        if frames and len(shape) == 4 and layouts.layout_of(module, shape, self._size) == "NCHW":
            self._takes_frames = True
        if not frames or not self._takes_frames:
            return self._read_image(module, shape, self._size)
        reading = self._read_image(module, (1, *shape[1:]), self._size[1:])
        return replace(reading, grids=tuple(grid.folded_from(frames) for grid in reading.grids))

    def _read_image(self, module: nn.Module, shape: Size, size: Size) -> LayoutReading:
        """How a module's output for one image may be read as a map: with channels first or last.

        ``size`` is the input's. Most modules keep the layout of the last one whose class says its
        layout. Sequences of tokens stay open here; where values come from decides later. Feature
        maps are laid out for methods by this.
        """
        layout = layouts.layout_of(module, shape, size)
        if len(shape) <= 3:
            # a sequence of tokens, unless the module puts channels first, as a one-dimensional
            # convolution
            may_be_tokens = len(shape) == 3 and layout != "NCHW"
            return LayoutReading(open=may_be_tokens and len(size) > 1)
        if layout is not None:
            self._layouts[shape] = layout
        if shape[0] != 1:
            return LayoutReading()
        latest = self._layouts.get(shape)
        # a map with its dimensions exchanged would have this shape too
        may_be_turned = len(set(shape[1:])) == 1 or (len(shape) == 5 and shape[1] == shape[2])
        if layout is not None or latest is None or not may_be_turned:
            return layouts.read_map(shape, size, latest)
        reading = layouts.read_map(shape, size, None)
        grids = sorted(reading.grids, key=lambda grid: grid.layout != latest)
        return replace(reading, grids=tuple(grids), believed=isinstance(module, _BY_ELEMENT))


def _version(tensor: Tensor) -> int:
    """How often a tensor has been overwritten, by autograd's count; 0 in inference mode, which does
    not count.

    By it, a tensor that a module returns again is told from one that was overwritten.
    """
    return 0 if tensor.is_inference() else tensor._version


def record(model: nn.Module, inputs: Inputs, kept: int = 0) -> ModuleCallRecorder:
    """Run a network once, and record its calls with their layouts and dependence on the input, for
    its summary.

    The graph shows which calls depend on what is explained; of a network that cannot be recorded,
    all may. The graph keeps ``kept`` bytes of values for a backward pass.
    """
    size = tuple(inputs.x.shape[2:])
    count = len(inputs)
    if inputs.x.is_floating_point():
        source = inputs.x.clone().requires_grad_()
        recorder = ModuleCallRecorder(size, source, count)
        try:
            with keeping_values(kept):
                return recorder.run(model, inputs.replaced(source), grad=True)
        # the network may overwrite views, or differentiate something itself
        except Exception as error:
            if isinstance(error, ExplainError) or came_by_signal(error):
                raise
    return ModuleCallRecorder(size, None, count).run(model, inputs)


def _figures(tensor: Tensor) -> tuple[float, float]:
    """Two numbers by which two runs of a layer are compared: its sum and a weighted sum, which
    change when it does.

    Inside a transform of `torch.func`, of all that it maps. In float64, so that equal runs give
    equal numbers.
    """
    values = without_proxy(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    values = values.double().flatten()
    weights = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    return float(values.sum()), float((values * weights).sum())


def tensors_in(output: Any, most: int | None = 1) -> list[Tensor]:
    """The tensors in a model's output: itself, or those on the first level of a container or
    object; down to level ``most``, or with None all.

    Summaries look among them for scores and maps of classes.
    """
    container = (
        output
        if isinstance(output, Tensor) or nested.items(output)
        else getattr(output, "__dict__", {})
    )
    return [tensor for path, tensor in nested.paths(container) if most is None or len(path) <= most]
