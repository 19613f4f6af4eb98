"""How many channels the maps of layers have."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from explain.inputs import Inputs
from explain.layers.calls import remembered, split_call


def channels_of(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, int]:
    """How many channels the maps of some layers have, as far as a look at the network shows."""
    calls = remembered(model, inputs).calls
    found = {}
    for layer in layers:
        name, number = split_call(layer, model)
        mine = [call for call in calls if call.name == name and number in (None, call.number) and call.grid]
        if mine and mine[-1].grid is not None:
            found[layer] = mine[-1].shape[mine[-1].grid.of_channels]
    return found
