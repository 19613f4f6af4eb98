"""Where the cells of a map are drawn: from values and places to pixels.

A cell of a feature map is drawn where it looks (`explain.layers.receptive_fields`), which is seldom
the middle of its share of the image. All pictures, masks and metrics of maps go through `draw`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from explain.layers.layouts import Size, enlarge

PlacementMode: TypeAlias = Literal["cells", "even"]
"""Where maps are drawn: each cell where it looks, or all spread evenly over the image."""

NEAREST = 4  # cells that a pixel takes its value from, where they lie on no grid
_EVEN = 1e-3  # of a cell: how far cells that count as spread evenly may lie beside
_BESIDE = 0.5  # of a cell: how far the cells of a row may lie beside their mean
_APART = 0.75  # of a cell: how far apart the cells of maps may lie that are added up by cells
_TOGETHER = 0.1  # of a cell: rows that lie nearer are at one place
_AT_ONCE = 2**24  # distances between pixels and cells that are in memory together


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the cells of a layer's map look in images of a ``size``."""

    size: Size
    centres: Tensor
    """Rows and columns ``(1, h, w, 2)`` in pixels, the first pixel's centre at 0.5, and NaN for
    cells that look nowhere; one entry for each image where these differ."""
    seen: Tensor | None = None
    """The pixels ``(H, W)`` that any cell looks at, or None for all."""
    copy: "tuple[Placement, Placement] | None" = None
    """If the network reads a moved copy of the image, such as a crop: where the cells look in that,
    and where the pixels of the copy lie on the image."""

    def __len__(self) -> int:
        return len(self.centres)

    def __getitem__(self, image: int) -> "Placement":
        """The placement of one image."""
        return self if len(self) == 1 else replace(self, centres=self.centres[image][None])

    def converted(self, convert: Callable[[Tensor], Tensor]) -> "Placement":
        """A copy with ``convert`` applied to what has an entry for each image."""
        return self if len(self) == 1 else replace(self, centres=convert(self.centres))

    def fits(self, maps: Tensor, size: Size) -> bool:
        """Whether maps ``(N, C, h, w)`` have these cells, and an image of ``size`` these pixels."""
        return tuple(maps.shape[2:]) == tuple(self.centres.shape[1:3]) and tuple(size) == self.size

    def on_photo(self, maps: Tensor, *, smooth: bool = False) -> Tensor:
        """The values of maps ``(N, C, h, w)`` at each pixel ``(N, C, H, W)``: linear between the
        centres of cells, or cubic if ``smooth``. Pixels that no cell looks at are 0."""
        if len(self) > 1:
            return torch.cat(
                [
                    self[image].on_photo(maps[image][None], smooth=smooth)
                    for image in range(len(maps))
                ]
            )
        # Beyond the outer centres, values are constant. A smooth peak may lie between cells; what
        # is above zero and what is below are drawn apart then, since a cubic falls below zero
        # beside a peak. For cells on no grid, each pixel takes the nearest ones, weighted by how
        # near they are.
        pixels = self._spread(maps, smooth=smooth)
        return pixels if self.seen is None else pixels * self.seen.to(pixels)

    def at_cells(self, pixels: Tensor) -> Tensor:
        """The values of pixels ``(N, C, H, W)`` where the cells look ``(N, C, h, w)``, linearly
        between pixels; 0 for cells that look nowhere."""
        sides = torch.tensor(self.size, dtype=torch.float64, device="cpu")
        # from -1 to 1, columns before rows, as `grid_sample` wants it
        grid = (2 * self.centres / sides - 1).flip(-1).to(pixels)
        grid = grid.nan_to_num().expand(len(pixels), -1, -1, -1)
        values = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
        looks = ~self.centres.isnan().any(-1)[:, None]
        return values * looks.to(pixels)

    def in_pixels(self, maps: Tensor) -> Tensor:
        """Share the values of maps ``(N, C, h, w)`` out among the pixels ``(N, C, H, W)``, so that
        their sum stays; what looks at no pixel is lost."""
        if self.copy is None:
            return shared_out(maps, self, of_pixels(self.size), self.size)
        in_copy, of_copy = self.copy
        values = in_copy.in_pixels(maps).flatten(2)
        # the pixel of the image that each pixel of the copy lies in
        places = of_copy.centres[0].flatten(0, 1).floor()
        sides = torch.tensor(self.size, device="cpu")
        looks = ((places >= 0) & (places < sides)).all(1)  # nor is NaN
        rows, columns = places[looks].long().unbind(1)
        pixels = values.new_zeros((*values.shape[:2], math.prod(self.size)))
        index = (rows * self.size[1] + columns).to(values.device)
        pixels = pixels.index_add(2, index, values[..., looks.to(values.device)])
        return pixels.reshape(*values.shape[:2], *self.size)

    def cells_at(self, centres: Tensor) -> Tensor | None:
        """Where in this map ``centres`` ``(N, h, w, 2)`` on the image lie, in its cells; None if
        these are not equally far apart."""
        cells = self.centres[0]
        if min(cells.shape[:2]) == 1:
            return None
        # how far one row, and one column, is from the next: these may be turned
        gaps = torch.stack([cells[1, 0] - cells[0, 0], cells[0, 1] - cells[0, 0]])
        size = (cells.shape[0], cells.shape[1])
        regular = cells[0, 0] + (_even_centres(size, size) - 0.5) @ gaps
        if not torch.allclose(regular, cells, atol=_EVEN):
            return None
        numbers: Tensor = (centres - cells[0, 0]) @ torch.linalg.inv(gaps)
        return numbers + 0.5  # the middle of the first cell is 0.5

    def centres_at(self, places: Tensor) -> Tensor:
        """Where the cells look that are the nearest to places ``(N, h, w, 2)`` in their own map, in
        its cells; NaN at NaN."""
        last = torch.tensor(self.centres.shape[1:3], device="cpu") - 1
        rows, columns = places.nan_to_num().floor().long().clamp(min=0).minimum(last).unbind(-1)
        return self.centres[0][rows, columns] + 0 * places  # NaN stays NaN

    def lies_apart(self, other: "Placement") -> bool:
        """Whether the cells of another map look elsewhere, by more than a cell's share of the
        image, or in another copy of it."""
        pixels, other_pixels = (
            of_pixels(of.size).centres if of.copy is None else of.copy[1].centres
            for of in (self, other)
        )
        """Where the pixels that the network reads lie on the image."""
        if not torch.equal(pixels, other_pixels):
            return True
        # both are compared at the rows and columns of the coarser one
        _, rows, columns, _ = map(min, self.centres.shape, other.centres.shape)
        places, other_places = (
            F.interpolate(of.centres.movedim(-1, 1), (rows, columns), mode="bilinear")
            for of in (self, other)
        )
        sides_of_cell = torch.tensor([self.size[0] / rows, self.size[1] / columns], device="cpu")
        off = (places - other_places).abs()
        return bool((off > _APART * sides_of_cell[:, None, None]).any())

    def _spread(self, maps: Tensor, *, smooth: bool) -> Tensor:
        """The values of maps at all pixels, whether they are seen or not; if ``smooth``, along
        cubics where cells lie in rows and columns."""
        if self.is_even:
            return enlarge(maps, self.size)
        if self.lines is not None:
            turned, *_ = self.lines
            maps = maps.mT if turned else maps
            of_rows, of_columns = self._matrices[smooth]
            rows = of_rows.to(maps)
            columns = of_columns.to(maps).mT
            if not smooth:
                return rows @ maps @ columns
            # apart and clamped, so that no cubic gives a pixel a sign that its cells do not have
            above = rows @ maps.clamp(min=0) @ columns
            below = rows @ (-maps).clamp(min=0) @ columns
            return above.clamp(min=0) - below.clamp(min=0)
        indices, weights = self.nearest
        flat = maps.flatten(2)
        pixels = maps.new_zeros((*maps.shape[:2], math.prod(self.size)))
        for index, weight in zip(indices, weights, strict=True):
            pixels = pixels + flat[..., index.to(maps.device)] * weight.to(maps)
        return pixels.reshape(*maps.shape[:2], *self.size)

    @cached_property
    def _cell(self) -> Tensor:
        """The height and width that a cell has where cells are spread evenly, in pixels."""
        cells = torch.tensor(self.centres.shape[1:3], device="cpu")
        return torch.tensor(self.size, device="cpu") / cells

    @cached_property
    def is_even(self) -> bool:
        """Whether the cells are spread evenly over the image."""
        even = _even_centres(tuple(self.centres.shape[1:3]), self.size)
        return bool(((self.centres - even).abs() <= _EVEN * self._cell).all())

    def is_beside(self, other: "Placement") -> bool:
        """Whether each cell lies less than half a cell beside that of another placement."""
        if self.centres.shape != other.centres.shape or self.size != other.size:
            return False
        off = (self.centres - other.centres).abs()
        return not bool((off >= 0.5 * self._cell).any())

    @cached_property
    def lines(self) -> tuple[bool, Tensor, Tensor] | None:
        """Whether the map is turned, its rows running along the columns of the image, and where
        rows and columns of cells look, if they are a grid along its axes; None for others."""
        for turned in (False, True):
            centres = self.centres[0].transpose(0, 1) if turned else self.centres[0]
            lines = []
            for axis, length in enumerate(self.size):
                # the places along the axis: each row, or each column, of cells should have one
                cells = centres[..., axis] if axis == 0 else centres[..., axis].mT
                places = cells.double().nanmean(1)
                ordered = places[~places.isnan()].sort().values
                gaps = ordered.diff()
                gap = float(gaps.median()) if len(gaps) else float(length)
                off = (cells - places[:, None]).abs()
                are_lines = bool((off <= _BESIDE * gap).logical_or(places.isnan()[:, None]).all())
                # cells of a row lie apart, or two rows at one place: no grid, turned like this
                if not len(ordered) or not are_lines or bool((gaps < _TOGETHER * gap).any()):
                    break
                lines.append(places.float())
            else:  # both axes have lines
                rows, columns = lines
                return turned, rows, columns
        return None

    @property
    def aligned(self) -> "Placement":
        """The same placement with the cells of each row, and of each column, in one line, if they
        lie near enough."""
        if len(self) > 1 or self.lines is None:
            return self
        turned, *lines = self.lines
        return replace(self, centres=_crossings(lines, turned=turned)[None])

    @property
    def described(self) -> dict[str, Any]:
        """The placement of one image in values of JSON: the places of rows and columns, or of each
        cell; and how many pixels of the image, row after row, are in turn unseen and seen."""
        description: dict[str, Any] = {"size": list(self.size)}
        if self.lines is not None:
            description["turned"], rows, columns = self.lines
            description |= {"rows": _listed(rows), "columns": _listed(columns)}
        else:
            description["cells"] = [list(map(_listed, row)) for row in self.centres[0]]
        if self.seen is not None:
            # with an unseen pixel before the first one, so that the first run is unseen, or empty
            flags = F.pad(self.seen.flatten().int(), (1, 0))
            changes = flags.diff().nonzero()[:, 0].tolist()
            ends = [0, *changes, self.seen.numel()]
            description["runs"] = [end - start for start, end in pairwise(ends)]
        return description

    @classmethod
    def restored(cls, description: Mapping[str, Any]) -> "Placement":
        """The placement that `described` has described."""
        height, width = map(int, description["size"])
        if "cells" in description:
            centres = _placed(description["cells"])
        else:
            lines = [_placed(description[axis]) for axis in ("rows", "columns")]
            centres = _crossings(lines, turned=description["turned"])
        seen = None
        if "runs" in description:
            lengths = torch.tensor(list(map(int, description["runs"])), device="cpu")
            pixels = int(lengths.sum())
            if bool((lengths < 0).any()) or pixels != height * width:
                raise ValueError(f"runs must be of {height * width} pixels, got {pixels}")
            # runs are in turn unseen and seen, the first is unseen
            is_seen = torch.arange(len(lengths), device="cpu") % 2 == 1
            seen = is_seen.repeat_interleave(lengths).reshape(height, width)
        # of one image; a record whose lists are deeper is refused
        centres = centres.reshape(1, *centres.shape[-3:])
        return cls((height, width), centres, seen=seen)

    @cached_property
    def _matrices(self) -> dict[bool, list[Tensor]]:
        """The matrices that interpolate along the rows and the columns of the image, for `lines`,
        by whether they are smooth."""
        assert self.lines is not None
        _, *lines = self.lines
        pairs = list(zip(lines, self.size, strict=True))
        return {
            smooth: [_interpolating(line, length, smooth=smooth) for line, length in pairs]
            for smooth in (False, True)
        }

    @cached_property
    def nearest(self) -> tuple[Tensor, Tensor]:
        """For each pixel, the nearest cells and their weights: ``(NEAREST, H * W)`` each."""
        cells = self.centres[0].flatten(0, 1)
        placed = (~cells.isnan().any(1)).nonzero()[:, 0]
        count = self.size[0] * self.size[1] if self.seen is None else int(self.seen.sum())
        if not len(placed):  # all pixels have the first cell, with no weight
            zeros = torch.zeros(1, self.size[0] * self.size[1], device="cpu")
            return zeros.long(), zeros
        # how far cells are apart, if each has as many of the pixels
        gap = (max(count, 1) / len(placed)) ** 0.5
        pixels = _even_centres(self.size, self.size).flatten(0, 1)
        nearest = []
        weights = []
        for some_pixels in torch.split(pixels, max(1, _AT_ONCE // len(placed))):
            distances = torch.cdist(some_pixels, cells[placed])
            near = distances.topk(min(NEAREST, len(placed)), largest=False)
            nearest.append(placed[near.indices])
            # a Gaussian, whose standard deviation is half the gap
            weights.append((-2 * (near.values / gap).square()).softmax(1))
        return torch.cat(nearest).T, torch.cat(weights).T


def of_pixels(size: Size) -> Placement:
    """The placement of a map that has a cell for each pixel."""
    return Placement(size, _even_centres(size, size)[None])


def draw(
    maps: Tensor, size: Size, placement: Placement | None = None, *, smooth: bool = True
) -> Tensor:
    """Draw maps ``(N, C, h, w)`` on images of ``size``: each cell where it looks, or with no
    placement, or one of other maps, spread evenly; linear in the maps if not ``smooth``."""
    if placement is None or not placement.fits(maps, size):
        return enlarge(maps, size)
    return placement.on_photo(maps, smooth=smooth)


def nearest(cells: Tensor, size: Size, placement: Placement | None = None) -> Tensor:
    """What the nearest cell of a map ``(h, w)`` has, for each pixel ``(H, W)`` of an image."""
    if placement is None or not placement.fits(cells[None, None], size) or placement.is_even:
        pixels = F.interpolate(cells[None, None].double(), size, mode="nearest-exact")
        return pixels[0, 0].to(cells)
    return cells.flatten()[placement.nearest[0][0].to(cells.device)].reshape(size)


def transferred(
    maps: Tensor, placement: Placement | None, other: Placement | None, cells: Size
) -> Tensor:
    """Bring maps ``(N, C, h, w)`` to the ``cells`` of another map: what is drawn where these look.
    Maps whose cells lie less than half a cell apart stay as they are."""
    if placement is None or other is None or not placement.fits(maps, other.size):
        return enlarge(maps, cells)
    if placement.is_beside(other):
        return maps
    if placement.is_even and other.is_even:
        return enlarge(maps, cells)
    return other.at_cells(placement.on_photo(maps))


def shared_out(
    maps: Tensor, placement: Placement | None, other: Placement | None, cells: Size
) -> Tensor:
    """Share the values of maps ``(N, C, h, w)`` out among the ``cells`` of another map, so that
    their sum stays; what no cell of that looks at is lost."""
    with torch.enable_grad():
        ones = torch.ones_like(maps[:, :1], requires_grad=True)
        # how much of each cell all those cells have together: the derivative of their sum
        (taken,) = torch.autograd.grad(transferred(ones, placement, other, cells).sum(), ones)
    return transferred(maps / torch.where(taken > 0, taken, 1), placement, other, cells)


def _listed(places: Tensor) -> list[float | None]:
    """Places as numbers, None for those that are nowhere."""
    return [None if math.isnan(place) else place for place in places.tolist()]


def _placed(places: Any) -> Tensor:
    """Places that `_listed` has listed, however deep in lists."""
    return torch.from_numpy(np.array(places, np.float32))


def _crossings(lines: list[Tensor], *, turned: bool) -> Tensor:
    """The centres ``(h, w, 2)`` of cells where rows and columns at these places cross; those of a
    map that is ``turned`` (see `Placement.lines`) have its rows along the image's columns."""
    centres = torch.stack(torch.meshgrid(lines, indexing="ij"), -1)
    return centres.transpose(0, 1) if turned else centres


def _even_centres(cells: Size, size: Size) -> Tensor:
    """The centres ``(h, w, 2)`` of cells that are spread evenly."""
    axes = [
        (torch.arange(count, device="cpu") + 0.5) * (length / count)
        for count, length in zip(cells, size, strict=True)
    ]
    return torch.stack(torch.meshgrid(axes, indexing="ij"), -1)


def _interpolating(places: Tensor, length: int, *, smooth: bool) -> Tensor:
    """The matrix ``(length, cells)`` that interpolates between cells at these ``places``, in any
    order, linearly or by cubics; cells at NaN have no part."""
    placed = (~places.isnan()).nonzero()[:, 0]
    cells = placed[places[placed].argsort()]
    ordered = places[cells].double()
    matrix = torch.zeros(length, len(places), dtype=torch.float64, device="cpu")
    if len(cells) == 1:
        matrix[:, cells] = 1
        return matrix
    # a column for each cell: 1 at this one, 0 at others
    values = torch.eye(len(cells), dtype=torch.float64, device="cpu")
    pixels = torch.arange(length, dtype=torch.float64, device="cpu") + 0.5
    upper = torch.searchsorted(ordered, pixels).clamp(1, len(cells) - 1)
    lower = upper - 1
    gap = (ordered[upper] - ordered[lower])[:, None]
    # from 0 to 1 between both cells; beyond the outer ones, values are constant
    t = ((pixels - ordered[lower])[:, None] / gap).clamp(0, 1)
    if not smooth:
        matrix[:, cells] = (1 - t) * values[lower] + t * values[upper]
        return matrix
    # the slope at a cell is that from its one neighbour to the other (Catmull and Rom 1974)
    slopes = torch.zeros_like(values)
    slopes[1:-1] = (values[2:] - values[:-2]) / (ordered[2:] - ordered[:-2])[:, None]
    # the cubic with these values and slopes at both ends (Hermite)
    share = t.square() * (3 - 2 * t)
    straight = (1 - share) * values[lower] + share * values[upper]
    bend = t * (1 - t).square() * slopes[lower] - t.square() * (1 - t) * slopes[upper]
    matrix[:, cells] = straight + gap * bend
    return matrix
