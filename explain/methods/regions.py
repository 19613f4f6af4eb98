"""Regions of an image that are absent as one: squares, a quadtree, superpixels, or what the caller
gives."""

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError, optional, shown
from explain._utils.options import CheckedFields, register_reader
from explain.baselines.replacements import blurred, to_unit


class Regions(CheckedFields):
    """Cuts images ``(N, C, H, W)`` or videos into regions: gives each pixel the number of its
    region, from 0 on, ``(N, H, W)``. A frozen value; each image is cut by its own content."""

    def most(self, size: tuple[int, ...]) -> int:
        """The largest number of regions of an image of ``size`` ``(H, W)``, from which plans count
        runs; 0 if that is not known."""
        return 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.of_image(image.double().cpu()) for image in images]).to(
            images.device
        )

    def of_image(self, image: torch.Tensor) -> torch.Tensor:
        """The number of the region of each pixel ``(H, W)``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Squares(Regions):
    """A grid of cells, ``across`` in each direction, of a video in time too. A photo with fewer
    pixels has a cell for each pixel.

    >>> Squares(2)(torch.zeros(1, 3, 2, 4))[0]
    tensor([[0, 0, 1, 1],
            [2, 2, 3, 3]])
    """

    across: int = 7

    minimums = {"across": 1}

    def __str__(self) -> str:
        return f"{self.across} squares across"

    def cells(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """How many cells there are in each direction."""
        return tuple(min(self.across, side) for side in size)

    def most(self, size: tuple[int, ...]) -> int:
        return math.prod(self.cells(size))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The number of each pixel's cell ``(N, H, W)``, row by row from 0 on; the same for all
        images of a size."""
        size = tuple(images.shape[2:])
        cells = self.cells(size)
        labels = torch.zeros((), dtype=torch.long, device=images.device)
        for count, side in zip(cells, size, strict=True):
            cells_along_side = torch.arange(side, device=images.device) * count // side
            # row by row: a cell of the sides so far becomes a row of cells along this one
            labels = labels[..., None] * count + cells_along_side
        return labels.expand((len(images), *size))


def _check_images(kind: str, image: torch.Tensor) -> None:
    """Refuse an ``image`` that is a volume or a video ``(C, T, H, W)``, which the way of cutting
    called ``kind`` does not take."""
    if image.ndim != 3:
        raise MethodError(
            f"regions by {kind} must be of images, got {image.ndim + 1} dimensions; take Squares()"
        )


@dataclass(frozen=True)
class Quadtree(Regions):
    """Cells that are small where the photo has detail: the one that varies most is cut into four,
    again and again.

    Args:
        count: how many cells there are at most.

    >>> x = torch.zeros(1, 1, 4, 4)
    >>> x[..., 0, 0] = 1
    >>> Quadtree(7)(x)[0]
    tensor([[3, 4, 0, 0],
            [5, 6, 0, 0],
            [1, 1, 2, 2],
            [1, 1, 2, 2]])
    """

    count: int = 49

    minimums = {"count": 1}

    def __str__(self) -> str:
        return f"a quadtree of {self.count} cells"

    def most(self, size: tuple[int, ...]) -> int:
        return self.count

    def of_image(self, image: torch.Tensor) -> torch.Tensor:
        """The number of each pixel's cell ``(H, W)``: the cell whose colours vary most is cut into
        four until one more cut would give more than ``count`` cells, or all left are single
        pixels."""
        cell = tuple((0, side) for side in image.shape[1:])
        spreads = {cell: _spread(image, cell)}
        while True:
            widest = max(spreads, key=spreads.__getitem__)
            parts = halves(widest)
            # negative: only single pixels are left
            if spreads[widest] < 0 or len(spreads) - 1 + len(parts) > self.count:
                break
            del spreads[widest]
            spreads |= {part: _spread(image, part) for part in parts}
        labels = torch.zeros(image.shape[1:], dtype=torch.long)
        for number, cell in enumerate(spreads):
            labels[pixels_of(cell)] = number
        return labels


Cell = tuple[tuple[int, int], ...]
"""The first pixel of a box in each direction, and the one behind the last."""


def pixels_of(cell: Cell) -> tuple[slice, ...]:
    """The index of a cell's pixels in a map ``(H, W)``."""
    return tuple(slice(start, end) for start, end in cell)


def halves(cell: Cell) -> list[Cell]:
    """Cut a cell in half in each direction in which it has more than one pixel."""
    parts_of_sides = []
    for start, end in cell:
        middle = (start + end) // 2
        halved = [(start, middle), (middle, end)]
        parts_of_sides.append(halved if middle > start else [(start, end)])
    return list(product(*parts_of_sides))


def _spread(image: torch.Tensor, cell: Cell) -> float:
    """How much a cell of ``image`` ``(C, H, W)`` varies: the sum of squared deviations from its
    mean colour; -1 for a single pixel, which cannot be cut."""
    part = image[:, *pixels_of(cell)].flatten(1)
    if part.shape[1] == 1:
        return -1.0
    return float((part - part.mean(1, keepdim=True)).square().sum())


@dataclass(frozen=True)
class Superpixels(Regions):
    """Regions of similar colour, by SLIC (Achanta et al., 2012) as in scikit-image, which has to be
    installed.

    Args:
        count: about how many; there may be a few more or fewer.
        compactness: how much nearness counts against colour.
    """

    count: int = 50
    compactness: float = 10.0

    minimums = {"count": 1, "compactness": 0}

    def __str__(self) -> str:
        return f"about {self.count} superpixels"

    def of_image(self, image: torch.Tensor) -> torch.Tensor:
        """The number of each pixel's superpixel ``(H, W)``, by SLIC of the photo with its values
        brought to [0, 1]."""
        slic = optional("skimage.segmentation", "for Superpixels", "superpixels", MethodError).slic
        _check_images("Superpixels", image)
        labels = slic(
            to_unit(image[None])[0].movedim(0, -1).numpy(),
            n_segments=self.count,
            compactness=self.compactness,
            channel_axis=-1,
        )
        return in_a_row(torch.as_tensor(labels))


@dataclass(frozen=True, repr=False)
class GivenRegions(Regions):
    """Regions that the caller gives: whole numbers ``(H, W)``, of signals ``(L,)``, or one such
    tensor for each image, ``(N, H, W)`` or ``(N, L)``."""

    labels: torch.Tensor = field(compare=False)
    content: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Check that the numbers are whole, and keep them on the CPU; ``content``, their bytes,
        makes equal regions compare equal."""
        labels = torch.as_tensor(self.labels).detach().cpu()
        if (
            labels.dtype.is_floating_point
            or labels.dtype.is_complex
            or labels.ndim < 1
            or labels.numel() == 0
        ):
            raise MethodError(
                f"regions must be whole numbers (H, W) or (L,), got {shown(labels)}; mend them"
            )
        object.__setattr__(self, "labels", labels.long())
        object.__setattr__(
            self, "content", repr(labels.shape).encode() + self.labels.numpy().tobytes()
        )

    def __repr__(self) -> str:
        return f"Given({'×'.join(map(str, self.labels.shape))})"

    def most(self, size: tuple[int, ...]) -> int:
        return max(len(labels.unique()) for labels in self._of_images(size))

    def _of_images(self, size: tuple[int, ...]) -> torch.Tensor:
        """The numbers ``(N, H, W)``, or ``(1, H, W)`` where all images have the same; of signals,
        which are images of one row, they may have been given without the row."""
        if len(size) == 2 and size[0] == 1 and self.labels.shape[-1] == size[1]:
            return self.labels.reshape(-1, *size)
        return self.labels[None] if self.labels.ndim == len(size) else self.labels

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The region of each pixel ``(N, H, W)``, numbered from 0 without gaps for each image."""
        size = tuple(images.shape[2:])
        labels = self._of_images(size)
        if tuple(labels.shape[1:]) != size or len(labels) not in (1, len(images)):
            raise MethodError(
                f"regions must have the shape {size} of the image, got {tuple(self.labels.shape)}"
            )
        numbers = torch.stack([in_a_row(of_image) for of_image in labels])
        return numbers.expand((len(images), *size)).to(images.device)


def in_a_row(labels: torch.Tensor) -> torch.Tensor:
    """Number the regions in ``labels`` ``(...)`` again from 0 on, without gaps, in the order of
    their old numbers."""
    return torch.unique(labels, return_inverse=True)[1]  # type: ignore[no-any-return]


def region_values(values: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """One value for each region ``(M,)``, of each map ``(N, H, W)``: the mean over its pixels,
    which are all the same.

    Args:
        values: maps in which each pixel has the value of its region, such as those of `KernelSHAP`.
        labels: the number of each pixel's region, ``(N, H, W)``, or ``(H, W)`` for all maps; as
            `Squares` gives them.

    >>> region_values(torch.tensor([[[3.0, 3.0], [3.0, 1.0]]]), torch.tensor([[0, 0], [0, 1]]))[
    ...     0
    ... ].sum()
    tensor(4.)
    """
    means = []
    for of_image, numbers in zip(
        values.flatten(1), labels.to(values.device).expand_as(values).flatten(1), strict=True
    ):
        sums = of_image.new_zeros(int(numbers.max()) + 1).index_add_(0, numbers, of_image)
        means.append(sums / numbers.bincount().clamp(min=1))
    return means


def pixels_near(region: torch.Tensor, by: float) -> torch.Tensor:
    """Grow regions ``(N, H, W)`` of truth values by all pixels no farther than ``by`` pixels from
    them."""
    # distances squared add up over axes: along one after the other, the least of all shifts counts
    squared = torch.where(region, 0.0, torch.inf)
    reach = int(by)
    for dim in range(1, region.ndim):
        along = F.pad(squared.movedim(dim, -1), (reach, reach), value=torch.inf)
        for step in range(-reach, reach + 1):
            shifted = along.narrow(-1, reach + step, region.shape[dim]).movedim(-1, dim)
            squared = torch.minimum(squared, shifted + step**2)
    return squared.sqrt() <= by


def regions_of(value: Any) -> Any:
    """Return the option ``regions``: a number as `Squares`, an array of numbers as `GivenRegions`;
    anything else stays, for the check of the field's type to refuse."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0:
        return Squares(int(value))
    if isinstance(value, (torch.Tensor, np.ndarray, list, tuple)):
        try:
            labels = torch.as_tensor(value)
            return Squares(int(labels)) if labels.ndim == 0 else GivenRegions(labels)
        except (TypeError, ValueError, RuntimeError, MethodError):
            return value
    # a class, such as Squares without brackets, is no value
    return None if isinstance(value, type) else value


register_reader(
    Regions,
    "how many squares across, from 1, or the number of each pixel's region (H, W)",
    regions_of,
)


USUAL_AREA = 224 * 224  # pixels of the images that the literature's numbers are meant for


@dataclass(frozen=True)
class Felzenszwalb(Regions):
    """Regions of similar colour (Felzenszwalb and Huttenlocher, 2004), joined where they differ by
    less than the largest difference within either, plus ``scale`` over its pixels."""

    # larger values give larger regions; meant for 224 x 224 pixels, as ``least`` is
    scale: float = 100.0
    # in pixels, of the Gaussian that is laid over the image first
    sigma: float = 0.8
    # pixels; smaller regions are joined to a neighbour
    least: int = 150

    minimums = {"scale": 0, "sigma": 0, "least": 1}

    def __str__(self) -> str:
        return f"regions of similar colour (scale {self.scale:g})"

    def of_image(self, image: torch.Tensor) -> torch.Tensor:
        """The number of each pixel's region ``(H, W)``. Scale and least size grow with the area, as
        if the image were of 224 x 224 pixels."""
        _check_images("Felzenszwalb", image)
        area = image[0].numel() / USUAL_AREA
        # as XRAI's authors call scikit-image: colours from -1 to 1, the scale divided by 255
        smooth = blurred(2 * to_unit(image[None])[0] - 1, self.sigma)
        return joined_pixels(smooth, self.scale / 255 * area, max(1, round(self.least * area)))


def joined_pixels(image: torch.Tensor, scale: float, least: int) -> torch.Tensor:
    """Each pixel's region ``(H, W)`` of ``image`` ``(C, H, W)``: Felzenszwalb's graph (eight
    neighbours, least differences first), then regions under ``least`` join a neighbour.
    """
    pixel_numbers = torch.arange(image[0].numel()).reshape(image.shape[1:])
    # to the right, below, and along both diagonals
    neighbours = [
        (pixel_numbers[:, :-1], pixel_numbers[:, 1:]),
        (pixel_numbers[:-1], pixel_numbers[1:]),
        (pixel_numbers[:-1, :-1], pixel_numbers[1:, 1:]),
        (pixel_numbers[:-1, 1:], pixel_numbers[1:, :-1]),
    ]
    from_pixels = torch.cat([one.flatten() for one, _ in neighbours])
    to_pixels = torch.cat([other.flatten() for _, other in neighbours])
    flat = image.flatten(1)
    weights = (flat[:, from_pixels] - flat[:, to_pixels]).square().sum(0).sqrt()
    order = weights.argsort(stable=True)
    ordered = weights[order].tolist()
    edges = list(zip(ordered, from_pixels[order].tolist(), to_pixels[order].tolist(), strict=True))
    # a region is a tree of pixels, of which the root stands for it: each pixel alone at first
    roots = pixel_numbers.flatten().tolist()
    sizes = [1] * len(roots)
    largest_within = [0.0] * len(roots)

    def root(i: int) -> int:
        """The root of pixel ``i`` in the forest of joined pixels (union-find); shortens the path
        there."""
        while roots[i] != i:
            roots[i] = roots[roots[i]]
            i = roots[i]
        return i

    # first regions of like colour are joined, then those that are too small
    for by_size in (False, True):
        for weight, one, other in edges:
            a = root(one)
            b = root(other)
            if a == b:
                continue
            alike = weight < min(
                largest_within[a] + scale / sizes[a], largest_within[b] + scale / sizes[b]
            )
            joins = min(sizes[a], sizes[b]) < least if by_size else alike
            if joins:
                roots[b] = a
                sizes[a] += sizes[b]
                largest_within[a] = weight  # differences come in order: none was larger
    return in_a_row(torch.tensor([root(i) for i in range(len(roots))])).reshape(image.shape[1:])
