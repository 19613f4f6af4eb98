"""Which part of a forward pass lies behind a layer."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from explain.inputs import Inputs
from explain.layers.calls import remembered, split_call


def shares_behind(model: nn.Module, inputs: Inputs, layers: Iterable[str]) -> dict[str, float]:
    """Estimate which part of a pass lies behind each of some layers, by the multiplications with weights.

    Each weight of a module is used once for every place of the module's output. What has no weights is not counted.

    >>> from explain.inputs import as_inputs
    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(8, 4))
    >>> shares_behind(model, as_inputs(torch.zeros(1, 1, 2, 2)), ["0", "1"])  # of 8, 16 and 32
    {'0': 0.8571428571428571, '1': 0.5714285714285714}
    """
    calls = remembered(model, inputs).calls
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
