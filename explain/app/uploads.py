"""The limits of the app, and uploaded photos: their pixels are counted before any of them is decoded."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import PurePosixPath

from PIL import Image

from explain._utils.errors import ImageError, printable, quiet
from explain.data.images import load_image

NAME_LENGTH = 100  # characters of a file name that stay


@dataclass(frozen=True)
class Limits:
    """Bounds that keep one visitor from using up the machine.

    ``upload`` is the largest number of bytes of a photo and ``pixels`` its largest number of pixels, both checked
    before it is decoded. ``photos`` and ``kept_pixels`` limit the photos in memory and their pixels together;
    ``explanations`` and ``kept_values`` limit the answers in memory and the values of their maps together. All of these
    expire after ``age`` seconds without use. ``waiting`` requests may wait for a model. A request has at most ``body``
    bytes, ``methods`` methods and ``targets`` targets, and a slow method may take ``seconds``.

    >>> Limits().upload
    33554432
    """

    upload: int = 32 * 2**20
    pixels: int = 50_000_000
    photos: int = 64
    kept_pixels: int = 200_000_000
    explanations: int = 48
    kept_values: int = 100_000_000
    age: float = 3600.0
    waiting: int = 64
    body: int = 64 * 2**10
    methods: int = 16
    targets: int = 8
    seconds: float = 120.0


class TooLargeError(ImageError):
    """A photo has more bytes or pixels than the app takes."""


def decode_upload(content: bytes, name: str, limits: Limits) -> Image.Image:
    """Decode an uploaded photo, and return it under its name.

    Raises:
        TooLargeError: it has too many bytes or pixels; it has not been decoded then.
        ImageError: it is no photo, or damaged.

    >>> decode_upload(b"", "cat.jpg", Limits())
    Traceback (most recent call last):
    explain.ImageError: image of 0 bytes is empty (0 bytes); get the file again
    """
    check_bytes(len(content), limits)
    try:
        with quiet(), Image.open(io.BytesIO(content)) as header:
            width, height = header.size
    except Image.DecompressionBombError:
        raise TooLargeError("photo has far too many pixels; resize it first") from None
    except Exception:  # broken files raise nearly anything; `load_image` says what is wrong
        width = height = 0
    if width * height > limits.pixels:
        raise TooLargeError(
            f"photo must have at most {limits.pixels / 1e6:g} megapixels, got {width} x {height}; resize it first"
        )
    photo = load_image(content)
    photo.filename = file_name(name)  # type: ignore[attr-defined]  # the name in records
    return photo


def check_bytes(count: int, limits: Limits) -> None:
    """Refuse a photo of more bytes than the app takes."""
    if count > limits.upload:
        raise TooLargeError(
            f"photo must have at most {limits.upload / 2**20:g} MiB, got more; resize it, or save it as JPEG"
        )


def file_name(name: str) -> str:
    r"""Return the last part of a path, without control characters.

    >>> file_name("C:\\photos\\cat.jpg"), file_name("../../etc/passwd"), file_name("/..")
    ('cat.jpg', 'passwd', 'photo')
    """
    last = PurePosixPath(name.replace("\\", "/")).name
    return printable(last)[-NAME_LENGTH:] if last.strip(". ") else "photo"
