"""Copies of a model with reinitialised layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from explain._utils import nested
from explain._utils.errors import MetricError, raised
from explain.data.inputs import Inputs
from explain.hooks import HookGroup, copied, untouched
from explain.hooks.unwrap import modules_of

POWER_ITERATIONS = 15
"""Of spectral normalisation after new weights: as many as torch makes when it is registered."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A module that is initialised as one, with its own parameters in the order of their first use.

    The parametrizations of a module belong to it. A parameter in no module makes a layer of its own.
    """

    name: str
    module: nn.Module
    parameters: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The layer's own parameters and buffers."""
        parts = _own_parts(self.module)
        return [each for part in parts for each in (*part.parameters(recurse=False), *part.buffers(recurse=False))]

    def write(self, values: Sequence[torch.Tensor]) -> None:
        for own, value in zip(self.tensors, values, strict=True):
            own.copy_(value)


def layers_with_weights(model: nn.Module, inputs: Inputs) -> list[Layer]:
    """The layers with trained values that a forward pass uses, in the order in which it first uses these.

    The order in which modules were registered says nothing about it. Modules in plain lists, which are not registered
    at all, are found when they run. Of shared parameters, the module that comes first counts.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> [layer.name for layer in layers_with_weights(model, Inputs((torch.ones(1, 3, 4, 4),)))]
    ['0', '3']
    """
    uses, called = _Uses(), dict[nn.Module, None]()

    def note(module: nn.Module, args: Any) -> None:
        called[module] = None

    with untouched(model), HookGroup() as group, uses:
        group.every_forward_pre(note)
        inputs.detached().call(model)
    names = modules_of(model)
    found: dict[tuple[int, ...], Layer] = {}
    parts = dict.fromkeys(part for module in called for part in module.modules() if part not in names)
    names |= {part: f"unregistered {type(part).__name__} {number}" for number, part in enumerate(parts)}
    inside = {part for module in names for part in _own_parts(module)[1:]}
    for module, name in names.items():
        if module not in inside:
            _add(found, uses, name, module)
    known = {number for numbers in found for number in numbers}
    loose = [each for each in uses.parameters.values() if uses.order[_memory(each)] not in known]
    for number, parameter in enumerate(loose):
        _add(found, uses, f"parameter {number} of no module", nn.ParameterList([parameter]))
    return [found[numbers] for numbers in sorted(found)]


def _add(found: dict[tuple[int, ...], Layer], uses: _Uses, name: str, module: nn.Module) -> None:
    """Add a layer by the numbers of the tensors that it uses, unless another one uses the same."""
    tensors = {uses.order[key]: each for each in _trained(module) if (key := _memory(each)) in uses.order}
    if tensors:
        numbers = tuple(sorted(tensors))
        found.setdefault(numbers, Layer(name, module, tuple(tensors[number] for number in numbers)))


def _trained(module: nn.Module) -> list[torch.Tensor]:
    """Parameters, and the statistics of normalisations, that a module holds itself."""
    parameters = [each for part in _own_parts(module) for each in part.parameters(recurse=False)]
    return [*parameters, *(module.buffers(recurse=False) if hasattr(module, "reset_running_stats") else ())]


def _own_parts(module: nn.Module) -> list[nn.Module]:
    """The module, and all that parametrizes its tensors."""
    return [module, *(_parametrizations(module).modules() if parametrize.is_parametrized(module) else ())]


def _parametrizations(module: nn.Module) -> nn.ModuleDict:
    return module.parametrizations if parametrize.is_parametrized(module) else nn.ModuleDict()  # type: ignore[return-value]


def _memory(tensor: torch.Tensor) -> int:
    """The address of a tensor, which its views from the first value on share (``.data``, ``.T``)."""
    return (tensor.data_ptr() if tensor.layout == torch.strided else 0) or id(tensor)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the order in which this thread's operations first use tensors, and which of these are parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: dict[int, int] = {}
        self.parameters: dict[int, nn.Parameter] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for _, tensor in nested.paths((args, kwargs or {})):
            self.order.setdefault(_memory(tensor), len(self.order))
            if isinstance(tensor, nn.Parameter):
                self.parameters[id(tensor)] = tensor
        return func(*args, **(kwargs or {}))


def grouped(layers: Sequence[str], steps: int | None) -> list[list[str]]:
    """Cut layers into so many groups of neighbours, of one size but for rounding; None makes each one of its own.

    >>> grouped(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    """
    count = len(layers) if steps is None else min(steps, len(layers))
    ends = [-(-len(layers) * k // count) for k in range(count + 1)]
    return [list(layers[start:end]) for start, end in pairwise(ends)]


class Randomised:
    """One copy of a model, some layers of which are initialised once more: `of` says which.

    A layer is initialised as its class does it (``reset_parameters``), normalisations with their statistics. Under
    weight or spectral normalisation, a parametrization or pruning, the plain weight is initialised, and what it is
    computed from follows. Parameters that this leaves unchanged, such as class tokens, are shuffled. The values of a
    layer depend on the seed and its position in the forward pass only, whichever other layers are initialised.

    Each layer is initialised once for a seed, and its values are stored for the next states. The copy is the same
    object all the time, so a state ends when `of` is called again.

    Raises:
        MetricError: the model cannot be copied, or the copy uses weights of the model itself.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    >>> other = Randomised(model, Inputs((torch.ones(1, 3),))).of(["1"])
    >>> torch.equal(other[0].weight, model[0].weight), torch.equal(other[1].weight, model[1].weight)
    (True, False)
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        here = {_memory(each) for layer in layers_with_weights(model, inputs) for each in layer.parameters}
        try:
            self._copy = copied(model)
        except Exception as error:
            raise MetricError(
                f"model must be one that copy.deepcopy can copy to be randomised, but {raised(error)}; keep what "
                "cannot be copied outside of it"
            ) from error
        self._layers = {layer.name: layer for layer in layers_with_weights(self._copy, inputs)}
        self._seed: int | None = None
        self._trained: dict[str, list[torch.Tensor]] = {}
        self._initial: dict[str, list[torch.Tensor]] = {}
        for layer in self._layers.values():
            if any(_memory(each) in here for each in layer.parameters):
                raise MetricError(
                    f"model must hold its weights in attributes to be randomised in a copy, but {layer.name!r} is "
                    "elsewhere, as in a global variable; make it an attribute of the model"
                )

    @property
    def layers(self) -> list[str]:
        """The names of all layers with weights, in the order in which a forward pass uses them."""
        return list(self._layers)

    def of(self, layers: Collection[str], seed: int = 0) -> nn.Module:
        """Return the copy with these layers initialised, and all others as they were.

        Raises:
            MetricError: a layer cannot be initialised.
        """
        if seed != self._seed:
            self._seed, self._initial = seed, {}
        with torch.inference_mode(False), torch.no_grad():
            for name, values in self._trained.items():
                self._layers[name].write(values)
            chosen = [(number, layer) for number, layer in enumerate(self._layers.values()) if layer.name in layers]
            for _, layer in chosen:  # before any is initialised, since layers may share their weights
                self._trained.setdefault(layer.name, _values(layer.tensors))
            for number, layer in chosen:
                if layer.name not in self._initial:
                    self._initial[layer.name] = self._initialised(layer, (seed * 1_000_003 + number) % 2**63)
            for _, layer in chosen:
                layer.write(self._initial[layer.name])
        return self._copy

    def _initialised(self, layer: Layer, seed: int) -> list[torch.Tensor]:
        """Initialise a layer, return its new values, and restore all that this changed."""
        changed = [*layer.module.parameters(), *layer.module.buffers()]
        before = _values(changed)
        devices = sorted({each.device.index or 0 for each in layer.tensors if each.device.type == "cuda"})
        try:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed)
                _initialise(layer)
            return _values(layer.tensors)
        finally:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            layer.write(self._trained[layer.name])


def _values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.detach().clone() for each in tensors]


def _initialise(layer: Layer) -> None:
    module = layer.module
    before = _values(layer.parameters)
    reset = "reset_parameters" if hasattr(module, "reset_parameters") else "_reset_parameters"
    if callable(getattr(module, reset, None)):
        try:
            _reset(module, reset)
        except Exception as error:
            raise MetricError(
                f"layer {layer.name!r} must be initialised once more for this metric, but {raised(error)}; give it a "
                "reset_parameters that works"
            ) from error
    for parameter, value in zip(layer.parameters, before, strict=True):
        if isinstance(parameter, nn.Parameter) and torch.equal(parameter, value):
            order = torch.randperm(parameter.numel(), device="cpu").to(parameter.device)
            parameter.copy_(value.flatten()[order].reshape(parameter.shape))
    _iterate(module)


def _reset(module: nn.Module, reset: str) -> None:
    """Let a module initialise its weights where they are plain ones, and bring them back to what they come from."""
    weights = {name: nn.Parameter(getattr(module, name).detach().clone()) for name in _parametrizations(module)}
    plain: Any = module
    if weights:
        plain = object.__new__(parametrize.type_before_parametrizations(module))
        plain.__dict__ |= {**vars(module), "_parameters": {**module._parameters, **weights}}
    getattr(plain, reset)()
    for name, weight in weights.items():
        with suppress(RuntimeError):  # a parametrization without an inverse: what it comes from is shuffled
            setattr(module, name, weight.detach())
    for hook in module._forward_pre_hooks.values():  # those of torch.nn.utils before parametrizations
        if isinstance(hook, WeightNorm):
            weight = getattr(module, hook.name).detach()
            getattr(module, f"{hook.name}_v").copy_(weight)
            getattr(module, f"{hook.name}_g").copy_(torch.norm_except_dim(weight, 2, hook.dim))
        elif isinstance(hook, (SpectralNorm, BasePruningMethod)):
            name = hook.name if isinstance(hook, SpectralNorm) else hook._tensor_name
            getattr(module, f"{name}_orig").copy_(getattr(module, name).detach())


def _iterate(module: nn.Module) -> None:
    """Let spectral normalisation, which goes on with every step of training, find the norm of new weights."""
    parts = {part: part.training for part in _own_parts(module)[1:]}
    for part in parts:
        part.training = True
    for _ in range(POWER_ITERATIONS):
        for name in _parametrizations(module):
            getattr(module, name)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                hook.compute_weight(module, do_power_iteration=True)
    for part, training in parts.items():
        part.training = training
