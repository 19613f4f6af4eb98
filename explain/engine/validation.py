"""Refuses inputs that cannot be explained, before anything runs."""

import weakref
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from explain._utils.device_reads import require_finite
from explain._utils.errors import ImageError, ModelError, warn
from explain._utils.modules import parameters_of
from explain.data.inputs import (
    BRIGHT,
    COLOURS,
    InputLayout,
    Inputs,
    InputsLike,
    as_inputs,
    check_dimensions,
    dotted,
)
from explain.hooks import preserve
from explain.layers.frames import with_layout

_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models of which a warning has said that their inputs may not be scaled."""


def check_inputs(
    model: nn.Module, x_or_inputs: InputsLike, layout: InputLayout | None = None
) -> Inputs:
    """Return a caller's ``x`` or several inputs as `Inputs` with their layout; refuse what cannot
    be explained. Values are checked on the device later, with other numbers."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if preserve.is_transforming():
        raise ModelError(
            "an explanation must be started outside transforms of torch.func; give it the whole "
            "batch"
        )
    inputs = as_inputs(x_or_inputs)
    if layout is not None:
        inputs = replace(inputs, layout=layout)
    x = inputs.x
    name = "x" if inputs.name is None else f"input {inputs.name}"
    check_dimensions(model, x, name)
    if x.numel() == 0:
        raise ImageError(
            f"{name} must hold at least one image, got shape {tuple(x.shape)}; leave empty batches "
            "out"
        )
    if not x.is_floating_point():
        raise ImageError(
            f"{name} must be floating point, got {x.dtype}; use x / 255 or the model's "
            "preprocessing"
        )
    _check_weights(model, inputs, name)
    if x.is_meta:
        raise ImageError(
            f"{name} must hold values, got one on the meta device; load the model and the input "
            "first"
        )
    for path in inputs.paths:  # the image, and what is explained together with it
        tensor = inputs.tensor(path)
        tensor_name = name if path == inputs.path else f"input {dotted(path)}"
        if not tensor.is_floating_point():
            raise ImageError(
                f"{tensor_name} must be floating point, got {tensor.dtype}; leave it out of "
                "explained"
            )
        if path != inputs.path and not inputs.goes_with_images(path):
            raise ImageError(
                f"{tensor_name} must have {len(inputs)} samples, got {tuple(tensor.shape)}; leave "
                "it out"
            )
        # the sum is quick, finite only if all values are, and small of preprocessed images; a large
        # one is made NaN, so that values are checked then too
        total = tensor.detach().sum()
        total = total.masked_fill(total > BRIGHT * tensor.numel(), torch.nan)
        require_finite(total, partial(_check_values, model, tensor, tensor_name))
    # signals and videos may, and images if their last side is as short as channels are few
    may_end_in_channels = x.ndim != 4 or x.shape[-1] in COLOURS
    return with_layout(model, inputs) if may_end_in_channels else inputs


def _check_values(model: nn.Module, tensor: Tensor, name: str) -> None:
    """Refuse an input with NaN or infinity, and warn once for each model of one with values from 0
    to 255; called where the sum is not finite, or large."""
    if not tensor.isfinite().all():
        raise ImageError(
            f"{name} must hold finite values, got NaN or infinity; check the preprocessing"
        )
    least, most = tensor.aminmax()
    has_colours = not {tensor.shape[1], tensor.shape[-1]}.isdisjoint(COLOURS)
    is_of_bytes = has_colours and least >= 0 and BRIGHT < most <= 255
    if is_of_bytes and model not in _warned:
        _warned.add(model)
        warn(
            f"{name} has values up to {most:g}, as photos without preprocessing; use x / 255 or "
            "the model's preprocessing, unless the model itself scales them"
        )


def _check_weights(model: nn.Module, inputs: Inputs, name: str) -> None:
    """Refuse a model whose weights are missing, lazy or on another device than its inputs; messages
    call the image ``name``."""
    x = inputs.x
    parameters = parameters_of(model)
    if not parameters:
        return
    if any(map(is_lazy, parameters)):
        raise ModelError(
            "model must have all its weights, got lazy layers without them; call model(x) once "
            "first"
        )
    weight = parameters[0]
    if weight.is_meta and not x.is_meta:
        raise ModelError(
            "model must hold values, got one on the meta device; load its weights first"
        )
    if any(map(torch.is_inference, parameters)):
        raise ModelError(
            "model must have weights made outside torch.inference_mode(), got others; load it again"
        )
    images_by_name = {name: x}
    for path, tensor in inputs.other_tensors.items():
        if tensor.ndim > 3:
            images_by_name[f"input {dotted(path)}"] = tensor
    for image_name, tensor in images_by_name.items():
        if weight.device != tensor.device:
            raise ImageError(
                f"{image_name} must be on {weight.device}, the model's device, got "
                f"{tensor.device}; move it"
            )
