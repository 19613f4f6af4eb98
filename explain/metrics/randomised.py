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
    return Randomised(model, seed).of(layers)


class Randomised:
    """One copy of a model that is asked in one state after the other: `of` says which layers are initialised.

    Each layer is initialised once, and its values are kept for the states to come. The copy is the same object all the
    time, so a state ends when the next one is asked for.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self._seed, self._copy = seed, copied(model)
        self._places = layers_with_weights(self._copy)
        self._trained: dict[str, list[torch.Tensor]] = {}
        self._initial: dict[str, list[torch.Tensor]] = {}

    def of(self, layers: Collection[str]) -> nn.Module:
        """Return the copy with these layers initialised, and all others as they were."""
        with torch.inference_mode(False), torch.no_grad():
            for name, values in self._trained.items():
                self._write(name, values)
            for name in self._places:  # before any is initialised, since layers may share their weights
                if name in layers and name not in self._trained:
                    self._trained[name] = self._values(name)
            for place, name in enumerate(self._places):
                if name in layers:
                    self._begin(place, name)
        return self._copy

    def _begin(self, place: int, name: str) -> None:
        if name in self._initial:
            self._write(name, self._initial[name])
            return
        devices = sorted({each.device.index or 0 for each in self._trained[name] if each.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed((self._seed * 1_000_003 + place) % 2**63)
            _initialise(self._copy.get_submodule(name), name)
        self._initial[name] = self._values(name)

    def _tensors(self, name: str) -> list[torch.Tensor]:
        module = self._copy.get_submodule(name)
        return [*module.parameters(recurse=False), *module.buffers(recurse=False)]

    def _values(self, name: str) -> list[torch.Tensor]:
        return [each.detach().clone() for each in self._tensors(name)]

    def _write(self, name: str, values: list[torch.Tensor]) -> None:
        for mine, value in zip(self._tensors(name), values, strict=True):
            mine.copy_(value)


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
