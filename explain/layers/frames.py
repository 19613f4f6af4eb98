"""Where inputs of five dimensions have their channels: behind the frames, or before them."""

import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from explain._utils.errors import ImageError, warn
from explain._utils.signals import came_by_signal
from explain.data.inputs import InputLayout, Inputs, InputsLike, as_inputs
from explain.hooks.preserve import untouched
from explain.hooks.tracer import Tracer
from explain.layers.stitched import Stitched

COLOURS = (1, 3)
"""How many channels an input has, where nothing else says it."""

_layouts: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], InputLayout]] = weakref.WeakKeyDictionary()
"""What was found out, by the lengths of the first two dimensions of one input."""
_said: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def with_layout(model: nn.Module, x: InputsLike) -> Inputs:
    """Return inputs that say where their channels are; of those with five dimensions, it is found out.

    The channels are what the first convolution takes as channels. Where no convolution shows it, they are the
    dimension of one or three, or of as many as a configuration of Hugging Face says. A warning says once for each model
    that frames come first, or that both are possible and which is assumed.

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
        raise ImageError("layout must be NCTHW for a Stitched model, got NTCHW; let the model inside exchange them")
    if inputs.x.ndim != 5 or inputs.layout is not None or isinstance(model, Stitched):
        return inputs
    lengths = inputs.x.shape[1], inputs.x.shape[2]
    known = _layouts.setdefault(model, {})
    if lengths not in known:
        seen = _by_convolution(model, inputs)
        known[lengths] = seen or _by_lengths(model, *lengths)
        _say(model, inputs, known[lengths], certain=seen is not None)
    return replace(inputs, layout=known[lengths])


def _by_convolution(model: nn.Module, inputs: Inputs) -> InputLayout | None:
    """The layout in which the first convolution takes the channels of one input as its channels, if it shows it.

    A change of one channel is one of its channels, and a change of one frame lies in all of them.
    """
    inputs = inputs.first().detached()
    x = inputs.x
    other = x - x.abs() - 1
    of_first, of_second = x.clone(), x.clone()
    of_first[:, 0] = other[:, 0]
    of_second[:, :, 0] = other[:, :, 0]
    try:
        plain = _first_convolution(model, inputs)
        changed = [_first_convolution(model, inputs.replaced(each)) for each in (of_first, of_second)]
    except Exception as error:  # what is wrong with the inputs is said where they are explained
        if came_by_signal(error):
            raise
        return None
    others = [each for each in changed if each is not None and plain is not None and each.shape == plain.shape]
    if plain is None or len(others) < 2:
        return None
    if len(plain) == 1:
        first, second = (length == 1 for length in x.shape[1:3])
    elif plain.ndim == 4 and len(plain) == x.shape[1] * x.shape[2] and x.shape[1] > 1:
        return None  # frames and channels are its channels together
    else:
        first, second = (int(each.ne(plain).flatten(1).any(1).sum()) == 1 for each in others)
    return None if first == second else "NCTHW" if first else "NTCHW"


class _ReachedError(BaseException):
    """Ends a forward pass at a convolution; no ``except Exception`` of the model catches it."""


class _FirstConvolution(Tracer):
    """Ends a forward pass at its first convolution, and keeps what this was ``given``, its channels first."""

    given: Tensor | None = None

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = 2 if func is F.conv2d else 3 if func is F.conv3d else None
        given = args[0] if args else kwargs.get("input")
        if places is None or not isinstance(given, Tensor) or given.ndim > places + 2:
            return func(*args, **kwargs)
        self.given = given.detach().movedim(-places - 1, 0).clone()
        raise _ReachedError


def _first_convolution(model: nn.Module, inputs: Inputs) -> Tensor | None:
    with untouched(model), _FirstConvolution() as tracer, suppress(_ReachedError):
        inputs.call(model)
    return tracer.given


def _by_lengths(model: nn.Module, first: int, second: int) -> InputLayout:
    """The layout that the lengths of the first two dimensions, and a configuration of Hugging Face, speak for."""
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", config)
    channels = getattr(config, "num_channels", None)
    usual = (channels,) if isinstance(channels, int) else COLOURS
    if (first in usual) == (second in usual):
        return "NCTHW" if channels is None else "NTCHW"  # as all models of transformers take videos
    return "NTCHW" if second in usual else "NCTHW"


def _say(model: nn.Module, inputs: Inputs, layout: InputLayout, *, certain: bool) -> None:
    """Warn once for a model that frames come first, or that this is as likely as what is assumed."""
    first, second = inputs.x.shape[1:3]
    doubtful = not certain and first in COLOURS and second in COLOURS and first * second > 1
    if model in _said or not (layout == "NTCHW" or doubtful):
        return
    _said.add(model)
    name = "x" if inputs.name is None else f"input {inputs.name}"
    reading = "frames before channels (NTCHW)" if layout == "NTCHW" else "channels before frames (NCTHW)"
    verb = "may be in either layout, and is taken to have" if doubtful else "is taken to have"
    warn(f'{name} {tuple(inputs.x.shape)} {verb} {reading}; pass layout="NTCHW" or "NCTHW" to say which')
