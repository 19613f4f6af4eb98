"""Which call of a module the name of a layer stands for."""

from collections.abc import Iterable

from torch import nn

from explain.data.inputs import Inputs
from explain.hooks.layer_names import Where, name_of, place_of, select_places
from explain.layers import stitched
from explain.layers.grids import calls_in_window
from explain.layers.recording import CallKey
from explain.layers.summary import summary_of


def window_calls(model: stitched.Stitched, inputs: Inputs, layer: str) -> list[str]:
    """The calls that the name of a layer stands for in a `Stitched` model: one in each window."""
    place = place_of(layer, model)
    count = calls_in_window(model, inputs, model.inside(place).module)
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
