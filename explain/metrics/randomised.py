"""Copies of a model with reinitialised layers."""

import math
from collections.abc import Collection, Iterable, Sequence
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

from explain._utils import nested
from explain._utils.errors import MetricError, raised
from explain._utils.modules import modules_of
from explain._utils.random_numbers import drawing
from explain.data.inputs import Inputs
from explain.hooks import copied
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import sharded
from explain.recording.modes import OperatorCalls

POWER_ITERATIONS = 15
"""Of spectral normalisation after new weights: as many as torch makes when it is registered."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A module that is initialised as a whole, with its own parameters (and its parametrizations')
    in the order of first use. A parameter in no module is a layer of its own."""

    name: str
    module: nn.Module
    parameters: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The layer's own parameters and buffers, those of its parametrizations too; `write` and
        the stored values of `Randomised` are in this order."""
        tensors: list[torch.Tensor] = []
        for part in _own_parts(self.module):
            tensors += part.parameters(recurse=False)
            tensors += part.buffers(recurse=False)
        return tensors

    def write(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.copy_(value)


def layers_with_weights(model: nn.Module, inputs: Inputs) -> list[Layer]:
    """Return the layers with trained values, also those in plain lists, in the order of first use
    in one forward pass; of modules with shared parameters, the first."""
    uses = _Uses()
    with untouched(model), OperatorCalls(uses.run):
        inputs.detached().call(model)
    names = modules_of(model)
    # these are initialised with the module whose tensors they make
    parametrizing = {part for module in names for part in _own_parts(module)[1:]}
    layers: dict[tuple[int, ...], Layer] = {}  # by the numbers of first use of their tensors
    for module, name in names.items():
        tensors = uses.in_order(_trained(module))
        if tensors and module not in parametrizing:
            layers.setdefault(tuple(tensors), Layer(name, module, tuple(tensors.values())))
    of_modules = {number for numbers in layers for number in numbers}
    all_parameters = uses.in_order(uses.parameters.values())
    for number in all_parameters.keys() - of_modules:
        parameter = all_parameters[number]
        name = f"parameter {number} of no module"
        layers[number,] = Layer(name, nn.ParameterList([parameter]), (parameter,))
    return [layers[numbers] for numbers in sorted(layers)]


def _trained(module: nn.Module) -> list[torch.Tensor]:
    """The trained values that a module itself holds, without its submodules: parameters, also of
    its parametrizations, and the running statistics of normalisations."""
    trained: list[torch.Tensor] = []
    for part in _own_parts(module):
        trained += part.parameters(recurse=False)
    if hasattr(module, "reset_running_stats"):
        trained += module.buffers(recurse=False)
    return trained


def _own_parts(module: nn.Module) -> list[nn.Module]:
    """The module itself, and all modules that parametrize its tensors."""
    if not parametrize.is_parametrized(module):
        return [module]
    return [module, *_parametrizations(module).modules()]


def _parametrizations(module: nn.Module) -> nn.ModuleDict:
    """What parametrizes the tensors of a module, by their names."""
    return module.parametrizations if parametrize.is_parametrized(module) else nn.ModuleDict()  # type: ignore[return-value]


def _memory(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor: the address of its values, shared by views that begin at
    the first value (``.data``, ``.T``). The same weights are recognised by it under any object."""
    return (tensor.data_ptr() if tensor.layout == torch.strided else 0) or id(tensor)


class _Uses:
    """The order in which operations first use tensors, and which of these are parameters."""

    def __init__(self) -> None:
        """``order`` is the number of first use by a tensor's memory (`_memory`), ``parameters`` the
        used ones by id."""
        self.order: dict[int, int] = {}
        self.parameters: dict[int, nn.Parameter] = {}

    def in_order(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those of ``tensors`` that an operation has used, by the number of their first use, in
        that order."""
        used = {
            self.order[_memory(tensor)]: tensor
            for tensor in tensors
            if _memory(tensor) in self.order
        }
        return dict(sorted(used.items()))

    def run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and note the tensors that it has used."""
        result = operator(*args, **kwargs)
        for _, tensor in nested.paths((args, kwargs)):
            self.order.setdefault(_memory(tensor), len(self.order))
            if isinstance(tensor, nn.Parameter):
                self.parameters[id(tensor)] = tensor
        return result


def layer_groups(layers: Sequence[str], steps: int | None) -> list[list[str]]:
    """Cut the names of layers, in forward order, into ``steps`` groups of neighbours, of one size
    but for rounding; None makes each layer a group."""
    count = len(layers) if steps is None else min(steps, len(layers))
    ends = [math.ceil(len(layers) * k / count) for k in range(count + 1)]
    return [list(layers[start:end]) for start, end in pairwise(ends)]


class Randomised:
    """One copy of a model, whose layers `of` initialises once more; the same object for each state.
    Values of a layer depend only on the seed and the layer's position in the pass."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        """Copy the model, and find the copy's layers in the order of use; runs both once. Refuses
        sharded models, and copies that still use the model's own weights.
        """
        sharded_layers = sharded(model)
        if sharded_layers:
            raise MetricError(
                "model must hold whole weights for random ones, but FSDP shards layer "
                f"{next(iter(sharded_layers))!r}; evaluate a plain model with its full state dict"
            )
        model_memory = {
            _memory(parameter)
            for layer in layers_with_weights(model, inputs)
            for parameter in layer.parameters
        }
        try:
            self._copy = copied(model)
        except Exception as error:
            raise MetricError(
                f"model must be one that copy.deepcopy can copy, but {raised(error)}"
            ) from error
        self._layers = {layer.name: layer for layer in layers_with_weights(self._copy, inputs)}
        # by layer, as far as it was initialised: what it has been trained to, and what the latest
        # seed made of it
        self._trained_values: dict[str, list[torch.Tensor]] = {}
        self._initial_values: dict[str, list[torch.Tensor]] = {}
        self._seed: int | None = None
        for layer in self._layers.values():
            if any(_memory(parameter) in model_memory for parameter in layer.parameters):
                raise MetricError(
                    f"model must hold its weights in attributes, but {layer.name!r} is a global "
                    "variable"
                )
        # names of the layers, in the order in which a forward pass uses them
        self.layers = list(self._layers)

    def of(self, layers: Collection[str], seed: int = 0) -> nn.Module:
        """The copy with these ``layers`` (names in ``self.layers``) initialised by ``seed``, and
        all others trained; the same object each time, so an earlier state ends.
        """
        if seed != self._seed:
            self._seed = seed
            self._initial_values = {}
        with torch.inference_mode(False), torch.no_grad():
            # the state of the call before ends
            for name, values in self._trained_values.items():
                self._layers[name].write(values)
            chosen = [layer for layer in self._layers.values() if layer.name in layers]
            for layer in chosen:
                self._trained_values.setdefault(layer.name, _values(layer.tensors))
                if layer.name not in self._initial_values:
                    # a seed of its own, so that layers of one shape differ
                    number = self.layers.index(layer.name)
                    self._initial_values[layer.name] = self._initialised(
                        layer, (seed * 1_000_003 + number) % 2**63
                    )
            for layer in chosen:
                layer.write(self._initial_values[layer.name])
        return self._copy

    def _initialised(self, layer: Layer, seed: int) -> list[torch.Tensor]:
        """The values of a layer's tensors after an initialisation with ``seed``; all that it
        changes (shared weights too) is restored, and the global random state left alone.
        """
        # a reset may write into modules inside of the layer's, too
        all_tensors = [*layer.module.parameters(), *layer.module.buffers()]
        values_so_far = _values(all_tensors)
        trained_values = _values(layer.parameters)
        try:
            with drawing(seed, [tensor.device for tensor in layer.tensors]):
                _reset(layer)
                # what this leaves unchanged, such as class tokens, is shuffled
                for parameter, value in zip(layer.parameters, trained_values, strict=True):
                    # running statistics, which are buffers, are reset in any case
                    if isinstance(parameter, nn.Parameter) and torch.equal(parameter, value):
                        order = torch.randperm(parameter.numel(), device="cpu").to(parameter.device)
                        parameter.copy_(value.flatten()[order].reshape(parameter.shape))
                _find_spectral_norms(layer.module)  # of the new weights
            return _values(layer.tensors)
        finally:
            for tensor, value in zip(all_tensors, values_so_far, strict=True):
                tensor.copy_(value)


def _values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def _reset(layer: Layer) -> None:
    """Initialise a module's plain weights in place by ``reset_parameters``, and write what
    parametrizations, weight norm, spectral norm or pruning compute them from.
    """
    module = layer.module
    # some modules of torch, such as those of attention, have the name with an underscore
    reset = "reset_parameters" if hasattr(module, "reset_parameters") else "_reset_parameters"
    if not callable(getattr(module, reset, None)):
        return
    weights = {
        name: nn.Parameter(getattr(module, name).detach().clone())
        for name in _parametrizations(module)
    }
    # a twin whose parametrized tensors are plain parameters, which alone can be reset in place
    plain: Any = module
    if weights:
        plain = object.__new__(parametrize.type_before_parametrizations(module))
        plain.__dict__ |= {**vars(module), "_parameters": {**module._parameters, **weights}}
    try:
        getattr(plain, reset)()
    except Exception as error:
        raise MetricError(
            f"layer {layer.name!r} must have a working {reset}, but it {raised(error)}"
        ) from error
    for name, weight in weights.items():
        # a parametrization without an inverse refuses it: what it comes from is shuffled later
        with suppress(RuntimeError):
            setattr(module, name, weight.detach())
    # the older hooks of torch.nn.utils, which are no parametrizations
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            weight = getattr(module, hook.name).detach()
            getattr(module, f"{hook.name}_v").copy_(weight)
            getattr(module, f"{hook.name}_g").copy_(torch.norm_except_dim(weight, 2, hook.dim))
        elif isinstance(hook, (SpectralNorm, BasePruningMethod)):
            name = hook.name if isinstance(hook, SpectralNorm) else hook._tensor_name
            getattr(module, f"{name}_orig").copy_(getattr(module, name).detach())


def _find_spectral_norms(module: nn.Module) -> None:
    """Let spectral normalisation find the norm of new weights in place: it iterates in training
    only, so its modules are in training mode for a moment."""
    parts = {part: part.training for part in _own_parts(module)[1:]}
    for part in parts:
        part.training = True
    for _ in range(POWER_ITERATIONS):
        for name in _parametrizations(module):
            getattr(module, name)  # computes the tensor, by one more iteration
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                hook.compute_weight(module, do_power_iteration=True)
    for part, training in parts.items():
        part.training = training
