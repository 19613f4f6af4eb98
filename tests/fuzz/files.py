"""Image files that are wrong in every way there is: a seeded generator, without end, of what people
may hand over.

>>> from itertools import islice
>>> [case.mutation for case in islice(cases(seed=0), 3)] == [
...     case.mutation for case in islice(cases(seed=0), 3)
... ]
True
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.fuzz.pictures import SUFFIXES, Picture, chunk, pictures

Pictures = Sequence[Picture]
Made = tuple[str, bytes, str]  # what it was made of, the content, and the suffix of the file's name
Mutation = Callable[[random.Random, Pictures], Made]
Place = Callable[[random.Random, Path, str, bytes, str], "Path | str"]

MUTATIONS: dict[str, Mutation] = {}
PLACES: dict[str, Place] = {}
EXTREMES = (0, 1, 2, 127, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1)
PLAIN = 0.75  # share of the files whose names have nothing odd


@dataclass(frozen=True)
class Case:
    """One file: its number, what was done to which picture, and where it lies."""

    number: int
    picture: str
    mutation: str
    place: str
    content: bytes
    suffix: str
    seed: str

    @property
    def token(self) -> str:
        """What the file's name begins with, and nothing else that is printed contains."""
        return f"f{self.number:05d}x"

    @property
    def good(self) -> bool:
        """Whether it is a photo like any other, that must be explained."""
        drawing = self.picture.startswith("EPS")
        return (
            self.mutation in ("unchanged", "wrong_suffix") and self.place in FOUND and not drawing
        )

    def write(self, folder: Path) -> str:
        """Put the file into a folder; return what to give to the command line."""
        return str(
            PLACES[self.place](
                random.Random(self.seed), folder, self.token, self.content, self.suffix
            )
        )

    def __str__(self) -> str:
        return f"{self.token}: {self.picture}, {self.mutation}, {self.place} ({self.seed})"


def cases(seed: int) -> Iterator[Case]:
    """Yield files for ever; each depends on the seed and its own number alone."""
    originals = _pictures(seed)
    names = sorted(MUTATIONS)
    number = 0
    while True:
        draw = random.Random(f"{seed} {number}")
        # All mutations take turns, so that also a small run has each of them.
        mutation = names[number % len(names)]
        about, content, suffix = MUTATIONS[mutation](draw, originals)
        place = "plain" if draw.random() < PLAIN else draw.choice(sorted(PLACES))
        yield Case(number, about, mutation, place, content, suffix, f"{seed} {number}")
        number += 1


@lru_cache(maxsize=2)
def _pictures(seed: int) -> Pictures:
    return pictures(seed)


def mutation(function: Mutation) -> Mutation:
    """Enter a mutation in the table under its own name."""
    MUTATIONS[function.__name__] = function
    return function


Change = Callable[[random.Random, bytes], bytes]


def of_bytes(change: Change, name: str = "", formats: Sequence[str] = tuple(SUFFIXES)) -> Change:
    """Enter a mutation that takes the bytes of a picture, in any format or in some."""

    def mutated(draw: random.Random, originals: Pictures) -> Made:
        original = draw.choice([each for each in originals if each.format in formats])
        return original.about, change(draw, original.content), original.suffix

    MUTATIONS[name or change.__name__] = mutated
    return change


def of_format(*formats: str) -> Callable[[Change], Change]:
    """Enter a mutation that takes the bytes of pictures in some formats."""
    return lambda change: of_bytes(change, formats=formats)


# What happens to files on the way


def _flipped(draw: random.Random, content: bytes, end: int) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5, 20, 200))):
        changed[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _range(draw: random.Random, content: bytes) -> tuple[bytes, bytes, bytes]:
    """What is before a range, in it and behind it."""
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice((1, 4, 30, 500, 10_000)))
    return content[:start], content[start:end], content[end:]


def _of_range(change: Callable[[random.Random, bytes], bytes]) -> Change:
    def changed(draw: random.Random, content: bytes) -> bytes:
        before, inside, behind = _range(draw, content)
        return before + change(draw, inside) + behind

    return changed


def _halves(draw: random.Random, content: bytes) -> bytes:
    middle = draw.randrange(len(content))
    return content[middle:] + content[:middle]


ON_THE_WAY: dict[str, Change] = {
    "unchanged": lambda draw, content: content,
    "cut_short": lambda draw, content: content[: draw.randrange(1, len(content))],
    "cut_near_the_end": lambda draw, content: content[
        : -draw.randint(1, min(40, len(content) - 1))
    ],
    "cut_in_the_header": lambda draw, content: content[: draw.randint(1, 64)],
    "cut_at_the_start": lambda draw, content: content[draw.randint(1, 64) :],
    "flip_bits": lambda draw, content: _flipped(draw, content, len(content)),
    "flip_bits_of_the_header": lambda draw, content: _flipped(
        draw, content, min(len(content), 100)
    ),
    "zero_a_range": _of_range(lambda draw, inside: bytes(len(inside))),
    "repeat_a_range": _of_range(lambda draw, inside: inside * draw.randint(2, 4)),
    "insert_noise": _of_range(lambda draw, inside: draw.randbytes(len(inside)) + inside),
    "overwrite_with_noise": _of_range(lambda draw, inside: draw.randbytes(len(inside))),
    "delete_a_range": _of_range(lambda draw, inside: b""),
    "swap_the_halves": _halves,
    "append_garbage": lambda draw, c: (
        c + draw.choice((b"\0", b"\r\n", b"<html>", c)) * draw.randint(1, 50)
    ),
    "change_line_ends": lambda draw, c: c.replace(
        *draw.choice(((b"\n", b"\r\n"), (b"\r\n", b"\n"), (b"\r", b"")))
    ),
    "decode_as_text": lambda draw, c: c.decode(
        draw.choice(("utf-8", "latin-1", "ascii")), "replace"
    ).encode(),
}
for _name, _change in ON_THE_WAY.items():
    of_bytes(_change, _name)


# Files that are not what they say


@mutation
def wrong_suffix(draw: random.Random, originals: Pictures) -> Made:
    original = draw.choice(originals)
    return (
        original.about,
        original.content,
        draw.choice([*SUFFIXES.values(), "", ".txt", ".PNG", ".jpg.exe", "."]),
    )


@mutation
def magic_of_another(draw: random.Random, originals: Pictures) -> Made:
    original = draw.choice(originals)
    other = draw.choice(originals)
    size = draw.choice((2, 4, 8, 12, 16))
    return (
        f"{original.about} as {other.about}",
        other.content[:size] + original.content[size:],
        other.suffix,
    )


@mutation
def header_of_another(draw: random.Random, originals: Pictures) -> Made:
    original = draw.choice(originals)
    other = draw.choice(originals)
    cut = draw.randint(16, 300)
    return (
        f"{other.about} then {original.about}",
        other.content[:cut] + original.content[cut:],
        other.suffix,
    )


@mutation
def two_files_in_one(draw: random.Random, originals: Pictures) -> Made:
    first = draw.choice(originals)
    second = draw.choice(originals)
    return f"{first.about} and {second.about}", first.content + second.content, first.suffix


@mutation
def no_image_at_all(draw: random.Random, originals: Pictures) -> Made:
    about = draw.choice(sorted(OTHERS))
    return about, OTHERS[about], draw.choice((".png", ".jpg", ".gif", ".tif", ".webp", ".bmp"))


@mutation
def noise(draw: random.Random, originals: Pictures) -> Made:
    return (
        "noise",
        draw.randbytes(draw.choice((1, 2, 7, 64, 1000, 50_000))),
        draw.choice([*SUFFIXES.values()]),
    )


@mutation
def magic_and_noise(draw: random.Random, originals: Pictures) -> Made:
    original = draw.choice(originals)
    content = original.content[: draw.choice((4, 8, 12, 26))] + draw.randbytes(
        draw.choice((0, 9, 200, 5000))
    )
    return original.about, content, original.suffix


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("photo.png", b"no photo")
    return buffer.getvalue()


def _bomb() -> bytes:
    """A picture of 30,000 x 30,000 pixels in a hundred kilobytes, and nothing wrong with it but its
    size."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0)
    pack = zlib.compressobj(9)
    lines = b"".join(pack.compress(bytes(3751)) for _ in range(30_000)) + pack.flush()
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    )


def _text_bomb() -> bytes:
    header = struct.pack(">IIBBBBB", 9, 9, 8, 0, 0, 0, 0)
    text = b"Comment\0\0" + zlib.compress(bytes(200_000_000 // 8), 9)
    body = chunk(b"zTXt", text) * 8 + chunk(b"IDAT", zlib.compress(bytes(90))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body


OTHERS = {
    "empty": b"",
    "one zero": b"\0",
    "many zeros": bytes(4096),
    "a word": b"hello",
    "a newline": b"\n",
    "JSON": b'{"image": "none"}',
    "a page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>',
    "ZIP": _zip(),
    "PDF": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\ntrailer\n<<>>\n%%EOF\n",
    "script": b"#!/bin/sh\nexit 0\n",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) print\n%%EOF\n",
    "WMF": b"\xd7\xcd\xc6\x9a\0\0"
    + struct.pack("<4hH", 0, 0, 99, 99, 96)
    + bytes(6)
    + b"\1\0\x09\0"
    + bytes(40),
    "GRIB": b"GRIB\0\0\0\1" + bytes(60),
    "BUFR": b"BUFR" + bytes(60),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(60),
    "MPEG": b"\0\0\1\xb3" + b"\x14\0\xf0\x13" + bytes(60),
    "LFS": b"version https://git-lfs.github.com/spec/v1\n",
    "bomb": _bomb(),
    "bomb in a comment": _text_bomb(),
    "GIF magic": b"GIF89a",
    "JPEG ends": b"\xff\xd8\xff\xd9",
    "NumPy": b"\x93NUMPY\1\0\x76\0{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }\n"
    + bytes(24),
}


# Fields that say something extreme


@mutation
def extreme_size(draw: random.Random, originals: Pictures) -> Made:
    """Overwrite width or height (or both) where the format keeps them; the checksum is right again
    afterwards."""
    original = draw.choice([p for p in originals if p.format in SIZES])
    content = original.content
    for axis in draw.choice(((0,), (1,), (0, 1))):
        content = SIZES[original.format](content, axis, draw.choice(EXTREMES))
    return original.about, content, original.suffix


def _put(content: bytes, place: int, form: str, value: int) -> bytes:
    size = struct.calcsize(form)
    if not 0 <= place <= len(content) - size:
        return content
    return content[:place] + struct.pack(form, value & (256**size - 1)) + content[place + size :]


def _fixed(form: str, *places: int) -> Callable[[bytes, int, int], bytes]:
    return lambda content, axis, value: _put(content, places[axis], form, value)


def _size_of_png(content: bytes, axis: int, value: int) -> bytes:
    return _checked(_put(content, 16 + 4 * axis, ">I", value))


def _checked(content: bytes) -> bytes:
    """Make the checksum of a PNG's header right."""
    return _put(content, 29, ">I", zlib.crc32(content[12:29]))


def _size_of_jpeg(content: bytes, axis: int, value: int) -> bytes:
    found = re.search(rb"\xff[\xc0-\xc2]\x00[\x0b-\x14]", content)
    return content if found is None else _put(content, found.start() + 7 - 2 * axis, ">H", value)


def _size_of_tiff(content: bytes, axis: int, value: int) -> bytes:
    found = re.search(rb"%c\x01[\x03\x04]\x00\x01\x00\x00\x00" % axis, content)
    return content if found is None else _put(content, found.start() + 8, "<I", value)


def _size_of_ppm(content: bytes, axis: int, value: int) -> bytes:
    words = content.split(None, 3)
    words[1 + axis] = str(value).encode()
    return b"\n".join(words)


SIZES: dict[str, Callable[[bytes, int, int], bytes]] = {
    "PNG": _size_of_png,
    "JPEG": _size_of_jpeg,
    "MPO": _size_of_jpeg,
    "TIFF": _size_of_tiff,
    "PPM": _size_of_ppm,
    "GIF": _fixed("<H", 6, 8),
    "BMP": _fixed("<I", 18, 22),
    "DIB": _fixed("<I", 4, 8),
    "TGA": _fixed("<H", 12, 14),
    "PCX": _fixed("<H", 8, 10),
    "SGI": _fixed(">H", 6, 8),
    "DDS": _fixed("<I", 16, 12),
    "ICO": _fixed("B", 6, 7),
    "QOI": _fixed(">I", 4, 8),
    "MSP": _fixed("<H", 4, 6),
    "SPIDER": _fixed(">I", 44, 4),
    "BLP": _fixed("<I", 12, 16),
    "JPEG2000": _fixed(">I", 52, 48),
}


@of_bytes
def extreme_number_in_the_header(draw: random.Random, content: bytes) -> bytes:
    """Overwrite any two, four or eight bytes near the start."""
    form = draw.choice(("<H", ">H", "<I", ">I", "<Q"))
    return _put(content, draw.randrange(4, 120), form, draw.choice((*EXTREMES, 2**64 - 1)))


@of_format("PNG")
def odd_png_header(draw: random.Random, content: bytes) -> bytes:
    """Overwrite depth, colour type, compression, filter or interlacing."""
    return _checked(
        _put(content, draw.randint(24, 28), "B", draw.choice((0, 1, 2, 3, 4, 6, 7, 16, 255)))
    )


@of_format("JPEG", "TIFF", "WEBP", "PNG", "AVIF")
def broken_exif(draw: random.Random, content: bytes) -> bytes:
    """Flip bits only in what comes right behind the magic of a TIFF directory."""
    found = [m.start() for m in re.finditer(rb"II\*\0|MM\0\*", content)]
    if not found:
        return content
    start = draw.choice(found) + 4
    tags = content[start : start + 60]
    return content[:start] + _flipped(draw, tags, len(tags)) + content[start + 60 :]


# Parts that are dropped, repeated or out of order


def _chunks(content: bytes) -> list[bytes]:
    """Cut a PNG file into its chunks."""
    parts = []
    place = 8
    while place + 12 <= len(content):
        size = 12 + int.from_bytes(content[place : place + 4], "big")
        parts.append(content[place : place + size])
        place += size
    return parts


def _with_chunks(change: Callable[[random.Random, list[bytes]], object]) -> Change:
    def changed(draw: random.Random, content: bytes) -> bytes:
        parts = _chunks(content)
        change(draw, parts)
        return content[:8] + b"".join(parts)

    return changed


for _name, _of_parts in {
    "png_chunks_out_of_order": lambda draw, parts: draw.shuffle(parts),
    "png_chunk_twice": lambda draw, parts: parts.insert(
        draw.randrange(len(parts)), draw.choice(parts)
    ),
    "png_chunk_missing": lambda draw, parts: parts.pop(draw.randrange(len(parts))),
}.items():
    of_bytes(_with_chunks(_of_parts), _name, ["PNG"])


@of_format("PNG")
def png_chunk_with_odd_data(draw: random.Random, content: bytes) -> bytes:
    """Put in a chunk whose checksum is right and whose data make no sense."""
    kinds = (
        b"tRNS",
        b"PLTE",
        b"gAMA",
        b"cHRM",
        b"iCCP",
        b"eXIf",
        b"pHYs",
        b"zTXt",
        b"iTXt",
        b"acTL",
        b"fcTL",
        b"sRGB",
    )
    parts = _chunks(content)
    data = draw.choice(
        (b"", b"\0", bytes(13), draw.randbytes(1), draw.randbytes(30), draw.randbytes(700))
    )
    parts.insert(draw.randint(1, len(parts) - 1), chunk(draw.choice(kinds), data))
    return content[:8] + b"".join(parts)


@of_format("JPEG", "MPO")
def jpeg_segments_out_of_order(draw: random.Random, content: bytes) -> bytes:
    """Move, drop or repeat the segments before the pixels."""
    parts = []
    place = 2
    while content[place : place + 1] == b"\xff" and content[place + 1] != 0xDA and len(parts) < 50:
        size = 2 + int.from_bytes(content[place + 2 : place + 4], "big")
        parts.append(content[place : place + size])
        place += size
    change = draw.randrange(3)
    if change == 0:
        draw.shuffle(parts)
    elif change == 1:
        parts.append(draw.choice(parts))
    else:
        del parts[draw.randrange(len(parts))]
    return content[:2] + b"".join(parts) + content[place:]


# Where files lie, and what they are called


def place(function: Place) -> Place:
    """Enter a place in the table under its own name."""
    PLACES[function.__name__] = function
    return function


def _named(form: str) -> Place:
    """Return a place that only has an odd name; where the file system refuses it, the plain one is
    used."""

    def put(draw: random.Random, folder: Path, token: str, content: bytes, suffix: str) -> Path:
        path = folder / (form.format(token=token) + suffix)
        try:
            path.write_bytes(content)
        except OSError as error:
            if error.errno not in (errno.EILSEQ, errno.EINVAL, errno.EPERM):
                raise
            path = folder / (token + suffix)
            path.write_bytes(content)
        return path

    return put


PLACES |= {
    name: _named(form)
    for name, form in {
        "plain": "{token}",
        "spaces": " {token}  of  a photo ",
        "other scripts": "{token}-Käse-猫-كلب-🐈",
        "decomposed": "{token}-cafe\u0301",
        "new lines": "{token}\nsecond line\r\n",
        "control": "{token}\x1b[31m\a\t\b",
        "no characters": "{token}-\udce9\udcff",
        "format": "{token}-%s-%d-{{0}}-{{x}}",
        "quotes": "{token}'\"`$HOME\\",
        "dashes": "--{token}",
        "hidden": ".{token}",
        "dots": "{token}...",
        "long": "{token}" + "x" * 230,
        "wide": "{token}" + "猫" * 70,
        "right to left": "{token}\u202egpj",
        "separators": "{token}\u2028\u2029\x85",
        "part": ".{token}.part",
    }.items()
}
FOUND = frozenset([*PLACES, "link", "above"])


@place
def link(draw: random.Random, folder: Path, token: str, content: bytes, suffix: str) -> Path:
    (folder / "elsewhere").mkdir(exist_ok=True)
    (folder / "elsewhere" / token).write_bytes(content)
    path = folder / f"{token}{suffix}"
    path.symlink_to(Path("elsewhere") / token)
    return path


@place
def above(draw: random.Random, folder: Path, token: str, content: bytes, suffix: str) -> Path:
    (folder / "deeper").mkdir(exist_ok=True)
    (folder / f"{token}{suffix}").write_bytes(content)
    return folder / "deeper" / ".." / f"{token}{suffix}"


@place
def broken_link(draw: random.Random, folder: Path, token: str, content: bytes, suffix: str) -> Path:
    path = folder / f"{token}.png"
    path.symlink_to(draw.choice(("nowhere.png", path.name, "/dev/null", "nowhere/at/all")))
    return path


@place
def missing(draw: random.Random, folder: Path, token: str, content: bytes, suffix: str) -> Path:
    return folder / draw.choice(
        (f"{token}.png", f"none/{token}.png", token + "x" * 300, f"{token}/../{token}.png")
    )


@place
def below_a_file(
    draw: random.Random, folder: Path, token: str, content: bytes, suffix: str
) -> Path:
    (folder / f"{token}{suffix}").write_bytes(content)
    return folder / f"{token}{suffix}" / "photo.png"


@place
def empty_folder(
    draw: random.Random, folder: Path, token: str, content: bytes, suffix: str
) -> Path:
    (folder / f"{token}.png").mkdir()
    return folder / f"{token}.png"


@place
def folder_with_a_file(
    draw: random.Random, folder: Path, token: str, content: bytes, suffix: str
) -> Path:
    (folder / f"{token}.png").mkdir()
    (folder / f"{token}.png" / f"{token}.jpg").write_bytes(content)
    return folder / f"{token}.png"


@place
def forbidden(draw: random.Random, folder: Path, token: str, content: bytes, suffix: str) -> Path:
    path = folder / f"{token}{suffix}"
    path.write_bytes(content)
    with suppress(OSError):
        os.chmod(path, 0)  # which does not stop root
    return path


@place
def address(draw: random.Random, folder: Path, token: str, content: bytes, suffix: str) -> str:
    return f"https://{token}.example/photo{suffix}"
