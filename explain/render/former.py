"""Names of version 0.1.0 that still work: `overlay` replaces them."""

from __future__ import annotations

from PIL import Image

from explain._utils.errors import deprecated
from explain.data.images import Box
from explain.render.colors import SIGNED
from explain.render.overlay import overlay
from explain.render.placement import Array, Region


def _box(region: Region) -> Box:
    return Box(region.left, region.top, region.right, region.bottom)


@deprecated("overlay(photo, values, box=region)", since="0.2.0", until="0.3.0")
def heat(
    photo: Image.Image, values: Array, region: Region, *, colormap: str | None = None, alpha: float | None = None
) -> Image.Image:
    """Draw a heatmap ``(H, W)`` in [0, 1] on the part of a photo that the model saw."""
    return overlay(photo, values, "heat", box=_box(region), colormap=colormap, alpha=alpha)


@deprecated("overlay(photo, values, 'intensity', box=region)", since="0.2.0", until="0.3.0")
def intensity(photo: Image.Image, values: Array, region: Region, *, colormap: str | None = None) -> Image.Image:
    """Draw magnitudes ``(H, W)`` in [0, 1] as brightness."""
    return overlay(photo, values, "intensity", box=_box(region), colormap=colormap)


@deprecated("overlay(photo, values, 'signed', box=region)", since="0.2.0", until="0.3.0")
def signed(photo: Image.Image, values: Array, region: Region, *, colormap: str = SIGNED) -> Image.Image:
    """Draw values ``(H, W)`` in [-1, 1] over the photo in grey."""
    return overlay(photo, values, "signed", box=_box(region), colormap=colormap)


@deprecated("overlay(photo, values, 'color', box=region)", since="0.2.0", until="0.3.0")
def color(photo: Image.Image, values: Array, region: Region) -> Image.Image:
    """Draw values ``(C, H, W)`` as a colour picture in which grey is zero."""
    return overlay(photo, values, "color", box=_box(region))
