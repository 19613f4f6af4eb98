"""Maps of tiles, frames or patches of a photo, laid where these lie in it."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from explain.attribution.result import Attribution
from explain.data.boxes import Box
from explain.layers.layouts import enlarge


def tiles_on_photo(
    attribution: Attribution, boxes: Sequence[Box], size: tuple[int, int]
) -> Attribution:
    """A photo's T tiles, frames or patches as one attribution at the finest tile's resolution, laid
    at ``boxes`` in pixels of a photo of ``size`` (width, height)."""
    height, width = attribution.size[1:]
    is_in_pixels = attribution.values.ndim == len(attribution.size) + 2
    finest = min(boxes, key=lambda box: box.height * box.width)
    scale = height / finest.height, width / finest.width
    canvas = canvas_of(boxes, size, (height, width))
    neutral = 0.0 if attribution.neutral is None else float(attribution.neutral[0])

    def laid(values: torch.Tensor) -> torch.Tensor:
        """Return the values of the tiles, a batch of one, on the canvas of the photo."""
        if is_in_pixels:
            tiles = values[0] if attribution.frames_first else values[0].transpose(0, 1)
            # `_laid` divides by the number of tiles, but contributions of pixels are summed
            return _laid(tiles, boxes, canvas, scale) * len(boxes)
        if len(values[0]) != len(boxes):  # a layer with fewer steps in time
            values = enlarge(values[:, None], (len(boxes), *values.shape[2:]))[:, 0]
        return _laid(values[0], boxes, canvas, scale, neutral)

    return replace(
        attribution,
        values=laid(attribution.values),
        maps={name: laid(values) for name, values in attribution.maps.items()},
        size=canvas,
        # what does not lie on the canvas
        error=None,
        sets=None,
        frames_first=False,
        placement=None,
    )


def canvas_of(
    boxes: Sequence[Box], size: tuple[int, int], sides: tuple[int, int]
) -> tuple[int, int]:
    """The height and width of a map of a photo of ``size`` (width, height), from those of its tiles
    (``sides``), which lie at ``boxes``: as fine as in the finest tile."""
    finest = min(boxes, key=lambda box: box.height * box.width)
    height, width = sides
    return (
        max(round(size[1] * height / finest.height), height),
        max(round(size[0] * width / finest.width), width),
    )


def _laid(
    values: torch.Tensor,
    boxes: Sequence[Box],
    canvas: tuple[int, int],
    scale: tuple[float, float],
    neutral: float = 0.0,
) -> torch.Tensor:
    """T tiles laid at ``boxes`` (in pixels): ``(T, C, H, W)`` to sums divided by T, ``(T, h, w)``
    to means. ``canvas`` is (height, width) in cells, ``scale`` cells a pixel (down, across)."""
    is_in_pixels = values.ndim == 4
    height, width = canvas
    down, across = scale
    total = values.new_zeros(1, values.shape[1] if is_in_pixels else 1, height, width)
    count = values.new_zeros(height, width)
    for tile, box in zip(values if is_in_pixels else values[:, None], boxes, strict=True):
        sides = max(1, round(box.height * down)), max(1, round(box.width * across))
        spread = tile[None] if tuple(tile.shape[1:]) == sides else enlarge(tile[None], sides)
        if is_in_pixels:  # a pixel's value is divided among its cells, so that the sum stays
            spread = spread * (tile[0].numel() / spread[0, 0].numel())
        rows, own_rows = _overlap(round(box.top * down), sides[0], height)
        columns, own_columns = _overlap(round(box.left * across), sides[1], width)
        total[:, :, rows, columns] += spread[:, :, own_rows, own_columns]
        count[rows, columns] += 1
    if is_in_pixels:
        return total / len(boxes)
    return torch.where(count > 0, total[:, 0] / count.clamp(min=1), neutral)


def _overlap(start: int, length: int, whole: int) -> tuple[slice, slice]:
    """Along one axis, the cells of a whole (0 to ``whole``) that a part of ``length`` cells from
    ``start`` (maybe negative) covers, and the part's own cells there."""
    if start + length == whole + 1:  # by rounding
        start -= 1
    first = max(start, 0)
    end = max(0, min(start + length, whole))
    return slice(first, end), slice(first - start, max(first - start, end - start))
