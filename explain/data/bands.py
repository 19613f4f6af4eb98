"""Images of several bands, such as those of satellites: all are for the model, some make the
picture."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from explain._utils.errors import (
    ImageError,
    option_name,
    optional,
    python_or_command,
    reason_of,
    shown,
)
from explain.data.greys import Array, Window, to_levels
from explain.data.limits import Limit
from explain.data.scans import check_numbers, checked_header, is_npy

TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
STRETCHED = (2, 98)
"""Percentiles of the shown bands that are black and white in the picture."""


@dataclass(frozen=True)
class Bands:
    """How images of several bands are read. `ImageError` where there is no such band."""

    count: int
    """How many bands a file or array must have."""
    shown: tuple[int, ...] = ()
    """Which bands are red, green and blue in the picture, or its grey, counted from 1; by default
    the first three."""
    window: Window | None = None
    """The level and the width of the values that are 0 to 1 for the model; by default as for
    photos: the range of bytes, floats from 0 to 1 as they are, or the fewest bits that hold the
    brightest."""

    def __post_init__(self) -> None:
        """Refuse bands that are not there."""
        first = (1, 2, 3) if self.count > 2 else (1,)
        numbers = tuple(self.shown) or first
        are_numbers = [isinstance(one, int) and 1 <= one <= self.count for one in numbers]
        if len(numbers) not in (1, 3) or not all(are_numbers):
            remedy = python_or_command("pass bands=(3, 2, 1)", "give --bands 3,2,1")
            raise ImageError(
                f"{option_name('bands')} must be one or three numbers from 1 to {self.count}, got "
                f"{shown(self.shown)}; {remedy}"
            )
        object.__setattr__(self, "shown", numbers)  # the class is frozen

    def picture(self, values: Array, name: str) -> Image.Image:
        """The picture of values ``(C, H, W)`` or ``(H, W, C)``, in RGB and upright; its ``bands``
        are what a preprocessing takes: floats ``(C, H, W)``, 0 to 1 for the usual range."""
        while values.ndim > 3 and 1 in values.shape:  # as of pages; a side may have one pixel, too
            values = values.squeeze(values.shape.index(1))
        # where the bands may be: first or last
        axes = [axis for axis in (0, 2) if values.ndim == 3 and values.shape[axis] == self.count]
        if not axes:
            raise ImageError(
                f"image {name} must have {self.count} bands for this model, got shape "
                f"{values.shape}; give a TIFF or NumPy file (C, H, W) or (H, W, C) with all of them"
            )
        bands = to_levels(np.moveaxis(values, axes[0], 0), window=self.window, name=name)
        chosen = bands[[number - 1 for number in self.shown]]
        low, high = np.percentile(chosen, STRETCHED)
        grey = (chosen - low) / ((high - low) or 1.0)  # nothing but black where all are alike
        pixels = (255 * grey.clip(0, 1)).round().astype(np.uint8)
        rgb = np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)
        picture = Image.fromarray(np.ascontiguousarray(rgb))
        # preprocessings read the bands, and `load_image` returns what has the mark as it is
        picture.bands = np.ascontiguousarray(bands, np.float32)  # type: ignore[attr-defined]
        picture.is_upright = True  # type: ignore[attr-defined]
        return picture


def as_read(
    window: Window | None, channels: int | None, bands: Sequence[int] = ()
) -> Window | Bands | None:
    """How images are read for a model of so many channels: in a ``window``, or all of several
    bands; ``bands`` are those that are shown."""
    if channels not in (None, 0, 1, 3):
        return Bands(channels, tuple(bands), window)
    if bands:
        raise ImageError(
            f"{option_name('bands')} would have no effect on a model of photos; leave them out"
        )
    return window


def read_values(file: Any, name: str, size: int, limit: Limit) -> Array:
    """The values of an open file of ``size`` bytes: of NumPy, of TIFF with any number of bands, or
    of another image as Pillow stores it. Sizes are checked before anything is decoded."""
    if is_npy(file):
        shape, dtype = checked_header(file, name, size)
        _check(name, shape, dtype, limit)
        values: Array = np.load(file, allow_pickle=False)
        return values
    file.seek(0)
    if file.read(4) in TIFF:
        return _from_tiff(file, name, limit)
    file.seek(0)
    image = Image.open(file)
    limit.check(name, *image.size)
    return np.asarray(image)


def _from_tiff(file: Any, name: str, limit: Limit) -> Array:
    """All bands of the first image of a TIFF file, pixel by pixel, plane by plane, or page by
    page."""
    tifffile = optional("tifffile", f"for the bands of the TIFF file {name}", "bands", ImageError)
    file.seek(0)
    with tifffile.TiffFile(io.BytesIO(file.read())) as tiff:
        image = tiff.series[0]
        _check(name, image.shape, image.dtype, limit)
        try:
            values: Array = image.asarray()
        except ValueError as error:  # of a compression that needs another package
            raise ImageError(
                f"image {name} cannot be unpacked ({reason_of(error)}); run pip install imagecodecs"
            ) from None
    return values


def _check(name: str, shape: tuple[int, ...], dtype: Any, limit: Limit) -> None:
    """Refuse values that are no numbers, and images that are too large once unpacked."""
    check_numbers(name, dtype)
    pixels = int(np.prod(shape, dtype=object))
    limit.check_bytes(name, pixels * max(4, dtype.itemsize))


def bytes_of(photo: Image.Image) -> bytes:
    """The pixels of a photo as bytes, with all of its bands."""
    bands = getattr(photo, "bands", None)
    return photo.tobytes() + (b"" if bands is None else bands.tobytes())
