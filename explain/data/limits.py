"""How large images may be, asked of their headers before anything is unpacked."""

import struct
import zlib
from dataclasses import dataclass
from typing import Any

from explain._utils.errors import ImageError

MAX_PIXELS = 178_956_970  # where Pillow itself calls a file a decompression bomb
MAX_SIDE = 500_000  # pixels; captions are at least 260 wide, which costs most below thin photos
MAX_SLICES = 100_000
SLOW_PIXELS = 4_000_000  # of formats that Pillow decodes in Python, for a second or two
MAX_SCANS = 500  # of a progressive JPEG, which has about ten; each may cost a pass over all pixels
BYTES = 8  # of a pixel that is unpacked, at the most pixels


class TooLargeError(ImageError):
    """An image has more pixels or bytes than are read."""


@dataclass(frozen=True)
class Limit:
    """The most pixels that an image may have, and with them the most bytes that it may unpack
    to."""

    pixels: int = MAX_PIXELS

    def check(self, name: str, width: int, height: int, unpacked: float = 0) -> None:
        """Refuse an image by the size that its header says, and by the bytes that all of it would
        take once ``unpacked``; ``name`` is what messages call it.
        """
        size = f"image {name} is {width} x {height}"
        if width * height > self.pixels:
            raise TooLargeError(f"{size}, over {self.pixels // 10**6} megapixels; resize it first")
        if max(width, height) > MAX_SIDE:
            raise TooLargeError(f"{size}, over {MAX_SIDE} pixels long; cut it into pieces first")
        if width < 1 or height < 1:
            raise ImageError(
                f"image {name} must have at least one pixel, got {width} x {height}; get the file "
                "again"
            )
        self.check_bytes(name, unpacked)

    def check_bytes(self, name: str, unpacked: float) -> None:
        """Refuse an image that would take so many bytes once it is ``unpacked``."""
        if unpacked > BYTES * self.pixels:
            raise TooLargeError(
                f"image {name} would take over {BYTES * self.pixels // 2**20} MiB once unpacked; "
                "cut it into pieces first"
            )

    def check_slices(self, name: str, count: int) -> None:
        """Refuse a file that says that it has more slices than anybody looks at."""
        if count > MAX_SLICES:
            raise TooLargeError(
                f"image {name} has over {MAX_SLICES} slices; cut it into pieces first"
            )

    def check_deflated(self, name: str, content: bytes) -> None:
        """Refuse raw deflated ``content`` that would inflate to too much: no more than a part of it
        is inflated at a time."""
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        total = 0
        while content and not inflater.eof:
            total += len(inflater.decompress(content, 2**20))
            self.check_bytes(name, total)
            content = inflater.unconsumed_tail


def tiff_fields(file: Any) -> dict[int, int]:
    """The numbers in an open TIFF file's first directory, by tag: the first of several values, the
    largest of a tag that comes twice, as readers differ in which they take.
    """
    file.seek(0)
    order = {b"II": "<", b"MM": ">"}[file.read(2)]
    _, start = struct.unpack(f"{order}HI", file.read(6))
    file.seek(start)
    (count,) = struct.unpack(f"{order}H", file.read(2))
    fields: dict[int, int] = {}
    entries = file.read(12 * count)
    entries = entries[: len(entries) // 12 * 12]  # of a file that is cut off
    for tag, kind, length, value in struct.iter_unpack(f"{order}HHI4s", entries):
        number_format = {3: f"{order}H", 4: f"{order}I"}.get(kind)  # of 16 and of 32 bits
        if number_format is None:
            continue
        # values that do not fit into the entry lie elsewhere, and it says where
        if length * struct.calcsize(number_format) > len(value):
            (place,) = struct.unpack(f"{order}I", value)
            file.seek(place)
            value = file.read(4)
        if len(value) == 4:
            (number,) = struct.unpack_from(number_format, value)
            fields[tag] = max(number, fields.get(tag, 0))
    return fields
