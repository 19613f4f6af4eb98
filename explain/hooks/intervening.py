"""Interventions applied to a model by hooks, for as long as a block lasts."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from explain._utils import nested
from explain._utils.errors import HookError, warn
from explain._utils.modules import inserting
from explain._utils.signals import came_by_signal, signal_safe
from explain.data.inputs import Inputs
from explain.hooks.attention_parts import NO_ATTENTION
from explain.hooks.group import HookGroup
from explain.hooks.guard import Hook
from explain.hooks.interventions import Intervention, Replace, sample_counts
from explain.hooks.layer_names import find_places, name_of_place, place_of
from explain.hooks.preserve import copied
from explain.hooks.units import Axes
from explain.hooks.unwrap import unwrapped

Interventions: TypeAlias = Intervention | Iterable[Intervention]
GridsOfImage: TypeAlias = Callable[[nn.Module, Inputs], Any]
"""From a model and its inputs to how tokens and cells lie on the image."""


class _ActiveInterventions(threading.local):
    """The interventions that this thread has applied to each model, with what they have become at
    each place."""

    def __init__(self) -> None:
        """Start without interventions, in each thread that asks."""
        self.active: WeakKeyDictionary[nn.Module, dict[Intervention, tuple[Intervention, ...]]] = (
            WeakKeyDictionary()
        )


_interventions = _ActiveInterventions()


def active_interventions(model: nn.Module) -> tuple[Intervention, ...]:
    """The interventions that act on a model in this thread, one for each place, with values taken
    from inputs in place."""
    active = _interventions.active.get(model)
    return (
        tuple(bound for bound_by_intervention in active.values() for bound in bound_by_intervention)
        if active
        else ()
    )


@signal_safe
def with_interventions(
    model: nn.Module, interventions: Interventions, grids_of_image: GridsOfImage
) -> Iterator[tuple[Intervention, ...]]:
    """Apply interventions for as long as the block lasts, as `explain.hooks.intervene` says it.
    Regions, and positions of tokens, are found by ``grids_of_image``."""
    new_interventions = (
        [interventions] if isinstance(interventions, Intervention) else list(interventions)
    )
    if not new_interventions:
        yield ()
        return
    for intervention in new_interventions:
        if not isinstance(intervention, Intervention):
            raise HookError(
                f"interventions must be values such as Ablate('layer3'), got {intervention!r:.60}"
            )
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise HookError(
            "model must run on one device for interventions, got DataParallel on several; use "
            "model.module"
        )
    model = unwrapped(model)
    outer_interventions = _interventions.active.get(model, {})
    # those of blocks around this one, as the caller gave them or as a block returned them
    active_already = {*outer_interventions, *active_interventions(model)}
    new_interventions = [
        intervention for intervention in new_interventions if intervention not in active_already
    ]
    replacements = [
        change
        for change in new_interventions
        if isinstance(change, Replace) and isinstance(change.by, nn.Module)
    ]
    with inserting(model, _inserted_modules(replacements)), HookGroup(model) as group:
        placed_by_intervention = {
            intervention: _placed(intervention, model) for intervention in new_interventions
        }
        # values are taken from the model with inserted modules, but without other interventions
        with HookGroup(model) as replacements_alone:
            for replacement in replacements:
                for placed in placed_by_intervention[replacement]:
                    _apply(replacements_alone, placed, _ModelCalls(), model, grids_of_image)
            bound = {
                intervention: tuple(placed.bound(model) for placed in all_placed)
                for intervention, all_placed in placed_by_intervention.items()
            }
        bound_interventions = tuple(
            placed for all_placed in bound.values() for placed in all_placed
        )
        model_calls = _ModelCalls()
        group.forward_pre("", model_calls.begin, with_kwargs=True)
        for placed in bound_interventions:
            _apply(group, placed, model_calls, model, grids_of_image)
        _interventions.active[model] = {**outer_interventions, **bound}
        try:
            yield bound_interventions
        finally:
            _interventions.active[model] = outer_interventions
        idle = [placed for placed in bound_interventions if placed not in model_calls.acted]
        if model_calls.count and idle:  # the model has run
            are_of_attention = any(place_of(placed.layer, model).of_attention for placed in idle)
            or_else = f", or {NO_ATTENTION}" if are_of_attention else ""
            warn(
                f"interventions had no effect, since their layers did not run{or_else}: "
                f"{', '.join(map(str, idle))}"
            )


def _inserted_modules(replacements: Iterable[Replace]) -> dict[str, nn.Module]:
    """The modules that `Replace` interventions put behind layers, by the names that they get, such
    as ``layer3/sae``."""
    modules: dict[str, nn.Module] = {}
    for replacement in replacements:
        name = f"{replacement.layer}/{replacement.name}"
        if name in modules:  # two of them at one layer
            raise HookError(
                f"names of modules that are inserted at {name} must differ; give each a name="
            )
        modules[name] = replacement.by
    return modules


def _placed(intervention: Intervention, model: nn.Module) -> list[Intervention]:
    """A copy of an intervention for each place (layer or call) that its layer pattern selects. One
    on ``heads`` is placed on the attention inside the layer."""
    placed_interventions = []
    for place in find_places(model, intervention.layer).values():
        if intervention.heads is not None and not place.part:
            place = place._replace(part="heads")
        name = name_of_place(place, model)
        placed_interventions.append(
            intervention if name == intervention.layer else replace(intervention, layer=name)
        )
    return placed_interventions


class _ModelCalls:
    """The calls of a model: the size of its image, which regions are relative to, and which
    interventions acted."""

    def __init__(self) -> None:
        """Start before the first call of a model in a block of `intervene`."""
        self.count = 0
        # of the latest call
        self.image_count = 0
        self.size: tuple[int, ...] = ()
        self.inputs: tuple[Any, Any] = (), {}
        self.acted: set[Intervention] = set()
        """The interventions whose layers have run, in any call."""

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of a call of the model, the size of its images and the number of its
        images: a forward-pre hook."""
        self.count += 1
        self.inputs = args, kwargs
        tensors = [tensor for _, tensor in nested.paths(self.inputs) if tensor.ndim]
        images = [tensor for tensor in tensors if tensor.ndim >= 4 and tensor.is_floating_point()]
        self.size = tuple(images[0].shape[-2:]) if images else ()
        batches = images or tensors  # a model without images may take vectors or tokens
        self.image_count = len(batches[0]) if batches else 0


def _apply(
    group: HookGroup,
    intervention: Intervention,
    model_calls: _ModelCalls,
    model: nn.Module,
    grids_of_image: GridsOfImage,
) -> None:
    """Register the forward hook that lets an intervention act on its layer, behind those before it;
    ``model_calls`` notes the model's calls and which interventions acted."""
    place = place_of(intervention.layer, model)

    def act(module: nn.Module, args: Any, output: Any) -> Any:
        """Return the layer's output with the chosen units replaced."""
        model_calls.acted.add(intervention)
        values = nested.first_tensor(output)
        if values is None:
            raise HookError(
                f"{intervention} must be on a layer that gives a tensor, got "
                f"{type(output).__name__}"
            )
        shape = tuple(values.shape)
        counts = {model_calls.image_count, *sample_counts()}
        # tokens may come before the samples, ``(T, N, C)``, in sequence-first transformers
        tokens_first = values.ndim == 3 and shape[0] not in counts and shape[1] in counts
        # places of one image cannot be told where a layer runs on parts, such as windows
        if intervention.of_places and len(values) not in counts and not tokens_first:
            raise HookError(
                f"{intervention} must be on a layer of {model_calls.image_count} samples, got "
                f"{shape}; take one around it"
            )
        axes = Axes(
            values,
            place,
            what=str(intervention),
            channel_dim=intervention.channel_dim,
            size=model_calls.size,
            image_dim=1 if tokens_first else 0,
            find_grids=partial(_grids_on_image, grids_of_image, model, model_calls.inputs),
        )
        replacement_values = intervention.replacement(values, axes)
        mask = axes.mask(intervention)
        # only what replaces all of a layer's output may have another shape
        if mask is not None or not isinstance(intervention, Replace):
            try:
                replacement_values = replacement_values.expand(shape)
            except RuntimeError:
                got = tuple(replacement_values.shape)
                raise HookError(
                    f"{intervention} must broadcast to {shape}, got {got}; reshape it"
                ) from None
        if mask is None:
            # a copy, since what runs next may overwrite it
            replacement_values = replacement_values.clone()
        else:
            replacement_values = torch.where(mask, replacement_values, values)
        return nested.replace(
            output, lambda path, tensor: replacement_values if tensor is values else tensor
        )

    act.__name__ = str(intervention)  # as messages of the hook show it
    group.forward(intervention.layer, Hook(act, f"layer {intervention.layer!r}", "forward"))


_image_grids: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
"""What tells how a model's tokens and cells lie on images of some size."""


def _grids_on_image(grids_of_image: GridsOfImage, model: nn.Module, inputs: tuple[Any, Any]) -> Any:
    """How tokens and cells lie on the image; None where it is not known. Looked for once for each
    model and shape of ``inputs`` (args, kwargs)."""
    key = tuple((path, tensor.shape[1:]) for path, tensor in nested.paths(inputs))
    grids = _image_grids.setdefault(model, {})
    if key not in grids:
        try:
            args, kwargs = inputs
            # a copy has none of the active hooks, and shares the parameters
            grids[key] = grids_of_image(copied(model, share=True), Inputs(args, kwargs))
        except Exception as error:  # a model that cannot be copied, or is given no image
            if came_by_signal(error):  # an interrupt
                raise
            return None
    return grids[key]
