"""What share of a pass follows a layer."""

import math
from collections.abc import Iterable

from torch import nn

from explain.data.inputs import Inputs
from explain.hooks.layer_names import place_of
from explain.hooks.unwrap import submodule
from explain.layers.summary import summary_of


def cost_after(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, float]:
    """Estimate which share of a pass follows each of some layers, by the multiplications with
    weights.

    Each weight of a module is used once for every place of the module's output. What has no weights
    is not counted.

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
    shares = {}
    for layer in layers:
        place = place_of(layer, model)
        numbers = [
            i
            for i, call in enumerate(calls)
            if call.name == place.layer and place.call in (None, call.number)
        ]
        shares[layer] = sum(work[numbers[-1] + 1 :]) / total if numbers and total else 1.0
    return shares
