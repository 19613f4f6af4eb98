"""How a tensor is read as a map: channels first or last, or tokens; by its shape, and where its
values lie."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from explain._utils.errors import LayerError
from explain.layers.positions import Positions, averaged
from explain.targets.answer import JointTokens

Size = tuple[int, ...]
"""Height and width; of a video, frames before them."""
Layout = Literal["NCHW", "NHWC", "NTCHW", "tokens", "tokens first", "tokens last"]
CHANNEL_DIMS: dict[Layout, int] = {"NCHW": 1, "NHWC": -1, "NTCHW": 2}
"""The layouts of maps, unlike tokens, and the dimension that their channels are in."""


@dataclass(frozen=True)
class Grid:
    """Where a tensor's spatial map is: its layout, height and width, how many leading tokens to
    skip, and its frames."""

    layout: Layout
    """``tokens first`` is a sequence ``(tokens, N, C)``, ``tokens last`` one ``(N, C, tokens)``. Of
    a video, ``NCHW`` and ``NHWC`` have the frames right before the height, ``NTCHW`` before the
    channels."""
    height: int
    width: int
    skip: int = 0
    frames: int | None = None
    folded: Literal["", "by video", "by time"] = ""
    """Whether a network takes each frame as an image of the batch: all frames of one video
    together, or the first of all videos. The layout is then that of a frame."""
    places: tuple[int, ...] = field(default=(), repr=False)
    """Which token lies at each position, where they do not follow each other row by row."""

    @property
    def size(self) -> Size:
        """The size of the map in positions: height and width; of a video, frames before them."""
        return (
            (self.height, self.width)
            if self.frames is None
            else (self.frames, self.height, self.width)
        )

    @property
    def is_map(self) -> bool:
        """Whether the tensor's layout is that of a map, and not of a sequence of tokens."""
        return self.layout in CHANNEL_DIMS

    @property
    def is_line(self) -> bool:
        """Whether the tensor is a map of one row with its channels first, as convolutions of
        signals give it, ``(N, C, L)``."""
        return self.layout == "tokens last" and self.height == 1

    @property
    def of_images(self) -> int:
        """The dimension of the tensor that the images are in."""
        return 1 if self.layout == "tokens first" else 0

    @property
    def of_channels(self) -> int:
        """The dimension of the tensor that the channels are in; -1 is the last."""
        return CHANNEL_DIMS.get(self.layout, 1 if self.layout == "tokens last" else -1)

    @property
    def of_tokens(self) -> int:
        """The dimension of the tensor that the tokens are in, for layouts of tokens."""
        return {"tokens first": 0, "tokens last": 2}.get(self.layout, 1)

    @property
    def tokens(self) -> Sequence[int]:
        """The indices of the tokens that lie on the map, row by row; others may come before, behind
        and among them."""
        return self.places or range(self.skip, self.skip + math.prod(self.size))

    def __str__(self) -> str:
        """The size of the map in words, such as "7 x 7"."""
        return " x ".join(map(str, self.size))

    @property
    def described(self) -> str:
        """The layout of the tensor in words, such as "7 x 7 in the layout NHWC", for messages."""
        return f"{self} in the layout {self.layout}"

    @property
    def of_frame(self) -> "Grid":
        """The grid of one frame of a video, where frames are folded into the batch."""
        return replace(self, frames=None, folded="")

    def folded_from(self, frames: int) -> "Grid":
        """Return the grid of a video of so many frames, each of which is an image with this grid to
        the network."""
        return replace(self, frames=frames, folded="by video")

    def unfolded(self, tensor: Tensor) -> Tensor:
        """Split a tensor whose batch holds the frames of videos: ``(N * T, ...)`` to ``(N, T,
        ...)``. The order of the batch is by video or by time, as ``folded`` says."""
        frames = self.frames or 1
        if self.folded == "by time":
            return tensor.reshape((frames, -1, *tensor.shape[1:])).transpose(0, 1)
        return tensor.reshape((-1, frames, *tensor.shape[1:]))

    def refolded(self, tensor: Tensor) -> Tensor:
        """Undo `unfolded`: put the frames ``(N, T, ...)`` of videos back into the batch."""
        return (tensor.transpose(0, 1) if self.folded == "by time" else tensor).flatten(0, 1)

    def spread(self, tensor: Tensor) -> Tensor:
        """Lay a layer's output out as feature maps ``(N, C, h, w)``, of a video ``(N, C, t, h,
        w)``, without tokens that lie nowhere, such as class tokens. `fold` undoes it."""
        if self.folded:
            # from (N, t, C, h, w)
            return self.unfolded(self.of_frame.spread(tensor)).movedim(1, 2)
        if self.is_map:
            return tensor.movedim(CHANNEL_DIMS[self.layout], 1)
        cells = math.prod(self.size)
        index = list(self.places) if self.places else slice(self.skip, self.skip + cells)
        token_rows = self._rows(tensor)[:, index]
        return token_rows.reshape((len(token_rows), *self.size, -1)).movedim(-1, 1)

    def beside(self, tensor: Tensor) -> Tensor:
        """Return what lies beside the map, such as class tokens, ``(N, K)``."""
        if self.is_map:
            return tensor.new_zeros((len(self.spread(tensor)), 0))
        if self.folded:
            return self.unfolded(self.of_frame.beside(tensor)).flatten(1)
        rows = self._rows(tensor)
        beside = [token for token in range(rows.shape[1]) if token not in self.tokens]
        return rows[:, beside].flatten(1)

    def fold(self, maps: Tensor, like: Tensor) -> Tensor:
        """Undo `spread`: lay feature maps out as ``like``, the layer's output, whose other tokens
        stay."""
        if self.folded:
            return self.of_frame.fold(self.refolded(maps.movedim(2, 1)), like)
        if self.is_map:
            return maps.movedim(1, CHANNEL_DIMS[self.layout])
        index = torch.tensor(self.tokens, device=maps.device)
        token_rows = self._rows(like).index_copy(1, index, maps.flatten(2).mT)
        return (
            token_rows.mT if self.layout == "tokens last" else token_rows.movedim(0, self.of_images)
        )

    def _rows(self, tensor: Tensor) -> Tensor:
        """The tokens ``(N, tokens, C)`` of a sequence in any layout of tokens."""
        return tensor.mT if self.layout == "tokens last" else tensor.movedim(self.of_images, 0)

    def repeated(self, tensor: Tensor, image: Tensor, count: int) -> Tensor:
        """Return the part of a layer's output that belongs to one ``image`` ``(1,)``, with all its
        folded frames, ``count`` times in the batch; memory is shared where it can be."""
        if self.folded:
            image_part = self.unfolded(tensor).index_select(0, image)
            return self.refolded(image_part.expand((count, *image_part.shape[1:])))
        image_part = tensor.index_select(self.of_images, image)
        return image_part.expand(
            [count if dim == self.of_images else -1 for dim in range(image_part.ndim)]
        )


# one class token, a distillation token, and the four to eight registers that are in use
MAX_EXTRA_TOKENS = 8


@dataclass(frozen=True)
class LayoutReading:
    """The ways in which a shape may be read, the most likely first; ``open`` unless the first one
    is certain. ``channels_first``: by what computed the values, wherever these lie."""

    grids: tuple[Grid, ...] = ()
    open: bool = False
    channels_first: bool = False

    @property
    def likeliest(self) -> Grid | None:
        """The grid that the shape most likely has; None if it cannot be read as a map."""
        return self.grids[0] if self.grids else None


def find_grid(shape: Size, size: Size, layout: Layout | None = None) -> Grid | None:
    """How a tensor of ``shape`` most likely covers an input of ``size``, None if it has no spatial
    map. By shape alone: the input's aspect ratio decides where more than one is possible."""
    if len(shape) == 3:
        return _token_grid(shape[1], size)
    if len(shape) != len(size) + 2:
        return None
    if layout is None:
        *_, height, width, _ = shape  # with channels last
        # a closer fit than for `has_aspect`, or channels that come first are taken for rows
        fits_closely = abs(height - width * size[-2] / size[-1]) <= 1
        layout = "NHWC" if fits_closely and not has_aspect(shape[2:], size) else "NCHW"
    return _grid_of(layout, shape)


@lru_cache(maxsize=256)
def read_map(shape: Size, size: Size) -> LayoutReading:
    """The readings of a map's shape ``(N, C, h, w)`` or ``(N, h, w, C)``; of a video with frames
    before the height."""
    # The shape of a picture whose last dimensions alone have the input's aspect ratio has its
    # channels first, and everything else is open.
    if len(shape) != len(size) + 2:
        return LayoutReading()
    certain = len(size) == 2 and is_plain(shape, size)
    layouts: list[Layout] = ["NCHW"] if certain else ["NCHW", "NHWC"]
    if len(size) > 2:
        layouts.append("NTCHW")
    grids = [find_grid(shape, size), *(_grid_of(layout, shape) for layout in layouts)]
    possible = [grid for grid in dict.fromkeys(grids) if grid is not None]
    return LayoutReading(tuple(possible), open=bool(possible) and not certain)


def read_shape(shape: Size, size: Size) -> LayoutReading:
    """How a tensor for one image may be read as a map. Sequences of tokens stay open, and so do
    frames of a video that may be in the batch."""
    if len(shape) == 3:  # tokens, or the channels and values of a signal
        return LayoutReading(open=len(size) > 1)
    frames = frames_in_batch(shape, size)
    if not frames:
        return read_map(shape, size) if shape[:1] == (1,) else LayoutReading()
    grids = [grid.folded_from(frames) for grid in read_map((1, *shape[1:]), size[1:]).grids]
    return LayoutReading(tuple(grids), open=True)


def is_plain(shape: Size, size: Size) -> bool:
    """Whether a map's shape alone says that channels come first: only its last sides have the
    input's aspect ratio."""
    return has_aspect(shape[2:], size) and not has_aspect(shape[1:-1], size)


def has_aspect(of_map: Size, size: Size) -> bool:
    """Whether a map has the aspect ratio of the input, up to the rounding of strided layers.
    ``of_map`` and ``size`` end with height and width. Looser, channels would be taken for rows."""
    height, width = of_map[-2:]
    return abs(height - width * size[-2] / size[-1]) <= 1 + 0.1 * height


def map_grid(positions: Positions, shape: Size, grids: Sequence[Grid]) -> Grid | None:
    """The grid among ``grids`` along which a tensor's positions (one tensor for each axis of the
    photo) change most: where the map lies in truth. None if none fits."""
    dims_by_axis = [_main_dims(position) for position in positions]
    for grid in grids:
        first = 0 if grid.folded else 1  # folded frames are where the images are
        channels = grid.of_channels % len(shape)
        dims = [dim for dim in range(first, len(shape)) if dim != channels]
        # along a side of 1, no position changes
        if dims_by_axis == [[dim] if shape[dim] > 1 else [] for dim in dims]:
            return grid
    return None


def _main_dims(position: Tensor) -> list[int]:
    """The dimension that explains most of the variance of positions, if there is one. Branches that
    are joined along the channels look at slightly other places."""
    dims = range(position.ndim)
    variance = _variance(position)
    main = []
    for dim in dims:
        means = averaged(position, [other for other in dims if other != dim])
        if _variance(means) > 0.5 * variance:
            main.append(dim)
    return main


def _variance(position: Tensor) -> float:
    """The variance of positions, without values that lie nowhere, such as padding."""
    on_photo = position[position > 0].double()
    return float(on_photo.var(correction=0)) if len(on_photo) else math.nan


def token_grid(positions: Positions, shape: Size, count: int) -> Grid | None:
    """How the tokens of ``count`` images lie on the photo, by the positions of their values: each
    position of the grid has one token, in any order, others are extra. None if on no grid."""
    frames, *positions_in_frame = positions
    # the frames are folded into the batch: only they differ between rows
    if len(positions) == 3 and len(frames) > 1 and all(len(p) == 1 for p in positions_in_frame):
        grid = token_grid(positions[1:], shape, shape[0])
        return None if grid is None else grid.folded_from(shape[0] // count)
    if len(positions) < 2:
        return None
    centres: dict[Layout, Tensor] = {}
    """The centre ``(tokens, axes)`` of each token, if tokens run along one dimension or another."""
    layouts: list[Layout] = ["tokens first", "tokens", "tokens last"]
    for dim, layout in enumerate(layouts):  # the dimension of the tokens
        dim_of_images = 1 if dim == 0 else 0
        # along each axis of the photo, places must change from token to token, if they do at all
        varies = all(p.shape[dim] > 1 for p in positions if p.numel() > 1)
        if varies and shape[dim_of_images] == count:
            other_dims = [other for other in range(3) if other != dim]
            axes = [averaged(p, other_dims).flatten().expand(shape[dim]) for p in positions]
            centres[layout] = torch.stack(axes, 1).cpu()
    if not centres:
        return None
    # tokens lie far apart, unlike positions within a patch
    layout = max(centres, key=lambda of: float((centres[of].amax(0) - centres[of].amin(0)).sum()))
    return _grid_of_points(layout, centres[layout])


def _grid_of_points(layout: Layout, points: Tensor) -> Grid | None:
    """The grid whose positions are the centres ``(tokens, axes)`` of tokens, from 0 to 1 and 0 for
    nowhere, one for each; None if there is none."""
    tokens = (points > 0).all(1).nonzero()[:, 0]
    lengths = list[int]()
    # the number of each token's cell, counted row by row
    cells = torch.zeros(len(tokens), dtype=torch.long, device="cpu")
    for axis in points[tokens].round(decimals=5).unbind(1):
        values, ranks = torch.unique(axis, return_inverse=True)
        lengths.append(len(values))
        cells = cells * len(values) + ranks
    # no cell may be empty, and none may have two tokens
    if len(tokens) < 2 or len(tokens) != math.prod(lengths) or int(cells.bincount().amax()) > 1:
        return None
    places = tuple(tokens[cells.argsort()].tolist())
    skip = places[0]
    frames = lengths[0] if len(lengths) == 3 else None
    height, width = lengths[-2:]
    if places == tuple(range(skip, skip + len(places))):
        return Grid(layout, height, width, skip=skip, frames=frames)
    return Grid(layout, height, width, frames=frames, places=places)


def _grid_of(layout: Layout, shape: Size) -> Grid | None:
    """The grid of a map of ``shape`` in a known layout, such as ``(N, C, h, w)`` in ``NCHW``; None
    for one position, which shows no places."""
    channels = CHANNEL_DIMS[layout] % len(shape)
    *frames, height, width = (shape[dim] for dim in range(1, len(shape)) if dim != channels)
    if height * width <= 1:
        return None
    return Grid(layout, height, width, frames=frames[0] if frames else None)


def _token_grid(tokens: int, size: Size) -> Grid | None:
    """A guess: the grid of so many tokens that has the aspect ratio of an image, with the fewest
    extra tokens in front; None if there is none, and of a video."""
    if len(size) != 2:
        return None
    for skip in range(min(MAX_EXTRA_TOKENS, tokens - 1) + 1):
        cells = tokens - skip
        height = max(1, round((cells * size[0] / size[1]) ** 0.5))
        width = cells // height
        height_fits = height == round(width * size[0] / size[1])
        width_fits = width == round(height * size[1] / size[0])
        if cells > 1 and height * width == cells and (height_fits or width_fits):
            return Grid("tokens", height, width, skip)
    return None


def frames_in_batch(shape: Size, size: Size, count: int = 1) -> int | None:
    """The number of frames of ``count`` videos of a ``size`` (frames, height, width) that a network
    takes as images of their own in a tensor of ``shape``, or None."""
    has_frames = len(size) == 3 and len(shape) in (3, 4) and shape[0] == count * size[0]
    return size[0] if has_frames else None


@dataclass(eq=False)
class Grids:
    """What tensors are laid out on: the input's size, and the number of images in a batch. Shapes
    alone say how maps lie; `NetworkGrids` asks the network too."""

    size: Size
    count: int = 1

    def of_layer(self, layer: str) -> Grid | None:
        """The grid of a layer's output in the network; None if it has no spatial map."""
        return None

    def placement(self, layer: str | None) -> Any:
        """Where the cells of a layer's map look, as a `Placement` of `explain.layers.placement`;
        None where they count as spread evenly."""
        return None

    def doubt_about(self, layer: str) -> str:
        """The layouts that a layer's output may have, in words, if it has no grid because that is
        unclear; else empty."""
        return ""

    def of_tokens(self, length: int) -> Grid | None:
        """The grid of a sequence of ``length`` tokens in the network, class tokens and the like
        included."""
        return None

    @property
    def joint(self) -> JointTokens | None:
        """Where the tokens of the photo are among those that a language model reads; None if no
        language model reads it."""
        return None

    def folded_frames(self, layer: str | None) -> int | None:
        """The number of frames of a video that a layer takes as images of their own; None if it
        does not. Of photos it is always None."""
        grid = None if layer is None or len(self.size) != 3 else self.of_layer(layer)
        return grid.frames if grid is not None and grid.folded else None

    def grid(
        self, shape: Size, layer: str | None = None, constant: int | None = None
    ) -> Grid | None:
        """Tell how a tensor of this shape, from this layer, covers the input; None if it has no map
        for each image. ``constant`` is the address of what is added to the tensor, if any."""
        return find_grid(shape, self.size) if shape[:1] == (self.count,) else None


def to_spatial(tensor: Tensor, grids: Grids, layer: str) -> Tensor:
    """Lay a layer's output, or the gradient in it, out as feature maps ``(N, C, h, w)``, or ``(N,
    C, t, h, w)`` of a video."""
    shape = tuple(tensor.shape)
    if tensor.is_complex():
        raise LayerError(
            f"layer {layer!r} must give a map of real numbers, got {tensor.dtype}; choose one "
            "before or behind the transform, since the values of a spectrum lie nowhere"
        )
    grid = grids.grid(shape, layer)
    if grid is not None:
        is_spread = grid.layout == "NCHW" and not grid.folded
        return tensor if is_spread else grid.spread(tensor)
    must = (
        f"a spatial map, got shape {shape}; choose a layer with a grid (explain.list_layers shows "
        "which have one)"
    )
    doubt = grids.doubt_about(layer)
    if shape[:1] == (1,) and grids.count > 1:
        must = (
            f"a map for each of {grids.count} images at once, got shape {shape}; give the model "
            "its images together, or explain one image"
        )
    elif doubt:
        must = (
            f"a map whose layout is clear, got shape {shape}, which may be {doubt}; choose a "
            "convolution near it"
        )
    elif len(shape) == len(grids.size) + 2 and math.prod(shape[2:]) == 1:
        must = (
            f"a map of several positions, got one position, shape {shape}; choose an earlier "
            "layer or a larger input"
        )
    raise LayerError(f"layer {layer!r} must give {must}")


def enlarge(maps: Tensor, size: Size) -> Tensor:
    """Resize maps ``(N, C, h, w)`` to ``size``, linearly between positions; of a video, between
    frames too."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[maps.ndim - 2]
    return F.interpolate(maps, size=size, mode=mode, align_corners=False)
