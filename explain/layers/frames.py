"""Where inputs have their channels: before the rows or frames, behind the frames, or last."""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import ImageError, warn
from explain._utils.signals import came_by_signal
from explain.data.inputs import InputLayout, Inputs, InputsLike, as_inputs
from explain.hooks.group import HookGroup
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import hookable
from explain.layers.layouts import Size
from explain.layers.stitched import Stitched

COLOURS = (1, 3)
"""How many channels an input has, where nothing else says it."""

_layouts: weakref.WeakKeyDictionary[nn.Module, dict[Any, InputLayout]] = weakref.WeakKeyDictionary()
"""What was found out, by the lengths of the dimensions that channels may be in."""
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def with_layout(model: nn.Module, x: InputsLike) -> Inputs:
    """Return inputs that say where their channels are; where their shape leaves that open, it is
    found out by the network, with one warning for each model where that is not certain."""
    inputs = as_inputs(x)
    shape = inputs.x.shape
    if isinstance(model, Stitched) and not inputs.as_taken:
        raise ImageError(
            f"layout must have the channels first for a Stitched model, got {inputs.layout}; let "
            "the model inside exchange them"
        )
    dims = _dims_of_channels(tuple(shape))
    if len(dims) == 1 or inputs.layout is not None or isinstance(model, Stitched):
        return inputs
    lengths = {layout: shape[dim] for layout, dim in dims.items()}
    # The channels are what the first convolution, or of signals also the first recurrent layer,
    # takes as channels. Where none shows it, they are the dimension of one or three, or of as many
    # as a configuration of Hugging Face says, and of signals the first linear layer.
    layouts = _layouts.setdefault(model, {})
    key = tuple(lengths.items())
    if key not in layouts:
        certain_layout = _by_convolution(model, inputs, dims)
        layouts[key] = certain_layout or _by_lengths(model, lengths)
        _warn_once(model, inputs, layouts[key], lengths, certain=certain_layout is not None)
    return replace(inputs, layout=layouts[key])


def _dims_of_channels(shape: Size) -> dict[InputLayout, int]:
    """The layouts that an input's shape allows, and the dimension of the channels in each; last
    only if one or three are there alone, behind more than one row or column."""
    if len(shape) == 3:
        return {"NCL": 1, "NLC": 2}
    dims: dict[InputLayout, int] = {"NCTHW": 1, "NTCHW": 2} if len(shape) == 5 else {"NCHW": 1}
    has_sides = len(shape) > 3 and min(shape[-3:-1]) > 1
    if has_sides and shape[-1] in COLOURS:
        lengths = {shape[dim] for dim in dims.values()}
        if lengths.isdisjoint(COLOURS):
            dims["NHWC" if len(shape) == 4 else "NTHWC"] = len(shape) - 1
    return dims


def _by_convolution(
    model: nn.Module, inputs: Inputs, dims: Mapping[InputLayout, int]
) -> InputLayout | None:
    """The layout of inputs by where the gradient of one channel of the first convolution lies: in
    one channel, in all rows and frames. None if unclear."""
    inputs = inputs.first().detached()
    source = inputs.x.clone().requires_grad_()
    first_calls: list[tuple[int, bool, Tensor]] = []
    """The number of channels of the first call, whether it is of images, and the sum of its first
    channel."""
    ran = False

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Pre-hook of convolutions, which notes the first call."""
        x = args[0]
        is_map = isinstance(module, nn.Conv2d)
        # a recurrent layer has no kernel, and its channels last
        dim = x.ndim - 1 - len(getattr(module, "kernel_size", ()))
        if not first_calls:
            first_calls.append((x.shape[dim], is_map, x.select(dim, 0).sum()))

    kinds = (nn.Conv1d, nn.RNNBase) if "NCL" in dims else (nn.Conv2d, nn.Conv3d)
    layers = [name for name, m in hookable(model).items() if isinstance(m, kinds)]
    try:
        with untouched(model, grad=True), HookGroup(model) as group:
            for name in layers:
                group.forward_pre(name, note)
            inputs.replaced(source).call(model)
        ran = True
        if not first_calls:
            return None
        channels, is_map, total = first_calls[0]
        (gradient,) = torch.autograd.grad(total, source)
    except Exception as error:  # errors of the inputs are reported where they are explained
        if came_by_signal(error):
            raise
        # what the network refuses is given to it as usual, so that its own error is seen
        return None if ran or "NCHW" not in dims else "NCHW"
    shape = inputs.x.shape
    if is_map and len(shape) == 5 and channels == shape[1] * shape[2] and shape[1] > 1:
        return None  # the convolution takes frames and channels together as its channels
    if channels == 1:  # the gradient lies everywhere: a dimension of one is that of the channels
        fitting = [layout for layout, dim in dims.items() if shape[dim] == 1]
    else:
        has_gradient = gradient != 0
        reached = {
            dim: int(has_gradient.movedim(dim, 0).flatten(1).any(1).sum()) for dim in dims.values()
        }
        """How many entries of each dimension the first channel is computed from."""
        fitting = [
            layout
            for layout, dim in dims.items()
            if reached[dim] == 1
            and all(reached[other] > 1 or shape[other] == 1 for other in reached if other != dim)
        ]
    return fitting[0] if len(fitting) == 1 else None


def _by_lengths(model: nn.Module, lengths: Mapping[InputLayout, int]) -> InputLayout:
    """The likeliest layout by the lengths of dimensions that may be the channels: as a
    configuration or first linear layer says, else one or three. A guess."""
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", config)
    channels = getattr(config, "num_channels", None)
    channel_counts: tuple[int, ...] = (channels,) if isinstance(channels, int) else COLOURS
    if "NCL" in lengths:
        linear = (module.in_features for module in model.modules() if isinstance(module, nn.Linear))
        channel_counts = tuple(islice(linear, 1))
    fitting = [layout for layout, length in lengths.items() if length in channel_counts]
    if len(fitting) == 1:
        return fitting[0]
    if channels is None or "NTCHW" not in lengths:
        return next(iter(lengths))  # the usual layout comes first
    return "NTCHW"  # as all models of transformers take videos


def _warn_once(
    model: nn.Module,
    inputs: Inputs,
    layout: InputLayout,
    lengths: Mapping[InputLayout, int],
    *,
    certain: bool,
) -> None:
    """Warn, once for each model, that frames come before channels, or that several layouts are as
    likely, and which is assumed."""
    colour_counts = [length for length in lengths.values() if length in COLOURS]
    # of two dimensions of size 1, it does not matter which is that of the channels
    several_fit = len(colour_counts) > 1 and max(colour_counts) > 1
    is_channels_last = layout[-1] == "C"
    doubtful = (several_fit or is_channels_last) and not certain
    if model in _warned or not (layout == "NTCHW" or doubtful):
        return
    _warned.add(model)
    name = "x" if inputs.name is None else f"input {inputs.name}"
    reading = {
        "NTCHW": "frames before channels (NTCHW)",
        "NCTHW": "channels before frames (NCTHW)",
    }.get(layout, f"channels last ({layout})")
    verb = "may be in either layout, and is taken to have" if doubtful else "is taken to have"
    choices = " or ".join(f'"{possible}"' for possible in lengths)
    warn(f"{name} {tuple(inputs.x.shape)} {verb} {reading}; pass layout={choices} to say which")
