"""What share of a pass follows a layer."""

import math
from collections.abc import Iterable

from torch import nn

from explain._utils.modules import submodule
from explain.data.inputs import Inputs
from explain.hooks.layer_names import place_of
from explain.layers.recording import CallKey, last_of_place
from explain.layers.summary import summary_of


def cost_after(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, float]:
    """Estimate which share of a forward pass follows each of some layers, by the multiplications
    with weights: one for each weight and position of a module's output."""
    multiplications = 0
    done_by_call: dict[CallKey, int] = {}
    for call in summary_of(model, inputs).calls:
        # what a module itself takes for one image, without those inside it
        weights = [p for p in submodule(model, call.name).parameters(recurse=False) if p.ndim > 1]
        output_count = math.prod(call.shape[1:])
        # weights have a row for each channel of the output: the other numbers are its positions
        multiplications += sum(
            p.numel() * max(1, output_count // max(1, p.shape[0])) for p in weights
        )
        done_by_call[call.key] = multiplications
    shares = {}
    for layer in layers:
        multiplications_until = last_of_place(done_by_call, place_of(layer, model))
        # where the layer did not run, or nothing has weights, the whole pass may follow
        shares[layer] = (
            1.0
            if multiplications_until is None or not multiplications
            else (multiplications - multiplications_until) / multiplications
        )
    return shares
