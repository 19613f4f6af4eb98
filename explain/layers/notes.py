"""What the modules of a network give in one forward pass, noted as they return."""

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

from explain import nested
from explain.hooks import HookGroup, hookable, leaves, untouched
from explain.inputs import Inputs
from explain.layers.grid import MAPS, Grid, Layout, Size
from explain.layers.readings import Reading, layout_of, read_map, read_tokens
from explain.layers.spatial import Grids

CallKey: TypeAlias = "tuple[str, int]"
"""A call: the module's name, and which of its calls it is, counted from 0."""
Note: TypeAlias = Callable[[CallKey, nn.Module, Any, torch.Tensor], None]
"""Called for each call with its key, the module, its output, and the tensor in that."""


@dataclass(frozen=True)
class Call:
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


def maps_of(calls: Iterable[Call]) -> list[tuple[int, Size]]:
    """The channels and sizes of all maps, in their order."""
    maps = [(c.shape, c.grid) for c in calls if c.grid is not None and c.grid.layout in MAPS]
    return list(dict.fromkeys((shape[grid.of_channels], grid.size) for shape, grid in maps))


def watched(model: nn.Module, inputs: Inputs, note: Note, *, grad: bool = False, ran: list[str] | None = None) -> Any:
    """Run a network, and note every call of its modules that gives a tensor, and in ``ran`` what `Ran` sees.

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
        seen = None if ran is None else Ran(group, model)
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


class Ran:
    """Which modules without parts run while ``group`` is alive, by name: the way that inputs take through a network.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> with HookGroup(model) as group:
    ...     ran = Ran(group, model)
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


class Notes:
    """Notes the calls of modules; of ``source``, if it is given, whether they depend on it."""

    def __init__(self, size: Size, source: torch.Tensor | None, count: int = 1) -> None:
        self.calls: list[Call] = []
        self.open: dict[CallKey, Reading] = {}
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
        self.calls.append(Call(name, kind, shape, grid, passes_on, again, number, depends=depends))
        self._previous = tensor
        self._seen[id(tensor)] = (weakref.ref(tensor), _version(tensor))

    def _read(self, module: nn.Module, shape: Size) -> Reading:
        """How an output may be read; most modules keep the layout of the last one that has a layout of its own."""
        own = layout_of(module, shape, self._size)
        if len(shape) > 3 and own is not None:
            self._layouts[shape] = own
        if len(shape) > 3:
            return self._read_map(shape, own, by_element=isinstance(module, _BY_ELEMENT))
        if len(shape) < 3 or own == "NCHW":  # channels, and positions in one dimension
            return Reading()
        maps = maps_of(self.calls)
        strict = self._source is not None
        if strict or shape[0] != 1:
            grid = Grids(self._size, sizes=lambda: [size for _, size in maps], strict=strict).grid(shape)
            return Reading((grid,) if grid else ())
        before = (*shape[:2], module.in_features) if isinstance(module, nn.Linear) else shape
        channels_last = own == "NHWC" or (before in self._sequences and shape[1] != shape[2])
        reading = read_tokens(shape, self._size, maps, channels_last=channels_last)
        if reading.grids and not reading.open:
            self._sequences.add(shape)
        return reading

    def _read_map(self, shape: Size, own: Layout | None, *, by_element: bool) -> Reading:
        if shape[0] != 1:
            return Reading()
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
