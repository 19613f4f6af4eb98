"""Images: files, arrays and pictures of any kind as upright RGB pictures."""

import io
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from explain._utils.errors import (
    ExplainError,
    ExplainWarning,
    ImageError,
    collect_warnings,
    quiet,
    warn,
)
from explain.data.greys import DEEP, stored_bits, to_8_bits
from explain.data.opening import NoFileError, open_for_reading

Array: TypeAlias = np.ndarray[Any, Any]
ImageLike: TypeAlias = (
    str | os.PathLike[str] | bytes | io.IOBase | Image.Image | np.ndarray[Any, Any]
)

MAX_PIXELS = 178_956_970  # where Pillow itself calls a file a decompression bomb
# pixels; captions stand below photos and are at least 260 wide, which costs most on thin ones
MAX_SIDE = 500_000
MAX_BYTES = 2**30  # of what is not a regular file; a device may never end

# Formats that Pillow recognises, but does not read, or (EPS) reads by starting another program on
# an untrusted file.
NO_PHOTOS = frozenset(["BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"])

# A pipe that this process was started with, as in ``explain <(command)``.
_OURS = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")


def load_image(image: ImageLike) -> Image.Image:
    """Return an image as an upright RGB picture.

    Takes a path, the bytes of a file or an open file, a PIL image, or an array ``(H, W)``, ``(H, W,
    3)`` or ``(H, W, 4)`` of uint8 or of floats in [0, 1]. The EXIF orientation is applied; of an
    animation the first frame is taken; transparency is laid on white. Deep greys are scaled to 8,
    10, 12, 14 or 16 bits, the fewest that hold the brightest, with a warning if these are not those
    of their type; signed ones from the darkest to the brightest. A picture that this function has
    returned is returned as it is.

    Raises:
        ImageError: missing, unreadable, truncated or too large; the message says which.

    >>> load_image(np.zeros((4, 6), np.uint8)).size
    (6, 4)
    """
    if isinstance(image, Image.Image):
        return image if hasattr(image, "is_upright") else _decode(image, "image")
    if isinstance(image, np.ndarray):
        return _decode(_from_array(image), "image")
    if isinstance(image, (str, os.PathLike)):
        return _from_path(Path(image), os.fsdecode(image))
    if isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, (bytes, bytearray, memoryview)):
        return _open(io.BytesIO(image), f"of {len(image)} bytes", len(image))
    kind = type(image).__name__
    remedy = (
        "use explain.attribute(model, x)"
        if isinstance(image, torch.Tensor)
        else "name the photo's file"
    )
    raise ImageError(
        f"image must be a path, bytes, a PIL image or an array (H, W, 3), got {kind}; {remedy}"
    )


def image_path(image: ImageLike) -> str | None:
    """Return the path of the file that an image comes from, where that is known.

    >>> image_path("cat.jpg"), image_path(b"...")
    ('cat.jpg', None)
    """
    return (
        str(image)
        if isinstance(image, (str, os.PathLike))
        else str(getattr(image, "filename", "")) or None
    )


def _from_path(path: Path, name: str) -> Image.Image:
    if re.match(r"\w+://", name):
        raise ImageError(f"image {name!r} must be a file, got an address; download it first")
    if os.path.isdir(path):  # unlike Path.is_dir, this accepts any name
        raise ImageError(f"image {name!r} must be a file, got a folder; name the images in it")
    try:
        with open_for_reading(
            path, pipes=_OURS.fullmatch(os.path.abspath(path)) is not None
        ) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                return _open(file, repr(name), status.st_size)
            # our own pipe: it has no size, perhaps no end, and is not read twice
            content = file.read(MAX_BYTES)
            if len(content) < MAX_BYTES:
                return _open(io.BytesIO(content), repr(name), len(content))
        reason = f"gives {MAX_BYTES} bytes or more; save it to a file first"
    except ExplainError:
        raise
    except FileNotFoundError:
        reason = "does not exist; check the path"
    except NoFileError as error:
        reason = f"must be a file, {error.strerror}; save what it gives to a file first"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {_reason(error)}"
    raise ImageError(f"image {name!r} {reason}")


def _open(file: Any, name: str, size: int) -> Image.Image:
    remarks: list[str] = []
    # Pillow warns of large pictures and odd metadata; the limits here count
    with quiet(), collect_warnings(remarks):
        picture = _read(file, name, size)
    for remark in remarks:
        warn(remark)
    return picture


def _read(file: Any, name: str, size: int) -> Image.Image:
    if size == 0:
        raise ImageError(f"image {name} is empty (0 bytes); get the file again")
    try:
        with Image.open(file) as image:
            if image.format in NO_PHOTOS:
                raise ImageError(
                    f"image {name} must be a photo, got {image.format}; convert it to PNG or JPEG"
                )
            if image.format == "DDS" and size < image.width * image.height / 2:
                # No kind of DDS is denser; Pillow before 13 takes minutes to fill up what is
                # missing.
                raise ImageError(
                    f"image {name} is damaged or truncated (too short); get the file again"
                )
            return _decode(image, name)
    except Image.DecompressionBombError:
        raise ImageError(
            f"image {name} is larger than {MAX_PIXELS // 10**6} megapixels; resize it first"
        ) from None
    except UnidentifiedImageError:
        file.seek(0)
        if _HEIC.match(file.read(12)):
            return _decode(_from_heic(file, name), name)
        raise ImageError(
            f"image {name} is not an image that Pillow can read; convert it to PNG or JPEG"
        ) from None
    except ImageError:
        raise
    except Exception as error:  # headers, too, may hold anything
        raise _damaged(name, error) from None


_HEIC = re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""How photos of many phones begin, which Pillow alone does not read."""


def _from_heic(file: Any, name: str) -> Image.Image:
    try:
        from pillow_heif import open_heif
    except ImportError:
        remedy = "run pip install pillow-heif, or convert it to JPEG"
        raise ImageError(
            f"image {name} is a HEIC photo, which needs the package pillow-heif; {remedy}"
        ) from None
    file.seek(0)
    try:
        return open_heif(file).to_pillow()  # type: ignore[no-any-return]
    except Exception as error:
        raise _damaged(name, error) from None


def _decode(image: Image.Image, name: str) -> Image.Image:
    width, height = image.size
    named = f"image {name} is {width} x {height}"
    if width * height > MAX_PIXELS:
        raise ImageError(f"{named}, over {MAX_PIXELS // 10**6} megapixels; resize it first")
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"{named}, over {MAX_SIDE} pixels long; cut it into pieces first")
    if not width or not height:
        raise ImageError(
            f"image {name} must have at least one pixel, got {width} x {height}; get the file again"
        )
    try:
        picture = _to_rgb(image)
    except (ImageError, ExplainWarning):  # a warning may be an error for the caller
        raise
    except MemoryError:
        raise ImageError(f"{named}, too large for the memory; resize it first") from None
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise _damaged(name, error) from None
    picture.info.clear()  # nothing is left to do: it is upright, and nothing in it is transparent
    picture.is_upright = True  # type: ignore[attr-defined]
    return picture


def _to_rgb(image: Image.Image) -> Image.Image:
    bits = stored_bits(image)
    has_deep_colors = image.mode not in DEEP and any(
        ";16" in str(tile[-1]) for tile in getattr(image, "tile", ())
    )
    image.load()
    # a damaged EXIF block says nothing about the pixels: show them as they are stored
    with suppress(Exception):
        image = ImageOps.exif_transpose(image)
    # Of 16 bits, Pillow keeps the upper 8.
    if has_deep_colors and max(high for _, high in image.convert("RGB").getextrema()) < 64:  # type: ignore[misc]
        warn(
            "the photo's colors use 14 or less of their 16 bits, and are nearly black; save it "
            "with 8 bits"
        )
    if image.mode in DEEP:
        return Image.fromarray(to_8_bits(np.asarray(image), bits)).convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def _from_array(array: Array) -> Image.Image:
    shape = array.shape
    if not (array.ndim == 2 or (array.ndim == 3 and shape[2] in (1, 3, 4))) or 0 in shape:
        remedy = (
            "; use array.transpose(1, 2, 0)" if array.ndim == 3 and shape[0] in (1, 3, 4) else ""
        )
        raise ImageError(
            f"image must be an array (H, W), (H, W, 3) or (H, W, 4), got shape {shape}{remedy}"
        )
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):  # NaN is neither
            raise ImageError(
                "image must have floats in [0, 1], got values outside or not finite; use uint8 for "
                "0-255"
            )
        array = (array * 255).round().astype(np.uint8)
    elif array.dtype == np.uint16 and array.ndim == 2:
        array = to_8_bits(array)
    if array.dtype != np.uint8:
        raise ImageError(
            f"image must be an array of uint8 or of floats in [0, 1], got {array.dtype}; convert it"
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _damaged(name: str, error: BaseException) -> ImageError:
    return ImageError(
        f"image {name} is damaged or truncated ({_reason(error)}); get the file again"
    )


def _reason(error: BaseException) -> str:
    return (
        " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
        or type(error).__name__
    )
