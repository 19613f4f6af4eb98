"""NIfTI files: volumes in slices from the feet up, as radiologists see them, and maps written for
them."""

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np

from explain._utils.errors import ImageError, optional, reason_of
from explain.data.files import write_file
from explain.data.greys import Array
from explain.data.limits import Limit
from explain.data.opening import ending_of

ENDINGS = (".nii", ".nii.gz")
_HEADER = 348  # bytes
_GZIP = b"\x1f\x8b"


def is_nifti(file: Any) -> bool:
    """Whether an open file is one of NIfTI, packed or not, by its first bytes; moves its
    position."""
    return _kind(file) is not None


def _kind(file: Any) -> str | None:
    """The class of nibabel for an open file, by the mark in its header; None for other files."""
    header = without_gzip(file).read(_HEADER)
    if header[344:348] == b"n+1\0":
        return "Nifti1Image"
    return "Nifti2Image" if header[4:8] == b"n+2\0" else None


def without_gzip(file: Any) -> Any:
    """An open file from its beginning on, without gzip around it."""
    file.seek(0)
    is_packed = file.read(2) == _GZIP
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if is_packed else file


def slice_count(file: Any, name: str) -> int:
    """The number of slices in an open NIfTI file, by its header alone."""
    return _upright(_opened(file, name), name)[2]


def slices_in(file: Any, name: str, limit: Limit) -> Array:
    """The slices ``(D, H, W)`` of an open NIfTI file, oriented as `read_nifti` says. Sizes are
    checked by the header, before values are read."""
    image = _opened(file, name)
    width, height, depth = _upright(image, name)
    limit.check_slices(name, depth)
    limit.check(name, width, height, width * height * depth * 8.0)  # as floats of 64 bits
    upright = _nibabel(name).as_closest_canonical(image)
    values = np.asanyarray(upright.dataobj).reshape(width, height, depth)
    # nibabel counts from left to right and from back to front, a picture the other way round
    return np.ascontiguousarray(values[::-1, ::-1].T)


def read_nifti(path: str | os.PathLike[str]) -> Array:
    """Read a NIfTI file as slices ``(D, H, W)``, in the order in which photos of it are named.

    From the feet up; in each the front is above and the patient's right on the left, as
    radiologists see them, whatever the order in the file. `write_nifti` writes maps of these
    slices.

    Raises:
        ImageError: it is missing, damaged, or no volume.
    """
    name = repr(os.fspath(path))
    try:
        with open(path, "rb") as file:
            if not is_nifti(file):
                raise ImageError(f"image {name} must be a NIfTI file; read others with load_image")
            return slices_in(file, name, Limit())
    except ImageError:
        raise
    except Exception as error:  # headers, too, may hold anything
        raise ImageError(
            f"image {name} cannot be read as NIfTI ({reason_of(error)}); check it"
        ) from None


def write_nifti(
    path: str | os.PathLike[str],
    maps: Any,
    like: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> Path:
    """Write a map of each slice ``(D, H, W)`` as a NIfTI file in the place, orientation and spacing
    of another, ``like``, whose slices `read_nifti` gives.

    Raises:
        ImageError: the maps have another size than the slices.
        OutputError: the file exists already, unless ``overwrite``.
    """
    path = os.fspath(path)
    nibabel = _nibabel(repr(path))
    like = os.fspath(like)
    values = np.asarray(maps.detach().cpu() if hasattr(maps, "detach") else maps, np.float32)
    ending = ending_of(path)
    if ending not in ENDINGS:
        raise ImageError(f"path must end with .nii or .nii.gz, got {path!r}")
    with open(like, "rb") as file:
        source = _opened(file, repr(like))
        upright = nibabel.as_closest_canonical(source)
        size = _upright(source, repr(like))[::-1]  # (D, H, W)
    if values.shape != size:
        raise ImageError(
            f"maps must have a value for each voxel of {like!r}, {size}, got {values.shape}; "
            "enlarge them first"
        )
    orientations = nibabel.orientations
    # the reverse of `slices_in`: first into the axes of nibabel, then into those of the other file
    turned = nibabel.Nifti1Image(values.T[::-1, ::-1].copy(), upright.affine)
    turned.header.set_xyzt_units(*source.header.get_xyzt_units())
    back = orientations.ornt_transform(
        orientations.axcodes2ornt("RAS"), orientations.io_orientation(source.affine)
    )
    content = turned.as_reoriented(back).to_bytes()
    if ending == ".nii.gz":
        content = gzip.compress(content, mtime=0)  # the same bytes whenever it is written
    return write_file(path, content, overwrite=overwrite)


def _opened(file: Any, name: str) -> Any:
    """An open NIfTI file as an image of nibabel, whose values are not read yet."""
    nibabel = _nibabel(name)
    return getattr(nibabel, _kind(file) or "Nifti1Image").from_stream(without_gzip(file))


def _shape(image: Any, name: str) -> tuple[int, int, int]:
    """The three lengths of an image of nibabel; refused of a series in time or of colours."""
    shape = tuple(map(int, image.shape))
    lengths = (*shape, 1, 1, 1)  # of two axes, it is a volume of one slice
    if any(length != 1 for length in lengths[3:]) or not len(shape) > 1:
        raise ImageError(
            f"image {name} must be one volume, got shape {shape}; save the one that is meant"
        )
    return lengths[0], lengths[1], lengths[2]


def _upright(image: Any, name: str) -> tuple[int, int, int]:
    """The lengths of an image of nibabel from left to right, from back to front and from the feet
    up."""
    axes = _nibabel(name).orientations.io_orientation(image.affine)[:, 0]
    lengths = [0, 0, 0]
    for length, axis in zip(_shape(image, name), axes, strict=True):
        lengths[int(axis)] = length
    return lengths[0], lengths[1], lengths[2]


def _nibabel(name: str) -> Any:
    """The package nibabel; refused of a file of this ``name`` where it is missing."""
    return optional("nibabel", f"for the NIfTI file {name}", "nifti", ImageError)
