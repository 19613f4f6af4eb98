"""What the modules of a network return in one forward pass, and which call returned the tensor that a module takes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import Node

from explain._utils import nested
from explain.data.inputs import Inputs
from explain.hooks import HookGroup, untouched
from explain.hooks.unwrap import hookable, leaves
from explain.layers.feature_maps import Grids
from explain.layers.layouts import MAPS, Grid, Layout, LayoutReading, Size, layout_of, read_map, read_tokens

CallKey: TypeAlias = "tuple[str, int]"
"""A call: the module's name, and which of its calls it is, counted from 0."""
Note: TypeAlias = Callable[[CallKey, nn.Module, Any, torch.Tensor], None]
"""Called for each call with its key, the module, its output, and the tensor in that."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module during a forward pass: dotted name, class, output shape, and spatial grid if it has one."""

    name: str
    kind: str
    shape: Size
    grid: Grid | None
    passes_on: bool
    """Whether the output is the very tensor that the previous call returned, unaltered (containers, identities)."""
    again: bool = False
    """Whether it comes beside others, and had been returned before the previous call: then it may not be used again."""
    number: int = 0
    """Which call of this module it is, counted from 0."""
    last: bool = True
    """Whether it is the module's last."""
    depends: bool = True
    """Whether the output depends on what is explained; always, where the model takes nothing else."""
    doubt: str = ""
    """How the output may be read, if neither its shape nor the network shows which grid it has."""

    @property
    def key(self) -> CallKey:
        """The module's name, and which of its calls this is."""
        return self.name, self.number

    @property
    def label(self) -> str:
        """What to name this call by: the module's name stands for its last."""
        return self.name if self.last else f"{self.name}@{self.number}"


def maps_of(calls: Iterable[ModuleCall]) -> list[tuple[int, Size]]:
    """The channels and sizes of all maps, in their order."""
    maps = [(c.shape, c.grid) for c in calls if c.grid is not None and c.grid.layout in MAPS]
    return list(dict.fromkeys((shape[grid.of_channels], grid.size) for shape, grid in maps))


def run_noting_calls(
    model: nn.Module, inputs: Inputs, note: Note, *, grad: bool = False, ran: list[str] | None = None
) -> Any:
    """Run a network, and note every call of its modules that gives a tensor; in ``ran``, the modules that were run.

    Returns:
        The network's output.
    """
    numbers: Counter[str] = Counter()

    def take(name: str, module: nn.Module, args: Any, output: Any) -> None:
        path, tensor = nested.find(output) or ((), None)
        if tensor is not None and len(path) < 2:  # what is deeper down is no output of the module's own
            note((name, numbers[name]), module, output, tensor)
            numbers[name] += 1

    with untouched(model, grad=grad), HookGroup(model) as group:
        for name in hookable(model):
            if name:
                group.forward(name, partial(take, name))
        seen = None if ran is None else ExecutedModules(group, model)
        output = inputs.call(model)
    if ran is not None and seen is not None:
        ran += seen.names
    return output


def _of_one(shape: Size, count: int) -> Size:
    """The shape that one image would have of what was seen of several."""
    if shape[:1] == (count,):
        return (1, *shape[1:])
    return (shape[0], 1, shape[2]) if len(shape) == 3 and shape[1] == count else shape


_BY_ELEMENT = (nn.modules.dropout._DropoutNd, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh)
"""Modules that keep the layout of their input."""


class ExecutedModules:
    """Which modules without parts run while ``group`` is alive, by name: the way that inputs take through a network.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> with HookGroup(model) as group:
    ...     ran = ExecutedModules(group, model)
    ...     _ = model(torch.ones(1, 1, 4, 4))
    >>> ran.names
    ['0', '1']
    """

    def __init__(self, group: HookGroup, model: nn.Module) -> None:
        self.names: list[str] = []
        last = leaves(model)
        self._named = {module: name for name, module in last.items()}
        if last:
            group.forward(last, self._note)  # one hook on all of them, which is the cheapest

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        self.names.append(self._named[module])


class ModuleCallRecorder:
    """Notes the calls of modules; of ``source``, if it is given, whether they depend on it."""

    def __init__(self, size: Size, source: torch.Tensor | None, count: int = 1) -> None:
        self.calls: list[ModuleCall] = []
        self.open: dict[CallKey, LayoutReading] = {}
        """The calls whose output may be read in several ways."""
        self._size, self._source, self._count = size, source, count
        self._previous: torch.Tensor | None = None
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._layouts: dict[Size, Layout] = {}
        self._sequences: set[Size] = set()
        self._reaching: dict[Node, bool] = {}

    def take(self, key: CallKey, module: nn.Module, output: Any, tensor: torch.Tensor) -> None:
        name, number = key
        returned = self._was_returned(tensor)
        passes_on = returned and tensor is self._previous
        again = returned and output is not tensor and not passes_on
        shape = _of_one(tuple(tensor.shape), self._count)
        reading = self._read(module, shape)
        grid = reading.likeliest
        if reading.open:
            self.open[key] = reading
            grid = None  # until it is known
        kind = type(module).__name__
        depends = self._depends(tensor)
        self.calls.append(ModuleCall(name, kind, shape, grid, passes_on, again, number, depends=depends))
        self._previous = tensor
        self._seen[id(tensor)] = (weakref.ref(tensor), _version(tensor))

    def _read(self, module: nn.Module, shape: Size) -> LayoutReading:
        """How an output may be read; most modules keep the layout of the last one that has a layout of its own."""
        own = layout_of(module, shape, self._size)
        if len(shape) > 3 and own is not None:
            self._layouts[shape] = own
        if len(shape) > 3:
            return self._read_map(shape, own, by_element=isinstance(module, _BY_ELEMENT))
        if len(shape) < 3 or own == "NCHW":  # channels, and positions in one dimension
            return LayoutReading()
        maps = maps_of(self.calls)
        strict = self._source is not None
        if strict or shape[0] != 1:
            grid = Grids(self._size, sizes=lambda: [size for _, size in maps], strict=strict).grid(shape)
            return LayoutReading((grid,) if grid else ())
        before = (*shape[:2], module.in_features) if isinstance(module, nn.Linear) else shape
        channels_last = own == "NHWC" or (before in self._sequences and shape[1] != shape[2])
        reading = read_tokens(shape, self._size, maps, channels_last=channels_last)
        if reading.grids and not reading.open:
            self._sequences.add(shape)
        return reading

    def _read_map(self, shape: Size, own: Layout | None, *, by_element: bool) -> LayoutReading:
        if shape[0] != 1:
            return LayoutReading()
        known = self._layouts.get(shape)
        may_be_turned = len(set(shape[1:])) == 1 or (len(shape) == 5 and shape[1] == shape[2])  # and keep its shape
        if own is not None or known is None or not may_be_turned:
            return read_map(shape, self._size, own or known)
        reading = read_map(shape, self._size, None)
        first = [grid for grid in reading.grids if grid.layout == known]
        return replace(reading, grids=tuple(dict.fromkeys([*first, *reading.grids])), believed=by_element)

    def _was_returned(self, tensor: torch.Tensor) -> bool:
        known, version = self._seen.get(id(tensor), (None, 0))
        return known is not None and known() is tensor and version == _version(tensor)

    def _depends(self, tensor: torch.Tensor) -> bool:
        if self._source is None:
            return True
        return tensor.grad_fn is not None and _reaches(tensor.grad_fn, self._source, self._reaching)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _reaches(node: Node, source: torch.Tensor, known: dict[Node, bool]) -> bool:
    """Whether a leaf is among what a Node was computed from; without recursion, since networks are deep."""
    waiting = [node]
    while waiting:
        here = waiting[-1]
        before = [n for n, _ in here.next_functions if n is not None]
        unknown = [n for n in before if n not in known]
        if here in known or not unknown:
            known[here] = getattr(here, "variable", None) is source or any(known[n] for n in before)
            waiting.pop()
        else:
            waiting += unknown
    return known[node]


_KEEPING = (
    *(nn.Identity, nn.modules.dropout._DropoutNd, nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.GroupNorm),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh),
)
"""Modules that lay out their output like their input."""


def input_producers(model: nn.Module, inputs: Inputs) -> dict[CallKey, CallKey]:
    """Run a network on these inputs; for each call of a module, return the call that gave its first tensor.

    A call that keeps the layout of its input stands for itself where that was computed between modules.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> input_producers(model, Inputs((torch.zeros(1, 3, 4, 4),)))
    {('1', 0): ('0', 0)}
    """
    found: dict[CallKey, CallKey] = {}
    last: dict[int, tuple[torch.Tensor, CallKey]] = {}  # the tensors too: while they are there, nothing has their ids
    called, returned = Counter[str](), Counter[str]()

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        _, tensor = nested.find((args, kwargs)) or ((), None)
        key = name, called[name]
        called[name] += 1
        if tensor is not None and id(tensor) in last:
            found[key] = last[id(tensor)][1]
        elif isinstance(module, _KEEPING):
            found[key] = key

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        _, tensor = nested.find(output) or ((), None)
        if tensor is not None:
            last[id(tensor)] = tensor, (name, returned[name])
            returned[name] += 1

    with untouched(model), HookGroup(model) as group:
        for name, _ in model.named_modules():
            if name:
                group.forward_pre(name, partial(enter, name), with_kwargs=True)
                group.forward(name, partial(leave, name))
        inputs.call(model)
    return found
