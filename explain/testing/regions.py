"""Regions of photos: boxes, masks and functions as masks of the model's input, and the same shape
elsewhere."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ArgumentError, shown
from explain.data.boxes import Box
from explain.render.styles import as_floats

PartOfPhoto: TypeAlias = Sequence[float] | torch.Tensor | np.ndarray[Any, Any] | Image.Image
"""A box x0 y0 x1 y1, or a mask ``(H, W)``."""
RegionLike: TypeAlias = PartOfPhoto | Callable[[Any], PartOfPhoto] | Sequence[PartOfPhoto]
"""A part for all photos, a function of the photo, or a part for each photo."""

LARGEST = 0.5
"""The share of the input from which on the same area does not fit elsewhere."""
MUST = "a box (x0, y0, x1, y1), a mask (H, W), a function of the photo, or one for each photo"


def region_for(region: RegionLike, photo: Any, place: int) -> PartOfPhoto:
    """Return the region of ``photo`` number ``place`` from what a caller gave: one for all photos,
    a function of the photo, or a list with one for each."""
    if callable(region):
        return region(photo)
    if is_one_region(region):
        return region  # type: ignore[return-value]
    return region[place]  # type: ignore[index,return-value]


def is_one_region(region: Any) -> bool:
    """Whether a caller's region is a single one (box, mask, image), not a list or array of one for
    each photo. An array ``(N, 4)`` counts as N boxes."""
    shape = getattr(region, "shape", None)
    if shape is not None:  # one box (4,), or a mask (H, W)
        return len(shape) == 1 or (len(shape) == 2 and shape[1] != 4)
    if isinstance(region, str) or not isinstance(region, Sequence):
        return True
    return len(region) == 4 and all(isinstance(edge, int | float) for edge in region)


def mask_on_photo(region: PartOfPhoto, size: tuple[int, int]) -> torch.Tensor:
    """Return the pixels ``(H, W)``, bool, of a photo of ``size`` that a region holds: a mask, or a
    box in pixels, or in shares where no edge is above 1."""
    values = torch.from_numpy(as_floats("region", region, f"give {MUST}"))
    height, width = size
    if tuple(values.shape) == size:
        return values != 0
    if tuple(values.shape) != (4,):
        raise ArgumentError(
            f"region must be {MUST}, of a photo of {width} × {height} pixels (width × height), got "
            f"{shown(region)}; give it in pixels of the photo"
        )
    if float(values.max()) <= 1:
        values = values * torch.tensor([width, height, width, height])
    left, top, right, bottom = values.round().long().tolist()
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise ArgumentError(
            f"region must be a box with 0 <= x0 < x1 <= {width} and 0 <= y0 < y1 <= {height}, "
            f"got {shown(region)}; give it in pixels of the photo, or in shares"
        )
    mask = torch.zeros(size, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    return mask


def mask_on_input(mask: torch.Tensor, seen: Box, size: tuple[int, int]) -> torch.Tensor:
    """Return which pixels of an input of ``size`` (height, width) show anything of a region
    ``mask`` ``(H, W)`` of the photo, whose part ``seen`` the input shows."""
    rows = _any_between(mask, seen.top, seen.height, size[0])
    return _any_between(rows.T, seen.left, seen.width, size[1]).T


def _any_between(mask: torch.Tensor, start: float, length: float, count: int) -> torch.Tensor:
    """Divide the part from ``start`` of ``length`` pixels along the first axis of a mask into
    ``count`` pixels of the input, and return what each shows any of."""
    edges = [start + number * length / count for number in range(count + 1)]
    shown_parts = []
    for first, last in pairwise(edges):
        # an edge that rounding errors move over that of a pixel must not add this pixel
        pixels = slice(max(0, math.floor(first + 1e-6)), max(0, math.ceil(last - 1e-6)))
        shown_parts.append(mask[pixels].any(0))
    return torch.stack(shown_parts)


def masks_elsewhere(mask: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``count`` masks ``(count, H, W)`` of the shape of ``mask`` ``(H, W)`` at random places
    with the least in common with it, inside the image if there is room."""
    height, width = mask.shape
    transformed = torch.fft.rfft2(mask.double())
    # how many pixels each shift has in common with the mask: its autocorrelation, by FFT
    overlap = torch.fft.irfft2(transformed.conj() * transformed, s=(height, width)).round()
    mask_rows = mask.any(1).nonzero()[:, 0]
    mask_columns = mask.any(0).nonzero()[:, 0]
    stays_inside = torch.zeros_like(mask)
    shifts_down = torch.arange(-int(mask_rows[0]), height - int(mask_rows[-1])) % height
    shifts_right = torch.arange(-int(mask_columns[0]), width - int(mask_columns[-1])) % width
    stays_inside[shifts_down[:, None], shifts_right] = True
    without_overlap = stays_inside & (overlap == 0)
    # without room, also over the border, and nearly the least in common, to have several
    allowed_shifts = (
        without_overlap if without_overlap.any() else overlap <= overlap.min() + 0.02 * mask.sum()
    )
    shifts = allowed_shifts.nonzero()
    order = torch.randperm(len(shifts), generator=generator)
    # where there are fewer than ``count``, they come again
    chosen_shifts = shifts[order.repeat(math.ceil(count / len(shifts)))[:count]].tolist()
    return torch.stack(
        [mask.roll((shift_down, shift_right), (0, 1)) for shift_down, shift_right in chosen_shifts]
    )
