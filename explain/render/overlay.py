"""A map drawn on the photo that it explains, at the photo's own resolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from explain._utils.errors import ImageError, keywords, shown
from explain.data.images import Box, ImageLike, load_image
from explain.render.placement import Array, Region, mark_unseen
from explain.render.styles import Reading, Style, StyleLike, get_style

LARGEST = float(np.finfo(np.float32).max)
Edges = tuple[float, float, float, float]


@keywords()
def overlay(
    photo: ImageLike,
    heatmap: Any,
    style: StyleLike = "heat",
    *,
    box: Box | Edges | None = None,
    colormap: str | None = None,
    alpha: float | None = None,
) -> Image.Image:
    """Draw a heatmap on a photo, at the photo's own resolution.

    For the result of `explain.attribute`: ``overlay(photo, attribution.heatmap[0])``.

    Args:
        photo: a path, the bytes of a file, a PIL image or an array ``(H, W, 3)``; see `explain.data.images.load_image`.
        heatmap: ``(h, w)`` in [0, 1], a tensor or an array, of any size: it is stretched over the box. For the style
            "signed", ``attribution.signed[0]`` in [-1, 1]; for "color", ``attribution.values[0]`` ``(C, h, w)``.
        style: "heat", "contour", "mask" or "spotlight", or a style with options, as ``render.Contour(shares=(0.5,))``;
            also "intensity", "signed" and "color", which pixel methods are drawn in.
        box: which part of the photo the model saw, as (left, top, right, bottom) in pixels of the photo; by default,
            all of it. What lies outside is hatched. Where the photo was cut by a preprocessing,
            ``explain.data.images.locate(preprocess, photo.size)`` finds the box.
        colormap: any colour map of matplotlib, for styles that have one.
        alpha: opacity of the heat, 0 to 1.

    Returns:
        An RGB picture of the photo's size.

    Raises:
        ImageError: the photo cannot be read, or the heatmap or box is not valid.
        ExplainError: an unknown style or colour map, or an opacity outside [0, 1].

    >>> overlay(Image.new("RGB", (8, 4)), np.ones((2, 2)), "spotlight").size
    (8, 4)
    """
    chosen = get_style(style, colormap=colormap, alpha=alpha)
    picture = load_image(photo)
    whole = Box(0.0, 0.0, float(picture.width), float(picture.height))
    region = whole if box is None else _checked_box(box)
    return drawn(picture, _checked_map(heatmap, chosen), chosen, region, [region])


def drawn(photo: Image.Image, values: Array, style: Style, region: Region, seen: Sequence[Region]) -> Image.Image:
    """Draw a map where it lies on an RGB photo, and mark what lies in no seen part."""
    return mark_unseen(style.draw(photo, values, region), photo, seen)


def _checked_box(box: Any) -> Box:
    try:
        found = box if isinstance(box, Box) else Box(*map(float, box))
    except (TypeError, ValueError):
        found = Box(0, 0, 0, 0)
    if not (0 < found.width < np.inf and 0 < found.height < np.inf):
        raise ImageError(
            f"box must be (left, top, right, bottom) in pixels with left < right and top < bottom, got {shown(box)}; "
            "leave it out where the model saw the whole photo"
        )
    return found


def _checked_map(heatmap: Any, style: Style) -> Array:
    """Return a map as an array, if a style can draw it."""
    least, most, dimensions, remedy = _NEEDS[style.reads]
    tensor = heatmap.detach().float().cpu() if hasattr(heatmap, "detach") else heatmap
    try:
        values = np.asarray(tensor, dtype=np.float32)
    except (TypeError, ValueError):
        got = type(heatmap).__name__
        raise ImageError(f"heatmap must be a tensor or an array, got {got}; {remedy}") from None
    must = f"heatmap for style {style.name!r} must"
    if values.ndim != dimensions or not values.size:
        raise ImageError(f"{must} be the map of one image, got shape {values.shape}; {remedy}")
    low, high = float(values.min()), float(values.max())
    if not (least <= low and high <= most + 1e-6):  # NaN is neither
        raise ImageError(f"{must} have values from {least:g} to {most:g}, got {low:.3g} to {high:.3g}; {remedy}")
    return values


# The lowest and highest value, how many dimensions, and what to pass.
_NEEDS: dict[Reading, tuple[float, float, int, str]] = {
    "heatmap": (0.0, 1.0, 2, "pass attribution.heatmap[0], (H, W) in [0, 1]"),
    "signed": (-1.0, 1.0, 2, "pass attribution.signed[0], (H, W) in [-1, 1]"),
    "values": (-LARGEST, LARGEST, 3, "pass attribution.values[0], (C, H, W)"),
}
