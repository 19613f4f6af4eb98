"""Which layers, calls, inputs and outputs a caller means: ``layer4@0``, ``layer4:input``, patterns, modules; and which
units of a layer: channels, tokens, heads and places, and where they are in its values."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, reduce
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import nn

from explain._utils.errors import HookError, LayerError, either
from explain._utils.spelling import close_to, did_you_mean
from explain.hooks.unwrap import modules_of, submodule

Where: TypeAlias = (
    str | nn.Module | type[nn.Module] | Iterable[str | nn.Module | type[nn.Module]] | dict[str, nn.Module]
)


def select(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that ``where`` selects, by dotted name, in the order given.

    ``where`` is a dotted name, a glob pattern (``"layer*.conv1"``), a module, a module class, or several of these; or
    what this function returned for the model before. The model itself is named ``""``.

    Raises:
        LayerError: a name or pattern matches nothing, a module is not part of the model, or the type is wrong.

    >>> list(select(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.ReLU))
    ['1']
    """
    if isinstance(where, dict) and where:
        return where
    return {name: module for item in _items(where) for name, module in _select_one(model, item).items()}


def _items(where: Any) -> list[Any]:
    """What a selection is made of, one or several."""
    items = [*where] if isinstance(where, Iterable) and not isinstance(where, (str, nn.Module, type)) else [where]
    if not items:
        raise LayerError("layer must name at least one layer, got an empty list; leave it out for the last feature map")
    return items


def _select_one(model: nn.Module, where: object) -> dict[str, nn.Module]:
    if isinstance(where, str):
        return _by_name(model, where)
    known, remedy = modules_of(model), "explain.list_layers(model, x) shows the names"
    if isinstance(where, nn.Module):
        if where in known:
            return {known[where]: where}
        raise LayerError(f"layer must be one of the model, got a {type(where).__name__} that is not in it; name it")
    if isinstance(where, type) and issubclass(where, nn.Module):
        found = {name: module for module, name in known.items() if isinstance(module, where)}
        if not found:
            raise LayerError(f"layer must select a module, but the model has no {where.__name__}; {remedy}")
        return found
    raise LayerError(f"layer must be a name, a pattern, a module or a module class, got {where!r}; {remedy}")


def _by_name(model: nn.Module, where: str) -> dict[str, nn.Module]:
    if _is_module(where, model):
        return {where: submodule(model, where)}  # a shared module has several names
    names = {name: module for module, name in modules_of(model).items() if name}
    found = {name: module for name, module in names.items() if fnmatch.fnmatchcase(name, where)}
    if found:
        return found
    listed = either("explain.list_layers(model, x) lists them", "'explain layers PHOTO' lists them")
    hint = did_you_mean(where, names)
    more = "" if close_to(where, names) or len(names) <= 8 else f"; {listed}"
    raise LayerError(f"layer {where!r} is not in the model; {hint}{more}")


Part: TypeAlias = Literal["", "input", "q", "k", "v", "pattern", "heads"]
"""What of a layer is meant: its output; the first tensor that it is given; or, of the attention in it, the queries,
keys and values ``(N, heads, tokens, d)``, the attention weights ``(N, heads, queries, keys)``, or the result of each
head ``(N, heads, tokens, d)``."""
PARTS: tuple[Part, ...] = get_args(Part)[1:]


class LayerPlace(NamedTuple):
    """What a name means: the module, which part of it, and which call, if it names one."""

    module: str
    part: Part = ""
    call: int | None = None

    @property
    def layer(self) -> str:
        """The name without a call."""
        return f"{self.module}:{self.part}" if self.part else self.module

    @property
    def of_attention(self) -> bool:
        """Whether it is a part of the attention in the module."""
        return self.part not in ("", "input")


def place_of(name: str, model: nn.Module | None = None) -> LayerPlace:
    """Split a name into its parts; with a model, a module that has the whole name takes precedence over suffixes.

    >>> place_of("encoder.conv@0"), place_of("conv:input")
    (LayerPlace(module='encoder.conv', part='', call=0), LayerPlace(module='conv', part='input', call=None))
    """
    if _is_module(name, model):
        return LayerPlace(name)
    start, at, number = name.rpartition("@")
    if at and number.isdecimal():
        inner = place_of(start, model)
        if inner.call is None:
            return inner._replace(call=int(number))
    start, _, part = name.rpartition(":")
    return LayerPlace(start, part) if part in PARTS else LayerPlace(name)


def find_places(model: nn.Module, where: Where) -> dict[str, LayerPlace]:
    """Return the places that ``where`` selects by name, in its order; names and patterns may have the suffixes.

    Raises:
        LayerError: a name or pattern matches nothing, or a module is not part of the model.

    >>> list(find_places(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), ["*:input", nn.ReLU]))
    ['0:input', '1:input', '1']
    """
    if isinstance(where, dict) and where and all(isinstance(module, nn.Module) for module in where.values()):
        return {name: LayerPlace(name) for name in where}
    found: dict[str, LayerPlace] = {}
    for item in _items(where):
        place = place_of(item, model) if isinstance(item, str) else LayerPlace("")
        for module in select(model, place.module if isinstance(item, str) else item):
            named = place._replace(module=module)
            found[name_of(named)] = named
    return found


def select_places(model: nn.Module, where: Where) -> list[str]:
    """Name the places that ``where`` selects; see `find_places`."""
    return list(find_places(model, where))


def name_of(place: LayerPlace) -> str:
    """Join the parts of a name.

    >>> name_of(LayerPlace("conv", "input", 2))
    'conv:input@2'
    """
    return place.layer if place.call is None else f"{place.layer}@{place.call}"


def _is_module(name: str, model: nn.Module | None) -> bool:
    if model is None:
        return False
    try:
        submodule(model, name)
    except AttributeError:
        return False
    return True


@dataclass(frozen=True, eq=False, repr=False)
class Units:
    """Which units of a layer are meant; several intersect, and none is all of it."""

    _: KW_ONLY
    channels: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    positions: Sequence[tuple[int, int]] | None = None
    region: Sequence[float] | None = None
    channel_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("channels", "tokens", "heads", "positions", "region"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _as_tuple(name, value))

    @property
    def of_places(self) -> bool:
        """Whether tokens or places of the photo are meant."""
        return any(each is not None for each in (self.tokens, self.positions, self.region))

    def chosen(self) -> list[str]:
        """What is chosen, in words."""
        found = []
        for name in ("channels", "tokens", "heads", "positions"):
            value = getattr(self, name) or ()
            found += [f"{name} {', '.join(map(str, value[:6]))}{', …' if len(value) > 6 else ''}"] if value else []
        return found if self.region is None else [*found, "region " + ",".join(f"{edge:g}" for edge in self.region)]


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.tolist()
    found = list(value) if isinstance(value, Iterable) else [value]
    if name == "region":
        kind, fits = "numbers x0, y0, x1, y1 with x0 < x1 and y0 < y1", all(isinstance(each, Real) for each in found)
        fits = fits and len(found) == 4 and found[0] < found[2] and found[1] < found[3]
    elif name == "positions":
        found = [tuple(each) if isinstance(each, (list, tuple)) else each for each in found]
        kind, fits = "pairs (row, column)", all(isinstance(each, tuple) and len(each) == 2 for each in found)
    else:
        if all(isinstance(each, bool) for each in found):  # a mask
            found = [index for index, chosen in enumerate(found) if chosen]
        kind, fits = "whole numbers", all(isinstance(each, Integral) for each in found)
        found = list(map(int, found)) if fits else found
    if not found or not fits:
        raise HookError(f"{name} must be a list of {kind}, got {value!r:.60}")
    return tuple(found)


class Layout:
    """Where channels and positions are in the ``values`` that a place of a model gives.

    ``channel_dim`` is the dimension of channels, and ``places`` has those of positions: rows and columns of a map, or
    tokens. ``size`` is that of the photo, and ``what`` is named in errors. ``of_images`` is the dimension of images,
    and ``find_grid`` tells how tokens lie on the photo: a `Grid` of `explain.layers`, or None.
    """

    def __init__(
        self, values: torch.Tensor, place: LayerPlace, module: nn.Module, model: nn.Module, size: tuple[int, ...],
        what: str, channel_dim: int | None = None, *, of_images: int = 0, find_grid: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        self._shape, self._device, self._size, self._what = tuple(values.shape), values.device, size, what
        self._find_grid = find_grid
        self._of_attention, last = place.of_attention, values.ndim - 1
        self._of_tokens = self._of_attention or values.ndim == 3
        if channel_dim is not None:
            self.channel_dim = channel_dim % values.ndim
        elif values.ndim < 4 and not self._of_tokens:
            self.channel_dim = min(1, last)
        else:
            is_last = self._of_tokens or _is_channels_last(values, module, model, place.part == "input")
            self.channel_dim = last if is_last else 1
        maps = [dim for dim in range(values.ndim) if dim not in (of_images, self.channel_dim)]
        self.places = [last - 1] if self._of_attention else maps

    def mask(self, units: Units) -> torch.Tensor | None:
        """Return where the units are, as truth values that broadcast to the values; None for all of it."""
        dims, must = len(self._shape), f"{self._what} must be on"
        if units.heads is not None and not self._of_attention:
            raise HookError(f"{self._what} must name a part of an attention, such as 'LAYER:heads', got a layer")
        if units.heads is not None and dims != 4:
            raise HookError(f"{must} an attention whose heads are told apart, got {self._shape}")
        if units.tokens is not None and dims != (4 if self._of_attention else 3):
            raise HookError(f"{must} a layer of tokens (N, T, C), got {self._shape}; use positions or region")
        along = {"channels": self.channel_dim, "heads": 1, "tokens": self.places[-1] if self.places else 0}
        masks = [self._along(along[name], getattr(units, name), name) for name in along if getattr(units, name)]
        if units.positions is not None or units.region is not None:
            masks.append(self._on_grid(units))
        return reduce(torch.logical_and, masks) if masks else None

    def grid(self) -> tuple[int, int]:
        """The rows and columns of a map, or of the tokens that lie on one."""
        if self._of_tokens:
            grid = self._grid_of_tokens
            return grid.height, grid.width
        if len(self.places) < 2:
            raise HookError(f"{self._what} must be on a layer with a map, got {self._shape}")
        rows, columns = self.places[-2:]
        return self._shape[rows], self._shape[columns]

    @cached_property
    def _grid_of_tokens(self) -> Any:
        found = None if self._find_grid is None else self._find_grid()
        if found is None or found.frames is not None:
            must = "be on tokens that lie on a grid of the photo, which these are not known to do"
            raise HookError(f"{self._what} must {must}, got {self._shape}; give tokens= instead")
        return found

    def _on_grid(self, units: Units) -> torch.Tensor:
        """Where the positions and the region are."""
        height, width = self.grid()
        grid = torch.ones(height, width, dtype=torch.bool, device=self._device)
        if units.positions is not None:
            grid = torch.zeros_like(grid)
            for at in units.positions:
                if not (-height <= at[0] < height and -width <= at[1] < width):
                    raise HookError(f"positions of {self._what} must be within {height} × {width}, got {at}")
                grid[at] = True
        if units.region is not None:
            if not self._size:
                raise HookError(f"region of {self._what} must be one of a photo, but the model is given none")
            x0, y0, x1, y1 = units.region
            ys = (torch.arange(height, device=self._device) + 0.5) * self._size[0] / height
            xs = (torch.arange(width, device=self._device) + 0.5) * self._size[1] / width
            inside = ((ys >= y0) & (ys < y1))[:, None] & ((xs >= x0) & (xs < x1))
            if not inside.any():
                raise HookError(f"region of {self._what} must hold the centre of a position, got none; make it larger")
            grid &= inside
        dims = range(len(self._shape))
        if self._of_tokens:
            along = self.places[-1] if self._of_attention else self._grid_of_tokens.of_tokens
            chosen = grid.new_zeros(self._shape[along])
            chosen[list(self._grid_of_tokens.tokens)] = grid.flatten()
            return chosen.reshape([-1 if dim == along else 1 for dim in dims])
        return grid.reshape([self._shape[dim] if dim in self.places[-2:] else 1 for dim in dims])

    def _along(self, dim: int, chosen: Sequence[int], name: str) -> torch.Tensor:
        """Truth values that are true for the chosen indices of a dimension."""
        count = self._shape[dim]
        wrong = [index for index in chosen if not (isinstance(index, int) and -count <= index < count)]
        if wrong:
            raise HookError(f"{name} of {self._what} must be from 0 to {count - 1}, got {wrong[0]}")
        found = torch.zeros(count, dtype=torch.bool, device=self._device)
        found[list(chosen)] = True
        return found.reshape([-1 if each == dim else 1 for each in range(len(self._shape))])


def _is_channels_last(values: torch.Tensor, module: nn.Module, model: nn.Module, of_input: bool) -> bool:
    """Whether a map is ``(N, H, W, C)``: the nearest module that fixes the order of dimensions tells.

    That is the last one inside the module, or the first for its input, and else the last before it.
    """
    inside, everything = list(module.modules()), list(model.modules())
    place = next((i for i, each in enumerate(everything) if each is module), 0)
    for each in [*(inside if of_input else reversed(inside)), *reversed(everything[:place])]:
        dims = getattr(each, "dims", None)
        if isinstance(dims, (list, tuple)) and len(dims) == values.ndim:  # a permutation
            return bool((dims[1] if of_input else dims[-1]) == (values.ndim - 1 if of_input else 1))
        if isinstance(each, nn.modules.conv._ConvNd) or "BatchNorm" in type(each).__name__:
            return False
        if isinstance(each, nn.Linear) and values.shape[-1] in (each.in_features, each.out_features):
            return True
        of_tokens = isinstance(each, nn.LayerNorm) and type(each).__name__ != "LayerNorm2d"
        if of_tokens and values.shape[-1] == each.normalized_shape[-1]:
            return True
    return False
