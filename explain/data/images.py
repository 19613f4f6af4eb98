"""Images: files, arrays and pictures of any kind as upright RGB pictures."""

import io
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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

Array: TypeAlias = np.ndarray[Any, Any]
ImageLike: TypeAlias = (
    str | os.PathLike[str] | bytes | io.IOBase | Image.Image | np.ndarray[Any, Any]
)

MAX_PIXELS = 178_956_970  # where Pillow itself calls a file a decompression bomb
MAX_SIDE = 500_000  # pixels; captions are at least 260 wide, which costs most below thin photos
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
        if hasattr(image, "is_upright"):
            return image
        return _Reading("image", window).decode(image, window)
    if isinstance(image, np.ndarray):
        scan = Scan("the array", as_slices(image))
        return _Reading("array", window, stack).slices_of(scan)
    if isinstance(image, (str, os.PathLike)):
        path = os.fsdecode(image)
        return _Reading(repr(path), window, stack).path(path)
    if isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, (bytes, bytearray, memoryview)):
        reading = _Reading(f"of {len(image)} bytes", window, stack)
        return reading.file(io.BytesIO(image), len(image))
    kind = type(image).__name__
    remedy = "name the photo's file"
    if isinstance(image, torch.Tensor):
        remedy = "use explain.attribute(model, x)"
    elif hasattr(image, "__getitem__") or hasattr(image, "dataset"):
        remedy = "use explain.run(dataset, explainer, methods) for a data set"
    raise ImageError(
        f"image must be a path, bytes, a PIL image or an array (H, W, 3), got {kind}; {remedy}"
    )


def image_path(image: ImageLike) -> str | None:
    """Return the path of the file that an image comes from, where that is known.

    >>> image_path("cat.jpg"), image_path(b"...")
    ('cat.jpg', None)
    """
    if isinstance(image, (str, os.PathLike)):
        return str(image)
    return str(getattr(image, "filename", "")) or None


@dataclass(frozen=True)
class _Reading:
    """How an image is read: the ``name`` that messages have for it, and the caller's ``window`` and
    ``stack``, as `load_image` takes them."""

    name: str
    window: Window | None
    stack: bool = False

    def path(self, path: str) -> Image.Image:
        """Read the file at a path, or the slices of it that the name ends with. Refuses addresses,
        folders, and anything that could block, such as pipes of others."""
        if re.match(r"\w+://", path):
            raise self.error("must be a file, got an address; download it first")
        file_name, chosen = split_slice(path)
        # an empty name is the folder here; unlike Path.is_dir, os.path.isdir accepts any name
        if os.path.isdir(file_name or os.curdir):
            raise self.error("must be a file, got a folder; name the images in it")
        is_our_pipe = _OURS.fullmatch(os.path.abspath(file_name)) is not None
        try:
            with open_for_reading(Path(file_name), pipes=is_our_pipe) as file:
                status = os.fstat(file.fileno())
                if chosen is not None:
                    stamp = (status.st_size, status.st_mtime_ns)
                    return self.guarded(
                        lambda: self.slices_of(
                            cached_scan(file_name, repr(file_name), stamp), chosen
                        )
                    )
                if stat.S_ISREG(status.st_mode):
                    return self.file(file, status.st_size)
                # our own pipe: it has no size, perhaps no end, and is not read twice
                content = file.read(MAX_BYTES)
                if len(content) < MAX_BYTES:
                    return self.file(io.BytesIO(content), len(content))
            reason = f"gives {MAX_BYTES} bytes or more; save it to a file first"
        except ExplainError:
            raise
        except FileNotFoundError:
            reason = "does not exist; check the path"
        except NoFileError as error:
            reason = f"must be a file, {error.strerror}; save what it gives to a file first"
        except (OSError, ValueError) as error:
            reason = f"cannot be read: {_reason(error)}"
        raise self.error(reason)

    def file(self, file: Any, size: int) -> Image.Image:
        """Read an open file of so many bytes."""
        return self.guarded(lambda: self._read(file, size))

    def guarded(self, read: Callable[[], Image.Image]) -> Image.Image:
        """Run the decoder ``read`` and return its picture; its errors become an `ImageError`, and
        of its warnings only those of this package are passed on."""
        remarks: list[str] = []
        # Pillow warns of large pictures and odd metadata; the limits here count
        with quiet(), collect_warnings(remarks):
            try:
                image = read()
            except ImageError:
                raise
            except MemoryError:
                raise self.error("is too large for the memory; resize it first") from None
            except Exception as error:  # headers, too, may hold anything
                raise self.damaged(error) from None
        for remark in remarks:
            warn(remark)
        return image

    def damaged(self, error: BaseException) -> ImageError:
        return self.error(f"is damaged or truncated ({_reason(error)}); get the file again")

    def error(self, message: str) -> ImageError:
        """The error that says this of the image."""
        return ImageError(f"image {self.name} {message}")

    def _read(self, file: Any, size: int) -> Image.Image:
        """Read an open ``file`` of ``size`` bytes as a photo or scan. Trying is in this order:
        NumPy and DICOM, Pillow, then what Pillow cannot read."""
        if size == 0:
            raise self.error("is empty (0 bytes); get the file again")
        scan = read_scan(file, self.name, size)
        if scan is not None:
            return self.slices_of(scan)
        file.seek(0)
        try:
            with Image.open(file) as image:
                if image.format in NO_PHOTOS:
                    raise self.error(
                        f"must be a photo, got {image.format}; convert it to PNG or JPEG"
                    )
                if image.format == "DDS" and size < image.width * image.height / 2:
                    # No kind of DDS is denser; Pillow before 13 takes minutes to fill up what is
                    # missing.
                    raise self.error("is damaged or truncated (too short); get the file again")
                return self.decode(image, self.window, file)
        except Image.DecompressionBombError:
            raise self.error(
                f"is larger than {MAX_PIXELS // 10**6} megapixels; resize it first"
            ) from None
        except UnidentifiedImageError:
            return self._without_pillow(file)

    def _without_pillow(self, file: Any) -> Image.Image:
        """Read an open file that Pillow does not know: a HEIC photo, or a TIFF file with floats in
        colour or of 64 bits."""
        file.seek(0)
        head = file.read(12)
        if _HEIC.match(head):
            return self.decode(self._from_heic(file), self.window)
        pixels = _with_opencv(file) if head[:4] in _TIFF else None
        if pixels is None:
            raise self.error(
                "is not an image that Pillow can read; convert it to PNG or JPEG"
            ) from None
        return self.decode(Image.fromarray(to_8_bits(pixels, window=self.window, name=self.name)))

    def _from_heic(self, file: Any) -> Image.Image:
        """Open a HEIC photo with the optional package pillow-heif; the error says how to install
        it."""
        try:
            from pillow_heif import open_heif
        except ImportError:
            raise self.error(
                "is a HEIC photo, which needs the package pillow-heif; run pip "
                "install pillow-heif, or convert it to JPEG"
            ) from None
        file.seek(0)
        try:
            return open_heif(file).to_pillow()  # type: ignore[no-any-return]
        except Exception as error:
            raise self.damaged(error) from None

    def slices_of(self, scan: Scan | None, chosen: Chosen = None) -> Image.Image:
        """Return the chosen slice of a scan as a picture, or several as one picture with ``cells``;
        ``scan`` is None for a file that has no slices. Several are refused unless ``stack``."""
        count = 0 if scan is None else len(scan.slices)
        numbers = chosen_numbers(chosen, count)
        if scan is None or not numbers:
            raise self.error(f"must be of the {count} slices of its file; name one")
        if len(numbers) == 1:
            return self.decode(scan.picture(numbers[0], self.window))
        if not self.stack:
            example = slice_name(scan.name.strip("'"), numbers[len(numbers) // 2])
            # bytes and arrays have no name
            remedy = f"name one, as {example!r}" if scan.name[0] == "'" else "give them one by one"
            raise self.error(f"must be one slice, got {len(numbers)} slices; {remedy}")
        picture, cells = scan.stack(numbers, self.window)
        decoded = self.decode(picture)
        decoded.cells = cells  # type: ignore[attr-defined]
        return decoded

    def decode(
        self, image: Image.Image, window: Window | None = None, file: Any = None
    ) -> Image.Image:
        """Check the size of an opened image, and return it as an upright RGB picture, marked as
        such (``is_upright``) so that `load_image` returns it at once; ``file`` is the open file
        that it is from, for deep colours."""
        width, height = image.size
        size = f"{width} x {height}"
        if width * height > MAX_PIXELS:
            raise self.error(f"is {size}, over {MAX_PIXELS // 10**6} megapixels; resize it first")
        if max(width, height) > MAX_SIDE:
            raise self.error(f"is {size}, over {MAX_SIDE} pixels long; cut it into pieces first")
        if not width or not height:
            raise self.error(f"must have at least one pixel, got {size}; get the file again")
        try:
            picture = _to_rgb(image, window, file)
        except (ImageError, ExplainWarning):  # a warning may be an error for the caller
            raise
        except MemoryError:
            raise self.error(f"is {size}, too large for the memory; resize it first") from None
        except Exception as error:  # decoders raise nearly anything on damaged files
            raise self.damaged(error) from None
        # nothing is left to do: it is upright, and nothing in it is transparent
        picture.info.clear()
        picture.is_upright = True  # type: ignore[attr-defined]
        return picture


_TIFF = (b"II*\0", b"MM\0*")
_HEIC = re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""How photos of many phones begin, which Pillow alone does not read."""


def _to_rgb(image: Image.Image, window: Window | None, file: Any) -> Image.Image:
    """Bring an image to 8-bit RGB: deep greys and colours by the ``window`` or their own range,
    turned upright by EXIF, transparency laid on white. ``file`` is the open file, of which colours
    of 16 bits are read again."""
    bits = stored_bits(image)
    has_deep_colors = image.mode not in DEEP and any(
        ";16" in str(tile[-1]) for tile in getattr(image, "tile", ())
    )
    image.load()
    colors = None
    if has_deep_colors:
        extrema: Any = image.convert("RGB").getextrema()
        # Of 16 bits, Pillow keeps the upper 8.
        if window or max(map(max, extrema)) < 64:
            colors = _with_opencv(file)
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


def _with_opencv(file: Any) -> Array | None:
    """Decode an open ``file`` with OpenCV, at its stored depth: ``(H, W)`` or ``(H, W, C)`` in RGB
    order; None without a file, or where it cannot be read."""
    import cv2

    if file is None:
        return None
    file.seek(0)
    pixels = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None or pixels.ndim == 2:
        return pixels
    rgb_channels = [2, 1, 0, 3][: pixels.shape[2]]  # OpenCV has blue first
    return np.ascontiguousarray(pixels[:, :, rgb_channels])


def _reason(error: BaseException) -> str:
    """What an ``error`` says, on one line of at most 120 characters, for the message of ours that
    quotes it."""
    text = str(getattr(error, "strerror", None) or error)
    return " ".join(text.split())[:120] or type(error).__name__
