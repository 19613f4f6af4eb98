"""The calls that a network makes of its modules: what they return, which one a name stands for, and what share of the
pass follows."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from types import NoneType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from explain._utils import nested
from explain._utils.errors import ExplainError, keywords
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, InputsLike
from explain.hooks import HookGroup
from explain.hooks.graph import Reach, without_values
from explain.hooks.layer_names import LayerPlace, Where, name_of, place_of, select_places
from explain.hooks.preserve import untouched, without_proxy
from explain.hooks.unwrap import hookable, leaves, modules_of, submodule, unwrapped
from explain.layers import layouts, stitched
from explain.layers.frames import with_layout
from explain.layers.layouts import MAPS, Grid, Grids, Layout, LayoutReading, Size
from explain.relevance.positions import EVERYWHERE, UNKNOWN, Positions, PositionTracer, State
from explain.targets.regions import read_class_maps

CallKey: TypeAlias = tuple[str, int]
"""A call: the module's name, and which of its calls it is, counted from 0."""
Note: TypeAlias = Callable[[CallKey, nn.Module, Any, Tensor], None]
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
    """Whether the output depends on what is explained."""
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


def run_noting_calls(model: nn.Module, inputs: Inputs, note: Note, *, grad: bool = False) -> tuple[Any, list[str]]:
    """Run a network, and note every call of its modules that gives a tensor; return the output, and what ran."""
    numbers: Counter[str] = Counter()

    def take(name: str, module: nn.Module, args: Any, output: Any) -> None:
        path, tensor = nested.find(output) or ((), None)
        if tensor is not None and len(path) < 2:  # what is deeper down is no output of the module's own
            note((name, numbers[name]), module, output, tensor)
            numbers[name] += 1

    with untouched(model, grad=grad), HookGroup(model) as group:
        for name in filter(None, hookable(model)):
            group.forward(name, partial(take, name))
        ran = executed_modules(group, model)
        return inputs.call(model), ran


_BY_ELEMENT = (nn.modules.dropout._DropoutNd, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh)
"""Modules that keep the layout of their input."""


def executed_modules(group: HookGroup, model: nn.Module) -> list[str]:
    """Which modules without parts run while ``group`` is alive, by name: the way that inputs take through a network.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> with HookGroup(model) as group:
    ...     ran = executed_modules(group, model)
    ...     _ = model(torch.ones(1, 1, 4, 4))
    >>> ran
    ['0', '1']
    """
    names = list[str]()
    on_leaves(group, model, lambda name, output: names.append(name))
    return names


def on_leaves(group: HookGroup, model: nn.Module, note: Callable[[str, Any], None]) -> None:
    """Call ``note`` with the name and the output of each module that has no others inside, when it has run."""
    last = leaves(model)
    names = {module: name for name, module in last.items()}
    if last:  # one hook on all of them, which is the cheapest
        group.forward(last, lambda module, args, output: note(names[module], output))


class ModuleCallRecorder:
    """Notes the calls of modules; of ``source``, if it is given, whether they depend on it."""

    def __init__(self, size: Size, source: Tensor | None, count: int = 1) -> None:
        self.calls: list[ModuleCall] = []
        self.open: dict[CallKey, LayoutReading] = {}
        """The calls whose output may be read in several ways."""
        self.unreached: dict[CallKey, tuple[float, float]] = {}
        """The calls that no gradient leads from to ``source``, and what shows whether they change with it."""
        self._size, self._count = size, count
        self._previous: Tensor | None = None
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._layouts: dict[Size, Layout] = {}
        self._takes_frames = False
        self._reach = None if source is None else Reach([source])

    def take(self, key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        known, version = self._seen.get(id(tensor), (None, 0))
        returned = known is not None and known() is tensor and version == _version(tensor)
        passes_on = returned and tensor is self._previous
        again = returned and output is not tensor and not passes_on
        shape = tuple(tensor.shape)  # as one image would have it
        frames = layouts.frames_in_batch(shape, self._size, self._count)
        if frames or shape[:1] == (self._count,):
            shape = (frames or 1, *shape[1:])
        elif len(shape) == 3 and shape[1] == self._count:
            shape = (shape[0], 1, shape[2])
        reading = self._read(module, shape)
        if reading.open:
            self.open[key] = reading
        grid = None if reading.open else reading.likeliest  # until it is known
        depends = self._reach is None or self._reach.of(tensor.grad_fn)
        if not depends:
            self.unreached[key] = _figures(tensor.detach())
        about = type(module).__name__, shape, grid, passes_on, again
        self.calls.append(ModuleCall(key[0], *about, key[1], depends=depends))
        self._previous = tensor
        self._seen[id(tensor)] = (weakref.ref(tensor), _version(tensor))

    def _read(self, module: nn.Module, shape: Size) -> LayoutReading:
        """How an output may be read; each frame of a video alone, once an operation of photos has taken them so."""
        frames = layouts.frames_in_batch(shape, self._size)
        if frames and len(shape) == 4 and layouts.layout_of(module, shape, self._size) == "NCHW":
            self._takes_frames = True
        if not frames or not self._takes_frames:
            return self._read_image(module, shape, self._size, maps_of(self.calls))
        of_frames = [call for call in self.calls if call.grid is not None and call.grid.folded]
        maps = [(channels, size[1:]) for channels, size in maps_of(of_frames)]
        reading = self._read_image(module, (1, *shape[1:]), self._size[1:], maps)
        return replace(reading, grids=tuple(grid.folded_from(frames) for grid in reading.grids))

    def _read_image(
        self, module: nn.Module, shape: Size, size: Size, maps: Sequence[tuple[int, Size]]
    ) -> LayoutReading:
        """How an output may be read; most modules keep the layout of the last one that has a layout of its own."""
        own = layouts.layout_of(module, shape, size)
        if len(shape) > 3:
            if own is not None:
                self._layouts[shape] = own
            if shape[0] != 1:
                return LayoutReading()
            known = self._layouts.get(shape)
            may_be_turned = len(set(shape[1:])) == 1 or (len(shape) == 5 and shape[1] == shape[2])  # and keep its shape
            if own is not None or known is None or not may_be_turned:
                return layouts.read_map(shape, size, own or known)
            reading = layouts.read_map(shape, size, None)
            first = [grid for grid in reading.grids if grid.layout == known]
            grids = tuple(dict.fromkeys([*first, *reading.grids]))
            return replace(reading, grids=grids, believed=isinstance(module, _BY_ELEMENT))
        may_be_tokens = len(shape) == 3 and own != "NCHW"  # and not channels, and positions in one dimension
        return LayoutReading(open=may_be_tokens and len(size) > 1)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_KEEPING = (*_BY_ELEMENT, nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Modules that lay out their output like their input."""


def input_producers(model: nn.Module, inputs: Inputs) -> dict[CallKey, CallKey]:
    """Run a network on these inputs; for each call of a module, return the call that gave its first tensor.

    A call that keeps the layout of its input stands for itself where that was computed between modules.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> input_producers(model, Inputs((torch.zeros(1, 3, 4, 4),)))
    {('1', 0): ('0', 0)}
    """
    found: dict[CallKey, CallKey] = {}
    last: dict[int, tuple[Tensor, CallKey]] = {}  # the tensors too: while they are there, nothing has their ids
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
        for name in filter(None, dict(model.named_modules())):
            group.forward_pre(name, partial(enter, name), with_kwargs=True)
            group.forward(name, partial(leave, name))
        inputs.call(model)
    return found


T = TypeVar("T")


@dataclass(frozen=True)
class ForwardSummary:
    """The calls of one forward pass, on one image, or on the batch if the network does not take a single image."""

    calls: tuple[ModuleCall, ...]
    gives_scores: bool
    """Whether the output has a row of numbers for the image, as a classifier's has."""
    answers: frozenset[int] = frozenset()
    """The number of channels of outputs that are as large as the input: a map of classes, for example."""
    outputs: int = 1
    """How many tensors the output has."""
    ran: tuple[str, ...] = ()
    """The modules without parts that ran."""
    alone: bool = True
    """Whether the network takes a single image."""
    chosen: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Layers that were chosen with it."""

    @property
    def sizes(self) -> list[Size]:
        """The sizes of all maps, in their order."""
        return list(dict.fromkeys(size for _, size in maps_of(self.calls)))

    def call_of(self, name: str, number: int | None) -> ModuleCall | None:
        """The call of a layer with this number, or its last."""
        calls = [call for call in self.calls if call.name == name and number in (None, call.number)]
        return calls[-1] if calls else None


@keywords()
def list_layers(model: nn.Module, x: InputsLike) -> list[ModuleCall]:
    """Run ``model`` on the first image of ``x`` and list the calls of its modules, as they return.

    ``x`` is a tensor ``(N, C, H, W)``, or several inputs as for `explain.attribute`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
    >>> [(call.name, call.shape) for call in list_layers(model, torch.zeros(1, 3, 4, 4))]
    [('0', (1, 8, 2, 2)), ('1', (1, 8, 2, 2)), ('2', (1, 32))]
    """
    model = unwrapped(model)
    return list(summarize(model, with_layout(model, x)).calls)


PRODUCERS = "which call gave what a module is given"
PLACES = "where in the photo the values of tensors lie"
SUMMARIES = 16  # of a network, each for another size of inputs
_summaries: weakref.WeakKeyDictionary[nn.Module, dict[Any, ForwardSummary]] = weakref.WeakKeyDictionary()
_tokens: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
"""What stands for a module in a key: unlike an id, it is never used again for another module."""


def summary_of(model: nn.Module, inputs: Inputs, *, whole: bool = False) -> ForwardSummary:
    """Return the summary of a network; it is made once for the same modules and inputs of the same sizes.

    The network runs on the first image, or with ``whole`` on the batch.
    """
    take = partial(summarize, model, inputs, whole=whole)
    if not all(isinstance(value, (int, float, str, NoneType)) for value in inputs.constants):
        return take()  # cannot be a key
    modules = tuple(_tokens.setdefault(module, object()) for module in modules_of(model))
    key = (inputs.path, inputs.sizes, inputs.layout, inputs.constants, modules)
    known = _summaries.setdefault(model, {})
    summary = known.get(key) or known.setdefault(key, take())  # of two threads, the first one's
    for old in list(known)[:-SUMMARIES]:
        known.pop(old, None)
    return summary


def forget_summary(model: nn.Module) -> None:
    """Drop the summaries of a network: it may have changed in ways that its modules do not show."""
    _summaries.pop(model, None)


def summary_is_current(model: nn.Module, inputs: Inputs, ran: Sequence[str]) -> bool:
    """Whether these inputs took the same path through the network as its summary, by the modules in ``ran``.

    Where they did not (an early exit, a flag of the model), the summary is made again: what is then chosen depends on
    these inputs, and not on earlier ones. If the first image alone takes another path than the batch, the batch is run.
    """
    if summary_of(model, inputs).ran == tuple(ran):
        return True
    forget_summary(model)
    if len(inputs) > 1 and summary_of(model, inputs).ran != tuple(ran):
        forget_summary(model)
        summary_of(model, inputs, whole=True)
    return False


def summarize(model: nn.Module, inputs: Inputs, *, whole: bool = False) -> ForwardSummary:
    """Run a network on one image and record every call; one exported for a fixed number of images, on all of them."""
    failed = None
    try:
        if not whole:
            return _summarize_once(model, inputs.first())
    except Exception as error:
        if isinstance(error, ExplainError) or len(inputs) == 1 or came_by_signal(error):
            raise
        failed = error
    try:
        return replace(_summarize_once(model, inputs), alone=False)
    except Exception as error:
        raise error if failed is None or came_by_signal(error) else failed from None


def _summarize_once(model: nn.Module, inputs: Inputs) -> ForwardSummary:
    inputs = inputs.detached()
    recorder, output, ran = _recorded(model, inputs)
    calls = recorder.calls
    chosen = dict[Any, Any]()
    if recorder.open:
        chosen[PLACES] = _located(model, inputs, calls)
        calls = [_laid_out(call, recorder.open.get(call.key), chosen[PLACES]) for call in calls]
    with_map = (call for call in calls if call.grid is not None or call.doubt)
    if inputs.others or len({call.depends for call in with_map}) > 1:  # see what changes though no gradient leads there
        altered, _, _ = _recorded(model, inputs.replaced(0.5 * inputs.x.flip(-1) + 0.1))
        same = {key for key, figures in recorder.unreached.items() if altered.unreached.get(key) == figures}
        calls = [replace(call, depends=call.key not in same) for call in calls]
    numbers = {call.name: call.number for call in calls}
    calls = [replace(call, last=call.number == numbers[call.name]) for call in calls]
    found, count = tensors_in(output), len(inputs)
    maps = [t for t in found if t.ndim > 3 and tuple(t.shape[2:]) == tuple(inputs.x.shape[2:])]
    if (read := read_class_maps(output, count)) is not None:  # also smaller than the input
        maps.append(read.maps)
    answers = frozenset(each.shape[1] for each in maps)
    rows = [t for t in found if t.numel() and (t.ndim <= 2 or t.numel() == len(t)) and t.shape[:1] in ((), (count,))]
    return ForwardSummary(tuple(calls), bool(rows), answers, len(found), tuple(ran), chosen=chosen)


def _recorded(model: nn.Module, inputs: Inputs) -> tuple[ModuleCallRecorder, Any, list[str]]:
    """Run a network; return its calls, its output, and what ran.

    The graph shows which calls depend on what is explained; of a network that cannot be recorded, all may.
    """
    size, count = tuple(inputs.x.shape[2:]), len(inputs)
    if inputs.x.is_floating_point():
        source = inputs.x.clone().requires_grad_()
        recorder = ModuleCallRecorder(size, source, count)
        try:
            with without_values():
                return recorder, *run_noting_calls(model, inputs.replaced(source), recorder.take, grad=True)
        except Exception as error:  # it overwrites views, or differentiates something itself
            if isinstance(error, ExplainError) or came_by_signal(error):
                raise
    recorder = ModuleCallRecorder(size, None, count)
    return recorder, *run_noting_calls(model, inputs, recorder.take)


def _read(model: nn.Module, inputs: Inputs, read: Callable[[CallKey, Tensor], T]) -> dict[CallKey, T]:
    """What can be read off the tensor that each call gives."""
    found: dict[CallKey, T] = {}

    def note(key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        found[key] = read(key, tensor.detach())

    run_noting_calls(model, inputs, note)
    return found


def _figures(tensor: Tensor) -> tuple[float, float]:
    """Two figures of a tensor, which change when it does; inside a transform of `torch.func`, of all that it maps."""
    values = without_proxy(tensor).double().flatten()
    weights = torch.linspace(1, 2, len(values), dtype=torch.float64, device=values.device)
    return float(values.sum()), float((values * weights).sum())


@dataclass(frozen=True)
class _Places:
    """Where in the photo the values of tensors lie: of what calls give, with its shape, and of sequences of tokens."""

    rows: int
    of_calls: Mapping[CallKey, tuple[Size, State]]
    sequences: Mapping[Size, Sequence[Positions]]

    @cached_property
    def of_tokens(self) -> dict[int, Grid | None]:
        """How so many tokens lie: those that modules give, or else all sequences of this length, if they lie alike."""
        of_modules = [(shape, state) for shape, state in self.of_calls.values() if isinstance(state, tuple)]
        others = [(shape, positions) for shape, several in self.sequences.items() for positions in several]
        return self._in_one_way(others) | self._in_one_way(of_modules)

    def _in_one_way(self, sequences: Iterable[tuple[Size, Positions]]) -> dict[int, Grid | None]:
        found: dict[int, set[Grid]] = {}
        for shape, positions in sequences:
            grid = layouts.token_grid(positions, shape, self.rows) if len(shape) == 3 else None
            if grid is not None:
                found.setdefault(shape[grid.of_tokens], set()).add(replace(grid, layout="tokens"))
        return {length: grids.pop() if len(grids) == 1 else None for length, grids in found.items()}

    def as_long(self, shape: Size) -> Grid | None:
        """How the tokens of a tensor lie, if they lie as all others of their number."""
        if shape[0] == self.rows:
            return self.of_tokens.get(shape[1])
        grid = self.of_tokens.get(shape[0]) if shape[1] == self.rows else None
        return None if grid is None else replace(grid, layout="tokens first")


def _located(model: nn.Module, inputs: Inputs, calls: Sequence[ModuleCall]) -> _Places:
    """Run a network, and follow where the values of its tensors lie.

    Two images tell the tokens of one image from single tokens of its windows.
    """
    several = len(inputs) == 1 and any(len(call.shape) == 3 and call.shape[0] != 1 for call in calls)
    for given in ([inputs.rows(torch.zeros(2, dtype=torch.long))] if several else []) + [inputs]:
        try:
            return _located_once(model, given)
        except Exception as error:  # it may take one image alone
            if came_by_signal(error):
                raise
    return _Places(len(inputs), {}, {})


FOLDED = "calls with the first frames of all videos after each other"


def folded_by_time(model: nn.Module, inputs: Inputs, calls: Iterable[ModuleCall]) -> frozenset[CallKey]:
    """The calls whose frames are folded into the batch by time: two videos are run, and the first of them alone."""
    folded = {call.key: call.shape[0] for call in calls if call.grid is not None and call.grid.folded}

    def keep(key: CallKey, tensor: Tensor) -> Any:
        return tensor.clone() if key in folded else None

    try:
        alone = _read(model, inputs.first(), keep)
        among = _read(model, inputs.rows(torch.tensor([0, 1])), keep)
    except Exception as error:  # it takes one video at a time, or as many as there are
        if came_by_signal(error):
            raise
        return frozenset()

    def is_by_time(key: CallKey, frames: int) -> bool:
        own, both = alone[key].double(), among[key].double()
        return bool((both[:frames] - own).abs().sum() > (both[::2] - own).abs().sum())

    ran = folded.keys() & alone.keys() & among.keys()
    return frozenset(key for key in ran if is_by_time(key, folded[key]))


def _located_once(model: nn.Module, inputs: Inputs) -> _Places:
    values = [value for module in modules_of(model) for value in vars(module).values() if isinstance(value, Tensor)]
    constants = [*model.parameters(), *model.buffers(), *values, *inputs.others.values()]
    found: dict[CallKey, tuple[Size, State]] = {}

    def note(key: CallKey, module: nn.Module, output: Any, tensor: Tensor) -> None:
        found[key] = tuple(tensor.shape), tracer.of(tensor)

    with PositionTracer(inputs.x, constants) as tracer:
        run_noting_calls(model, inputs.replaced(inputs.x), note)
    return _Places(len(inputs), found, tracer.sequences)


def _laid_out(call: ModuleCall, reading: LayoutReading | None, located: _Places) -> ModuleCall:
    """Decide how to read a call that its shape and class leave open; an unclear one gets a doubt instead of a grid."""
    if reading is None:
        return call
    shape, positions = located.of_calls.get(call.key, (call.shape, UNKNOWN))
    if len(shape) == 3 and positions in (EVERYWHERE, UNKNOWN):
        grid = located.as_long(shape)
        return replace(call, grid=grid, doubt="" if grid else "tokens in any order")
    known = positions if isinstance(positions, tuple) else ()
    if len(shape) == 3:
        return replace(call, grid=layouts.token_grid(known, shape, located.rows) if known else None)
    grid = layouts.map_grid(known, shape, reading.grids) if known else None
    grid = reading.likeliest if grid is None and reading.believed else grid
    return replace(call, grid=grid, doubt="" if grid else " or ".join(each.described for each in reading.grids))


def tensors_in(output: Any) -> list[Tensor]:
    """The output, or the tensors right in it, which may be an object of any class."""
    found = output if isinstance(output, Tensor) or nested.items(output) else getattr(output, "__dict__", {})
    return [tensor for path, tensor in nested.paths(found) if len(path) < 2]


def grids_of(model: nn.Module, inputs: Inputs) -> Grids:
    """The grids of the tensors of a network for these inputs; how tokens lie is found by running it, once.

    Of a `Stitched` model, they are those of a window: the maps of all windows lie in the same way.
    """
    whole, of_whole = model, inputs
    if isinstance(whole, stitched.Stitched):
        model, inputs = whole.model, whole.first(of_whole)
    summary = cache(partial(summary_of, model, inputs))

    def in_window(layer: str) -> LayerPlace:
        place = place_of(layer, whole)
        if not isinstance(whole, stitched.Stitched):
            return place
        place, call = whole.inside(place), place.call
        count = _calls_in_window(whole, of_whole, place.module)
        return place if call is None else place._replace(call=call % count)

    @cache
    def layout(layer: str, shape: Size) -> Layout | None:
        return layouts.layout_of(submodule(model, in_window(layer).module), shape, tuple(inputs.x.shape[2:]))

    @cache
    def look(layer: str) -> tuple[Grid | None, str]:
        place = in_window(layer)
        name = modules_of(model)[submodule(model, place.module)]  # one that has several names was noted under its first
        found, number = summary(), place.call
        call = found.call_of(name, number)
        if place.part == "input":  # the call that returned it
            if PRODUCERS not in found.chosen:
                given = inputs.first() if found.alone else inputs
                found.chosen[PRODUCERS] = input_producers(model, given.detached())
            producers: dict[CallKey, CallKey] = found.chosen[PRODUCERS]
            numbers = [n for given, n in producers if given == name and number in (None, n)]
            call = found.call_of(*producers[name, max(numbers)]) if numbers else None
        if call is None:
            return None, ""
        grid = call.grid
        if grid is not None and grid.folded and len(inputs) > 1 and by_time(call.key):
            grid = replace(grid, folded="by time")
        return grid, call.doubt

    @cache
    def by_time(key: CallKey) -> bool:
        found = summary()
        if FOLDED not in found.chosen:
            found.chosen[FOLDED] = folded_by_time(model, inputs.detached(), found.calls)
        return key in found.chosen[FOLDED]

    def tokens(length: int) -> Grid | None:
        found = summary()
        if PLACES not in found.chosen:
            one = inputs.first() if found.alone else inputs
            found.chosen[PLACES] = _located(model, one.detached(), found.calls)
        located: _Places = found.chosen[PLACES]
        return located.of_tokens.get(length)

    size, of_text = tuple(inputs.x.shape[2:]), getattr(model, "joint_tokens", None)
    return Grids(size, len(inputs), look, layout, tokens, lambda: summary().sizes, of_text)


def grids_of_photo(model: nn.Module, inputs: Inputs) -> Callable[[str, int], Grid | None]:
    """From a layer, or a part of the attention in one, and the number of its tokens, to how these lie on the photo."""
    grids = grids_of(model, inputs.detached())

    def find(layer: str, length: int) -> Grid | None:
        assert grids.known is not None
        assert grids.tokens is not None
        place = place_of(layer, model)
        is_output = not place.of_attention and place.module in dict(model.named_modules())
        return grids.known(layer)[0] if is_output else grids.tokens(length)

    return find


def _calls_in_window(model: stitched.Stitched, inputs: Inputs, name: str) -> int:
    """How often a module of the segmenter is called for one window."""
    calls = summary_of(model.model, model.first(inputs)).calls
    return max(1, sum(call.name == name for call in calls))


def window_calls(model: nn.Module, inputs: Inputs, layer: str) -> list[str]:
    """The calls that a layer's name stands for: itself, or in a `Stitched` model one call in each window."""
    if not isinstance(model, stitched.Stitched):
        return [layer]
    place = place_of(layer, model)
    count = _calls_in_window(model, inputs, model.inside(place).module)
    number = count - 1 if place.call is None else place.call
    windows = model.count(tuple(inputs.x.shape[2:]))
    return [name_of(place._replace(call=window * count + number)) for window in range(windows)]


def independent_calls(model: nn.Module, inputs: Inputs) -> set[CallKey]:
    """The calls, by name and number, that did not depend on what is explained but may on other images."""
    if not inputs.others:
        return set()
    return {(call.name, call.number) for call in summary_of(model, inputs).calls if not call.depends}


def split_call(layer: str, model: nn.Module | None = None) -> tuple[str, int | None]:
    """Split a layer's name from the number of the call that is meant; None is the last call.

    With a model, a module that has the whole name takes precedence.

    >>> split_call("encoder.conv@0"), split_call("encoder.conv"), split_call("conv:input@1")
    (('encoder.conv', 0), ('encoder.conv', None), ('conv:input', 1))
    """
    place = place_of(layer, model)
    return place.layer, place.call


def find_layers(model: nn.Module, inputs: Inputs, where: Where) -> list[str]:
    """Name the layers that a caller means, in their order; ``name@0`` is the first call of one that is called often.

    ``name:input`` is the first tensor in the input of a layer. A layer that sees several inputs one after the other, of
    which one is explained, stands for its last call that depends on that one.

    Raises:
        LayerError: a name or pattern matches nothing, or a module is not part of the model.
    """
    found = select_places(model, where)
    for i, layer in enumerate(found if inputs.others else ()):
        place = place_of(layer, model)
        calls = [call for call in summary_of(model, inputs).calls if call.name == place.module and call.depends]
        if place.call is None and calls and not calls[-1].last:
            found[i] = name_of(place._replace(call=calls[-1].number))
    return found


def channels_of(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, int]:
    """How many channels the maps of some layers have, as far as the summary of the network shows."""
    summary = summary_of(model, inputs)
    calls = {layer: summary.call_of(*split_call(layer, model)) for layer in layers}
    return {layer: call.shape[call.grid.of_channels] for layer, call in calls.items() if call and call.grid}


def cost_after(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, float]:
    """Estimate which share of a pass follows each of some layers, by the multiplications with weights.

    Each weight of a module is used once for every place of the module's output. What has no weights is not counted.

    >>> from explain.data.inputs import as_inputs
    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(8, 4))
    >>> cost_after(model, as_inputs(torch.zeros(1, 1, 2, 2)), ["0", "1"])  # of 8, 16 and 32
    {'0': 0.8571428571428571, '1': 0.5714285714285714}
    """
    calls = summary_of(model, inputs).calls
    work = []
    for call in calls:  # what a module itself takes for one image, without those inside it
        weights = [p for p in submodule(model, call.name).parameters(recurse=False) if p.ndim > 1]
        outputs = math.prod(call.shape[1:])
        work.append(sum(p.numel() * max(1, outputs // max(1, p.shape[0])) for p in weights))
    total = sum(work)
    found = {}
    for layer in layers:
        name, number = split_call(layer, model)
        places = [i for i, call in enumerate(calls) if call.name == name and number in (None, call.number)]
        found[layer] = sum(work[places[-1] + 1 :]) / total if places and total else 1.0
    return found
