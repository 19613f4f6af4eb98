"""Units of a layer (channels, tokens, heads, places of the image), and where they are in its
values."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch

from explain._utils.errors import HookError
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
        what: str,
        channel_dim: int | None = None,
        *,
        size: tuple[int, ...] = (),
        image_dim: int = 0,
        find_grids: Callable[[], Any] = lambda: None,
    ) -> None:
        """Begin to find both from where the values of a place lie on the image, or from
        ``channel_dim``. ``size`` is the image's, ``image_dim`` the dimension along which images
        lie; ``what`` names the layer in errors."""
        self._shape = tuple(values.shape)
        self._device = values.device
        self._place = place
        self._what = what
        self._channel_dim = channel_dim
        self._size = size
        self._image_dim = image_dim
        self._find_grids = find_grids
        """Finds the `PhotoGrids` of `explain.layers`; None where they are not known."""
        self._of_attention = place.of_attention
        self._of_tokens = self._of_attention or values.ndim == 3

    @cached_property
    def _grids(self) -> Any:
        """What tells how layers lie on the image; None if there is no image, or it is not known."""
        return self._find_grids() if self._size else None

    @cached_property
    def _grid(self) -> Any:
        """The `Grid` that the values lie on; None if on none."""
        return None if self._grids is None else self._grids(self._place, self._shape)

    @cached_property
    def channel_dim(self) -> int:
        """The dimension of channels."""
        dims = range(len(self._shape))  # which also counts negative numbers from the end
        if self._channel_dim is not None:
            return dims[self._channel_dim]
        if not self._of_attention and len(dims) > 2 and self._grid is not None:
            of_channels: int = self._grid.of_channels
            return dims[of_channels]
        if self._of_tokens or len(dims) < 2:
            return dims[-1]
        # a map that lies on no known grid: it may have the channels first or last
        wide = [dim for dim in dims[1:] if self._shape[dim] > 1]
        if self._grids is not None and len(wide) > 1:
            raise HookError(
                f"channels of {self._what} must be in a dimension that is clear, got "
                f"{self._shape}; give channel_dim="
            )
        # the only dimension of several numbers; or else the second, as of (N, C, H, W)
        return wide[0] if len(wide) == 1 else 1

    @cached_property
    def places(self) -> list[int]:
        """The dimensions of positions: rows and columns of a map, or tokens."""
        dims = range(len(self._shape))
        if self._of_attention:
            return [dims[-2]]
        return [dim for dim in dims if dim not in (self._image_dim, self.channel_dim)]

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
            grid_of_tokens = self._grid_of_tokens
            return grid_of_tokens.height, grid_of_tokens.width
        if len(self.places) < 2:
            raise HookError(f"{self._what} must be on a layer with a map, got {self._shape}")
        rows, columns = self.places[-2:]
        return self._shape[rows], self._shape[columns]

    @property
    def _grid_of_tokens(self) -> Any:
        """The `Grid` of `explain.layers` that the layer's tokens lie on."""
        grid = self._grid
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
        chosen = torch.zeros(height, width, dtype=torch.bool, device=self._device)
        for row, column in positions:
            if not (-height <= row < height and -width <= column < width):
                raise HookError(
                    f"positions of {self._what} must be within {height} × {width}, got "
                    f"{(row, column)}"
                )
            chosen[row, column] = True
        return chosen

    def of_region(self, region: Sequence[float]) -> torch.Tensor:
        """A mask that broadcasts to the layer's values, true at positions that look at a region of
        the image, maybe none: x0, y0, x1, y1 in pixels of the model's input, ends exclusive."""
        if not self._size:
            raise HookError(
                f"region of {self._what} must be one of an image, but the model is given none"
            )
        height, width = self.grid()
        x0, y0, x1, y1 = region
        placement = None
        image_size = self._size
        if self._grids is not None:
            placement = self._grids.placement(self._place)
            image_size = self._grids.size[-2:]  # of a video without its frames
        if placement is not None and tuple(placement.centres.shape[1:3]) == (height, width):
            ys, xs = placement.centres[0].to(self._device).unbind(-1)
        else:  # positions are taken to lie evenly
            rows = (torch.arange(height, device=self._device) + 0.5) * image_size[0] / height
            columns = (torch.arange(width, device=self._device) + 0.5) * image_size[1] / width
            ys, xs = torch.meshgrid(rows, columns, indexing="ij")
        in_region: torch.Tensor = (ys >= y0) & (ys < y1) & (xs >= x0) & (xs < x1)
        return self.on_grid(in_region)

    def on_grid(self, chosen: torch.Tensor) -> torch.Tensor:
        """A boolean grid ``(rows, columns)`` as a mask that broadcasts to the layer's values;
        tokens off the grid are false."""
        if not self._of_tokens:
            return self._laid_along(self.places[-2:], chosen)
        token_of_position = list(self._grid_of_tokens.tokens)
        dim = self.places[-1]
        mask = chosen.new_zeros(self._shape[dim])
        mask[token_of_position] = chosen.flatten()
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
