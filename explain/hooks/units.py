"""Units of a layer (channels, tokens, heads, places of the image), and where they are in its
values."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from explain._utils.errors import HookError
from explain._utils.modules import modules_of, submodule
from explain.hooks.layer_names import LayerPlace


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
        """Turn each selection of units into a tuple, and check it."""
        for name in ("channels", "tokens", "heads", "positions", "region"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _as_tuple(name, value))

    @property
    def of_places(self) -> bool:
        """Whether the chosen units are tokens or places of the image, rather than channels or heads
        alone."""
        return any(units is not None for units in (self.tokens, self.positions, self.region))

    def chosen(self) -> list[str]:
        """The chosen units of an intervention in words, for messages: ``["channels 1, 2", "region
        0,0,8,8"]``."""
        words = []
        for name in ("channels", "tokens", "heads", "positions"):
            units = getattr(self, name)
            if units is not None:
                more = ["…"] if len(units) > 6 else []
                words.append(f"{name} {', '.join([*map(str, units[:6]), *more])}")
        if self.region is not None:
            words.append("region " + ",".join(f"{edge:g}" for edge in self.region))
        return words


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A user's choice of units, a list, array, tensor, mask or number, as a tuple of numbers (of
    pairs, for positions). ``name`` is the option."""
    values = value.tolist() if isinstance(value, torch.Tensor) else value
    try:
        units = np.atleast_1d(np.asarray(values))
    except ValueError:  # lists of several lengths
        units = np.array([])
    is_whole = units.dtype.kind in "iu"
    if name == "region":
        requirement = "numbers x0, y0, x1, y1 with x0 < x1 and y0 < y1"
        is_number = is_whole or units.dtype.kind == "f"
        fits = is_number and units.shape == (4,) and bool((units[:2] < units[2:]).all())
    elif name == "positions":
        requirement = "pairs (row, column)"
        fits = is_whole and units.ndim == 2 and units.shape[1] == 2
    else:
        requirement = "whole numbers"
        if units.dtype == bool:
            units = units.nonzero()[0]
        fits = units.dtype.kind in "iu" and units.ndim == 1
    if not fits or not units.size:
        raise HookError(f"{name} must be a list of {requirement}, got {value!r:.60}")
    return tuple(tuple(unit) if name == "positions" else unit for unit in units.tolist())


class Axes:
    """Where channels (``channel_dim``) and positions (``places``: rows and columns of a map, or
    tokens) are in the ``values`` that a place of a model gives."""

    def __init__(
        self,
        values: torch.Tensor,
        place: LayerPlace,
        model: nn.Module,
        size: tuple[int, ...],
        what: str,
        channel_dim: int | None = None,
        *,
        image_dim: int = 0,
        find_grid: Callable[[], Any] = lambda: None,
        find_placement: Callable[[], Any] = lambda: None,
    ) -> None:
        """Find both from the place's name, the shape and the modules near it, or from
        ``channel_dim``. ``size`` is the image's; ``what`` names the layer in errors."""
        self._shape = tuple(values.shape)
        self._device = values.device
        self._size = size
        self._what = what
        self._find_grid = find_grid
        """Tells how tokens lie on the image: a `Grid` of `explain.layers`, or None."""
        self._find_placement = find_placement
        """Tells where the cells of a map look: a `Placement`, or None for evenly."""
        self._of_attention = place.of_attention
        self._of_tokens = self._of_attention or values.ndim == 3
        last_dim = values.ndim - 1
        if channel_dim is not None:
            self.channel_dim = channel_dim % values.ndim
        elif self._of_tokens or (values.ndim > 3 and _is_channels_last(values, place, model)):
            self.channel_dim = last_dim
        else:
            self.channel_dim = min(1, last_dim)
        if self._of_attention:
            self.places = [last_dim - 1]
        else:
            no_places = {image_dim, self.channel_dim}
            self.places = [dim for dim in range(values.ndim) if dim not in no_places]

    def mask(self, units: Units) -> torch.Tensor | None:
        """Return a boolean mask that broadcasts to the layer's values and is true at the chosen
        units; None for all of them."""
        masks = []
        if units.channels is not None:
            masks.append(self._along(self.channel_dim, units.channels, "channels"))
        if units.heads is not None:
            if not self._of_attention:
                raise HookError(
                    f"{self._what} must name a part of an attention, such as 'LAYER:heads', got a "
                    "layer"
                )
            if len(self._shape) != 4:
                raise HookError(
                    f"{self._what} must be on an attention whose heads are told apart, got "
                    f"{self._shape}"
                )
            masks.append(self._along(1, units.heads, "heads"))
        if units.tokens is not None:
            if len(self._shape) != (4 if self._of_attention else 3):
                raise HookError(
                    f"{self._what} must be on a layer of tokens (N, T, C), got {self._shape}; "
                    "use positions or region"
                )
            masks.append(self._along(self.places[-1], units.tokens, "tokens"))
        if units.positions is not None:
            masks.append(self.on_grid(self._at_positions(units.positions)))
        if units.region is not None:
            masks.append(self.of_region(units.region))
            if not masks[-1].any():
                raise HookError(
                    f"region of {self._what} must hold the centre of a position, got none; make it "
                    "larger"
                )
        return reduce(torch.logical_and, masks) if masks else None

    def grid(self) -> tuple[int, int]:
        """The numbers of rows and columns of a layer's map, or of the grid that its tokens lie
        on."""
        if self._of_tokens:
            grid = self._grid_of_tokens
            return grid.height, grid.width
        if len(self.places) < 2:
            raise HookError(f"{self._what} must be on a layer with a map, got {self._shape}")
        rows, columns = self.places[-2:]
        return self._shape[rows], self._shape[columns]

    @cached_property
    def _grid_of_tokens(self) -> Any:
        """The `Grid` of `explain.layers` that the layer's tokens lie on."""
        grid = self._find_grid()
        if grid is None or grid.frames is not None:
            raise HookError(
                f"{self._what} must be on tokens that lie on a grid of the image, which these "
                f"are not known to do, got {self._shape}; give tokens= instead"
            )
        return grid

    def _at_positions(self, positions: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A boolean grid ``(rows, columns)`` that is true at the given positions; negative ones
        count from the end."""
        height, width = self.grid()
        grid = torch.zeros(height, width, dtype=torch.bool, device=self._device)
        for row, column in positions:
            if not (-height <= row < height and -width <= column < width):
                raise HookError(
                    f"positions of {self._what} must be within {height} × {width}, got "
                    f"{(row, column)}"
                )
            grid[row, column] = True
        return grid

    def of_region(self, region: Sequence[float]) -> torch.Tensor:
        """A mask that broadcasts to the layer's values, true at positions that look at a region of
        the image, maybe none: x0, y0, x1, y1 in pixels of the model's input, ends exclusive."""
        if not self._size:
            raise HookError(
                f"region of {self._what} must be one of an image, but the model is given none"
            )
        height, width = self.grid()
        x0, y0, x1, y1 = region
        placement = self._find_placement()
        if placement is not None and tuple(placement.centres.shape[1:3]) == (height, width):
            ys, xs = placement.centres[0].to(self._device).unbind(-1)
        else:
            rows = (torch.arange(height, device=self._device) + 0.5) * self._size[0] / height
            columns = (torch.arange(width, device=self._device) + 0.5) * self._size[1] / width
            ys, xs = torch.meshgrid(rows, columns, indexing="ij")
        in_region: torch.Tensor = (ys >= y0) & (ys < y1) & (xs >= x0) & (xs < x1)
        return self.on_grid(in_region)

    def on_grid(self, grid: torch.Tensor) -> torch.Tensor:
        """A boolean grid ``(rows, columns)`` as a mask that broadcasts to the layer's values;
        tokens off the grid are false."""
        if not self._of_tokens:
            return self._laid_along(self.places[-2:], grid)
        tokens = self._grid_of_tokens
        dim = self.places[-1] if self._of_attention else tokens.of_tokens
        mask = grid.new_zeros(self._shape[dim])
        mask[list(tokens.tokens)] = grid.flatten()
        return self._laid_along([dim], mask)

    def _along(self, dim: int, chosen: Sequence[int], name: str) -> torch.Tensor:
        """A mask that broadcasts to the layer's values, true at the ``chosen`` indices of dimension
        ``dim``. ``name`` is the kind of unit in messages."""
        count = self._shape[dim]
        for index in chosen:
            if not -count <= index < count:
                raise HookError(
                    f"{name} of {self._what} must be from 0 to {count - 1}, got {index}"
                )
        mask = torch.zeros(count, dtype=torch.bool, device=self._device)
        mask[list(chosen)] = True
        return self._laid_along([dim], mask)

    def _laid_along(self, dims: Sequence[int], mask: torch.Tensor) -> torch.Tensor:
        """Reshape a mask over dimensions ``dims`` so that it broadcasts to the layer's values."""
        return mask.reshape([n if dim in dims else 1 for dim, n in enumerate(self._shape)])


def _is_channels_last(values: torch.Tensor, place: LayerPlace, model: nn.Module) -> bool:
    """Whether a layer's map is ``(N, H, W, C)`` rather than ``(N, C, H, W)``, from the kinds of
    modules nearest to it: inside the layer, then before it. Without any that tells, it is not."""
    module = submodule(model, place.module)
    of_input = place.part == "input"
    modules = list(modules_of(model))
    modules_before = modules[: modules.index(module)]
    inner_modules = list(module.modules())
    nearest_first = [*(inner_modules if of_input else inner_modules[::-1]), *modules_before[::-1]]
    for candidate in [module, *nearest_first]:
        data_format = getattr(candidate, "data_format", None)  # of layers that take either
        if isinstance(data_format, str):
            return data_format == "channels_last"
    for candidate in nearest_first:
        dims: Any = getattr(candidate, "dims", None)
        if isinstance(dims, (list, tuple)) and len(dims) == values.ndim:  # a permutation
            return bool(dims[1] == values.ndim - 1) if of_input else bool(dims[-1] == 1)
        if (
            isinstance(candidate, (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm))
            or "BatchNorm2d" in type(candidate).__name__
        ):
            return False
        if isinstance(candidate, nn.Linear) and values.shape[-1] in (
            candidate.in_features,
            candidate.out_features,
        ):
            return True
        normalises_tokens = (
            isinstance(candidate, nn.LayerNorm) and "2d" not in type(candidate).__name__
        )
        if normalises_tokens and values.shape[-1] == candidate.normalized_shape[-1]:  # type: ignore[index]
            return True
    return False
