"""The calls that a network makes of its modules: which one a name stands for, and what share of the pass follows."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import NoneType
from typing import Any

import torch
from torch import nn

from explain._utils import nested
from explain._utils.errors import ExplainError, keywords
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, InputsLike, as_inputs
from explain.hooks.layer_names import Where, name_of, place_of, select_places
from explain.hooks.unwrap import modules_of, unwrapped
from explain.layers.feature_maps import Grids
from explain.layers.layouts import MAPS, Grid, Layout, LayoutReading, Size, altered, corners, decide, layout_of
from explain.layers.outputs import CallKey, ModuleCall, ModuleCallRecorder, input_producers, maps_of, run_noting_calls


@dataclass(frozen=True)
class ForwardSummary:
    """The calls of one forward pass, on one image, or on the batch if the network does not take a single image."""

    calls: tuple[ModuleCall, ...]
    gives_scores: bool
    """Whether the output has a row of numbers for the image, as a classifier's has."""
    answers: frozenset[int] = frozenset()
    """The number of channels of outputs that are as large as the input: a map of classes, for example."""
    heads: int = 1
    """How many outputs have a row of numbers for the image."""
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
    return list(summarize(unwrapped(model), as_inputs(x)).calls)


PRODUCERS = "which call gave what a module is given"
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
    key = (inputs.path, inputs.sizes, inputs.constants, modules)
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
    try:
        return replace(_summarize_once(model, inputs), alone=False) if whole else _summarize_once(model, inputs.first())
    except ExplainError:
        raise
    except Exception as error:
        if whole or len(inputs) == 1 or came_by_signal(error):
            raise
        failed = error
    try:
        return replace(_summarize_once(model, inputs), alone=False)
    except Exception as error:
        raise error if came_by_signal(error) else failed from None


def _summarize_once(model: nn.Module, inputs: Inputs) -> ForwardSummary:
    inputs = inputs.detached()
    traced = bool(inputs.others)
    if traced:
        inputs = inputs.replaced(inputs.x.clone().requires_grad_())
    ran: list[str] = []
    recorder = ModuleCallRecorder(tuple(inputs.x.shape[2:]), inputs.x if traced else None, len(inputs))
    output = run_noting_calls(model, inputs, recorder.take, grad=traced, ran=ran)
    if traced:
        recorder.calls = _with_changes(recorder.calls, model, inputs.detached())
    numbers = {call.name: call.number for call in recorder.calls}
    calls = tuple(replace(call, last=call.number == numbers[call.name]) for call in recorder.calls)
    if any(call.grid is not None and call.grid.layout == "tokens first" for call in calls):
        calls = _really_first(calls, model, inputs)
    if recorder.open:
        calls = _probed(calls, recorder.open, model, inputs.detached())
    found = tensors_in(output)
    answers = frozenset(t.shape[1] for t in found if t.ndim > 3 and tuple(t.shape[2:]) == tuple(inputs.x.shape[2:]))
    rows = [t for t in found if t.ndim <= 2 and t.numel() and t.shape[:1] in ((), (len(inputs),))]
    return ForwardSummary(calls, bool(rows), answers, len(rows), tuple(ran))


def _with_changes(calls: list[ModuleCall], model: nn.Module, inputs: Inputs) -> list[ModuleCall]:
    """Note what changes with the explained input although no gradient leads there."""
    before, after = (_figures(model, inputs.replaced(x)) for x in (inputs.x, 0.5 * inputs.x.flip(-1) + 0.1))
    changed = [before.get(call.key) != after.get(call.key) for call in calls]
    return [replace(call, depends=call.depends or other) for call, other in zip(calls, changed, strict=True)]


def _figures(model: nn.Module, inputs: Inputs) -> dict[CallKey, tuple[float, float]]:
    """Two figures of what each call gives, which change when it does."""
    found: dict[CallKey, tuple[float, float]] = {}

    def note(key: CallKey, module: nn.Module, output: Any, tensor: torch.Tensor) -> None:
        values = tensor.detach().double()
        weights = torch.linspace(1, 2, values.numel(), dtype=torch.float64, device=values.device)
        found[key] = float(values.sum()), float((values.flatten() * weights).sum())

    run_noting_calls(model, inputs, note)
    return found


def _really_first(calls: tuple[ModuleCall, ...], model: nn.Module, inputs: Inputs) -> tuple[ModuleCall, ...]:
    """Tell the tokens of one image from single tokens of its windows, by running the network on two images."""
    shapes: dict[CallKey, Size] = {}

    def note(key: CallKey, module: nn.Module, output: Any, tensor: torch.Tensor) -> None:
        shapes[key] = tuple(tensor.shape)

    try:
        run_noting_calls(model, inputs.rows(torch.zeros(2, dtype=torch.long)).detached(), note)
    except Exception as error:  # it takes one image at a time, which leaves this open
        if came_by_signal(error):
            raise
        return calls
    first = [call.grid is not None and call.grid.layout == "tokens first" for call in calls]
    real = [shapes.get((call.name, call.number), ())[1:2] == (2,) for call in calls]
    return tuple(replace(c, grid=None) if f and not r else c for c, f, r in zip(calls, first, real, strict=True))


def _probed(
    calls: tuple[ModuleCall, ...], readings: Mapping[CallKey, LayoutReading], model: nn.Module, inputs: Inputs
) -> tuple[ModuleCall, ...]:
    """Decide how to read calls that shapes and classes leave open; unclear ones get a doubt instead of a grid."""
    changes = _changes(frozenset(readings), model, inputs)
    clear = {key: decide(readings[key].grids, changes[key]) for key in readings.keys() & changes.keys()}

    def settled(call: ModuleCall) -> ModuleCall:
        if call.key not in readings:
            return call
        reading = readings[call.key]
        grids = reading.grids
        grid = clear.get(call.key) or _as_elsewhere(grids, clear.values())
        grid = reading.likeliest if grid is None and reading.believed else grid
        return replace(call, grid=grid, doubt="" if grid else " or ".join(each.described for each in grids))

    return tuple(map(settled, calls))


def _as_elsewhere(grids: Sequence[Grid], clear: Iterable[Grid | None]) -> Grid | None:
    """The grid of as many tokens elsewhere in the network, where it is the only one."""
    if len(grids) != 1 or grids[0].layout in MAPS:
        return None
    own = grids[0]
    found = {each for each in clear if each is not None and each.layout == own.layout and each.skip == own.skip}
    alike = [each for each in found if each.height * each.width == own.height * own.width]
    return alike[0] if len(alike) == 1 else None


def _changes(keys: frozenset[CallKey], model: nn.Module, inputs: Inputs) -> dict[CallKey, list[torch.Tensor]]:
    """How the outputs of calls change with each corner of the input; without those whose shape changes."""
    tried = [inputs.x, *(altered(inputs.x, corner) for corner in corners(inputs.x.ndim - 2))]
    found: dict[CallKey, list[torch.Tensor]] = {}
    for number, x in enumerate(tried):

        def note(key: CallKey, module: nn.Module, output: Any, tensor: torch.Tensor, number: int = number) -> None:
            if key not in keys:
                return
            if number == 0:
                found[key] = [tensor.detach().clone()]
            elif key in found and found[key][0].shape == tensor.shape:
                found[key].append(tensor.detach().double() - found[key][0])

        try:
            run_noting_calls(model, inputs.replaced(x), note)
        except Exception as error:  # a network that does not take altered inputs leaves everything open
            if came_by_signal(error):
                raise
            return {}
    return {key: changes for key, (_, *changes) in found.items() if len(changes) == len(tried) - 1}


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The output, or the tensors right in it, which may be an object of any class."""
    found = output if isinstance(output, torch.Tensor) or nested.items(output) else getattr(output, "__dict__", {})
    return [tensor for path, tensor in nested.paths(found) if len(path) < 2]


def grids_of(model: nn.Module, inputs: Inputs) -> Grids:
    """The grids of the tensors of a network for these inputs; how tokens lie is found by running it, once."""
    summary = cache(partial(summary_of, model, inputs))

    def layout(layer: str, shape: Size) -> Layout | None:
        return layout_of(model.get_submodule(place_of(layer, model).module), shape, tuple(inputs.x.shape[2:]))

    @cache
    def call(layer: str) -> ModuleCall | None:
        place = place_of(layer, model)
        module = model.get_submodule(place.module)  # one that has several names was noted under its first
        first = modules_of(model)[module]
        return (
            _giver(model, inputs, summary(), first, place.call)
            if place.of_input
            else summary().call_of(first, place.call)
        )

    def grid(layer: str) -> Grid | None:
        known = call(layer)
        return None if known is None else known.grid

    def doubt(layer: str) -> str:
        known = call(layer)
        return "" if known is None else known.doubt

    size, strict = tuple(inputs.x.shape[2:]), bool(inputs.others)
    return Grids(size, len(inputs), lambda: summary().sizes, grid, layout, strict, doubt)


def _giver(
    model: nn.Module, inputs: Inputs, summary: ForwardSummary, name: str, number: int | None
) -> ModuleCall | None:
    """The call that returned the input of a module's call, or of its last call."""
    if PRODUCERS not in summary.chosen:
        summary.chosen[PRODUCERS] = input_producers(model, (inputs.first() if summary.alone else inputs).detached())
    known: dict[CallKey, CallKey] = summary.chosen[PRODUCERS]
    numbers = [n for given, n in known if given == name and number in (None, n)]
    return summary.call_of(*known[name, max(numbers)]) if numbers else None


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
    return [_dependent(model, inputs, name) for name in found] if inputs.others else found


def _dependent(model: nn.Module, inputs: Inputs, layer: str) -> str:
    place = place_of(layer, model)
    calls = [call for call in summary_of(model, inputs).calls if call.name == place.module and call.depends]
    if place.call is not None or not calls or calls[-1].last:
        return layer
    return name_of(place._replace(call=calls[-1].number))


def channels_of(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, int]:
    """How many channels the maps of some layers have, as far as the summary of the network shows."""
    calls = summary_of(model, inputs).calls
    found = {}
    for layer in layers:
        name, number = split_call(layer, model)
        mine = [call for call in calls if call.name == name and number in (None, call.number) and call.grid]
        if mine and mine[-1].grid is not None:
            found[layer] = mine[-1].shape[mine[-1].grid.of_channels]
    return found


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
    work = [_work(model.get_submodule(call.name), call.shape) for call in calls]
    total = sum(work)
    found = {}
    for layer in layers:
        name, number = split_call(layer, model)
        places = [i for i, call in enumerate(calls) if call.name == name and number in (None, call.number)]
        found[layer] = sum(work[places[-1] + 1 :]) / total if places and total else 1.0
    return found


def _work(module: nn.Module, shape: tuple[int, ...]) -> int:
    """How many multiplications a module itself takes for one image, without those inside it."""
    weights = [p for p in module.parameters(recurse=False) if p.ndim]
    outputs = math.prod(shape[1:])
    return sum(p.numel() * max(1, outputs // max(1, p.shape[0])) for p in weights if p.ndim > 1)
