"""Scans: files of NumPy (.npy), DICOM (.dcm) and NIfTI (.nii), with one slice or several, each of
which is a photo."""

import importlib
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from explain._utils.errors import ImageError, optional, quiet, reason_of
from explain.data.greys import Array, Window, to_8_bits
from explain.data.limits import MAX_SLICES, Limit
from explain.data.nifti import is_nifti, slice_count, slices_in
from explain.data.opening import SCANS, ending_of

Corners: TypeAlias = tuple[int, int, int, int]
"""Left, top, right and bottom of a slice in a picture of several."""
MAX_STACKED = 64_000_000  # pixels of such a picture
_NPY = b"\x93NUMPY"
_DICOM = b"DICM"  # after 128 bytes
_SLICE = re.compile(r"(.+) slices? ([\d:]+)", re.DOTALL)
_RANGE = re.compile(r"(\d*):(\d*)(?::([1-9]\d*))?")
PAGED = frozenset(["AVIF", "GIF", "PNG", "TIFF", "WEBP"])
Chosen: TypeAlias = int | slice | None
"""The place of a slice, a range of places, from 0 as in Python, or None for all slices."""


@dataclass(frozen=True, eq=False)
class Scan:
    """The slices of a file ``(D, H, W)``, or in colour ``(D, H, W, C)``, and what it says of their
    display."""

    name: str
    slices: Array = field(repr=False)
    window: Window | None = None
    is_inverted: bool = False

    def picture(self, number: int, window: Window | None) -> Image.Image:
        """Return slice ``number`` as an 8-bit picture. All slices of a file are read in one range,
        so that their greys can be compared; inverted files are turned to black for low values."""
        volume = self.slices if len(self.slices) > 1 else None
        pixels = to_8_bits(
            self.slices[number], window=window or self.window, volume=volume, name=self.name
        )
        return Image.fromarray(255 - pixels if self.is_inverted else np.ascontiguousarray(pixels))

    def stack(
        self, numbers: Sequence[int], window: Window | None
    ) -> tuple[Image.Image, tuple[Corners, ...]]:
        """The slices side by side in one picture, and where each lies (left, top, right, bottom),
        in a square of its own, so that padding does not reach into another one.
        """
        height, width = self.slices.shape[1:3]
        # from one slice to the next, with a gap between the squares
        pitch = max(height, width) + max(2, max(height, width) // 50)
        columns = math.ceil(math.sqrt(len(numbers)))
        rows = math.ceil(len(numbers) / columns)
        if columns * rows * pitch**2 > MAX_STACKED:
            raise ImageError(
                f"image {self.name} must have at most {MAX_STACKED // 10**6} megapixels in all "
                f"slices, got {len(numbers)} of {width} x {height}; take fewer of them"
            )
        mode = "L" if self.slices.ndim == 3 else "RGB"
        picture = Image.new(mode, (columns * pitch, rows * pitch))
        cells = []
        for place, number in enumerate(numbers):
            left = place % columns * pitch + (pitch - width) // 2
            top = place // columns * pitch + (pitch - height) // 2
            picture.paste(self.picture(number, window), (left, top))
            cells.append((left, top, left + width, top + height))
        return picture, tuple(cells)


def slice_name(path: str, place: int) -> str:
    """Return the name by which a slice is read, as "scan.dcm slice 1" for ``place`` 0: people count
    slices from 1."""
    return f"{path} {slice_label(place)}"


def slice_label(place: int) -> str:
    """The name of a slice without its file, such as "slice 1" for ``place`` 0."""
    return f"slice {place + 1}"


def split_slice(name: str) -> tuple[str, Chosen]:
    """Split a name such as ``scan.dcm slices 3:9`` into the file and the chosen slices; a name
    without slices, or of a file that exists, is returned whole with None."""
    match = _SLICE.fullmatch(name)
    chosen = None if match is None else read_range(match[2])
    if match is None or chosen is None or os.path.lexists(name):
        return name, None
    return match[1], chosen


def read_range(text: str) -> Chosen:
    """The slices that a text means: ``12``, ``10:20`` (the 10th to the 20th) or ``::5`` (every
    fifth, from the first on). None for any other text."""
    if text.isdecimal():
        return int(text) - 1 if int(text) else slice(0, 0)  # there is no slice 0
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    first, last, step = (int(part) if part else None for part in match.groups())
    if first == 0:
        return slice(0, 0)
    return slice(None if first is None else first - 1, last, step)


def chosen_numbers(chosen: Chosen, count: int) -> range:
    """Return the indices of the chosen slices of a file with ``count`` slices; all for None, none
    where there is no such slice."""
    if isinstance(chosen, int):
        chosen = slice(chosen, chosen + 1)
    return range(count)[chosen or slice(None)]


def stem_of(name: str | os.PathLike[str]) -> str:
    """Return the name of a photo without its folder and ending, as names of written files begin;
    chosen slices stay in it: "scan slice 12" of "a/scan.dcm slice 12"."""
    name = os.fspath(name)
    path, _ = split_slice(name)
    file_name = os.path.basename(path)
    return file_name[: len(file_name) - len(ending_of(file_name))] + name[len(path) :]


def slice_names(path: str, *, pages: bool = False) -> list[str]:
    """The names of the photos in a file, read from headers: one for each slice of a scan (of any
    file's pages with ``pages``, as in an animation), else the path itself.
    """
    if not pages and ending_of(path) not in SCANS:
        return [path]
    count = 1
    with suppress(Exception), open(path, "rb") as file:  # reading it says what is wrong
        count = _count(file, path)
    if not 1 < count <= MAX_SLICES:
        return [path]
    return [slice_name(path, place) for place in range(count)]


def _count(file: Any, name: str) -> int:
    """The number of slices in an open file of NumPy, DICOM or NIfTI, by its header alone, or of
    pages in any other."""
    if is_npy(file):
        shape, _ = npy_header(file)
        # an array of this shape that takes no memory
        return int(as_slices(np.broadcast_to(np.uint8(0), shape)).shape[0])
    if is_nifti(file):
        return slice_count(file, name)
    if not is_dicom(file):
        with quiet(), Image.open(file) as image:
            return page_count(image)
    import pydicom

    _check_deflated(file, name, Limit())
    return int(pydicom.dcmread(file, stop_before_pixels=True).get("NumberOfFrames") or 1)


def page_count(image: Image.Image) -> int:
    """Return the number of pages of an opened image, such as the frames of an animation; 1 where
    the others are no pictures of their own, such as layers, or the previews that cameras add."""
    return getattr(image, "n_frames", 1) if image.format in PAGED else 1


def is_npy(file: Any) -> bool:
    """Whether an open file is one of NumPy, by its first bytes; moves its position."""
    file.seek(0)
    return bool(file.read(len(_NPY)) == _NPY)


def is_dicom(file: Any) -> bool:
    """Whether an open file is one of DICOM, by the mark after 128 bytes; moves its position."""
    file.seek(0)
    return bool(file.read(132)[128:] == _DICOM)


def read_scan(file: Any, name: str, size: int, limit: Limit) -> Scan | None:
    """Read an open file of ``size`` bytes as a scan if it is one of NumPy, DICOM or NIfTI; None
    where it is none of them. ``name`` is what errors call it.
    """
    if is_npy(file):
        return _from_npy(file, name, size, limit)
    if is_nifti(file):
        return Scan(name, slices_in(file, name, limit))
    return _from_dicom(file, name, limit) if is_dicom(file) else None


@lru_cache(maxsize=1)
def cached_scan(path: str, name: str, stamp: tuple[int, int], limit: Limit) -> Scan | None:
    """Read a scan of several slices, which are asked for one after the other."""
    with open(path, "rb") as file:
        return read_scan(file, name, stamp[0], limit)


def as_slices(array: Array) -> Array:
    """An array as slices ``(D, H, W)`` or ``(D, H, W, C)``, without copies or outer axes of 1:
    ``(H, W)``, ``(H, W, 3 or 4)`` and ``(3, H, W)`` are one slice, one axis more is several."""
    shape = array.shape
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    while array.ndim > 2 and array.shape[-1] == 1:
        array = array[..., 0]
    is_color = array.ndim > 2 and array.shape[-1] in (3, 4)
    if array.ndim > 2 and array.shape[-3] == 3 and not is_color:  # channels first
        is_color = True
        array = np.moveaxis(array, -3, -1)
    axes = 4 if is_color else 3  # of several slices
    slices = array if array.ndim == axes else array[None]  # one slice lacks the first axis
    if 0 in shape or slices.ndim != axes:
        raise ImageError(
            "image must be an array (H, W), (H, W, 3), (H, W, 4) or (3, H, W), or slices of these, "
            f"got shape {shape}; name the axes in this order"
        )
    return slices


def npy_header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the type of the array in an open file of NumPy; its values are not read."""
    file.seek(0)
    npy = np.lib.format
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def check_numbers(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse the values of an image that are no numbers."""
    if dtype.hasobject or dtype.kind not in "biuf":
        raise ImageError(f"image {name} must hold numbers, got {dtype}; save it as floats")


def checked_header(file: Any, name: str, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the type of the array in an open file of NumPy, which goes back to its
    beginning; objects and truncated files are refused."""
    shape, dtype = npy_header(file)
    check_numbers(name, dtype)
    if int(np.prod(shape, dtype=object)) * dtype.itemsize > size:
        raise ImageError(f"image {name} is damaged or truncated (too short); get the file again")
    file.seek(0)
    return shape, dtype


def _from_npy(file: Any, name: str, size: int, limit: Limit) -> Scan:
    """Read a file of NumPy as a scan; those beyond the ``limit`` are refused by the header, before
    anything is loaded."""
    shape, _ = checked_header(file, name, size)
    # of an array of this shape that takes no memory
    count, height, width = as_slices(np.broadcast_to(np.uint8(0), shape)).shape[:3]
    limit.check(name, width, height)
    limit.check_slices(name, count)
    return Scan(name, as_slices(np.load(file, allow_pickle=False)))


def _check_deflated(file: Any, name: str, limit: Limit) -> None:
    """Refuse an open DICOM file whose deflated data would inflate to more than the ``limit``; goes
    back to its beginning."""
    from pydicom.filereader import read_dataset
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    file.seek(132)  # behind the mark
    # only the first group, 2, which is never deflated and says whether the others are
    header = read_dataset(
        file,
        is_implicit_VR=False,
        is_little_endian=True,
        stop_when=lambda tag, *_: tag >> 16 != 2,
    )
    if header.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        limit.check_deflated(name, file.read())
    file.seek(0)


def _from_dicom(file: Any, name: str, limit: Limit) -> Scan:
    """Read a DICOM file as a scan, in colour or in grey with the window that it names; sizes are
    checked before anything is unpacked."""
    why = f"for the DICOM file {name}"
    pydicom = optional("pydicom", why, "dicom", ImageError)
    decoding = optional("pydicom.pixels", why, "dicom", ImageError)
    _check_deflated(file, name, limit)
    data = pydicom.dcmread(file)
    if not any(tag in data for tag in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        raise ImageError(f"image {name} must have pixels, got a DICOM file without; name another")
    frames = int(data.get("NumberOfFrames") or 1)
    interpretation = data.PhotometricInterpretation
    is_palette = interpretation == "PALETTE COLOR"
    # the colours of a palette become red, green and blue
    samples = 3 if is_palette else data.get("SamplesPerPixel", 1)
    size_of_value = data.get("BitsAllocated", 16) / 8
    values = frames * data.Rows * data.Columns * samples
    limit.check_slices(name, frames)
    limit.check(name, data.Columns, data.Rows, values * size_of_value)
    try:
        pixels = decoding.pixel_array(data)
    except (RuntimeError, NotImplementedError, ImportError) as error:
        raise ImageError(
            f"image {name} is compressed in a way that needs another package of pydicom's "
            f"({reason_of(error)}); install it, or convert the file"
        ) from None
    if is_palette:
        pixels = decoding.apply_color_lut(pixels, data)
        if pixels.dtype == np.uint16:  # whose upper 8 bits are the colour
            pixels = (pixels >> 8).astype(np.uint8)
    slices = pixels if frames > 1 else pixels[None]
    if slices.ndim == 4:  # in colour, for which there is no window
        return Scan(name, slices)
    is_inverted = interpretation == "MONOCHROME1"  # low values are white
    return Scan(name, _rescaled(slices, data), window=_window_of(data), is_inverted=is_inverted)


def _rescaled(slices: Array, data: Any) -> Array:
    """Turn the stored values of a DICOM file's ``slices`` ``(D, H, W)`` into those that they stand
    for, such as Hounsfield units, by its lookup table or by slope and intercept of each slice."""
    if "ModalityLUTSequence" in data:
        units: Array = importlib.import_module("pydicom.pixels").apply_modality_lut(slices, data)
        return units
    lines = []
    for number in range(len(slices)):
        part = _part(data, "PixelValueTransformationSequence", number)
        lines.append([part.get("RescaleSlope", 1), part.get("RescaleIntercept", 0)])
    # one of each for a slice, (D, 1, 1)
    slopes, intercepts = np.array(lines, np.float32).T[..., None, None]
    if (slopes == 1).all() and (intercepts == 0).all():
        return slices
    values: Array = slices * slopes + intercepts
    return values


def _window_of(data: Any) -> Window | None:
    """The first window (level, width) that a DICOM file names for its display; None without one."""
    part = _part(data, "FrameVOILUTSequence", 0)
    numbers = []
    for name in ("WindowCenter", "WindowWidth"):
        value = part.get(name)
        values = [value] if isinstance(value, (int, float)) else list(value or ())
        numbers += values[:1]  # there may be several windows
    if len(numbers) < 2:
        return None
    level, width = map(float, numbers)
    return (level, width) if width > 0 else None


def _part(data: Any, sequence: str, number: int) -> Any:
    """The part of a DICOM file ``data`` that holds the values of a ``sequence`` for frame
    ``number``: the group of that frame, the group of all frames, or else the whole file."""
    frame_groups = data.get("PerFrameFunctionalGroupsSequence") or ()
    shared_groups = data.get("SharedFunctionalGroupsSequence") or ()
    for group in (*frame_groups[number : number + 1], *shared_groups[:1]):
        if group.get(sequence):
            return group.get(sequence)[0]
    return data
