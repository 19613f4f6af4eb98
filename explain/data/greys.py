"""Values of pixels other than 0-255: which of them are shown black and white."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from explain._utils.errors import ImageError, option_name, python_or_command, shown, warn

Array: TypeAlias = np.ndarray[Any, Any]
Window: TypeAlias = tuple[float, float]
"""A level and a width: black is half the width below the level, and white half above it."""

DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of greys with more than 8 bits."""
DEPTHS = (8, 10, 12, 14, 16)  # bits that cameras and scanners give


def check_window(window: Any) -> Window | None:
    """Check a caller's ``window``, the level and the width of the values shown from black to white,
    and return it as floats, or None.
    """
    if window is None:
        return None
    numbers = window if isinstance(window, Sequence) else ()
    are_numbers = [isinstance(value, (int, float)) and math.isfinite(value) for value in numbers]
    if len(numbers) != 2 or not all(are_numbers) or numbers[1] <= 0:
        remedy = python_or_command("pass window=(40, 400)", "give --window 40,400")
        raise ImageError(
            f"{option_name('window')} must be a level and a width above 0, got {shown(window)}; "
            f"{remedy}"
        )
    return float(numbers[0]), float(numbers[1])


def stored_bits(image: Image.Image) -> int | None:
    """Return how many bits a TIFF file's greys have, between 9 and 15; None for whole bytes and
    other files."""
    with suppress(Exception):  # a damaged file
        (bits,) = image.tag_v2[258]  # type: ignore[attr-defined]
        return int(bits) if 8 < bits < 16 else None
    return None


def to_8_bits(
    pixels: Array,
    *,
    window: Window | None = None,
    bits: int | None = None,
    volume: Array | None = None,
    name: str = "",
) -> Array:
    """Pixels of any depth as 0-255: bytes as they are, others by ``window`` (level, width), else by
    `_range_of`, that of the ``volume`` where there is one. What is not finite is black."""
    if pixels.dtype == np.bool_:
        pixels = pixels * np.uint8(255)
    if pixels.dtype == np.uint8 and window is None:
        return pixels
    values, ends = _levels(pixels, white=255, window=window, bits=bits, volume=volume, name=name)
    shown_values: Array = values.clip(0, 255, out=values).round(out=values).astype(np.uint8)
    is_flat = shown_values.min() == shown_values.max()
    # the range that was chosen shows nothing; one slice of a volume may well be flat, and floats
    # from 0 to 1 are shown as they are
    if is_flat and volume is None and ends != (0.0, 1.0):
        warn(NO_CONTRAST)
    return shown_values


BYTES = (127.5, 255.0)
"""The window of bytes."""


def to_levels(pixels: Array, *, window: Window | None = None, name: str = "") -> Array:
    """Pixels of any depth as floats, 0 for black and 1 for white, as `to_8_bits` reads them; what
    the window leaves out lies beyond."""
    if pixels.dtype == np.uint8:
        window = window or BYTES
    levels, _ = _levels(pixels, white=1, window=window, name=name)
    return levels


def _levels(
    pixels: Array,
    *,
    white: int,
    window: Window | None,
    bits: int | None = None,
    volume: Array | None = None,
    name: str,
) -> tuple[Array, tuple[float, float]]:
    """Pixels as floats, of which 0 is black and ``white`` is white, and the pixels that are these;
    arguments as of `to_8_bits`."""
    if pixels.dtype.kind not in "biuf":
        raise ImageError(
            f"image must hold numbers, got an array of {pixels.dtype}; convert it to floats"
        )
    # float32 would round what has 64 bits
    precision = np.float64 if pixels.dtype.itemsize > 4 else np.float32
    values: np.ndarray[Any, np.dtype[np.floating[Any]]] = pixels.astype(precision)
    finite = np.isfinite(values)
    missing = values.size - int(np.count_nonzero(finite))
    if missing == values.size:
        raise ImageError("image must have values that are finite, got none; mend it")
    if missing:
        warn(f"{missing} of the photo's {values.size} values are not finite; they are shown black")
        values[~finite] = np.nan
    if window is not None:
        level, width = window
        low = level - width / 2
        high = level + width / 2
    else:
        least, peak = _extremes(values if volume is None else volume)
        low, high, how = _range_of(least, peak, pixels.dtype, bits)
        if how:
            remedy = python_or_command("pass window=(level, width)", "give --window LEVEL,WIDTH")
            warn(
                f"the values of {name or 'the photo'}, {least:g} to {peak:g}, are read {how}; "
                f"{remedy} for another range"
            )
    values -= low
    values *= white / (high - low)
    if missing:
        values[~finite] = 0
    return values, (low, high)


def _extremes(values: Array) -> tuple[float, float]:
    """The smallest and the largest finite value of an array, which must have one."""
    finite = values[np.isfinite(values)]
    return float(finite.min()), float(finite.max())


def _range_of(
    least: float, peak: float, dtype: np.dtype[Any], bits: int | None
) -> tuple[float, float, str]:
    """The values shown black and white for pixels from ``least`` to ``peak``, by the file's
    ``bits``; and how a warning describes that range, "" where it needs none.
    """
    if least < -0.01 * abs(peak):  # a little below zero may be due to resampling
        high = peak if peak > least else least + 1
        return least, high, "from the darkest to the brightest"
    is_float = dtype.kind == "f"
    if is_float and peak <= 1:
        return 0.0, 1.0, ""
    depth = bits or next((depth for depth in DEPTHS if peak < 2**depth), None)
    # resampling goes a little beyond the range from 0 to 1
    if depth is None or (is_float and peak < 2):
        return 0.0, peak, "from 0 to the brightest"
    most = 2.0**depth - 1
    # what the file says, all of 16 bits, nothing but black, or bytes that were made 32 bits or more
    is_usual = depth in (bits, 16) or peak == 0 or (depth == 8 and dtype.itemsize > 2)
    if is_usual and not is_float:
        return 0.0, most, ""
    return 0.0, most, f"as {depth} bits, 0 to {most:g}, the fewest that hold the brightest"


MIN_CONTRAST = 8
"""Of 255: how far the brightest and the darkest value of a channel are apart in photos that show
something."""

NO_CONTRAST = "the photo shows nothing: all of its pixels have nearly the same value"


def has_contrast(photo: Image.Image) -> bool:
    """Whether the darkest and the brightest value of any channel of a photo differ by at least
    `MIN_CONTRAST`."""
    extrema: Any = photo.convert("RGB").getextrema()
    return any(high - low >= MIN_CONTRAST for low, high in extrema)
