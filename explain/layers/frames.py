"""Where inputs of five dimensions have their channels: behind the frames, or before them."""

import weakref
from dataclasses import replace

import torch
from torch import Tensor, nn

from explain._utils.errors import ImageError, warn
from explain._utils.signals import came_by_signal
from explain.data.inputs import InputLayout, Inputs, InputsLike, as_inputs
from explain.hooks.group import HookGroup
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import hookable
from explain.layers.stitched import Stitched

COLOURS = (1, 3)
"""How many channels an input has, where nothing else says it."""

_layouts: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], InputLayout]] = (
    weakref.WeakKeyDictionary()
)
"""What was found out, by the lengths of the first two dimensions of one input."""
_said: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def with_layout(model: nn.Module, x: InputsLike) -> Inputs:
    """Return inputs that say where their channels are; of inputs with five dimensions, that is
    found out.

    The channels are what the first convolution takes as channels. Where no convolution shows it,
    they are the dimension of one or three, or of as many as a configuration of Hugging Face says. A
    warning says once for each model that frames come first, or that both are possible and which is
    assumed.

    Raises:
        ImageError: frames come first in the inputs of a `Stitched` model.

    >>> import torch, warnings
    >>> with warnings.catch_warnings(action="ignore"):
    ...     inputs = with_layout(nn.Flatten(), torch.zeros(1, 8, 3, 4, 4))
    >>> inputs.layout, inputs.x.shape
    ('NTCHW', torch.Size([1, 3, 8, 4, 4]))
    """
    inputs = as_inputs(x)
    if isinstance(model, Stitched) and inputs.layout == "NTCHW":
        raise ImageError(
            "layout must be NCTHW for a Stitched model, got NTCHW; let the model inside exchange "
            "them"
        )
    if inputs.x.ndim != 5 or inputs.layout is not None or isinstance(model, Stitched):
        return inputs
    first_length, second_length = inputs.x.shape[1:3]
    layouts = _layouts.setdefault(model, {})
    if (first_length, second_length) not in layouts:
        seen = _by_convolution(model, inputs)
        layouts[first_length, second_length] = seen or _by_lengths(
            model, first_length, second_length
        )
        _warn_once(model, inputs, layouts[first_length, second_length], certain=seen is not None)
    return replace(inputs, layout=layouts[first_length, second_length])


def _by_convolution(model: nn.Module, inputs: Inputs) -> InputLayout | None:
    """The layout of inputs with five dimensions by what the first convolution takes as its
    channels; None if unclear.

    The gradient of one of the convolution's channels then lies in one channel of the input, and in
    all frames. The model is run once on the first input, with gradients, and left as it was;
    whatever fails gives None.
    """
    inputs = inputs.first().detached()
    first_length, second_length = inputs.x.shape[1:3]
    source = inputs.x.clone().requires_grad_()
    first_calls: list[tuple[int, bool, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Pre-hook of convolutions: of the first one, keep its number of channels and the sum of
        its first channel."""
        x = args[0]
        is_map = isinstance(module, nn.Conv2d)
        dim = x.ndim - (3 if is_map else 4)
        if not first_calls:
            first_calls.append((x.shape[dim], is_map, x.select(dim, 0).sum()))

    convolutions = [
        name for name, m in hookable(model).items() if isinstance(m, (nn.Conv2d, nn.Conv3d))
    ]
    try:
        with untouched(model, grad=True), HookGroup(model) as group:
            for name in convolutions:
                group.forward_pre(name, note)
            inputs.replaced(source).call(model)
        if not first_calls:
            return None
        channels, is_map, total = first_calls[0]
        (gradient,) = torch.autograd.grad(total, source)
    except Exception as error:  # errors of the inputs are reported where they are explained
        if came_by_signal(error):
            raise
        return None
    if channels == 1:
        first_is_channels = first_length == 1
        second_is_channels = second_length == 1
    elif is_map and channels == first_length * second_length and first_length > 1:
        return None  # the convolution takes frames and channels together as its channels
    else:
        reached = gradient[0].flatten(2).ne(0).any(2)
        reached_in_first = int(reached.any(1).sum())
        reached_in_second = int(reached.any(0).sum())
        first_is_channels = reached_in_first == 1 and (reached_in_second > 1 or second_length == 1)
        second_is_channels = reached_in_second == 1 and (reached_in_first > 1 or first_length == 1)
    if first_is_channels == second_is_channels:
        return None
    return "NCTHW" if first_is_channels else "NTCHW"


def _by_lengths(model: nn.Module, first_length: int, second_length: int) -> InputLayout:
    """The likelier layout of inputs with five dimensions, by the lengths of their second and third
    dimension.

    A configuration of Hugging Face says how many channels there are; otherwise one or three are
    usual. A guess, of which `_warn_once` tells the user.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", config)
    channels = getattr(config, "num_channels", None)
    channel_counts = (channels,) if isinstance(channels, int) else COLOURS
    if (first_length in channel_counts) == (second_length in channel_counts):
        return "NCTHW" if channels is None else "NTCHW"  # as all models of transformers take videos
    return "NTCHW" if second_length in channel_counts else "NCTHW"


def _warn_once(model: nn.Module, inputs: Inputs, layout: InputLayout, *, certain: bool) -> None:
    """Warn, once for each model, that frames come before channels, or that both are as likely and
    which is assumed.

    The layout that is assumed stays the same for the model, so once is enough.
    """
    first_length, second_length = inputs.x.shape[1:3]
    doubtful = (
        not certain
        and first_length in COLOURS
        and second_length in COLOURS
        and first_length * second_length > 1
    )
    if model in _said or not (layout == "NTCHW" or doubtful):
        return
    _said.add(model)
    name = "x" if inputs.name is None else f"input {inputs.name}"
    reading = (
        "frames before channels (NTCHW)" if layout == "NTCHW" else "channels before frames (NCTHW)"
    )
    verb = "may be in either layout, and is taken to have" if doubtful else "is taken to have"
    warn(
        f'{name} {tuple(inputs.x.shape)} {verb} {reading}; pass layout="NTCHW" or "NCTHW" to say '
        "which"
    )
