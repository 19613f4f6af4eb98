"""The calls that the modules of a network make on one input, and which of them a name stands for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import Node

from explain import nested
from explain.errors import ExplainError
from explain.hooks import HookGroup, Where, select, untouched, unwrapped
from explain.inputs import Inputs, InputsLike, as_inputs
from explain.interrupts import came_by_signal
from explain.layers.grid import MAPS, Grid, Layout, Size
from explain.layers.probe import altered, corners, decide
from explain.layers.readings import Reading, layout_of, read_map, read_tokens
from explain.layers.spatial import Grids

Place: TypeAlias = "tuple[str, int]"
"""A call: the module's name, and which of its calls it is, counted from 0."""
Note: TypeAlias = Callable[[Place, nn.Module, Any, torch.Tensor], None]
"""Told of a call: its place, the module, what it gave, and the tensor in that."""


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
    """How the output may be read, where it has no grid because neither shape nor network tell."""

    @property
    def place(self) -> Place:
        """The module's name, and which of its calls this is."""
        return self.name, self.number

    @property
    def label(self) -> str:
        """What to name this call by: the module's name stands for its last."""
        return self.name if self.last else f"{self.name}@{self.number}"


@dataclass(frozen=True)
class Look:
    """What one forward pass on one image showed, or on the whole batch where the network takes no single image."""

    calls: tuple[Call, ...]
    gives_scores: bool
    """Whether the output has a row of numbers for the image, as a classifier's has."""
    answers: frozenset[int] = frozenset()
    """The number of channels of outputs that are as large as the input: a map of classes, for example."""
    heads: int = 1
    """How many outputs have a row of numbers for the image."""
    alone: bool = True
    """Whether the network takes a single image."""
    chosen: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What has been chosen on account of it."""

    @property
    def sizes(self) -> list[Size]:
        """The sizes of all maps, in their order."""
        return list(dict.fromkeys(size for _, size in _maps_of(self.calls)))

    def call_of(self, name: str, number: int | None) -> Call | None:
        """The call of a layer with this number, or its last."""
        calls = [call for call in self.calls if call.name == name and number in (None, call.number)]
        return calls[-1] if calls else None


def _maps_of(calls: Iterable[Call]) -> list[tuple[int, Size]]:
    """The channels and sizes of all maps, in their order."""
    maps = [(c.shape, c.grid) for c in calls if c.grid is not None and c.grid.layout in MAPS]
    return list(dict.fromkeys((shape[MAPS[grid.layout]], grid.size) for shape, grid in maps))


def list_layers(model: nn.Module, x: InputsLike) -> list[Call]:
    """Run ``model`` on the first image of ``x`` and list the calls of its modules, as they return.

    ``x`` is a tensor ``(N, C, H, W)``, or several inputs as for `explain.attribute`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
    >>> [(call.name, call.shape) for call in list_layers(model, torch.zeros(1, 3, 4, 4))]
    [('0', (1, 8, 2, 2)), ('1', (1, 8, 2, 2)), ('2', (1, 32))]
    """
    return list(take_look(unwrapped(model), as_inputs(x)).calls)


KEPT = 16  # looks at a network, each for another size of inputs
_looks: weakref.WeakKeyDictionary[nn.Module, dict[Any, Look]] = weakref.WeakKeyDictionary()
_tokens: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
"""What stands for a module in a key: unlike its id, nothing else will ever have it."""


def remembered(model: nn.Module, inputs: Inputs) -> Look:
    """Look at a network once, for as long as it has the same modules and is given inputs of the same sizes."""
    if not all(isinstance(value, (int, float, str, NoneType)) for value in inputs.constants):
        return take_look(model, inputs)  # who knows what it says
    modules = tuple(_tokens.setdefault(module, object()) for module in model.modules())
    key = (inputs.path, inputs.sizes, inputs.constants, modules)
    known = _looks.setdefault(model, {})
    look = known.get(key) or known.setdefault(key, take_look(model, inputs))  # of two threads, the first one's
    for old in list(known)[:-KEPT]:
        known.pop(old, None)
    return look


def forget(model: nn.Module) -> None:
    """Look at a network again the next time: it may have been changed in ways that its modules do not show."""
    _looks.pop(model, None)


def take_look(model: nn.Module, inputs: Inputs) -> Look:
    """Run a network on one image and note every call; one that was exported for a fixed number of images, on all."""
    try:
        return _take_look(model, inputs.first())
    except ExplainError:
        raise
    except Exception as error:
        if len(inputs) == 1:
            raise
        failed = error
    try:
        return replace(_take_look(model, inputs), alone=False)
    except Exception:
        raise failed from None


def _take_look(model: nn.Module, inputs: Inputs) -> Look:
    inputs = inputs.detached()
    traced = bool(inputs.others)
    if traced:
        inputs = inputs.replaced(inputs.x.clone().requires_grad_())
    notes = _Notes(tuple(inputs.x.shape[2:]), inputs.x if traced else None, len(inputs))
    output = _watched(model, inputs, notes.take, grad=traced)
    if traced:
        notes.calls = _with_changes(notes.calls, model, inputs.detached())
    numbers = {call.name: call.number for call in notes.calls}
    calls = tuple(replace(call, last=call.number == numbers[call.name]) for call in notes.calls)
    if any(call.grid is not None and call.grid.layout == "tokens first" for call in calls):
        calls = _really_first(calls, model, inputs)
    if notes.open:
        calls = _probed(calls, notes.open, model, inputs.detached())
    found = tensors_in(output)
    answers = frozenset(t.shape[1] for t in found if t.ndim > 3 and tuple(t.shape[2:]) == tuple(inputs.x.shape[2:]))
    rows = [t for t in found if t.ndim <= 2 and t.numel() and t.shape[:1] in ((), (len(inputs),))]
    return Look(calls, bool(rows), answers, len(rows))


def _with_changes(calls: list[Call], model: nn.Module, inputs: Inputs) -> list[Call]:
    """Note what changes with the explained input, though no gradient leads there: it may be computed without any."""
    before, after = (_figures(model, inputs.replaced(x)) for x in (inputs.x, 0.5 * inputs.x.flip(-1) + 0.1))
    changed = [before.get(call.place) != after.get(call.place) for call in calls]
    return [replace(call, depends=call.depends or other) for call, other in zip(calls, changed, strict=True)]


def _figures(model: nn.Module, inputs: Inputs) -> dict[Place, tuple[float, float]]:
    """Two figures of what each call gives, which change when it does."""
    found: dict[Place, tuple[float, float]] = {}

    def note(place: Place, module: nn.Module, output: Any, tensor: torch.Tensor) -> None:
        values = tensor.detach().double()
        weights = torch.linspace(1, 2, values.numel(), dtype=torch.float64, device=values.device)
        found[place] = float(values.sum()), float((values.flatten() * weights).sum())

    _watched(model, inputs, note)
    return found


def _really_first(calls: tuple[Call, ...], model: nn.Module, inputs: Inputs) -> tuple[Call, ...]:
    """Tell tokens of one image from one token of each of an image's windows, by running the network on two images."""
    shapes: dict[Place, Size] = {}

    def note(place: Place, module: nn.Module, output: Any, tensor: torch.Tensor) -> None:
        shapes[place] = tuple(tensor.shape)

    try:
        _watched(model, inputs.rows(torch.zeros(2, dtype=torch.long)).detached(), note)
    except Exception as error:  # it takes one image at a time, which leaves this open
        if came_by_signal(error):
            raise
        return calls
    first = [call.grid is not None and call.grid.layout == "tokens first" for call in calls]
    real = [shapes.get((call.name, call.number), ())[1:2] == (2,) for call in calls]
    return tuple(replace(c, grid=None) if f and not r else c for c, f, r in zip(calls, first, real, strict=True))


def _probed(
    calls: tuple[Call, ...], open_: Mapping[Place, Reading], model: nn.Module, inputs: Inputs
) -> tuple[Call, ...]:
    """Decide how calls are to be read that shapes and classes leave open; who is not clear has no grid, but a doubt."""
    changes = _changes(frozenset(open_), model, inputs)

    def settled(call: Call) -> Call:
        if call.place not in open_:
            return call
        reading = open_[call.place]
        grids = reading.grids
        grid = decide(grids, changes[call.place]) if call.place in changes else None
        grid = reading.likeliest if grid is None and reading.believed else grid
        return replace(call, grid=grid, doubt="" if grid else " or ".join(each.described for each in grids))

    return tuple(map(settled, calls))


def _changes(places: frozenset[Place], model: nn.Module, inputs: Inputs) -> dict[Place, list[torch.Tensor]]:
    """How what calls give changes with each corner of the input; without those whose shape changes."""
    tried = [inputs.x, *(altered(inputs.x, corner) for corner in corners(inputs.x.ndim - 2))]
    found: dict[Place, list[torch.Tensor]] = {}
    for number, x in enumerate(tried):

        def note(place: Place, module: nn.Module, output: Any, tensor: torch.Tensor, number: int = number) -> None:
            if place not in places:
                return
            if number == 0:
                found[place] = [tensor.detach().clone()]
            elif place in found and found[place][0].shape == tensor.shape:
                found[place].append(tensor.detach().double() - found[place][0])

        try:
            _watched(model, inputs.replaced(x), note)
        except Exception as error:  # a network that does not take altered inputs leaves everything open
            if came_by_signal(error):
                raise
            return {}
    return {place: changes for place, (_, *changes) in found.items() if len(changes) == len(tried) - 1}


def _watched(model: nn.Module, inputs: Inputs, note: Note, *, grad: bool = False) -> Any:
    """Run a network, and note every call of its modules that gives a tensor; return the output."""
    numbers: Counter[str] = Counter()

    def take(name: str, module: nn.Module, args: Any, output: Any) -> None:
        path, tensor = nested.find(output) or ((), None)
        if tensor is not None and len(path) < 2:  # what is deeper down is no output of the module's own
            note((name, numbers[name]), module, output, tensor)
            numbers[name] += 1

    with untouched(model, grad=grad), HookGroup(model) as group:
        for name, _ in model.named_modules():
            if name:
                group.forward(name, partial(take, name))
        return inputs.call(model)


def _of_one(shape: Size, count: int) -> Size:
    """The shape that one image would have of what was seen of several."""
    if shape[:1] == (count,):
        return (1, *shape[1:])
    return (shape[0], 1, shape[2]) if len(shape) == 3 and shape[1] == count else shape


_BY_ELEMENT = (nn.modules.dropout._DropoutNd, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh)
"""What keeps the layout of its input."""


class _Notes:
    """Notes the calls of modules; of ``source``, if it is given, whether they depend on it."""

    def __init__(self, size: Size, source: torch.Tensor | None, count: int = 1) -> None:
        self.calls: list[Call] = []
        self.open: dict[Place, Reading] = {}
        """The calls whose output may be read in several ways."""
        self._size, self._source, self._count = size, source, count
        self._previous: torch.Tensor | None = None
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._layouts: dict[Size, Layout] = {}
        self._sequences: set[Size] = set()
        self._reaching: dict[Node, bool] = {}

    def take(self, place: Place, module: nn.Module, output: Any, tensor: torch.Tensor) -> None:
        name, number = place
        returned = self._was_returned(tensor)
        passes_on = returned and tensor is self._previous
        again = returned and output is not tensor and not passes_on
        shape = _of_one(tuple(tensor.shape), self._count)
        reading = self._read(module, shape)
        grid = reading.likeliest
        if reading.open:
            self.open[place] = reading
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
        maps = _maps_of(self.calls)
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


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The output, or the tensors right in it, which may be an object of any class."""
    found = output if isinstance(output, torch.Tensor) or nested.items(output) else getattr(output, "__dict__", {})
    return [tensor for path, tensor in nested.paths(found) if len(path) < 2]


def grids_of(model: nn.Module, inputs: Inputs) -> Grids:
    """What the tensors of a network are laid out on for these inputs; how tokens lie is found by looking, once."""
    look = cache(partial(remembered, model, inputs))

    def layout(layer: str, shape: Size) -> Layout | None:
        return layout_of(model.get_submodule(split_call(layer)[0]), shape, tuple(inputs.x.shape[2:]))

    def call(layer: str) -> Call | None:
        name, number = split_call(layer)
        module = model.get_submodule(name)  # one that has several names was noted under its first
        first = next(known for known, each in model.named_modules() if each is module)
        return look().call_of(first, number)

    def grid(layer: str) -> Grid | None:
        known = call(layer)
        return None if known is None else known.grid

    def doubt(layer: str) -> str:
        known = call(layer)
        return "" if known is None else known.doubt

    size, strict = tuple(inputs.x.shape[2:]), bool(inputs.others)
    return Grids(size, len(inputs), lambda: look().sizes, grid, layout, strict, doubt)


def of_other_images(model: nn.Module, inputs: Inputs) -> set[Place]:
    """The calls, by name and number, that did not depend on what is explained but may on other images."""
    if not inputs.others:
        return set()
    return {(call.name, call.number) for call in remembered(model, inputs).calls if not call.depends}


def split_call(layer: str) -> tuple[str, int | None]:
    """Take a layer's name apart from which of its calls is meant; None is the last.

    >>> split_call("encoder.conv@0"), split_call("encoder.conv")
    (('encoder.conv', 0), ('encoder.conv', None))
    """
    name, at, number = layer.rpartition("@")
    return (name, int(number)) if at and number.isdecimal() else (layer, None)


def find_layers(model: nn.Module, inputs: Inputs, where: Where) -> list[str]:
    """Name the layers that a caller means, in their order; ``name@0`` is the first call of one that is called often.

    A layer that sees several inputs one after the other, of which one is explained, stands for its last call that
    depends on that one.

    Raises:
        LayerError: a name or pattern matches nothing, or a module is not part of the model.
    """
    items = [where] if isinstance(where, (str, nn.Module, type)) else where
    several = [*items] if isinstance(items, Iterable) else []
    if not several:
        return list(select(model, items))  # which says what is wrong with it
    found: dict[str, None] = {}
    for item in several:
        plain, number = split_call(item) if isinstance(item, str) else (item, None)
        for name in select(model, plain):
            found[name if number is None else f"{name}@{number}"] = None
    return [_dependent(model, inputs, name) for name in found] if inputs.others else list(found)


def _dependent(model: nn.Module, inputs: Inputs, layer: str) -> str:
    name, number = split_call(layer)
    calls = [call for call in remembered(model, inputs).calls if call.name == name and call.depends]
    return layer if number is not None or not calls else calls[-1].label
