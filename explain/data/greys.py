"""Greys deeper than 8 bits: what is shown black and white."""

from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from explain._utils.errors import warn

Array: TypeAlias = np.ndarray[Any, Any]

DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of greys with more than 8 bits."""
DEPTHS = (8, 10, 12, 14, 16)  # bits that cameras and scanners give


def stored_bits(image: Image.Image) -> int | None:
    """How many bits a TIFF file says its greys have, where these are no whole bytes."""
    with suppress(Exception):  # a damaged file
        (bits,) = image.tag_v2[258]  # type: ignore[attr-defined]
        return int(bits) if 8 < bits < 16 else None
    return None


def to_8_bits(greys: Array, bits: int | None = None) -> Array:
    """Bring greys deeper than 8 bits to 0-255; say what range they are read in, where their type
    does not say it."""
    values = np.nan_to_num(greys.astype(np.float32), posinf=0.0, neginf=0.0)
    low, high, doubt = _range_of(values, greys.dtype, bits)
    if doubt:
        warn(
            f"the photo's greys are read {doubt}; convert it to 8 bits, or to floats from 0 to 1, "
            "for another range"
        )
    values -= low
    values *= 255 / (high - low)
    return values.clip(0, 255, out=values).round(out=values).astype(np.uint8)


def _range_of(values: Array, dtype: np.dtype[Any], bits: int | None) -> tuple[float, float, str]:
    """The greys that are shown black and white, and what is to be said of that."""
    peak = float(values.max(initial=0.0))
    least = float(values.min(initial=0.0))
    if least < -0.01 * peak:
        return least, peak, f"from the darkest to the brightest, {least:g} to {peak:g}"
    if np.issubdtype(dtype, np.floating):
        if 1 < peak < 2:  # resampling goes a little beyond the range from 0 to 1
            return 0.0, peak, f"from 0 to the brightest, {peak:g}"
        return 0.0, 1.0 if peak <= 1 else max(255.0, peak), ""
    depth = bits or next((depth for depth in DEPTHS if peak < 2**depth), None)
    if depth is None:
        return 0.0, peak, ""
    most = 2.0**depth - 1
    if depth in (bits, 16) or peak == 0 or (depth == 8 and dtype.itemsize > 2):
        return 0.0, most, ""
    return 0.0, most, f"as {depth} bits, 0 to {most:g}, the fewest that hold the brightest"
