"""Images: whatever a caller has, as an upright RGB picture; and where on it the model's input lies."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from explain.errors import ImageError

ImageLike: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | np.ndarray[Any, Any]"
Preprocess: TypeAlias = Callable[[Image.Image], torch.Tensor]

MAX_PIXELS = 178_956_970  # where Pillow itself calls a file a decompression bomb
EXTENSIONS = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif", ".avif"]
)


def load_image(image: ImageLike) -> Image.Image:
    """Return an image as an upright RGB picture.

    Takes a path, the bytes of a file, a PIL image, or an array ``(H, W)``, ``(H, W, 3)`` or ``(H, W, 4)`` of uint8 or
    of floats in [0, 1]. The EXIF orientation is applied; of an animation the first frame is taken; transparency is
    laid on white; 16-bit and floating-point greys are scaled to their range.

    Raises:
        ImageError: missing, unreadable, truncated or too large; the message says which.

    >>> load_image(np.zeros((4, 6), np.uint8)).size
    (6, 4)
    """
    if isinstance(image, Image.Image):
        return _decode(image, "image")
    if isinstance(image, np.ndarray):
        return _decode(_from_array(image), "image")
    if isinstance(image, bytes):
        return _open(io.BytesIO(image), f"image of {len(image)} bytes", len(image))
    if not isinstance(image, (str, os.PathLike)):
        raise ImageError(f"image must be a path, bytes, a PIL image or an array (H, W, 3), got {type(image).__name__}")
    path = Path(image)
    if path.is_dir():
        raise ImageError(f"image {str(path)!r} must be a file, got a folder; name the images in it")
    try:
        with path.open("rb") as file:
            return _open(file, repr(str(path)), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise ImageError(f"image {str(path)!r} does not exist; check the path") from None
    except (OSError, ValueError) as error:
        raise ImageError(f"image {str(path)!r} cannot be read: {_reason(error)}") from None


def _open(file: Any, name: str, size: int) -> Image.Image:
    if size == 0:
        raise ImageError(f"image {name} is empty (0 bytes); get the file again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of large pictures and odd metadata; the limit below is the one that counts
            with Image.open(file) as opened:
                return _decode(opened, name)
    except Image.DecompressionBombError:
        raise ImageError(f"image {name} is larger than {MAX_PIXELS // 10**6} megapixels; resize it first") from None
    except UnidentifiedImageError:
        raise ImageError(f"image {name} is not an image that Pillow can read; convert it to PNG or JPEG") from None
    except ImageError:
        raise
    except Exception as error:  # headers, too, may hold anything
        raise ImageError(f"image {name} is damaged or truncated ({_reason(error)}); get the file again") from None


def _decode(image: Image.Image, name: str) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageError(f"image {name} is {width} x {height}, over {MAX_PIXELS // 10**6} megapixels; resize it first")
    if not width or not height:
        raise ImageError(f"image {name} must have at least one pixel, got {width} x {height}")
    try:
        image.load()
        return _to_rgb(_upright(image))
    except ImageError:
        raise
    except MemoryError:
        raise ImageError(f"image {name} is {width} x {height}, too large for the memory; resize it first") from None
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise ImageError(f"image {name} is damaged or truncated ({_reason(error)}); get the file again") from None


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a damaged EXIF block says nothing about the pixels: show them as they are stored
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _scale_grey(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _scale_grey(image: Image.Image) -> Image.Image:
    """Bring greys deeper than 8 bits to 0-255: integers by their type's range, floats by [0, 1] or their maximum."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0, neginf=0.0).clip(min=0)
    peak = values.max(initial=0.0)
    if image.mode == "F":
        full = 1.0 if peak <= 1 else 255.0 if peak <= 255 else peak
    else:
        full = 255.0 if peak <= 255 and image.mode == "I" else 65535.0 if peak <= 65535 else peak
    return Image.fromarray((values / full * 255).round().astype(np.uint8)).convert("RGB")


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
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
        array = (array / 257).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise ImageError(f"image must be an array of uint8 or of floats in [0, 1], got {array.dtype}; convert it")
    return Image.fromarray(np.ascontiguousarray(array))


def _reason(error: BaseException) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text[:120] or type(error).__name__


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

    A preprocessing that knows says so through a method ``box(size)``. Any other is asked by example: it is given a
    picture whose values rise from left to right, one that rises from top to bottom, and a black and a white one to
    calibrate by. What comes out is a straight line over the part that was kept. A preprocessing that is not of that
    kind (random, or not linear) is taken to stretch the whole photo.

    >>> locate(lambda image: torch.zeros(3, 8, 8), (40, 20))
    Box(left=0.0, top=0.0, right=40.0, bottom=20.0)
    """
    known = getattr(preprocess, "box", None)
    if callable(known):
        box: Box = known(size)
        return box
    whole = Box(0.0, 0.0, float(size[0]), float(size[1]))
    horizontal = _extent(preprocess, size, axis=1)
    vertical = _extent(preprocess, size, axis=0)
    if horizontal is None or vertical is None:
        return whole
    return Box(horizontal[0], vertical[0], horizontal[1], vertical[1])


def _extent(preprocess: Preprocess, size: tuple[int, int], axis: int) -> tuple[float, float] | None:
    """Return where the first and the last edge of the model's input lie along an axis of the photo."""
    width, height = size
    length = (height, width)[axis]
    ramp = np.linspace(16, 240, length)  # away from black and white, where resampling would clip
    shape = (height, 1) if axis == 0 else (1, width)
    picture = np.broadcast_to(ramp.reshape(shape).round().astype(np.uint8), (height, width))
    try:
        seen, black, white = (
            preprocess(Image.fromarray(np.ascontiguousarray(values)).convert("RGB")).float()
            for values in (picture, np.zeros_like(picture), np.full_like(picture, 255))
        )
        value = ((seen - black) / (white - black)).mean(0) * 255
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    line = value.mean(1 - axis).numpy()
    position = (line - 16) / (240 - 16) * (length - 1) + 0.5
    steps = np.arange(len(line)) + 0.5
    if len(line) < 2 or not np.isfinite(position).all():
        return None
    slope, start = np.polyfit(steps, position, 1)
    error = np.abs(slope * steps + start - position).max()
    if slope <= 0 or error > max(2.0, 0.03 * length):
        return None
    return float(start), float(start + slope * len(line))
