"""Images: files, arrays and pictures of any kind as upright RGB pictures."""

import io
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

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
from explain.data.greys import DEEP, Window, check_window, stored_bits, to_8_bits
from explain.data.opening import NoFileError, open_for_reading
from explain.data.scans import (
    Chosen,
    Scan,
    as_slices,
    cached_scan,
    chosen_numbers,
    read_scan,
    slice_name,
    split_slice,
)

T = TypeVar("T")

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


def load_image(
    image: ImageLike, window: Window | None = None, *, stack: bool = False
) -> Image.Image:
    """Return an image as an upright RGB picture.

    Takes a path, the bytes of a file or an open file, a PIL image, or an array ``(H, W)``, ``(H, W,
    3)``, ``(H, W, 4)`` or ``(3, H, W)``. Files may be DICOM (.dcm) or of NumPy (.npy), too; of one
    with several slices, ``"scan.dcm slice 12"`` names one. The EXIF orientation is applied; of an
    animation the first frame is taken; transparency is laid on white. Values other than bytes and
    floats from 0 to 1 are read in the ``window``, or in that of the file; or as 8, 10, 12, 14 or 16
    bits, the fewest that hold the brightest; or, where some are below zero, from the darkest to the
    brightest. A warning says which, unless the file does. A picture that this function has returned
    is returned as it is.

    Args:
        image: what to read.
        window: the level and the width of the values that are shown from black to white.
        stack: read several slices side by side, instead of refusing them; the picture's ``cells``
            say where each lies (left, top, right, bottom).

    Raises:
        ImageError: missing, unreadable, truncated or too large; the message says which.

    >>> load_image(np.zeros((4, 6), np.uint8)).size
    (6, 4)
    """
    window = check_window(window)
    if isinstance(image, Image.Image):
        return image if hasattr(image, "is_upright") else _decode(image, "image", window)
    if isinstance(image, np.ndarray):
        return _from_array(image, window, stack)
    if isinstance(image, (str, os.PathLike)):
        return _from_path(os.fsdecode(image), window, stack)
    if isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, (bytes, bytearray, memoryview)):
        return _open(io.BytesIO(image), f"of {len(image)} bytes", len(image), window, stack)
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


def _from_path(name: str, window: Window | None, stack: bool) -> Image.Image:
    if re.match(r"\w+://", name):
        raise ImageError(f"image {name!r} must be a file, got an address; download it first")
    file_name, chosen = split_slice(name)
    path = Path(file_name)
    if os.path.isdir(path):  # unlike Path.is_dir, this accepts any name
        raise ImageError(f"image {name!r} must be a file, got a folder; name the images in it")
    try:
        with open_for_reading(
            path, pipes=_OURS.fullmatch(os.path.abspath(path)) is not None
        ) as file:
            status = os.fstat(file.fileno())
            if chosen is not None:
                stamp = (status.st_size, status.st_mtime_ns)
                return _said(
                    lambda: _of_scan(
                        cached_scan(file_name, repr(file_name), stamp),
                        repr(name),
                        window,
                        stack,
                        chosen,
                    ),
                    repr(name),
                )
            if stat.S_ISREG(status.st_mode):
                return _open(file, repr(name), status.st_size, window, stack)
            # our own pipe: it has no size, perhaps no end, and is not read twice
            content = file.read(MAX_BYTES)
            if len(content) < MAX_BYTES:
                return _open(io.BytesIO(content), repr(name), len(content), window, stack)
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


def _open(file: Any, name: str, size: int, window: Window | None, stack: bool) -> Image.Image:
    return _said(lambda: _read(file, name, size, window, stack), name)


def _said(read: Callable[[], T], name: str) -> T:
    """What a decoder returns; its errors are of one kind, and of warnings only our own are said."""
    remarks: list[str] = []
    # Pillow warns of large pictures and odd metadata; the limits here count
    with quiet(), collect_warnings(remarks):
        try:
            result = read()
        except ImageError:
            raise
        except MemoryError:
            raise ImageError(f"image {name} is too large for the memory; resize it first") from None
        except Exception as error:  # headers, too, may hold anything
            raise _damaged(name, error) from None
    for remark in remarks:
        warn(remark)
    return result


def _read(file: Any, name: str, size: int, window: Window | None, stack: bool) -> Image.Image:
    if size == 0:
        raise ImageError(f"image {name} is empty (0 bytes); get the file again")
    scan = read_scan(file, name, size)
    if scan is not None:
        return _of_scan(scan, name, window, stack)
    file.seek(0)
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
            return _decode(image, name, window, file)
    except Image.DecompressionBombError:
        raise ImageError(
            f"image {name} is larger than {MAX_PIXELS // 10**6} megapixels; resize it first"
        ) from None
    except UnidentifiedImageError:
        file.seek(0)
        head = file.read(12)
        if _HEIC.match(head):
            return _decode(_from_heic(file, name), name, window)
        pixels = _with_opencv(file) if head[:4] in _TIFF else None
        if pixels is not None:  # floats in colour, or of 64 bits
            return _decode(Image.fromarray(to_8_bits(pixels, window=window, name=name)), name)
        raise ImageError(
            f"image {name} is not an image that Pillow can read; convert it to PNG or JPEG"
        ) from None


_TIFF = (b"II*\0", b"MM\0*")
_HEIC = re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""How photos of many phones begin, which Pillow alone does not read."""


def _from_heic(file: Any, name: str) -> Image.Image:
    try:
        from pillow_heif import open_heif
    except ImportError:
        raise ImageError(
            f"image {name} is a HEIC photo, which needs the package pillow-heif; run pip "
            "install pillow-heif, or convert it to JPEG"
        ) from None
    file.seek(0)
    try:
        return open_heif(file).to_pillow()  # type: ignore[no-any-return]
    except Exception as error:
        raise _damaged(name, error) from None


def _of_scan(
    scan: Scan | None, name: str, window: Window | None, stack: bool, chosen: Chosen = None
) -> Image.Image:
    """A slice of a scan, or several as a stack; None is no scan."""
    count = 0 if scan is None else len(scan.slices)
    numbers = chosen_numbers(chosen, count)
    if scan is None or not numbers:
        raise ImageError(f"image {name} must be of the {count} slices of its file; name one")
    if len(numbers) == 1:
        return _decode(scan.picture(numbers[0], window), name)
    if not stack:
        example = slice_name(scan.name.strip("'"), numbers[len(numbers) // 2])
        # bytes and arrays have no name
        remedy = f"name one, as {example!r}" if scan.name[0] == "'" else "give them one by one"
        raise ImageError(f"image {name} must be one slice, got {len(numbers)} slices; {remedy}")
    picture, cells = scan.stack(numbers, window)
    decoded = _decode(picture, name)
    decoded.cells = cells  # type: ignore[attr-defined]
    return decoded


def _decode(
    image: Image.Image, name: str, window: Window | None = None, file: Any = None
) -> Image.Image:
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
        picture = _to_rgb(image, window, file)
    except (ImageError, ExplainWarning):  # a warning may be an error for the caller
        raise
    except MemoryError:
        raise ImageError(f"{named}, too large for the memory; resize it first") from None
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise _damaged(name, error) from None
    picture.info.clear()  # nothing is left to do: it is upright, and nothing in it is transparent
    picture.is_upright = True  # type: ignore[attr-defined]
    return picture


def _to_rgb(image: Image.Image, window: Window | None, file: Any) -> Image.Image:
    bits = stored_bits(image)
    has_deep_colors = image.mode not in DEEP and any(
        ";16" in str(tile[-1]) for tile in getattr(image, "tile", ())
    )
    image.load()
    # Of 16 bits, Pillow keeps the upper 8.
    is_dark = has_deep_colors and max(map(max, _extrema(image))) < 64
    colors = _with_opencv(file) if has_deep_colors and (is_dark or window) else None
    if colors is not None:
        pixels = to_8_bits(colors, window=window)
    elif image.mode in DEEP:
        pixels = to_8_bits(np.asarray(image), window=window, bits=bits)
    elif window is not None:
        pixels = to_8_bits(np.asarray(image.convert("RGB")), window=window)
    else:
        pixels = None
    if pixels is not None:
        exif = image.getexif()
        image = Image.fromarray(pixels)
        image.getexif().update(exif)
    # a damaged EXIF block says nothing about the pixels: show them as they are stored
    with suppress(Exception):
        image = ImageOps.exif_transpose(image)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def _extrema(image: Image.Image) -> Any:
    return image.convert("RGB").getextrema()


def _with_opencv(file: Any) -> Array | None:
    """The pixels of a file as they are stored, or None where they cannot be read."""
    import cv2

    if file is None:
        return None
    file.seek(0)
    pixels = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None or pixels.ndim == 2:
        return pixels
    order = [2, 1, 0, 3][: pixels.shape[2]]  # of OpenCV, which has blue first
    return np.ascontiguousarray(pixels[:, :, order])


def _from_array(array: Array, window: Window | None, stack: bool) -> Image.Image:
    return _of_scan(Scan("the array", as_slices(array)), "array", window, stack)


def _damaged(name: str, error: BaseException) -> ImageError:
    return ImageError(
        f"image {name} is damaged or truncated ({_reason(error)}); get the file again"
    )


def _reason(error: BaseException) -> str:
    return (
        " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
        or type(error).__name__
    )
