"""Where on the input the places of a tensor lie: maps with channels first or last, and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from explain.errors import LayerError

MAX_EXTRA_TOKENS = 8  # one class token, a distillation token, and the four to eight registers that are in use
Size = tuple[int, ...]
"""Height and width; of a video, frames before them."""
Layout = Literal["NCHW", "NHWC", "tokens", "tokens first"]
_CHANNELS_FIRST = (
    *(nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm),
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.Upsample),
    *(nn.modules.pooling._AdaptiveMaxPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd),
)


@dataclass(frozen=True)
class Grid:
    """Where a tensor's spatial map is: its layout, height and width, how many leading tokens to skip, and its frames.

    ``tokens first`` is a sequence with the images in its second dimension, ``(tokens, N, C)``.
    """

    layout: Layout
    height: int
    width: int
    skip: int = 0
    frames: int | None = None

    @property
    def size(self) -> Size:
        """Height and width; of a video, frames before them."""
        return (self.height, self.width) if self.frames is None else (self.frames, self.height, self.width)

    @property
    def of_images(self) -> int:
        """The dimension that the images are in."""
        return 1 if self.layout == "tokens first" else 0

    def __str__(self) -> str:
        return " x ".join(map(str, self.size))

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay a tensor out as ``(N, C, h, w)``, or ``(N, C, t, h, w)`` of a video."""
        if self.layout == "NCHW":
            return tensor
        if self.layout != "NHWC":
            tensor = tensor.movedim(self.of_images, 0)[:, self.skip :]
            tensor = tensor.reshape(len(tensor), *self.size, -1)
        return tensor.movedim(-1, 1)

    def fold(self, maps: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Undo `spread`: lay ``maps`` out as ``like``, whose class and register tokens stay.

        >>> tokens, grid = torch.rand(1, 5, 3), Grid("tokens", 2, 2, 1)
        >>> torch.equal(grid.fold(grid.spread(tokens), tokens), tokens)
        True
        """
        if self.layout == "NCHW":
            return maps
        last = maps.movedim(1, -1)
        if self.layout == "NHWC":
            return last
        extra = like.movedim(self.of_images, 0)[:, : self.skip]
        return torch.cat([extra, last.flatten(1, -2)], dim=1).movedim(0, self.of_images)


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

    def grid(self, shape: Size, layer: str | None = None) -> Grid | None:
        """Tell how a tensor of this shape, from this layer, covers the input; None if it has no map for each image."""
        layout = None if layer is None or self.layout is None else self.layout(layer, shape)
        is_map = len(shape) == len(self.size) + 2
        if layer is not None and self.known is not None and not (is_map and (layout or is_plain(shape, self.size))):
            return self.known(layer)
        if shape[:1] == (self.count,) and len(shape) == 3 and self.strict:
            return _seen_grid(shape[1], self.size, self.sizes(), most=1)
        if shape[:1] == (self.count,):
            return find_grid(shape, self.size, self.sizes() if len(shape) == 3 else (), layout)
        grid = _seen_grid(shape[0], self.size, self.sizes()) if len(shape) == 3 and shape[1] == self.count else None
        return None if grid is None else replace(grid, layout="tokens first")


def layout_of(module: nn.Module, shape: Size, size: Size) -> Layout | None:
    """Where a module puts the channels of a map of ``shape``, if its class says so.

    >>> layout_of(nn.Conv2d(3, 8, 1), (1, 8, 4, 4), (8, 8)), layout_of(nn.LayerNorm(8), (1, 4, 4, 8), (8, 8))
    ('NCHW', 'NHWC')
    """
    if isinstance(module, _CHANNELS_FIRST):
        return "NCHW"
    if type(module) is nn.LayerNorm:  # what is made of it may turn the map round and back
        return "NHWC" if len(module.normalized_shape) == 1 else "NCHW"
    if isinstance(module, nn.Linear) and len(shape) > 3:
        return "NCHW" if is_plain(shape, size) else "NHWC"  # it may mix places along the width
    return None


def find_grid(shape: Size, size: Size, seen: Collection[Size] = (), layout: Layout | None = None) -> Grid | None:
    """Tell how a tensor of ``shape`` covers an input of ``size``, or None if it has no spatial map.

    Of tokens, the sizes ``seen`` elsewhere in the network say how they lie; without any, the input's aspect ratio does,
    as it does for a map of which nobody knows the ``layout``.

    >>> find_grid((1, 512, 7, 7), (224, 224))
    Grid(layout='NCHW', height=7, width=7, skip=0, frames=None)
    >>> find_grid((1, 7, 7, 768), (224, 224))
    Grid(layout='NHWC', height=7, width=7, skip=0, frames=None)
    >>> find_grid((1, 197, 768), (224, 224))
    Grid(layout='tokens', height=14, width=14, skip=1, frames=None)
    >>> find_grid((1, 512, 2, 7, 7), (16, 112, 112)).size
    (2, 7, 7)
    """
    if len(shape) == 3:
        return _seen_grid(shape[1], size, seen) or _token_grid(shape[1], size)
    if len(shape) != len(size) + 2:
        return None
    first, last = shape[2:], shape[1:-1]
    if layout is None:
        aspect = size[-2] / size[-1]
        channels_last = not has_aspect(first, size) and abs(last[-2] - last[-1] * aspect) <= 1
        layout = "NHWC" if channels_last else "NCHW"
    places = last if layout == "NHWC" else first
    if places[-2] * places[-1] <= 1:
        return None
    return Grid(layout, places[-2], places[-1], frames=places[0] if len(places) == 3 else None)


def is_plain(shape: Size, size: Size) -> bool:
    """Whether a shape alone says that channels come first."""
    return has_aspect(shape[2:], size) and not has_aspect(shape[1:-1], size)


def has_aspect(places: Size, size: Size) -> bool:
    """Whether a map has the input's aspect ratio, up to the rounding of strided layers."""
    height, width = places[-2:]
    return abs(height - width * size[-2] / size[-1]) <= 1 + 0.1 * height


def _seen_grid(tokens: int, size: Size, seen: Collection[Size], most: int = MAX_EXTRA_TOKENS) -> Grid | None:
    """The map that was seen with as many places as there are tokens, up to a few that are extra."""
    extra = [(tokens - math.prod(places), places) for places in seen if len(places) == len(size)]
    fitting = [(skip, places) for skip, places in extra if 0 <= skip <= most and skip < tokens - 1]
    if not fitting:
        return None
    skip, places = min(reversed(fitting), key=lambda found: found[0])
    return Grid("tokens", places[-2], places[-1], skip, places[0] if len(places) == 3 else None)


def _token_grid(tokens: int, size: Size) -> Grid | None:
    """The grid with the aspect ratio of an image; of a video, nobody knows how many frames there are left."""
    if len(size) != 2:
        return None
    for skip in range(min(MAX_EXTRA_TOKENS, tokens - 1) + 1):
        cells = tokens - skip
        height = max(1, round((cells * size[0] / size[1]) ** 0.5))
        width = cells // height
        fits = height == round(width * size[0] / size[1]) or width == round(height * size[1] / size[0])
        if cells > 1 and height * width == cells and fits:
            return Grid("tokens", height, width, skip)
    return None


def to_spatial(tensor: torch.Tensor, grids: Grids, layer: str) -> torch.Tensor:
    """Lay a layer's output out as ``(N, C, h, w)``, or ``(N, C, t, h, w)`` where the input is a video.

    Raises:
        LayerError: the output has no spatial map.
    """
    grid = grids.grid(tuple(tensor.shape), layer)
    if grid is None:
        raise LayerError(
            f"layer {layer!r} must give a spatial map, got shape {tuple(tensor.shape)}; choose a convolutional layer "
            "(--list-layers or explain.list_layers shows which have a map)"
        )
    return grid.spread(tensor)


def enlarge(maps: torch.Tensor, size: Size) -> torch.Tensor:
    """Bring maps ``(N, C, h, w)`` to another size, linearly between places; of a video, between frames too.

    >>> enlarge(torch.ones(1, 2, 2, 3, 3), (4, 6, 6)).shape
    torch.Size([1, 2, 4, 6, 6])
    """
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[maps.ndim - 2]
    return F.interpolate(maps, size=size, mode=mode, align_corners=False)
