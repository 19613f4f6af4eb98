"""The maps that are evaluated: an attribution, or any array; ranks of pixels and regions;
similarity of two maps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from explain._utils.errors import MetricError, shown
from explain._utils.random_numbers import permutation
from explain.attribution.diagnostics import image_names
from explain.attribution.result import Attribution, by_maximum
from explain.baselines.replacements import blurred, in_single_or_double, to_unit
from explain.layers.layouts import Size
from explain.layers.placement import Placement, draw
from explain.methods.base import Style, ratio

Sign = Literal["own", "signed", "absolute"]
"""How values become one number for each pixel: "own" as the method means it (see `Maps.per_pixel`),
"signed" the sum over the channels, "absolute" the magnitude of that sum."""

MapsLike: TypeAlias = Attribution | torch.Tensor | np.ndarray[Any, Any]


def as_tensor(numbers: object) -> torch.Tensor | None:
    """Return a tensor, or an array of any byte order and strides, as a tensor of real numbers; None
    for anything else."""
    if isinstance(numbers, torch.Tensor):
        is_real = numbers.layout == torch.strided and not numbers.is_complex()
        return numbers if is_real else None
    if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "fiub":
        return None
    float_type = np.float32 if numbers.itemsize <= 4 else np.float64
    # types that torch has too; by NumPy's letters for bool, int, unsigned and float
    dtypes = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": float_type}
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=dtypes[numbers.dtype.kind]))


@dataclass(frozen=True, eq=False)
class Maps:
    """The values that a method gave for N images: ``(N, h, w)`` or ``(N, C, H, W)``; and the
    ``size`` of the images. Of volumes and videos, slices or frames come before the height."""

    name: str
    values: torch.Tensor
    size: Size
    style: Style | None = None
    placement: Placement | None = None

    @classmethod
    def of(cls, name: str, source: MapsLike, images: torch.Tensor) -> "Maps":
        """A checked attribution or array (``name`` in errors) for ``images`` ``(N, C, H, W)``, on
        their device in at least single precision; refused with NaN or another size.
        """
        values = as_tensor(source.values if isinstance(source, Attribution) else source)
        if values is None:
            raise MetricError(
                f"map {name!r} must be a method, Attribution or array of numbers, got "
                f"{shown(source)}"
            )
        size = tuple(images.shape[2:])
        if isinstance(source, Attribution) and source.frames_first:
            values = values.transpose(1, 2)  # channels first, as metrics have the images
        if size[0] == 1 and values.ndim in (2, 3) and values.shape[1] != 1:
            values = values.unsqueeze(-2)  # of signals, images of one row: (N, l) or (N, C, L)
        of_channels = tuple(values.shape[2:]) == size
        is_map = values.ndim == images.ndim - 1 or of_channels
        if not is_map or len(values) != len(images) or 0 in values.shape:
            raise MetricError(
                f"map {name!r} must have the shape (N, h, w), or (N, C, H, W) for each pixel, of "
                f"images {tuple(images.shape)}, got {tuple(values.shape)}"
            )
        values = in_single_or_double(values.detach().to(images.device))
        if of_channels and not bool(torch.isfinite(values.abs().sum(1)).all()):
            values = values.double()  # sums over the channels are beyond single precision
        wrong = (~torch.isfinite(values)).flatten(1).any(1)
        if wrong.any():
            raise MetricError(
                f"map {name!r} must hold finite values, got NaN or infinity for image "
                f"{image_names(wrong)}"
            )
        if isinstance(source, Attribution):
            return cls(name, values, size, source.style, source.placement)
        return cls(name, values, size)

    @property
    def of_channels(self) -> bool:
        """Whether there is a value for each channel of a pixel."""
        return self.values.ndim == len(self.size) + 2

    def per_pixel(self, sign: Sign = "own") -> torch.Tensor:
        """One number for each pixel ``(N, H, W)``: maps ``(N, h, w)`` as they are drawn, channels
        summed, of which "absolute" takes the magnitude; "own" is the largest magnitude of a pixel's
        channels for maps of intensities, colours or heat, as heatmaps have it."""
        values = self.values
        if self.of_channels and sign == "own" and self.style in ("intensity", "color", "heat"):
            return values.abs().amax(1)
        if self.of_channels:
            values = values.sum(1)
        elif self.placement is not None or tuple(values.shape[1:]) != self.size:
            values = draw(values[:, None], self.size, self.placement)[:, 0]
        return values.abs() if sign == "absolute" else values

    @property
    def contributions(self) -> torch.Tensor:
        """What each pixel contributes ``(N, H, W)`` float64: signed, and added up over the
        channels."""
        return self.per_pixel("signed").double()

    @property
    def heatmap(self) -> torch.Tensor:
        """``(N, H, W)`` in [0, 1]: the positive part of the own map, divided by its largest
        value."""
        return by_maximum(self.per_pixel("own").clamp(min=0))

    @property
    def constant(self) -> torch.Tensor:
        """Which maps ``(N,)`` have the same value everywhere."""
        return is_constant(self.per_pixel("own"))

    @property
    def zero(self) -> torch.Tensor:
        """Which maps ``(N,)`` are zero everywhere."""
        return (self.values == 0).flatten(1).all(1)


Similarity = Literal["spearman", "pearson", "ssim", "hog"]


def ranks_of(maps: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Rank the pixels of each map ``(N, H, W)`` in whole numbers, 0 for the largest. Equal values
    are shuffled by the seed, alike for every image: their index would favour the top."""
    flat = maps.flatten(1)
    shuffle = permutation(flat.shape[1], seed).to(flat.device)
    order = shuffle[torch.argsort(flat[:, shuffle], dim=1, descending=True, stable=True)]
    ranks = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks).reshape(maps.shape)


def region_ranks(
    maps: torch.Tensor, regions: torch.Tensor, seed: int = 0, *, mean: bool = False
) -> torch.Tensor:
    """The rank ``(N, H, W)`` of each pixel's region (numbers from 0 without gaps) by the sum, or
    ``mean``, of the map ``(N, H, W)`` in it, 0 for the largest.
    """
    figures = by_region(maps, regions)
    if mean:
        figures = figures / by_region(torch.ones_like(maps), regions)
    ranks = []
    for region_figures, region in zip(figures, regions, strict=True):
        # as a map of one row, without the regions that this image lacks
        ranks_of_regions = ranks_of(region_figures[None, None, : region.max() + 1], seed)[0, 0]
        ranks.append(ranks_of_regions[region])
    return torch.stack(ranks)


def by_region(maps: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """Add up maps ``(N, H, W)`` over numbered regions ``(N, H, W)``: ``(N, R)``, R the most regions
    of any image; 0 for those that an image lacks."""
    sums = maps.new_zeros(len(maps), int(regions.max()) + 1)
    return sums.scatter_add_(1, regions.flatten(1), maps.flatten(1))


def grid_regions(size: Size, side: int, like: torch.Tensor) -> torch.Tensor:
    """Number the squares (or cubes) of a grid with ``side`` pixels, line by line: ``(N, H, W)``
    with the N of ``like``. The last ones are as large as is left."""
    squares = torch.zeros((), dtype=torch.long, device=like.device)
    for length in size:
        square_of = torch.arange(length, device=like.device) // side
        squares = squares[..., None] * math.ceil(length / side) + square_of
    return squares.expand(len(like), *size).contiguous()


def steps_of(count: int, steps: int) -> list[int]:
    """Return whole numbers from 0 to ``count`` in ``steps`` equal steps, or in ``count`` if that is
    less."""
    steps = min(steps, count)
    return [round(count * step / steps) for step in range(steps + 1)]


def area_under_curve(curve: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the area ``(N,)`` under curves ``(N, n)`` over the share of covered pixels, by
    trapezia; ``counts`` has the pixels of each step, which may be unequal, the last one all."""
    at = torch.tensor(counts, dtype=torch.float64, device=curve.device) / counts[-1]
    return torch.trapezoid(curve.double(), at, dim=1).to(curve)


def gini(values: torch.Tensor) -> torch.Tensor:
    """Return the Gini coefficient ``(N,)`` of the magnitudes of each image's ``values`` ``(N,
    ...)``: 0 if all are equal, near 1 if one has all."""
    sizes = values.flatten(1).abs().sort(1).values
    count = sizes.shape[1]
    ranks = 2 * torch.arange(1, count + 1, device=sizes.device, dtype=sizes.dtype) - count - 1
    return ratio((ranks * sizes).sum(1), count * sizes.sum(1))


def correlation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of each row of two tensors ``(N, K)``: ``(N,)`` float64; NaN where a
    row does not vary, but for rounding."""
    one = one.double()
    other = other.double()
    a = one - one.mean(1, keepdim=True)
    b = other - other.mean(1, keepdim=True)
    scale = a.norm(dim=1) * b.norm(dim=1)
    varies = scale > 1e-12 * one.norm(dim=1) * other.norm(dim=1)
    return torch.where(varies, (a * b).sum(1) / scale.where(varies, 1), torch.nan)


def mid_ranks(rows: torch.Tensor) -> torch.Tensor:
    """Return the ranks of values ``(N, K)`` within each sample, from 0 for the smallest; equal
    values share the mean of their ranks, as Spearman's correlation wants it."""
    ordered = rows.sort(dim=1).values
    rows = rows.contiguous()
    smaller = torch.searchsorted(ordered, rows)
    not_larger = torch.searchsorted(ordered, rows, right=True)
    return (smaller + not_larger - 1).double() / 2


def spearman(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return Spearman's rank correlation ``(N,)`` of maps ``(N, H, W)``; NaN where one does not
    vary."""
    return correlation(mid_ranks(one.flatten(1)), mid_ranks(other.flatten(1)))


def pearson(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of maps ``(N, H, W)``: ``(N,)``; NaN where one of them does not
    vary."""
    return correlation(one.flatten(1), other.flatten(1))


def ssim(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the mean structural similarity ``(N,)`` of maps ``(N, H, W)``, each scaled to [0, 1]
    (Wang et al., TIP 2004); of volumes and videos, that of each slice or frame."""
    x = to_unit(one.double())
    y = to_unit(other.double())
    # Gaussian windows of 11 x 11, sigma 1.5, without what lies outside
    windowed = blurred(torch.stack([x, y, x * x, y * y, x * y], 1), 1.5, reach=5)
    mean_x, mean_y, square_x, square_y, product = windowed.unbind(1)
    means = mean_x * mean_y
    squares = mean_x**2 + mean_y**2
    # with the paper's constants, of the range 1
    structure = (2 * (product - means) + 0.03**2) / (square_x + square_y - squares + 0.03**2)
    light = (2 * means + 0.01**2) / (squares + 0.01**2)
    return (light * structure).flatten(1).mean(1)


def hog(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of two maps' histograms of oriented gradients, those of all slices or
    frames together: ``(N,)``; NaN where one has no gradient."""
    histograms = [gradient_histograms(maps.flatten(0, -3)) for maps in (one, other)]
    return correlation(*(frames.reshape(len(one), -1) for frames in histograms))


def gradient_histograms(maps: torch.Tensor, cell: int = 16) -> torch.Tensor:
    """Return HOG ``(N, D)`` of maps ``(N, H, W)`` (Dalal and Triggs, CVPR 2005), in nine directions
    and cells of 16 × 16 pixels (small maps: four across)."""
    maps = maps.double()
    largest = maps.abs().amax((1, 2), keepdim=True)
    # whatever the unit, the constant in the norm of blocks must be small beside them
    maps = ratio(maps, largest)
    cell = max(1, min(cell, min(maps.shape[1:]) // 4))
    down = torch.zeros_like(maps)
    across = torch.zeros_like(maps)
    down[:, 1:-1] = maps[:, 2:] - maps[:, :-2]
    across[:, :, 1:-1] = maps[:, :, 2:] - maps[:, :, :-2]
    strength = torch.hypot(down, across)
    # of 20 degrees each; opposite ones are the same
    directions = (torch.rad2deg(torch.atan2(down, across)) % 180 / 20).long().clamp(max=8)
    by_direction = F.one_hot(directions, 9).movedim(-1, 1) * strength[:, None]
    cells = F.avg_pool2d(by_direction, cell)  # (N, 9, cells down, cells across)
    side = min(3, cells.shape[2], cells.shape[3])
    # around each cell, 3 x 3 cells: (N, y, x, side * side * 9)
    blocks = cells.unfold(2, side, 1).unfold(3, side, 1).movedim(1, -1).flatten(3)
    # as in the paper (L2-Hys): no single strong edge decides
    return _to_length_one(_to_length_one(blocks).clamp(max=0.2)).flatten(1)


def _to_length_one(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks ``(..., D)`` divided by their Euclidean norms."""
    return blocks / (blocks.square().sum(-1, keepdim=True) + 1e-10).sqrt()


def similarity(how: Similarity, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How similar two maps of each image are, ``(N, H, W)`` each, by the measure named ``how``:
    ``(N,)``; 0 where one of them is constant."""
    value = {"spearman": spearman, "pearson": pearson, "ssim": ssim, "hog": hog}[how](one, other)
    constant = is_constant(one) | is_constant(other)
    return torch.where(constant | value.isnan(), 0, value)


def is_constant(maps: torch.Tensor) -> torch.Tensor:
    """Which maps ``(N, ...)`` have the same value everywhere: truth values ``(N,)``."""
    least, most = maps.flatten(1).aminmax(dim=1)
    return least == most
