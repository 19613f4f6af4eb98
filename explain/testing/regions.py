"""Regions of photos: boxes, masks and functions as masks of the model's input, and the same shape
elsewhere."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ArgumentError, shown
from explain.data.boxes import Box

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
    if place >= len(region):  # type: ignore[arg-type]
        raise ArgumentError(
            f"region must be {MUST}, got {len(region)} for more photos"  # type: ignore[arg-type]
        )
    return region[place]  # type: ignore[index,return-value]


def is_one_region(region: Any) -> bool:
    """Whether a caller's region is a single one (box, mask, image), not a list or array of one for
    each photo. An array ``(N, 4)`` counts as N boxes."""
    shape = getattr(region, "shape", None)
    if shape is not None:
        return len(shape) == 1 or (len(shape) == 2 and shape[1] != 4)
    if isinstance(region, str) or not isinstance(region, Sequence):
        return True
    return len(region) == 4 and all(isinstance(edge, int | float) for edge in region)


def mask_on_photo(region: PartOfPhoto, size: tuple[int, int]) -> torch.Tensor:
    """Return the pixels ``(H, W)``, bool, of a photo of ``size`` that a region holds: a mask, or a
    box in pixels, or in shares where no edge is above 1."""
    try:
        if isinstance(region, torch.Tensor):
            values = region.detach().cpu().double()
        else:
            values = torch.from_numpy(np.array(region, np.float64))
    except (TypeError, ValueError):
        raise ArgumentError(f"region must be {MUST}, got {shown(region)}") from None
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
    counts = torch.zeros(mask.shape[0] + 1, mask.shape[1] + 1, dtype=torch.long)
    counts[1:, 1:] = mask.long().cumsum(0).cumsum(1)
    tops, bottoms = _pixels_between(seen.top, seen.height, size[0], mask.shape[0])
    lefts, rights = _pixels_between(seen.left, seen.width, size[1], mask.shape[1])
    above = counts[tops][:, rights] - counts[tops][:, lefts]
    below = counts[bottoms][:, rights] - counts[bottoms][:, lefts]
    return below > above


def _pixels_between(
    start: float, length: float, input_length: int, photo_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pixel of the photo and the one behind the last, ``(input_length,)``, that each
    input pixel along one axis shows of the part from ``start`` of ``length``.
    """
    edges = start + torch.arange(input_length + 1, dtype=torch.float64) * length / input_length
    first = (edges[:-1] + 1e-6).floor().clamp(0, photo_length).long()
    last = (edges[1:] - 1e-6).ceil().clamp(0, photo_length).long()
    return first, last


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
    allowed_shifts = (
        without_overlap if without_overlap.any() else overlap <= overlap.min() + 0.02 * mask.sum()
    )
    shifts = allowed_shifts.nonzero()
    order = torch.randperm(len(shifts), generator=generator)
    chosen_shifts = shifts[order.repeat(math.ceil(count / len(shifts)))[:count]].tolist()
    return torch.stack(
        [mask.roll((shift_down, shift_right), (0, 1)) for shift_down, shift_right in chosen_shifts]
    )
