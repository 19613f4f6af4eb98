"""Images: files, arrays and pictures of any kind as upright RGB pictures; and where the model's input lies on them."""

import errno
import io
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from explain._utils.errors import ExplainError, ExplainWarning, ImageError, overheard, quiet, shown, warn

Array: TypeAlias = np.ndarray[Any, Any]
ImageLike: TypeAlias = str | os.PathLike[str] | bytes | io.IOBase | Image.Image | np.ndarray[Any, Any]
Preprocess: TypeAlias = Callable[[Image.Image], torch.Tensor]

MAX_PIXELS = 178_956_970  # where Pillow itself calls a file a decompression bomb
MAX_SIDE = 500_000  # pixels; captions stand below photos and are at least 260 wide, which costs most on thin ones
MAX_BYTES = 2**30  # of what is not a regular file; a device may never end
SMALLEST = 8  # pixels along an axis, below which it does not matter which of them were kept
_NAMES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jfif", "avif", "heic", "heif")
EXTENSIONS = frozenset(f".{name}" for name in _NAMES)

# Formats that Pillow recognises, but does not read, or (EPS) reads by starting another program on an untrusted file.
NO_PHOTOS = frozenset(["BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"])


def load_image(image: ImageLike) -> Image.Image:
    """Return an image as an upright RGB picture.

    Takes a path, the bytes of a file or an open file, a PIL image, or an array ``(H, W)``, ``(H, W, 3)`` or
    ``(H, W, 4)`` of uint8 or of floats in [0, 1]. The EXIF orientation is applied; of an animation the first frame is
    taken; transparency is laid on white. Deep greys are scaled to 8, 10, 12, 14 or 16 bits, the fewest that hold the
    brightest, with a warning if these are not those of their type; signed ones from the darkest to the brightest.

    Raises:
        ImageError: missing, unreadable, truncated or too large; the message says which.

    >>> load_image(np.zeros((4, 6), np.uint8)).size
    (6, 4)
    """
    if isinstance(image, Image.Image):
        return _decode(image, "image")
    if isinstance(image, np.ndarray):
        return _decode(_from_array(image), "image")
    if isinstance(image, io.IOBase):
        image = image.read()
    if isinstance(image, (bytes, bytearray, memoryview)):
        return _open(io.BytesIO(image), f"of {len(image)} bytes", len(image))
    if not isinstance(image, (str, os.PathLike)):
        kind = type(image).__name__
        remedy = "use explain.attribute(model, x)" if isinstance(image, torch.Tensor) else "name the photo's file"
        raise ImageError(f"image must be a path, bytes, a PIL image or an array (H, W, 3), got {kind}; {remedy}")
    path, name = Path(image), repr(os.fsdecode(image))
    if re.match(r"\w+://", os.fsdecode(image)):
        raise ImageError(f"image {name} must be a file, got an address; download it first")
    if os.path.isdir(path):  # unlike Path.is_dir, this accepts any name
        raise ImageError(f"image {name} must be a file, got a folder; name the images in it")
    try:
        with opened(path, pipes=_OURS.fullmatch(os.path.abspath(path)) is not None) as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode):
                return _open(file, name, about.st_size)
            content = file.read(MAX_BYTES)  # our own pipe: it has no size, perhaps no end, and is not read twice
            if len(content) < MAX_BYTES:
                return _open(io.BytesIO(content), name, len(content))
        reason = f"gives {MAX_BYTES} bytes or more; save it to a file first"
    except ExplainError:
        raise
    except FileNotFoundError:
        reason = "does not exist; check the path"
    except NoFileError as error:
        reason = f"must be a file, {error.strerror}; save what it gives to a file first"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {_reason(error)}"
    raise ImageError(f"image {name} {reason}")


def as_input(x: Any) -> torch.Tensor:
    """Return the model's input for one photo, as a preprocessing has made it: ``(C, H, W)``, or of tiles one more.

    Raises:
        ImageError: it is no such tensor.
    """
    if not isinstance(x, torch.Tensor) or x.ndim not in (3, 4):
        must = "return a tensor (C, H, W), or (T, C, H, W) of tiles"
        raise ImageError(f"preprocess must {must}, got {shown(x)}; leave out the batch dimension")
    return x


def photos_in(
    folder: str, inside: str = "", *, recursive: bool = True, apart_from: str = ""
) -> Iterator[tuple[str, str | None]]:
    """Yield the paths of the photos in a folder and in the folders inside it, in order; hidden ones are left out.

    Args:
        folder: the folder; paths are given from there on.
        inside: a folder in it, to begin with.
        recursive: whether folders inside it are searched too.
        apart_from: the real path of a folder to leave out.

    Yields:
        The path of a photo and None, or that of a folder that cannot be read and why; one by one, as there may be
        millions.
    """
    try:
        with os.scandir(os.path.join(folder, inside)) as found:
            items = sorted((item.name, item.is_dir(follow_symlinks=False)) for item in found)
    except OSError as error:
        yield inside, f"cannot be read: {error.strerror}; check its permissions"
        return
    for name, is_folder in items:
        path = os.path.join(inside, name)
        if name.startswith("."):
            continue
        if not is_folder and os.path.splitext(name)[1].lower() in EXTENSIONS:
            yield path, None
        elif is_folder and recursive and os.path.realpath(os.path.join(folder, path)) != apart_from:
            yield from photos_in(folder, path, apart_from=apart_from)


def source_of(image: ImageLike) -> str | None:
    """Return the path of the file that an image comes from, where that is known.

    >>> source_of("cat.jpg"), source_of(b"...")
    ('cat.jpg', None)
    """
    return str(image) if isinstance(image, (str, os.PathLike)) else str(getattr(image, "filename", "")) or None


_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


# A pipe that this process was started with, as in ``explain <(command)``.
_OURS = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")


class NoFileError(OSError):
    """What was to be opened is there, but is no file."""


def opened(path: Path, *, pipes: bool = False) -> IO[bytes]:
    """Open a file for reading. Anything else is refused without waiting: opening a pipe may take forever.

    Raises:
        NoFileError: it is a pipe (unless ``pipes``), a socket or a device.
        OSError: it cannot be read.
    """
    # Before it is opened, since that may rewind a tape; of folders, open() says what they are.
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR) and not (pipes and kind == stat.S_IFIFO):
        raise NoFileError(errno.EINVAL, f"got {_KINDS.get(kind, 'something else')}")
    file = open(path, "rb", opener=_at_once)  # noqa: SIM115  # the caller closes it
    if stat.S_IFMT(os.fstat(file.fileno()).st_mode) != kind:  # it has been replaced meanwhile
        file.close()
        raise NoFileError(errno.EINVAL, "got something else")
    return file


def _at_once(path: str, flags: int) -> int:
    """Open a file without waiting, in case a pipe has replaced it meanwhile."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    return descriptor


def _open(file: Any, name: str, size: int) -> Image.Image:
    said: list[str] = []
    with quiet(), overheard(said):  # Pillow warns of large pictures and odd metadata; the limits here are what counts
        picture = _read(file, name, size)
    for each in said:
        warn(each)
    return picture


def _read(file: Any, name: str, size: int) -> Image.Image:
    if size == 0:
        raise ImageError(f"image {name} is empty (0 bytes); get the file again")
    try:
        with Image.open(file) as opened:
            if opened.format in NO_PHOTOS:
                raise ImageError(f"image {name} must be a photo, got {opened.format}; convert it to PNG or JPEG")
            if opened.format == "DDS" and size < opened.width * opened.height / 2:
                # No kind of DDS is denser; Pillow before 13 takes minutes to fill up what is missing.
                raise ImageError(f"image {name} is damaged or truncated (too short); get the file again")
            return _decode(opened, name)
    except Image.DecompressionBombError:
        raise ImageError(f"image {name} is larger than {MAX_PIXELS // 10**6} megapixels; resize it first") from None
    except UnidentifiedImageError:
        file.seek(0)
        if _HEIC.match(file.read(12)):
            return _decode(_from_heic(file, name), name)
        raise ImageError(f"image {name} is not an image that Pillow can read; convert it to PNG or JPEG") from None
    except ImageError:
        raise
    except Exception as error:  # headers, too, may hold anything
        raise ImageError(f"image {name} is damaged or truncated ({_reason(error)}); get the file again") from None


_HEIC = re.compile(rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
"""How photos of many phones begin, which Pillow alone does not read."""


def _from_heic(file: Any, name: str) -> Image.Image:
    try:
        from pillow_heif import open_heif
    except ImportError:
        remedy = "run pip install pillow-heif, or convert it to JPEG"
        raise ImageError(f"image {name} is a HEIC photo, which needs the package pillow-heif; {remedy}") from None
    file.seek(0)
    try:
        found: Image.Image = open_heif(file).to_pillow()
    except Exception as error:
        raise ImageError(f"image {name} is damaged or truncated ({_reason(error)}); get the file again") from None
    return found


def _decode(image: Image.Image, name: str) -> Image.Image:
    width, height = image.size
    size = f"image {name} is {width} x {height}"
    if width * height > MAX_PIXELS:
        raise ImageError(f"{size}, over {MAX_PIXELS // 10**6} megapixels; resize it first")
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"{size}, over {MAX_SIDE} pixels long; cut it into pieces first")
    if not width or not height:
        raise ImageError(f"image {name} must have at least one pixel, got {width} x {height}; get the file again")
    try:
        deep_colors = image.mode not in DEEP and any(";16" in str(tile[-1]) for tile in getattr(image, "tile", ()))
        bits = _stored_bits(image)
        image.load()
        with suppress(Exception):  # a damaged EXIF block says nothing about the pixels: show them as they are stored
            image = ImageOps.exif_transpose(image)
        # Of 16 bits, Pillow keeps the upper 8.
        if deep_colors and max(high for _, high in image.convert("RGB").getextrema()) < 64:  # type: ignore[misc]
            warn("the photo's colors use 14 or less of their 16 bits, and are nearly black; save it with 8 bits")
        picture = _to_rgb(image, bits)
        picture.info.clear()  # nothing is left to do: it is upright, and nothing in it is transparent
        return picture
    except (ImageError, ExplainWarning):  # a warning may be an error for the caller
        raise
    except MemoryError:
        raise ImageError(f"image {name} is {width} x {height}, too large for the memory; resize it first") from None
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise ImageError(f"image {name} is damaged or truncated ({_reason(error)}); get the file again") from None


DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of greys with more than 8 bits."""
DEPTHS = (8, 10, 12, 14, 16)  # bits that cameras and scanners give


def _to_rgb(image: Image.Image, bits: int | None) -> Image.Image:
    if image.mode in DEEP:
        return Image.fromarray(_to_8_bits(np.asarray(image), bits)).convert("RGB")
    image = image.convert("LA") if image.mode == "La" else image
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def _stored_bits(image: Image.Image) -> int | None:
    """How many bits a TIFF file says its greys have, where these are no whole bytes."""
    with suppress(Exception):  # a damaged file
        (bits,) = image.tag_v2[258]  # type: ignore[attr-defined]
        return int(bits) if 8 < bits < 16 else None
    return None


def _to_8_bits(greys: Array, bits: int | None = None) -> Array:
    """Bring greys deeper than 8 bits to 0-255; say what range they are read in, where their type does not say it."""
    values = np.nan_to_num(greys.astype(np.float32), posinf=0.0, neginf=0.0)
    low, high, doubt = _range_of(values, greys.dtype, bits)
    if doubt:
        warn(f"the photo's greys are read {doubt}; convert it to 8 bits, or to floats from 0 to 1, for another range")
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
        if peak <= 1 or 2 <= peak <= 255:
            return 0.0, 1.0 if peak <= 1 else 255.0, ""
        # Resampling goes a little beyond the range from 0 to 1.
        return 0.0, peak, f"from 0 to the brightest, {peak:g}" if peak < 2 else ""
    depth = bits or next((depth for depth in DEPTHS if peak < 2**depth), None)
    if depth is None:
        return 0.0, peak, ""
    most = 2.0**depth - 1
    is_plain = depth in (bits, 16) or peak == 0 or (depth == 8 and dtype.itemsize > 2)
    return 0.0, most, "" if is_plain else f"as {depth} bits, 0 to {most:g}, the fewest that hold the brightest"


def _from_array(array: Array) -> Image.Image:
    shape = array.shape
    if not (array.ndim == 2 or (array.ndim == 3 and shape[2] in (1, 3, 4))) or 0 in shape:
        remedy = "; use array.transpose(1, 2, 0)" if array.ndim == 3 and shape[0] in (1, 3, 4) else ""
        raise ImageError(f"image must be an array (H, W), (H, W, 3) or (H, W, 4), got shape {shape}{remedy}")
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise ImageError("image must have floats in [0, 1], got values outside or not finite; use uint8 for 0-255")
        array = (array * 255).round().astype(np.uint8)
    if array.dtype == np.uint16 and array.ndim == 2:
        array = _to_8_bits(array)
    if array.dtype != np.uint8:
        raise ImageError(f"image must be an array of uint8 or of floats in [0, 1], got {array.dtype}; convert it")
    return Image.fromarray(np.ascontiguousarray(array))


def _reason(error: BaseException) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:120] or type(error).__name__


@contextmanager
def hushed() -> Iterator[list[str]]:
    """Keep what libraries in C print about a file off standard error; yield the list that has it afterwards.

    For programs without threads: until it ends, nothing reaches standard error.
    """
    said: list[str] = []
    with ExitStack() as stack:
        try:
            kept = os.dup(2)
            stack.callback(os.close, kept)
            heard = stack.enter_context(tempfile.TemporaryFile())
        except OSError:  # standard error was closed, or there is no room for a copy
            yield said
            return
        os.dup2(heard.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            heard.seek(0)
            said += heard.read(10_000).decode("utf-8", "replace").splitlines()


def troubles(printed: Sequence[str]) -> list[str]:
    """Return what a decoder has printed about a photo that may be damaged, as one remark; none for warnings."""
    serious = [line for line in printed if line and "Warning" not in line]
    return [f"may be damaged, its decoder says: {serious[0]}"] if serious else []


@dataclass(frozen=True)
class Box:
    """The part of a photo that a model's input shows, in the photo's pixels; it may reach past the edges."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top


def locate(preprocess: Preprocess, size: tuple[int, int]) -> Box:
    """Find which part of a photo of ``size`` (width, height) reaches the model, for any deterministic preprocessing.

    A preprocessing that knows says so through a method ``box(size)``. Any other is tried out: it gets pictures whose
    values rise from left to right and from top to bottom, and a black and a white one for calibration. The result is a
    straight line over the part that was kept; padding does not follow it and is left out. If the result is not of that
    kind (for a random preprocessing, say), the whole photo is assumed, with a warning.

    >>> locate(lambda image: torch.zeros(3, 8, 8), (2, 2))
    Box(left=0.0, top=0.0, right=2.0, bottom=2.0)
    """
    known: Callable[[tuple[int, int]], Box] | None = getattr(preprocess, "box", None)
    if callable(known):
        return known(size)
    try:
        ends = [_seen(preprocess, np.full((size[1], size[0]), level, np.uint8)) for level in (0, 255)]
        edges = [_extent(preprocess, size, axis, ends) for axis in (1, 0)]
    except ExplainError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError):
        edges = [None, None]
    if any(edge is None and length >= SMALLEST for edge, length in zip(edges, size, strict=True)):
        warn("preprocess must keep a rectangle of the photo for overlays, but which one is not clear; the overlay "
             "assumes the whole photo. Give preprocess a method box(size) -> Box")  # fmt: skip
    (left, right), (top, bottom) = (e or (0.0, float(length)) for e, length in zip(edges, size, strict=True))
    return Box(left, top, right, bottom)


def locate_tiles(preprocess: Preprocess, size: tuple[int, int], count: int) -> list[Box]:
    """Find which part of a photo each of so many tiles is that a preprocessing makes of it, ``(T, C, H, W)``."""
    made: dict[bytes, torch.Tensor] = {}

    def tile(number: int, image: Image.Image) -> torch.Tensor:
        key = image.tobytes()
        if key not in made:
            made[key] = preprocess(image)
        return made[key][number]

    return [locate(partial(tile, number), size) for number in range(count)]


def _seen(preprocess: Preprocess, grey: Array) -> Array:
    """Return what a preprocessing makes of a grey picture, ``(C, H, W)``."""
    return preprocess(Image.fromarray(np.ascontiguousarray(grey)).convert("RGB")).double().numpy()


def _extent(preprocess: Preprocess, size: tuple[int, int], axis: int, ends: list[Array]) -> tuple[float, float] | None:
    """Return where the first and the last edge of the model's input lie along an axis of the photo."""
    length = size[1 - axis]
    if length < SMALLEST:
        return None
    ramp = np.linspace(16, 240, length).round().astype(np.uint8)  # resampling would clip at black and white
    picture = np.broadcast_to(ramp[:, None] if axis == 0 else ramp, (size[1], size[0]))
    black, reach = ends[0], ends[1] - ends[0]
    kept = np.abs(reach) > 0.5 * np.abs(reach).max()
    value = np.where(kept, (_seen(preprocess, picture) - black) / np.where(kept, reach, 1) * 255, np.nan)
    lines = np.moveaxis(value, axis + 1, 0).reshape(value.shape[axis + 1], -1)
    filled = np.isfinite(lines).any(1)
    position = (np.nanmean(lines[filled], axis=1) - 16) / (240 - 16) * (length - 1) + 0.5
    steps = np.arange(len(lines))[filled] + 0.5
    if len(steps) < 2:
        return None
    slope, start = np.polyfit(steps, position, 1)
    error = np.abs(slope * steps + start - position).max()
    fits = slope > 0 and error <= max(2.0, 0.03 * length)
    return (float(start), float(start + slope * len(lines))) if fits else None
