"""Copies of a model whose layers are initialised once more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import nn

from explain.errors import MetricError, raised
from explain.hooks import copied


def layers_with_weights(model: nn.Module) -> list[str]:
    """The modules that hold parameters themselves, in the order in which they were registered.

    >>> layers_with_weights(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 5)))
    ['0', '2']
    """
    return [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]


def grouped(layers: Sequence[str], steps: int | None) -> list[list[str]]:
    """Cut layers into so many groups of neighbours, of one size but for rounding; None makes each one of its own.

    >>> grouped(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    """
    count = len(layers) if steps is None else min(steps, len(layers))
    ends = [-(-len(layers) * k // count) for k in range(count + 1)]
    return [list(layers[start:end]) for start, end in pairwise(ends)]


def randomised(model: nn.Module, layers: Collection[str], seed: int = 0) -> nn.Module:
    """Copy a model and initialise some of its layers once more; the model itself is not touched.

    A layer is initialised as its class does it (``reset_parameters``), normalisations with their statistics. The values
    of parameters whose class has no initialisation of its own, such as class tokens, are shuffled. What a layer gets
    depends on the seed and its place in the model only, whatever other layers are initialised.

    Raises:
        MetricError: the model has no parameters, or a layer cannot be initialised.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    >>> other = randomised(model, ["1"])
    >>> torch.equal(other[0].weight, model[0].weight), torch.equal(other[1].weight, model[1].weight)
    (True, False)
    """
    copy = copied(model)
    places = layers_with_weights(copy)
    devices = sorted({p.device.index or 0 for p in copy.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for place, name in enumerate(places):
            if name in layers:
                torch.manual_seed((seed * 1_000_003 + place) % 2**63)
                _initialise(copy.get_submodule(name), name)
    return copy


def _initialise(module: nn.Module, name: str) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        for parameter in module.parameters(recurse=False):
            order = torch.randperm(parameter.numel(), device="cpu").to(parameter.device)
            parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
        return
    try:
        reset()
    except Exception as error:
        raise MetricError(
            f"layer {name!r} must be initialised once more for this metric, but {raised(error)}; give it a "
            "reset_parameters that works"
        ) from error
