"""How the shape of a tensor may be read as a map: what shapes and module classes tell, and what they leave open."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from explain.layers.grid import Grid, Layout, Size

MAX_EXTRA_TOKENS = 8  # one class token, a distillation token, and the four to eight registers that are in use
_CHANNELS_FIRST = (
    *(nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm),
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.Upsample),
    *(nn.modules.pooling._AdaptiveMaxPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd),
)
Seen: TypeAlias = "Collection[tuple[int, Size]]"
"""The maps that were seen elsewhere in the network: their channels and sizes."""


@dataclass(frozen=True)
class Reading:
    """The ways in which a shape may be read, the most likely first; ``open`` unless the first one is certain.

    A reading that is ``believed`` is right unless the network clearly says otherwise.
    """

    grids: tuple[Grid, ...] = ()
    open: bool = False
    believed: bool = False

    @property
    def likeliest(self) -> Grid | None:
        return self.grids[0] if self.grids else None


def layout_of(module: nn.Module, shape: Size, size: Size) -> Layout | None:
    """Where a module puts the channels of a map of ``shape``, if its class says so.

    >>> layout_of(nn.Conv2d(3, 8, 1), (1, 8, 4, 4), (8, 8)), layout_of(nn.LayerNorm(8), (1, 4, 4, 8), (8, 8))
    ('NCHW', 'NHWC')
    """
    if isinstance(module, _CHANNELS_FIRST):
        return "NCHW"
    if type(module) is nn.LayerNorm:  # what is made of it may transpose the map and back
        return "NHWC" if len(module.normalized_shape) == 1 else "NCHW"
    if isinstance(module, nn.Linear) and len(shape) > 3:
        return "NCHW" if is_plain(shape, size) else "NHWC"  # it may mix positions along the width
    return None


def find_grid(shape: Size, size: Size, seen: Collection[Size] = (), layout: Layout | None = None) -> Grid | None:
    """Tell how a tensor of ``shape`` covers an input of ``size``, or None if it has no spatial map.

    This is the likeliest reading of the shape alone. Of tokens, the sizes ``seen`` elsewhere in the network say how
    they lie; without any, the input's aspect ratio does, as for a map of unknown ``layout``.

    >>> find_grid((1, 512, 7, 7), (224, 224))
    Grid(layout='NCHW', height=7, width=7, skip=0, frames=None, swapped=False)
    >>> find_grid((1, 7, 7, 768), (224, 224)).layout
    'NHWC'
    >>> find_grid((1, 197, 768), (224, 224)).skip
    1
    >>> find_grid((1, 512, 2, 7, 7), (16, 112, 112)).size
    (2, 7, 7)
    """
    if len(shape) == 3:
        return seen_grid(shape[1], size, seen) or _token_grid(shape[1], size)
    if len(shape) != len(size) + 2:
        return None
    first, last = shape[2:], shape[1:-1]
    if layout is None:
        aspect = size[-2] / size[-1]
        channels_last = not has_aspect(first, size) and abs(last[-2] - last[-1] * aspect) <= 1
        layout = "NHWC" if channels_last else "NCHW"
    return _grid_of(layout, last if layout == "NHWC" else first)


def read_map(shape: Size, size: Size, layout: Layout | None) -> Reading:
    """The readings of a shape ``(N, C, h, w)`` or ``(N, h, w, C)``; of a video with frames before the height.

    A known layout is believed, unless height and width look exchanged. Without one, a picture's shape with the input's
    aspect ratio in its last dimensions alone has its channels first, and everything else is open.

    >>> read_map((1, 8, 8, 2), (32, 32), None).open, read_map((1, 16, 8, 8), (32, 32), None).open
    (True, False)
    """
    likeliest = find_grid(shape, size, layout=layout)
    if layout is None and len(size) == 2 and is_plain(shape, size):
        layout = "NCHW"
    if likeliest is not None and layout is not None and not _looks_swapped(likeliest, size):
        return Reading((likeliest,))
    if len(shape) != len(size) + 2:
        return Reading()
    sizes: dict[Layout, Size] = {"NCHW": shape[2:], "NHWC": shape[1:-1]}
    if len(size) == 3:
        sizes["NTCHW"] = (shape[1], *shape[3:])
    upright = [_grid_of(each, of_map) for each, of_map in sizes.items() if layout in (None, each)]
    grids = [grid for grid in (likeliest, *upright) if grid is not None]
    grids += [grid.exchanged() for grid in grids]
    return Reading(tuple(dict.fromkeys(grids)), open=bool(grids), believed=layout is not None)


def read_tokens(shape: Size, size: Size, seen: Seen, *, channels_last: bool) -> Reading:
    """The readings of a shape ``(N, tokens, C)`` or ``(N, C, tokens)``.

    Tokens with as many channels as a map of their number, from which they were made, are certain. Open are shapes that
    may also be channels before positions, unless a module is known to have its channels last, and tokens of which no
    map is known.

    >>> read_tokens((1, 49, 64), (224, 224), [(64, (7, 7))], channels_last=False).open
    False
    >>> [grid.layout for grid in read_tokens((1, 64, 49), (224, 224), [(64, (7, 7))], channels_last=False).grids]
    ['tokens', 'tokens last']
    """
    _, first, last = shape
    sizes = [each for _, each in seen]
    of_map = seen_grid(first, size, sizes)
    tokens = of_map or _token_grid(first, size)
    if channels_last:
        return Reading((tokens,) if tokens else (), open=of_map is None and tokens is not None)
    made_of = seen_grid(first, size, [each for channels, each in seen if channels == last])
    flattened = [each for channels, each in seen if channels == first and math.prod(each) == last]
    turned = seen_grid(last, size, flattened or sizes, most=0) or _token_grid(last, size, most=0)
    if made_of is not None and not flattened:
        return Reading((made_of,))
    if turned is None or (tokens is None and not flattened):
        return Reading((tokens,) if tokens else (), open=of_map is None and tokens is not None)
    channels_first = Grid("tokens last", turned.height, turned.width, frames=turned.frames)
    return Reading((tokens, channels_first) if tokens else (channels_first,), open=True)


def is_plain(shape: Size, size: Size) -> bool:
    """Whether a shape alone says that channels come first."""
    return has_aspect(shape[2:], size) and not has_aspect(shape[1:-1], size)


def has_aspect(of_map: Size, size: Size) -> bool:
    """Whether a map has the input's aspect ratio, up to the rounding of strided layers."""
    height, width = of_map[-2:]
    return abs(height - width * size[-2] / size[-1]) <= 1 + 0.1 * height


def seen_grid(tokens: int, size: Size, seen: Collection[Size], most: int = MAX_EXTRA_TOKENS) -> Grid | None:
    """The map that was seen with as many positions as there are tokens, up to a few that are extra."""
    extra = [(tokens - math.prod(each), each) for each in seen if len(each) == len(size)]
    fitting = [(skip, each) for skip, each in extra if 0 <= skip <= most and skip < tokens - 1]
    if not fitting:
        return None
    skip, found = min(reversed(fitting), key=lambda pair: pair[0])
    return Grid("tokens", found[-2], found[-1], skip, found[0] if len(found) == 3 else None)


def _grid_of(layout: Layout, of_map: Size) -> Grid | None:
    if of_map[-2] * of_map[-1] <= 1:
        return None
    return Grid(layout, of_map[-2], of_map[-1], frames=of_map[0] if len(of_map) == 3 else None)


def _looks_swapped(grid: Grid, size: Size) -> bool:
    """Whether a map would have the input's aspect ratio only with height and width exchanged."""
    return not has_aspect(grid.size, size) and has_aspect((grid.width, grid.height), size)


def _token_grid(tokens: int, size: Size, most: int = MAX_EXTRA_TOKENS) -> Grid | None:
    """The grid with the aspect ratio of an image; for a video, the number of frames is unknown."""
    if len(size) != 2:
        return None
    for skip in range(min(most, tokens - 1) + 1):
        cells = tokens - skip
        height = max(1, round((cells * size[0] / size[1]) ** 0.5))
        width = cells // height
        fits = height == round(width * size[0] / size[1]) or width == round(height * size[1] / size[0])
        if cells > 1 and height * width == cells and fits:
            return Grid("tokens", height, width, skip)
    return None
