"""Layers: their names, the maps they give, and which one to explain when nobody says.

A feature map reaches a method as ``(N, C, h, w)`` whatever the network calls it: channels-last maps (Swin) are turned
round, and token sequences (ViT) are laid out on their grid with class and register tokens left out.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from explain.errors import LayerError
from explain.hooks import Capture, HookGroup, first_tensor, untouched

MAX_EXTRA_TOKENS = 8  # one class token, a distillation token, and the four to eight registers that are in use
_POOLING = re.compile("Pool(?!Former)|Upsample")
_ATTENTION = re.compile("(?!.*(?:Block|Layer))(?:.*[Aa]tt(?:ention|n)|[A-Z]*SA$|XCA$)")


@dataclass(frozen=True)
class Grid:
    """Where a tensor's spatial map is: its layout, height and width, and how many leading tokens to skip."""

    layout: Literal["NCHW", "NHWC", "tokens"]
    height: int
    width: int
    skip: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a module during a forward pass: dotted name, class, output shape, and spatial grid if it has one."""

    name: str
    kind: str
    shape: tuple[int, ...]
    grid: Grid | None
    passes_on: bool
    """Whether the output is the very tensor that the previous call returned (containers, in-place activations)."""
    again: bool = False
    """Whether it comes beside others, and had been returned before the previous call: then it may not be used again."""


def find_grid(shape: tuple[int, ...], size: tuple[int, int]) -> Grid | None:
    """Tell how a tensor of ``shape`` covers an input of ``size`` (height, width), or None if it has no spatial map.

    >>> find_grid((1, 512, 7, 7), (224, 224))
    Grid(layout='NCHW', height=7, width=7, skip=0)
    >>> find_grid((1, 7, 7, 768), (224, 224))
    Grid(layout='NHWC', height=7, width=7, skip=0)
    >>> find_grid((1, 197, 768), (224, 224))
    Grid(layout='tokens', height=14, width=14, skip=1)
    """
    if len(shape) == 4:
        _, a, b, c = shape
        channels_last = not _has_aspect(b, c, size) and abs(a - b * size[0] / size[1]) <= 1
        grid = Grid("NHWC", a, b) if channels_last else Grid("NCHW", b, c)
        return grid if grid.height * grid.width > 1 else None
    if len(shape) == 3:
        return _token_grid(shape[1], size)
    return None


def _has_aspect(height: int, width: int, size: tuple[int, int]) -> bool:
    """Whether a map has the input's aspect ratio, up to the rounding of strided layers."""
    return abs(height - width * size[0] / size[1]) <= 1 + 0.1 * height


def _token_grid(tokens: int, size: tuple[int, int]) -> Grid | None:
    for skip in range(min(MAX_EXTRA_TOKENS, tokens - 1) + 1):
        cells = tokens - skip
        height = max(1, round((cells * size[0] / size[1]) ** 0.5))
        width = cells // height
        fits = height == round(width * size[0] / size[1]) or width == round(height * size[1] / size[0])
        if cells > 1 and height * width == cells and fits:
            return Grid("tokens", height, width, skip)
    return None


def to_spatial(tensor: torch.Tensor, size: tuple[int, int], layer: str) -> torch.Tensor:
    """Lay a layer's output out as ``(N, C, h, w)`` for an input of ``size`` (height, width).

    Raises:
        LayerError: the output has no spatial map.
    """
    grid = find_grid(tuple(tensor.shape), size)
    if grid is None:
        raise LayerError(
            f"layer {layer!r} must give a spatial map, got shape {tuple(tensor.shape)}; choose a convolutional layer "
            "(--list-layers or explain.list_layers shows which have a map)"
        )
    if grid.layout == "NCHW":
        return tensor
    if grid.layout == "tokens":
        tensor = tensor[:, grid.skip :].reshape(len(tensor), grid.height, grid.width, -1)
    return tensor.permute(0, 3, 1, 2)


def from_spatial(maps: torch.Tensor, like: torch.Tensor, size: tuple[int, int], layer: str) -> torch.Tensor:
    """Undo `to_spatial`: lay ``maps`` ``(N, C, h, w)`` out as ``like``, whose class and register tokens stay.

    >>> tokens = torch.rand(1, 5, 3)
    >>> torch.equal(from_spatial(to_spatial(tokens, (8, 8), ""), tokens, (8, 8), ""), tokens)
    True
    """
    grid = find_grid(tuple(like.shape), size)
    if grid is None:
        raise LayerError(f"layer {layer!r} must give a spatial map, got shape {tuple(like.shape)}")
    if grid.layout == "NCHW":
        return maps
    last = maps.permute(0, 2, 3, 1)
    return last if grid.layout == "NHWC" else torch.cat([like[:, : grid.skip], last.flatten(1, 2)], dim=1)


def list_layers(model: nn.Module, x: torch.Tensor) -> list[Call]:
    """Run ``model`` on the first image of ``x`` ``(N, C, H, W)`` and list the calls of its modules, as they return.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
    >>> [(call.name, call.shape) for call in list_layers(model, torch.zeros(1, 3, 4, 4))]
    [('0', (1, 8, 2, 2)), ('1', (1, 8, 2, 2)), ('2', (1, 32))]
    """
    calls: list[Call] = []
    previous: list[torch.Tensor | None] = [None]
    seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
    size = (int(x.shape[-2]), int(x.shape[-1]))

    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is None:
                return
            shape, passes_on = tuple(tensor.shape), tensor is previous[0]
            grid = find_grid(shape, size) if shape[:1] == (1,) else None  # windows of one image are no batch of maps
            version = 0 if tensor.is_inference() else tensor._version
            known, then = seen.get(id(tensor), (None, 0))
            again = known is not None and known() is tensor and then == version and output is not tensor
            calls.append(Call(name, type(module).__name__, shape, grid, passes_on, again and not passes_on))
            previous[0], seen[id(tensor)] = tensor, (weakref.ref(tensor), version)

        return record

    with untouched(model), HookGroup(model) as group:
        for name, _ in model.named_modules():
            if name:
                group.forward(name, recorder(name))
        model(x[:1].detach().clone())
    return calls


_defaults: weakref.WeakKeyDictionary[nn.Module, dict[Any, str]] = weakref.WeakKeyDictionary()


def default_layer(model: nn.Module, x: torch.Tensor) -> str:
    """Name the layer to explain: the last feature map before pooling, or the tokens before the last attention.

    It is found by running the model once on one image, and remembered for as long as the model lives with the same
    modules and is given inputs of the same size.

    Raises:
        LayerError: no layer gives a spatial map.
    """
    key = (tuple(x.shape[1:]), hash(tuple(id(module) for module in model.modules())))
    known = _defaults.setdefault(model, {})
    if key not in known:
        known[key] = _choose(model, x[:1])
    return known[key]


def stage_layers(model: nn.Module, x: torch.Tensor, count: int = 4) -> list[str]:
    """Name the last layer at each of the ``count`` coarsest resolutions, the finest first.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1))
    >>> stage_layers(model, torch.zeros(1, 3, 8, 8))
    ['1', '3']
    """
    last: dict[tuple[int, int], str] = {}
    for group in _groups(list_layers(model, x)):
        grid = group[-1].grid
        if grid is not None and not _is_pooling(group):
            last[grid.height, grid.width] = _outermost(group)
    by_area = sorted(last, key=lambda size: size[0] * size[1])[:count]
    return [last[size] for size in reversed(by_area)] or [default_layer(model, x)]


def _groups(calls: list[Call]) -> list[list[Call]]:
    """Calls that returned one and the same tensor, together.

    Left out are those that returned it again later, those inside an attention, where heads and weights look like maps,
    and all but the last of a module's calls, since that one is what its name stands for.
    """
    groups: list[list[Call]] = []
    for call in calls:
        if call.passes_on and groups:
            groups[-1].append(call)
        else:
            groups.append([call])
    attentions = tuple(f"{call.name}." for call in calls if _is_attention(call))
    last = {call.name: id(call) for call in calls}
    found = [
        [call for call in group if id(call) == last[call.name] and not call.name.startswith(attentions)]
        for group in groups
        if not group[0].again
    ]
    return [group for group in found if group]


def _is_pooling(group: list[Call]) -> bool:
    return any(_POOLING.search(call.kind) for call in group)


def _is_attention(call: Call) -> bool:
    return _ATTENTION.match(call.kind) is not None


def _choose(model: nn.Module, x: torch.Tensor) -> str:
    """The last feature map; where there are tokens, the best place that the scores depend on, found by looking."""
    calls, size = list_layers(model, x), (int(x.shape[-2]), int(x.shape[-1]))
    groups = _groups(calls)
    maps, tokens = _places_of_maps(groups, size), _places_of_tokens(groups)
    places = sorted([*maps[-1:], *_before_attention(groups, tokens)[-1:]], reverse=True)
    if not places:
        raise LayerError(
            "layer must be given for this model: none of its layers gives a spatial map "
            f"({len(calls)} calls looked at); name one, or use a method for pixels such as saliency"
        )
    if not tokens:
        return _outermost(groups[places[0]])
    order = [places[0], *_before_attention(groups, tokens)[-1:], *sorted(maps + tokens, reverse=True)]
    return _first_that_matters(model, x, list(dict.fromkeys(_outermost(groups[place]) for place in order)))


def _places_of_maps(groups: list[list[Call]], size: tuple[int, int]) -> list[int]:
    """Where maps are: those that cover the input, not pooled, if there are any."""
    grids = [(i, grid) for i, group in enumerate(groups) if (grid := group[-1].grid) and grid.layout != "tokens"]
    maps = [i for i, grid in grids if _has_aspect(grid.height, grid.width, size)] or [i for i, _ in grids]
    return [i for i in maps if not _is_pooling(groups[i])] or maps


def _places_of_tokens(groups: list[list[Call]]) -> list[int]:
    """Where tokens are; what is pooled from them may have as many channels as there might be tokens."""
    grids = [(i, grid) for i, group in enumerate(groups) if (grid := group[-1].grid) and not _is_pooling(group)]
    return [i for i, grid in grids if grid.layout == "tokens"]


def _before_attention(groups: list[list[Call]], tokens: list[int]) -> list[int]:
    """The tokens that some attention follows, since behind the last one only the class token may count.

    What an attention gives itself may be a window, padded, of a map that is smaller.
    """
    attention = [i for i, group in enumerate(groups) if any(_is_attention(call) for call in group)]
    return [i for i in tokens if i < attention[-1] and i not in attention] if attention else tokens


def _first_that_matters(model: nn.Module, x: torch.Tensor, names: list[str], most: int = 24) -> str:
    """The first of some layers whose map the best score depends on: often, only the class token of the last does."""
    names, size = names[:most], (int(x.shape[-2]), int(x.shape[-1]))
    with untouched(model), HookGroup(model) as group:
        capture = Capture(group, names, gradients=True)
        scores = first_tensor(model(x.detach().clone()))
        if scores is not None:
            capture.backward(scores.float().amax())
    matters = {name: bool(to_spatial(gradient, size, name).any()) for name, gradient in capture.gradients.items()}
    return next((name for name in names if matters.get(name)), names[0])


def _outermost(group: list[Call]) -> str:
    """Of the names that one tensor goes by, the shortest path; among equals, the one that returned last."""
    return min(reversed(group), key=lambda call: call.name.count(".")).name
