"""Picture files that are wrong in many ways, handed to the command line: what comes of them.

The files are drawn without end from a seed; each is explained, or refused in one line.
"""

from __future__ import annotations

import io
import json
import random
import struct
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain.cli import main
from tests.fuzz.damage import CHANGES

FORMATS = {
    "PNG": (".png", "1 L LA P RGB RGBA I;16"),
    "JPEG": (".jpg", "L RGB CMYK"),
    "GIF": (".gif", "L P RGB"),
    "BMP": (".bmp", "1 L RGB"),
    "TIFF": (".tif", "L LA RGB RGBA I;16 F CMYK"),
    "WEBP": (".webp", "RGB RGBA"),
    "ICO": (".ico", "RGBA"),
    "PPM": (".ppm", "L RGB"),
    "TGA": (".tga", "RGB RGBA"),
}
NAMES = ("", "", "", " and spaces", "\n", "\x1b[2J", "'", "é猫", "%s", "-")
GROUPS = (1, 1, 2, 5, 16)
OPTIONS = ((), (), ("--json",))


@dataclass(frozen=True)
class Case:
    """A file: what was done to which picture; ``is_good`` if it must be explained."""

    number: int
    about: str
    change: str
    content: bytes | None
    """None for a file that is not there."""
    name: str
    is_good: bool = False

    @property
    def token(self) -> str:
        """What the file's name begins with, and nothing else that is printed contains."""
        return f"f{self.number:05d}x"


@lru_cache(maxsize=2)
def pictures(seed: int) -> dict[str, tuple[bytes, str]]:
    """Small pictures in many formats and modes, animated and turned ones among them, and their
    suffixes."""
    draw = np.random.default_rng(seed)
    photo = Image.fromarray(draw.integers(0, 255, (40, 30, 3)).astype(np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    animated = _saved(photo, "GIF", save_all=True, append_images=[photo.rotate(90)])
    of_kinds = {
        "turned JPEG": (_saved(photo, "JPEG", exif=turned), ".jpg"),
        "animated GIF": (animated, ".gif"),
    }
    for kind, (suffix, modes) in FORMATS.items():
        for mode in modes.split():
            size = draw.integers(16, 90, 2)
            image = Image.fromarray(draw.integers(0, 255, (*size, 3)).astype(np.uint8))
            image = image.convert("L") if mode in ("I;16", "F") else image
            of_kinds[f"{kind} {mode}"] = (_saved(image.convert(mode), kind), suffix)
    return of_kinds


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file, with the checksum that belongs to it."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@lru_cache(maxsize=1)
def no_pictures() -> dict[str, bytes]:
    """What is no picture, or says something extreme of itself."""
    lines = zlib.compressobj(9)
    bomb = b"".join(lines.compress(bytes(3751)) for _ in range(30_000)) + lines.flush()
    not_finite = Image.fromarray(np.full((20, 20), np.nan, np.float32))
    return {
        "empty": b"",
        "zeros": bytes(4096),
        "a page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>',
        "PDF": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\ntrailer\n<<>>\n%%EOF\n",
        "LFS": b"version https://git-lfs.github.com/spec/v1\n",
        "GIF magic": b"GIF89a",
        "JPEG ends": b"\xff\xd8\xff\xd9",
        "bomb": png(30_000, 30_000, 1, bomb),
        "larger than its data": png(2**31 - 1, 2**31 - 1, 8, zlib.compress(bytes(90))),
        "no pixels": png(0, 9, 8, zlib.compress(bytes(90))),
        "NaN": _saved(not_finite, "TIFF"),
    }


def cases(seed: int) -> Iterator[Case]:
    """Yield files for ever; each depends on the seed and its own number alone."""
    originals = pictures(seed)
    kinds = [*CHANGES, "unchanged", "wrong suffix", "no picture", "missing"]
    for number in count():
        draw = random.Random(f"{seed} {number}")
        kind = kinds[number % len(kinds)]  # in turn, so that also a small run has each of them
        about = draw.choice([*originals])
        content: bytes | None = originals[about][0]
        suffix = originals[about][1]
        if kind in CHANGES:
            content = CHANGES[kind](draw, originals[about][0])
        elif kind == "wrong suffix":
            suffix = draw.choice((".png", ".txt", "", ".jpg.exe"))
        elif kind == "no picture":
            about = draw.choice(sorted(no_pictures()))
            content = no_pictures()[about]
        elif kind == "missing":
            content = None
        name = f"f{number:05d}x{draw.choice(NAMES)}{suffix}"
        yield Case(number, about, kind, content, name, kind in ("unchanged", "wrong suffix"))


@dataclass
class Summary:
    """How many files of each kind were explained and refused, and what was wrong with calls."""

    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def count(self, result: str) -> int:
        return sum(number for (_, what), number in self.results.items() if what == result)


def fuzz(number: int, seed: int) -> Summary:
    """Hand files to the command line, some alone and some together."""
    draw = random.Random(f"groups {seed}")
    stream = islice(cases(seed), number)
    summary = Summary()
    while group := list(islice(stream, draw.choice(GROUPS))):
        problems, refused = check(group, draw.choice(OPTIONS))
        for case in group:
            result = "refused" if case in refused else "explained"
            summary.results[case.change, result] += 1
        summary.failures += [f"{problem} {[vars(case) for case in group]}" for problem in problems]
    return summary


def check(group: Sequence[Case], options: Sequence[str] = ()) -> tuple[list[str], list[Case]]:
    """Call the command line with some files; return what is wrong with all that it printed, wrote
    and left, and which files it refused."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "in"
        output = Path(name) / "out"
        folder.mkdir()
        for case in group:
            if case.content is not None:
                (folder / case.name).write_bytes(case.content)
        paths = [str(folder / case.name) for case in group]
        printed = io.StringIO()
        said = io.StringIO()
        try:
            with redirect_stdout(printed), redirect_stderr(said):
                code = main([*options, *paths, "--output", str(output), "--model", "tiny"])
        except BaseException:  # whatever comes out is what we look for
            return [traceback.format_exc()], []
        lines = said.getvalue().splitlines()
        complaints = [line for line in lines if line.startswith("explain: ")]
        refused = [case for case in group if any(case.token in line for line in complaints)]
        problems = list(_printed(group, options, printed.getvalue(), lines))
        if code != (1 if complaints else 0):
            problems.append(f"exit code {code} with {len(complaints)} complaints")
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        if files != {case.name: case.content for case in group if case.content is not None}:
            problems.append("the files handed over were altered")
        problems += _written([case for case in group if case not in refused], output)
    return problems, refused


def _printed(
    group: Sequence[Case], options: Sequence[str], printed: str, lines: Sequence[str]
) -> Iterator[str]:
    """One clear line for each file that was refused, and nothing else that looks like an error."""
    for line in [*lines, *("" if options else printed).split("\n")]:
        if "Traceback" in line or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in line):
            yield f"printed {line!r}"
    odd = [line for line in lines if not line.startswith(("explain: ", "note: "))]
    if odd:
        yield f"standard error has {odd[0]!r}"
    for case in group:
        complaints = [ln for ln in lines if ln.startswith("explain: ") and case.token in ln]
        most = 0 if case.is_good else 1
        if len(complaints) > most or any(len(line) > 1500 for line in complaints):
            yield f"said {complaints} of {case.about}"
    if options:
        document = _strict(printed)
        if len(document["results"]) + len(document["errors"]) != len(group):
            yield "the JSON document does not account for every file"


def _strict(text: str) -> Any:
    """Read JSON as others do, who know no NaN."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


READERS: dict[str, Callable[[Path], Any]] = {
    ".png": lambda path: np.asarray(Image.open(path)),
    ".npy": lambda path: np.load(path, allow_pickle=False),
    ".json": lambda path: bool(_strict(path.read_text("utf-8"))),
}


def _written(explained: Sequence[Case], output: Path) -> Iterator[str]:
    """Every file that was explained has all of its results, and these are whole; a refused one has
    none."""
    paths = sorted(output.iterdir()) if output.exists() else []
    expected = Counter((case.token, suffix) for case in explained for suffix in READERS)
    if Counter((path.name[:7], path.suffix) for path in paths) != expected:
        yield f"wrote {[path.name for path in paths]}"
    for path in paths:
        try:
            assert np.isfinite(READERS[path.suffix](path)).all()
        except Exception as error:  # whatever its reader raises, the file is not whole
            yield f"{path.name} is not whole: {error!r}"
