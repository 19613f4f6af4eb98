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
    with weights.

    For plans, in which perturbed feature maps run only what follows their layer. Each weight of a
    module is used once for every place of the module's output. What has no weights is not counted.

    >>> from explain.data.inputs import as_inputs
    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(8, 4))
    >>> cost_after(model, as_inputs(torch.zeros(1, 1, 2, 2)), ["0", "1"])  # of 8, 16 and 32
    {'0': 0.8571428571428571, '1': 0.5714285714285714}
    """
    multiplications = 0
    done_by_call: dict[CallKey, int] = {}
    for call in summary_of(model, inputs).calls:
        # what a module itself takes for one image, without those inside it
        weights = [p for p in submodule(model, call.name).parameters(recurse=False) if p.ndim > 1]
        output_count = math.prod(call.shape[1:])
        multiplications += sum(
            p.numel() * max(1, output_count // max(1, p.shape[0])) for p in weights
        )
        done_by_call[call.key] = multiplications
    shares = {}
    for layer in layers:
        multiplications_until = last_of_place(done_by_call, place_of(layer, model))
        shares[layer] = (
            1.0
            if multiplications_until is None or not multiplications
            else (multiplications - multiplications_until) / multiplications
        )
    return shares
