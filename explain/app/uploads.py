"""Photos that were sent: their pixels are counted before any of them is decoded."""

from __future__ import annotations

import io
from pathlib import PurePosixPath

from PIL import Image

from explain._utils.errors import ImageError, printable, quiet
from explain.app.limits import Limits
from explain.data.images import load_image

NAME = 100  # characters of a file name that are kept


class TooLargeError(ImageError):
    """A photo has more bytes or pixels than the app takes."""


def received(content: bytes, name: str, limits: Limits) -> Image.Image:
    """Decode a photo that was sent, and return it under its name, or say in one line why not.

    Raises:
        TooLargeError: it has too many bytes or pixels; it has not been decoded then.
        ImageError: it is no photo, or damaged.

    >>> received(b"", "cat.jpg", Limits())
    Traceback (most recent call last):
    explain.ImageError: image of 0 bytes is empty (0 bytes); get the file again
    """
    check_bytes(len(content), limits)
    size = _size(content)
    if size is not None and size[0] * size[1] > limits.pixels:
        raise TooLargeError(
            f"photo must have at most {limits.pixels / 1e6:g} megapixels, got {size[0]} x {size[1]}; resize it first"
        )
    picture = load_image(content)
    picture.filename = file_name(name)  # type: ignore[attr-defined]  # what records call it
    return picture


def check_bytes(count: int, limits: Limits) -> None:
    """Refuse more bytes than the app takes."""
    if count > limits.upload:
        raise TooLargeError(
            f"photo must have at most {limits.upload / 2**20:g} MiB, got more; resize it, or save it as JPEG"
        )


def file_name(name: str) -> str:
    r"""The last part of a name, without folders and without what steers a terminal.

    >>> file_name("C:\\photos\\cat.jpg"), file_name("../../etc/passwd"), file_name("/..")
    ('cat.jpg', 'passwd', 'photo')
    """
    last = PurePosixPath(name.replace("\\", "/")).name
    return printable(last)[-NAME:] if last.strip(". ") else "photo"


def _size(content: bytes) -> tuple[int, int] | None:
    """What the header says; None where it cannot be read, which decoding will say better."""
    try:
        with quiet(), Image.open(io.BytesIO(content)) as opened:
            return opened.size
    except Image.DecompressionBombError:
        raise TooLargeError("photo has far too many pixels; resize it first") from None
    except Exception:  # broken files raise nearly anything; decoding says what is wrong
        return None
