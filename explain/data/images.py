"""Images: files, arrays and pictures of any kind as upright RGB pictures."""

import io
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from explain._utils.errors import (
    ExplainError,
    ImageError,
    collect_warnings,
    optional,
    quiet,
    reason_of,
    warn,
)
from explain.data.bands import Bands, read_values
from explain.data.greys import DEEP, Window, check_window, stored_bits, to_8_bits
from explain.data.limits import (
    MAX_PIXELS,
    MAX_SCANS,
    SLOW_PIXELS,
    Limit,
    TooLargeError,
    tiff_fields,
)
from explain.data.opening import NoFileError, open_for_reading
from explain.data.scans import (
    Chosen,
    Scan,
    as_slices,
    cached_scan,
    chosen_numbers,
    page_count,
    read_scan,
    slice_label,
    slice_name,
    split_slice,
)

Array: TypeAlias = np.ndarray[Any, Any]
ImageLike: TypeAlias = (
    str | os.PathLike[str] | bytes | io.IOBase | Image.Image | np.ndarray[Any, Any]
)

MAX_BYTES = 2**30  # of what is not a regular file; a device may never end

# Formats that Pillow recognises, but does not read, or (EPS) reads by starting another program on
# an untrusted file.
NO_PHOTOS = frozenset(["BUFR", "EPS", "GRIB", "HDF5", "WMF"])

# A pipe that this process was started with, as in ``explain <(command)``.
_OURS = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")


def load_image(
    image: ImageLike,
    window: Window | Bands | None = None,
    *,
    stack: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Return an image as an upright RGB picture.

    Takes a path, the bytes of a file or an open file, a PIL image, or an array ``(H, W)``, ``(H, W,
    3)``, ``(H, W, 4)`` or ``(3, H, W)``. Files may be of DICOM (.dcm), NIfTI (.nii) or NumPy
    (.npy), too; of one with several slices, ``"scan.dcm slice 12"`` names the 12th. The EXIF
    orientation is applied; of an animation, or a TIFF file of several pages, the first is taken
    unless one is named so, and a warning says it; transparency is laid on white. Values other than
    bytes and floats from 0 to 1 are read in the ``window``, or in that of the file; or as 8, 10,
    12, 14 or 16 bits, the fewest that hold the brightest; or, where some are below zero, from the
    darkest to the brightest. A warning says which, unless the file does. A picture that this
    function has returned is returned as it is.

    Args:
        image: what to read.
        window: the level and the width of the values that are shown from black to white; or
            `explain.data.bands.Bands`, for a file or array of several bands: the picture has some
            of them, and its ``bands`` all.
        stack: read several slices, pages or frames side by side, instead of refusing all or but the
            first; the picture's ``cells`` say by the slice's name where each lies (left, top,
            right, bottom).
        max_pixels: the most that it may have, by the header of its file; nothing that has more is
            decoded.

    Raises:
        ImageError: missing, unreadable, truncated or too large; the message says which.

    >>> load_image(np.zeros((4, 6), np.uint8)).size
    (6, 4)
    """
    bands = window if isinstance(window, Bands) else None
    window = check_window(None if isinstance(window, Bands) else window)
    limit = Limit(max_pixels)
    if isinstance(image, Image.Image):
        # this function has made it, of all bands where they are asked for
        if hasattr(image, "is_upright") and (bands is None or hasattr(image, "bands")):
            return image
        if bands is not None:
            return bands.picture(np.asarray(image), name="given")
        reading = _Reading("image", window, limit)
        return reading.guarded(partial(reading.decode, image, window))
    if isinstance(image, np.ndarray):
        if bands is not None:
            return bands.picture(image, name="given")
        scan = Scan("the array", as_slices(image))
        reading = _Reading("array", window, limit, stack=stack)
        return reading.guarded(partial(reading.slices_of, scan))
    if isinstance(image, (str, os.PathLike)):
        path = os.fsdecode(image)
        return _Reading(repr(path), window, limit, stack=stack, bands=bands).path(path)
    if isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, (bytes, bytearray, memoryview)):
        name = f"of {len(image)} bytes"
        reading = _Reading(name, window, limit, stack=stack, bands=bands)
        return reading.file(io.BytesIO(image), len(image))
    raise ImageError(
        "image must be a path, bytes, a PIL image or an array (H, W, 3), got "
        f"{type(image).__name__}; name the photo's file, or use explain.attribute(model, x) for "
        "tensors, explain.run(dataset, explainer, methods) for a data set"
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
    """How an image is read: the ``name`` that messages have for it, and the caller's ``window``,
    ``limit``, ``stack`` and ``bands``, as `load_image` takes them."""

    name: str
    window: Window | None
    limit: Limit
    stack: bool = False
    bands: Bands | None = None

    def path(self, path: str) -> Image.Image:
        """Read the file at a path, or the slices of it that the name ends with. Refuses addresses,
        folders, and anything that could block, such as pipes of others."""
        if re.match(r"\w+://", path):
            raise self.error("must be a file, got an address; download it first")
        file_name, chosen = split_slice(path)
        if chosen is not None and self.bands is not None:
            raise self.error("must be a whole file for a model of its bands; name the file")
        is_our_pipe = _OURS.fullmatch(os.path.abspath(file_name)) is not None
        try:
            with open_for_reading(Path(file_name), pipes=is_our_pipe) as file:
                status = os.fstat(file.fileno())
                if chosen is not None:
                    stamp = (status.st_size, status.st_mtime_ns)
                    return self.guarded(lambda: self._chosen(file, file_name, stamp, chosen))
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
            reason = f"cannot be read: {reason_of(error)}"
        raise self.error(reason)

    def _chosen(self, file: Any, path: str, stamp: tuple[int, int], chosen: Chosen) -> Image.Image:
        """Read the chosen slices of an open file, or its pages where it is no scan."""
        scan = cached_scan(path, repr(path), stamp, self.limit)
        if scan is not None:
            return self.slices_of(scan, chosen)
        file.seek(0)
        with self._opened(file, stamp[0]) as image:
            count = page_count(image)
            # of a single page, there are no slices to choose from
            numbers = self._numbers(chosen, count if count > 1 else 0, repr(path))
            return self._pages(image, file, numbers)

    def _pages(self, image: Image.Image, file: Any, numbers: Sequence[int]) -> Image.Image:
        """Decode these pages of an opened image."""
        # at 4 bytes a pixel, as deep greys have
        self.limit.check_bytes(self.name, image.width * image.height * 4 * len(numbers))
        pages = []
        for number in numbers:
            image.seek(number)
            if len(numbers) == 1:
                return self.decode(image, self.window, file, page=number)
            is_deep = image.mode in DEEP  # `slices_of` reads such greys of all pages in one range
            # without the window, which `slices_of` uses below for all pages
            pages.append(np.asarray(image if is_deep else self.decode(image, None, file)))
        if len({page.shape for page in pages}) > 1:
            raise self.error("must have pages of one size to be read together; name one")
        return self.slices_of(Scan(self.name, np.stack(pages)), places=numbers)

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
        return self.error(f"is damaged or truncated ({reason_of(error)}); get the file again")

    def error(self, message: str) -> ImageError:
        """The error that says this of the image."""
        return ImageError(f"image {self.name} {message}")

    def _read(self, file: Any, size: int) -> Image.Image:
        """Read an open ``file`` of ``size`` bytes as a photo or scan. Trying is in this order:
        NumPy and DICOM, Pillow, then what Pillow cannot read."""
        if size == 0:
            raise self.error("is empty (0 bytes); get the file again")
        if self.bands is not None:
            return self.bands.picture(read_values(file, self.name, size, self.limit), self.name)
        scan = read_scan(file, self.name, size, self.limit)
        if scan is not None:
            return self.slices_of(scan)
        file.seek(0)
        if _VIDEO.match(file.read(_HEAD)):
            raise self.error(
                "must be a photo, got a video; save its frames as photos, as ffmpeg -i film.mp4 "
                "frame-%04d.png does"
            )
        file.seek(0)
        try:
            with self._opened(file, size) as image:
                count = 1
                with suppress(Exception):  # whatever is behind the first page
                    count = page_count(image)
                if self.stack and count > 1:
                    return self._pages(image, file, range(count))
                self._tell_of_pages(count)
                return self.decode(image, self.window, file)
        except Image.DecompressionBombError:
            raise TooLargeError(
                f"image {self.name} is over {self.limit.pixels // 10**6} megapixels; resize it "
                "first"
            ) from None
        except UnidentifiedImageError:
            return self._without_pillow(file)

    def _opened(self, file: Any, size: int) -> Image.Image:
        """Open a file of ``size`` bytes with Pillow, and refuse what is no photo, or what would
        take it minutes to decode."""
        fields = tiff_fields(file) if _is_tiff(file) else {}
        bands = fields.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
        # Pillow refuses more in words that say nothing to people
        if bands > TiffImagePlugin.MAX_SAMPLESPERPIXEL:
            self._check_tiff(fields)
        file.seek(0)
        image = Image.open(file)
        if image.format in NO_PHOTOS:
            raise self.error(f"must be a photo, got {image.format}; convert it to PNG or JPEG")
        decoders = {tile[0] for tile in getattr(image, "tile", ())}
        if "fits_gzip" in decoders:  # which is inflated whole, whatever its size
            raise self.error("is a packed FITS file; unpack it first")
        pixels = image.width * image.height
        # No kind of DDS is denser; Pillow before 13 takes minutes to fill up what is missing.
        if image.format == "DDS" and size < pixels / 2:
            raise self.error("is damaged or truncated (too short); get the file again")
        if pixels > SLOW_PIXELS and not decoders.isdisjoint(Image.DECODERS):
            raise TooLargeError(
                f"image {self.name} is over {SLOW_PIXELS // 10**6} megapixels of {image.format}, "
                "which is slow to read; convert it to PNG"
            )
        if image.info.get("progressive"):
            file.seek(0)
            if file.read().count(_SCAN) > MAX_SCANS:  # each may cost a pass over all pixels
                raise self.error("has too many scans to be a photo; get the file again")
        return image

    def _tell_of_pages(self, count: int) -> None:
        """Warn that only the first of several pages is read."""
        if count > 1:
            example = slice_name(self.name.strip("'"), 1)
            # only the name of a file is in quotes: bytes have none
            remedy = f"name another, as {example!r}" if self.name[0] == "'" else "save another"
            warn(f"image {self.name} has {count} pages, of which the first is read; {remedy}")

    def _without_pillow(self, file: Any) -> Image.Image:
        """Read an open file that Pillow does not know: a HEIC photo, or a TIFF file with floats in
        colour or of 64 bits."""
        file.seek(0)
        if _HEIC.match(file.read(12)):
            return self.decode(self._from_heic(file), self.window)
        pixels = self._with_opencv(file) if _is_tiff(file) else None
        if pixels is None:
            raise self.error("is not an image that Pillow can read; convert it to PNG or JPEG")
        return self.decode(Image.fromarray(to_8_bits(pixels, window=self.window, name=self.name)))

    def _with_opencv(self, file: Any, page: int = 0) -> Array | None:
        """Decode a page of an open ``file`` with OpenCV, at its stored depth: ``(H, W)`` or ``(H,
        W, C)`` in RGB order; None without a file, or where it cannot be read."""
        import cv2

        if file is None:
            return None
        if _is_tiff(file):  # whose size OpenCV does not limit
            self._check_tiff(tiff_fields(file))
        file.seek(0)
        content = np.frombuffer(file.read(), np.uint8)
        pixels: Any
        if page:
            _, (pixels,) = cv2.imdecodemulti(content, cv2.IMREAD_UNCHANGED, range=(page, page + 1))
        else:
            pixels = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
        if pixels is not None and pixels.ndim > 2:  # OpenCV has blue first
            pixels[:, :, [0, 2]] = pixels[:, :, [2, 0]]
        decoded: Array | None = pixels
        return decoded

    def _check_tiff(self, fields: Mapping[int, int]) -> None:
        """Refuse a TIFF file by its ``fields``: one that is too large, or that is no photo."""
        width = fields.get(TiffImagePlugin.IMAGEWIDTH, 0)
        height = fields.get(TiffImagePlugin.IMAGELENGTH, 0)
        bands = fields.get(TiffImagePlugin.SAMPLESPERPIXEL, 1)
        # once unpacked, each value takes a byte or more
        bits = max(8, fields.get(TiffImagePlugin.BITSPERSAMPLE, 1))
        if bands > 4:
            raise self.error(
                f"must have 1, 3 or 4 bands for this model, got {bands}; save three of them as a "
                "photo, or explain a model of all of them"
            )
        if fields.get(TiffImagePlugin.SAMPLEFORMAT, 1) in COMPLEX:
            raise self.error("must hold real numbers, got complex ones; save their magnitudes")
        self.limit.check(self.name, width, height, width * height * bands * bits / 8)

    def _from_heic(self, file: Any) -> Image.Image:
        """Open a HEIC photo with the optional package pillow-heif; the error says how to install
        it."""
        heif = optional("pillow_heif", f"for the HEIC photo {self.name}", "heic", ImageError)
        file.seek(0)
        photo = heif.open_heif(file)
        self.limit.check(self.name, *photo.size)
        picture: Image.Image = photo.to_pillow()
        return picture

    def slices_of(
        self, scan: Scan, chosen: Chosen = None, *, places: Sequence[int] = ()
    ) -> Image.Image:
        """Return the chosen slice of a scan as a picture, or several as one picture with
        ``cells``; ``places`` are those of the scan's slices in their file, where it has more."""
        numbers = self._numbers(chosen, len(scan.slices), scan.name)
        if len(numbers) == 1:
            return self.decode(scan.picture(numbers[0], self.window))
        picture, cells = scan.stack(numbers, self.window)
        decoded = self.decode(picture)
        # a scan that is given with `places` is shown whole: its slices were chosen before
        decoded.cells = {  # type: ignore[attr-defined]
            slice_label(place): cell for place, cell in zip(places or numbers, cells, strict=True)
        }
        return decoded

    def _numbers(self, chosen: Chosen, count: int, name: str) -> range:
        """Return the numbers of the chosen slices of a file with ``count``; several are refused
        unless ``stack``."""
        numbers = chosen_numbers(chosen, count)
        if not numbers:
            raise self.error(f"must be one of the slices 1 to {count} of its file; name one")
        if len(numbers) > 1 and not self.stack:
            example = slice_name(name.strip("'"), numbers[len(numbers) // 2])
            # only the name of a file is in quotes: bytes and arrays have none
            remedy = f"name one, as {example!r}" if name[0] == "'" else "give them one by one"
            raise self.error(f"must be one slice, got {len(numbers)} slices; {remedy}")
        return numbers

    def decode(
        self,
        image: Image.Image,
        window: Window | None = None,
        file: Any = None,
        page: int = 0,
    ) -> Image.Image:
        """Check an opened image's size, and return it as an upright RGB picture, marked
        ``is_upright``; ``file`` and its ``page`` are for deep colours.
        """
        self.limit.check(self.name, *image.size)
        picture = _to_rgb(image, window, lambda: self._with_opencv(file, page))
        # nothing is left to do: it is upright, and nothing in it is transparent
        picture.info.clear()
        picture.is_upright = True  # type: ignore[attr-defined]
        return picture


COMPLEX = (5, 6)  # formats of TIFF's samples
_SCAN = b"\xff\xda"  # before each scan of a JPEG, and nowhere else
_HEIC = re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""How photos of many phones begin, which Pillow alone does not read."""


def _is_tiff(file: Any) -> bool:
    """Whether an open file is one of TIFF, by its first bytes; moves its position."""
    file.seek(0)
    return file.read(4) in (b"II*\0", b"MM\0*")


_HEAD = 16  # bytes
_VIDEO = re.compile(
    rb".{4}ftyp(iso|mp4|M4|qt|avc|3g|dash|MSNV)|.{4}moov|\x1aE\xdf\xa3|RIFF.{4}AVI|"
    rb"\x00\x00\x01[\xb3\xba]",
    re.DOTALL,
)
"""How videos begin, which people have beside photos."""


def _to_rgb(
    image: Image.Image, window: Window | None, deep_colors: Callable[[], Array | None]
) -> Image.Image:
    """An image in 8-bit RGB, upright by EXIF: deep greys and colours (16 bits, by ``deep_colors``)
    in the ``window`` or their own range, transparency laid on white.
    """
    bits = stored_bits(image)
    has_deep_colors = image.mode not in DEEP and any(
        ";16" in str(tile[-1]) for tile in getattr(image, "tile", ())
    )
    image.load()  # after which it has no ``tile`` any more
    colors = None
    if has_deep_colors:
        extrema: Any = image.convert("RGB").getextrema()
        # Of 16 bits, Pillow keeps the upper 8. That is too little for a window, and for values that
        # do not use the upper bits, as those of 10 to 14 bits.
        if window or max(map(max, extrema)) < 64:
            colors = deep_colors()
    if colors is not None:
        pixels = to_8_bits(colors, window=window)
    elif image.mode in DEEP:
        pixels = to_8_bits(np.asarray(image), window=window, bits=bits)
    elif window is not None:
        pixels = to_8_bits(np.asarray(image.convert("RGB")), window=window)
    else:
        pixels = None
    if pixels is not None:
        exif = image.getexif()  # with the orientation
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
