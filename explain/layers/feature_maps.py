"""The maps of a network's layers: what their tensors are laid out on, as ``(N, C, h, w)``, at any size."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F

from explain._utils.errors import LayerError
from explain.layers.layouts import Grid, Layout, Size, find_grid, read_map, seen_grid


@dataclass(frozen=True)
class Grids:
    """What tensors of a network are laid out on: the input's size, and the number of images in a batch.

    Where shapes leave open how a map lies (tokens, and maps whose channels may be first as well as last), the network
    is looked at: ``known`` gives the grid of a layer, ``sizes`` the sizes of all maps. ``layout`` says what a layer's
    class tells without that. Where there may be other tokens than those of the image (``strict``), their number must be
    that of a map, but for a class token.
    """

    size: Size
    count: int = 1
    sizes: Callable[[], Collection[Size]] = tuple
    known: Callable[[str], Grid | None] | None = None
    layout: Callable[[str, Size], Layout | None] | None = None
    strict: bool = False
    doubt: Callable[[str], str] | None = None
    """Why a layer has no grid, where it may have one."""

    def grid(self, shape: Size, layer: str | None = None) -> Grid | None:
        """Tell how a tensor of this shape, from this layer, covers the input; None if it has no map for each image."""
        layout = None if layer is None or self.layout is None else self.layout(layer, shape)
        is_map = len(shape) == len(self.size) + 2
        if layer is not None and self.known is not None:
            reading = read_map(shape, self.size, layout) if is_map else None
            if reading is None or reading.open:
                return self.known(layer)
        if shape[:1] == (self.count,) and len(shape) == 3 and self.strict:
            return seen_grid(shape[1], self.size, self.sizes(), most=1)
        if shape[:1] == (self.count,):
            return find_grid(shape, self.size, self.sizes() if len(shape) == 3 else (), layout)
        grid = seen_grid(shape[0], self.size, self.sizes()) if len(shape) == 3 and shape[1] == self.count else None
        return None if grid is None else replace(grid, layout="tokens first")


def to_spatial(tensor: torch.Tensor, grids: Grids, layer: str) -> torch.Tensor:
    """Lay a layer's output out as ``(N, C, h, w)``, or ``(N, C, t, h, w)`` where the input is a video.

    Raises:
        LayerError: the output has no spatial map.
    """
    shape = tuple(tensor.shape)
    grid = grids.grid(shape, layer)
    if grid is not None:
        return grid.spread(tensor)
    doubt = "" if grids.doubt is None else grids.doubt(layer)
    if doubt:
        raise LayerError(
            f"layer {layer!r} must give a map whose layout is clear, got shape {shape}, which may be {doubt}, and the "
            "network's answers to altered inputs do not tell; choose a convolution or a normalisation near it"
        )
    if len(shape) == len(grids.size) + 2 and prod(shape[2:]) == 1:
        raise LayerError(
            f"layer {layer!r} must give a map of several positions, got shape {shape}, one position for the whole "
            "input, which cannot tell one part of it from another; choose an earlier layer, or use a larger input"
        )
    raise LayerError(
        f"layer {layer!r} must give a spatial map, got shape {shape}; choose a convolutional layer (--list-layers or "
        "explain.list_layers shows which have a map)"
    )


def enlarge(maps: torch.Tensor, size: Size) -> torch.Tensor:
    """Bring maps ``(N, C, h, w)`` to another size, linearly between positions; of a video, between frames too.

    >>> enlarge(torch.ones(1, 2, 2, 3, 3), (4, 6, 6)).shape
    torch.Size([1, 2, 4, 6, 6])
    """
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[maps.ndim - 2]
    return F.interpolate(maps, size=size, mode=mode, align_corners=False)
