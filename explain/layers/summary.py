"""The summary of a network: its calls for one image, kept as long as its modules are the same."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType
from typing import Any

from torch import nn

from explain._utils.errors import ExplainError, keywords
from explain._utils.modules import modules_of
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, InputsLike
from explain.hooks.layer_names import LayerPlace, Where, name_of_place, place_of, select_places
from explain.hooks.programs import OpenProgram, OtherLayersError
from explain.hooks.unwrap import unwrapped, with_layers
from explain.layers.frames import with_layout
from explain.layers.layouts import Size
from explain.layers.located import PLACES, laid_out, locate_tensors
from explain.layers.recording import (
    CallKey,
    ModuleCall,
    last_of_place,
    record,
    tensors_in,
)
from explain.targets.regions import read_class_maps


@dataclass(frozen=True)
class ForwardSummary:
    """The calls of one forward pass, on one image, or on the batch if the network does not take a
    single image."""

    calls: tuple[ModuleCall, ...]
    gives_scores: bool
    """Whether the output has a row of numbers for the image, as a classifier's has."""
    answers: frozenset[int] = frozenset()
    """The number of channels of outputs that are as large as the input: a map of classes, for
    example."""
    outputs: int = 1
    """How many tensors the output has."""
    ran: tuple[str, ...] = ()
    """The modules without parts that ran."""
    alone: bool = True
    """Whether the network takes a single image."""
    chosen: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Layers that were chosen with it."""

    @cached_property
    def sizes(self) -> frozenset[Size]:
        """The sizes of all feature maps of the network, in positions."""
        grids = [call.grid for call in self.calls if call.grid is not None]
        return frozenset(grid.size for grid in grids if grid.is_map)

    def call_of(self, place: LayerPlace) -> ModuleCall | None:
        """The recorded call that a layer's name stands for: the named one, or the layer's last;
        None if it did not run."""
        return last_of_place(self._calls_by_key, place)

    @cached_property
    def _calls_by_key(self) -> dict[CallKey, ModuleCall]:
        """The calls of the pass by the module's name and the call's number."""
        return {call.key: call for call in self.calls}


@keywords()
def list_layers(model: nn.Module, x: InputsLike) -> list[ModuleCall]:
    """Run ``model`` on the first image of ``x`` and list the calls of its modules, in the order in
    which they return.

    ``x`` is a tensor ``(N, C, H, W)``, or several inputs as for `explain.attribute`.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
    >>> [(call.name, call.shape) for call in list_layers(model, torch.zeros(1, 3, 4, 4))]
    [('0', (1, 8, 2, 2)), ('1', (1, 8, 2, 2)), ('2', (1, 32))]
    """
    model = with_layers(unwrapped(model))
    inputs = with_layout(model, x)
    open_layers(model, inputs)
    return list(summarize(model, inputs).calls)


RECORDED = "the operations of the pass"
SUMMARIES = 16  # of a network, each for another size of inputs
_summaries: weakref.WeakKeyDictionary[nn.Module, dict[Any, ForwardSummary]] = (
    weakref.WeakKeyDictionary()
)

_places: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


def summary_of(
    model: nn.Module, inputs: Inputs, *, whole: bool = False, with_record: bool = False
) -> ForwardSummary:
    """Return the summary of a network's calls for inputs like these, made in one run on the first
    image, or with ``whole`` on the batch, and kept for the same modules and sizes of inputs."""
    # With with_record, a summary that is made now has the record of its pass in `chosen` under
    # `RECORDED`; the caller takes it out at once, since it holds memory.
    if isinstance(model, OpenProgram):
        open_layers(model, inputs)
    modules = tuple(map(weakref.ref, modules_of(model)))
    if inputs.name is None:  # a tensor is all that the model takes
        key: tuple[Any, ...] = (inputs.x.shape[1:], inputs.layout, modules)
    elif all(isinstance(value, (int, float, str, NoneType)) for value in inputs.constants):
        key = (inputs.path, inputs.sizes, inputs.layout, inputs.constants, modules)
    else:  # other arguments may change unseen
        return summarize(model, inputs, whole=whole, with_record=with_record)
    summaries = _summaries.setdefault(model, {})
    summary = summaries.get(key)
    if summary is None:
        summary = summarize(model, inputs, whole=whole, with_record=with_record)
        # if two threads made one, the first one's counts
        summary = summaries.setdefault(key, summary)
        for old in list(summaries)[:-SUMMARIES]:
            summaries.pop(old, None)
    return summary


def forget_summary(model: nn.Module) -> None:
    """Drop the summaries of a network, and so the layers chosen by them, when it may have changed
    unseen."""
    _summaries.pop(model, None)
    _places.pop(model, None)


def kept_places(model: nn.Module) -> dict[Any, Any]:
    """What is kept with a network of where the cells of its layers look; see
    `explain.layers.grids`."""
    return _places.setdefault(model, {})


def summary_is_current(model: nn.Module, inputs: Inputs, ran: Sequence[str]) -> bool:
    """Whether these inputs took the same path through the network as its summary, by the names of
    modules that ``ran``; else the summary is made again."""
    if summary_of(model, inputs).ran == tuple(ran):
        return True
    # an early exit, or a flag of the model: layers must depend on these inputs, not on earlier ones
    forget_summary(model)
    # the first image alone may take another path than the batch
    if len(inputs) > 1 and summary_of(model, inputs).ran != tuple(ran):
        forget_summary(model)
        summary_of(model, inputs, whole=True)
    return False


def summarize(
    model: nn.Module, inputs: Inputs, *, whole: bool = False, with_record: bool = False
) -> ForwardSummary:
    """Make the summary of a network from a run on the first image; on all of them if it refuses
    one, or with ``whole``. Nothing is kept; `summary_of` does that."""
    if not whole:
        try:
            return _summarize_once(model, inputs.first(), with_record)
        except Exception as error:
            # of our own errors, only that a program computes other layers for one image
            is_refusal = not isinstance(error, ExplainError) or isinstance(error, OtherLayersError)
            if not is_refusal or len(inputs) == 1 or came_by_signal(error):
                raise
    return replace(_summarize_once(model, inputs, with_record), alone=False)


def _summarize_once(model: nn.Module, inputs: Inputs, with_record: bool) -> ForwardSummary:
    """Make the summary of a network from a run on these inputs as they are. Where shapes leave
    layouts open, it may run once more, to follow where values come from."""
    inputs = inputs.detached()
    recorded = record(model, inputs)
    output = recorded.output
    calls = recorded.calls
    chosen = dict[Any, Any]()
    if recorded.open_layouts:
        chosen[PLACES] = locate_tensors(model, inputs, calls, recorded)
        calls = [
            laid_out(call, recorded.open_layouts.get(call.key), chosen[PLACES]) for call in calls
        ]
    last_numbers = {call.name: call.number for call in calls}
    calls = [replace(call, last=call.number == last_numbers[call.name]) for call in calls]
    tensors = tensors_in(output)
    answers = {
        tensor.shape[1]
        for tensor in tensors
        if tensor.ndim > 3 and tensor.shape[2:] == inputs.x.shape[2:]
    }
    class_maps = read_class_maps(output, len(inputs))
    if class_maps is not None:  # class maps may be smaller than the input
        answers.add(class_maps.maps.shape[1])
    # one number alone may have no dimension
    tensors_of_images = [
        tensor for tensor in tensors if tensor.ndim == 0 or len(tensor) == len(inputs)
    ]
    gives_scores = any(
        tensor.numel() and (tensor.ndim <= 2 or tensor.numel() == len(tensor))
        for tensor in tensors_of_images
    )
    if with_record:
        chosen[RECORDED] = recorded
    else:
        recorded.release()
    return ForwardSummary(
        tuple(calls),
        gives_scores=gives_scores,
        answers=frozenset(answers),
        outputs=len(tensors),
        ran=tuple(recorded.ran),
        chosen=chosen,
    )


def independent_calls(model: nn.Module, inputs: Inputs) -> set[CallKey]:
    """The calls that saw only other inputs than the explained one, such as those of a text, by name
    and number."""
    if not inputs.other_tensors:
        return set()
    return {call.key for call in summary_of(model, inputs).calls if not call.depends}


def open_layers(model: nn.Module, inputs: Inputs) -> None:
    """Let the layers of a program be seen, if that is what the model is; its first pass shows
    them."""
    if isinstance(model, OpenProgram):
        images = inputs.copied()
        model.open(*images.args, **images.kwargs)


def find_layers(model: nn.Module, inputs: Inputs, where: Where) -> list[str]:
    """Name the layers that a caller means by ``where``, in their order; ``name@0`` is the first
    call of a layer, ``name:input`` the first tensor in its input."""
    open_layers(model, inputs)
    # A layer that sees several inputs one after the other, of which one is explained, stands for
    # its last call that depends on that one.
    layers = select_places(model, where)
    for index, layer in enumerate(layers if inputs.other_tensors else ()):
        place = place_of(layer, model)
        calls = [
            call
            for call in summary_of(model, inputs).calls
            if call.name == place.module and call.depends
        ]
        if place.call is None and calls and not calls[-1].last:
            layers[index] = name_of_place(place._replace(call=calls[-1].number), model)
    return layers


def channels_of(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, int]:
    """The number of channels of some layers' feature maps, by layer, for plans; layers without a
    known map are left out."""
    summary = summary_of(model, inputs)
    channels = {}
    for layer in layers:
        call = summary.call_of(place_of(layer, model))
        if call is not None and call.grid is not None:
            channels[layer] = call.shape[call.grid.of_channels]
    return channels
