"""Images that are too large are refused by their headers, whatever the format, before anything of
them is unpacked."""

from __future__ import annotations

import gzip
import io
import math
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin, features

from explain import ImageError
from explain.data.images import load_image
from explain.data.limits import TooLargeError, tiff_fields
from explain.data.scans import slice_names
from tests.data.test_scans import dicom, grey

SIZE = (40, 30)
PIXELS = math.prod(SIZE)


def encoded(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(SIZE).convert("RGB").save(file, kind, **options)
    return file.getvalue()


def tiff(
    size: tuple[int, int] = SIZE, bands: int = 3, kind: Any = np.float64, form: int = 3, **tags: int
) -> bytes:
    """A TIFF file of zeros, every row of which lies at the same place."""
    width, height = size
    row = bytes(width * bands * np.dtype(kind).itemsize)
    bits = 8 * np.dtype(kind).itemsize
    numbers = {256: width, 257: height, 258: bits, 259: 1, 262: 2 if bands == 3 else 1}
    numbers |= {273: 8, 277: bands, 278: 1, 279: len(row), 339: form}
    counts = {273: height, 279: height, 258: bands, 339: bands}
    start = 8 + len(row)
    far = start + 2 + 12 * (len(numbers) + len(tags)) + 4
    entries, rest = b"", b""
    for tag, number in sorted([*numbers.items(), *((int(name[1:]), tags[name]) for name in tags)]):
        count = counts.get(tag, 1)
        form_of = "H" if tag in (258, 339) else "I"
        packed = struct.pack(f"<{count}{form_of}", *[number] * count).ljust(4, b"\0")
        if len(packed) > 4:
            where = far + len(rest)
            rest += packed
            packed = struct.pack("<I", where)
        entries += struct.pack("<HHI", tag, 3 if form_of == "H" else 4, count) + packed
    directory = struct.pack("<H", len(entries) // 12) + entries + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", start) + row + directory + rest


def scan(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def packed_dicom(path: Path, syntax: str, pixels: np.ndarray, **tags: Any) -> Path:
    """A DICOM file in a compressed transfer syntax; ``tags`` may say of it what is not true."""
    pydicom = pytest.importorskip("pydicom", reason="pydicom is an extra")
    data = pydicom.dcmread(dicom(path, pixels))
    uid = getattr(pydicom.uid, syntax)
    if uid.is_encapsulated:
        data.compress(uid, generate_instance_uid=False)
    data.file_meta.TransferSyntaxUID = uid
    for name, value in tags.items():
        setattr(data, name, value)
    pydicom.dcmwrite(path, data, enforce_file_format=True)
    return path


def heic(folder: Path) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is an extra")
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.linear_gradient("L").resize(SIZE).convert("RGB")).save(file)
    return file.getvalue()


GREYS = np.random.default_rng(0).integers(0, 4096, SIZE[::-1]).astype(np.uint16)
FORMATS: dict[str, Callable[[Path], bytes]] = {
    "png": lambda folder: encoded("PNG"),
    "jpeg": lambda folder: encoded("JPEG"),
    "gif": lambda folder: encoded("GIF"),
    "float tiff": lambda folder: tiff(bands=1),
    "npy": lambda folder: scan(GREYS),
    "heic": heic,
    "dicom": lambda folder: dicom(folder / "a.dcm", GREYS).read_bytes(),
    "deflated dicom": lambda folder: packed_dicom(
        folder / "a.dcm", "DeflatedExplicitVRLittleEndian", GREYS
    ).read_bytes(),
    "rle dicom": lambda folder: packed_dicom(folder / "a.dcm", "RLELossless", GREYS).read_bytes(),
}
FORMATS |= {
    name: lambda folder, name=name: encoded(name)  # type: ignore[misc]
    for name in ("webp", "avif")
    if features.check(name)
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:the values of")
def test_every_format_is_read_within_the_limit_and_refused_beyond_it(
    kind: str, tmp_path: Path
) -> None:
    content = FORMATS[kind](tmp_path)
    assert load_image(content, max_pixels=PIXELS).size == SIZE
    with pytest.raises(TooLargeError, match="40 x 30"):
        load_image(content, max_pixels=PIXELS - 1)


BOMBS: dict[str, Callable[[Path], bytes]] = {
    "strips at one place": lambda folder: tiff((20_000, 20_000)),
    "a width that comes twice": lambda folder: tiff((20_000, 20_000), t256=9, t257=9),
    "bytes of a pixel": lambda folder: tiff((13_000, 13_000), bands=4),
    "a header of numpy": lambda folder: scan(np.zeros((200_001, 1, 2), np.uint8)),
    "rle": lambda folder: packed_dicom(
        folder / "a.dcm", "RLELossless", GREYS, Rows=30_000, Columns=30_000
    ).read_bytes(),
    "rle frames": lambda folder: packed_dicom(
        folder / "a.dcm", "RLELossless", GREYS, NumberOfFrames=99_999, Rows=200, Columns=100
    ).read_bytes(),
    "native frames": lambda folder: dicom(
        folder / "a.dcm", GREYS, NumberOfFrames=2**30
    ).read_bytes(),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_small_files_of_large_images_are_refused_before_they_are_unpacked(
    kind: str, tmp_path: Path
) -> None:
    content = BOMBS[kind](tmp_path)
    assert len(content) < 2e6
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        load_image(content)
    assert tracemalloc.get_traced_memory()[1] < 2e7
    tracemalloc.stop()


def test_what_is_deflated_is_inflated_within_the_limit_only(tmp_path: Path) -> None:
    file = dicom(tmp_path / "a.dcm", GREYS, PatientComments="blank")
    content = file.read_bytes()
    packed = packed_dicom(file, "DeflatedExplicitVRLittleEndian", GREYS).read_bytes()
    start = packed.index(b"1.2.840.10008.1.2.1.99")
    for begin in range(start, start + 400):  # where what is deflated begins
        try:
            plain = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed[begin:])
        except zlib.error:
            continue
        if len(plain) > len(content) // 2:
            break
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = packed[:begin] + deflater.compress(plain + bytes(2**26)) + deflater.flush()
    tracemalloc.start()
    with pytest.raises(TooLargeError, match="unpacked"):
        load_image(bomb, max_pixels=10**6)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_names_of_slices_are_never_more_than_anybody_looks_at(tmp_path: Path) -> None:
    header = io.BytesIO()
    fields = {"descr": "<f4", "fortran_order": False, "shape": (10**9, 4, 4)}
    np.lib.format.write_array_header_1_0(header, fields)
    (tmp_path / "a.npy").write_bytes(header.getvalue())
    files = [tmp_path / "a.npy", dicom(tmp_path / "b.dcm", GREYS, NumberOfFrames=10**9)]
    for file in files:
        assert slice_names(str(file)) == [str(file)]
        with pytest.raises(ImageError):
            load_image(file)


def progressive(scans: int) -> bytes:
    """A progressive JPEG, the last scan of which comes many times."""
    content = encoded("JPEG", progressive=True, quality=95)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * scans + content[-2:]


def packed_fits() -> bytes:
    """The headers of a FITS file whose pixels are packed, and zeros that inflate to 64 MB."""

    def block(cards: dict[str, Any]) -> bytes:
        lines = [f"{name:8}= {value!s:>20}".ljust(80) for name, value in cards.items()]
        return "".join([*lines, "END".ljust(80)]).encode().ljust(2880)

    first = block({"SIMPLE": "T", "BITPIX": 8, "NAXIS": 0})
    of_pixels = {"ZBITPIX": 16, "ZNAXIS": 2, "ZNAXIS1": 4, "ZNAXIS2": 4, "ZCMPTYPE": "'GZIP_1  '"}
    sizes = {"BITPIX": 8, "NAXIS": 2, "NAXIS1": 4, "NAXIS2": 1}
    second = block({"XTENSION": "'BINTABLE'", **sizes, "ZIMAGE": "T", **of_pixels})
    return first + second + bytes(4) + gzip.compress(bytes(2**26))


@pytest.mark.parametrize(
    "content",
    [
        progressive(600),
        b"qoif" + struct.pack(">IIBB", 3000, 3000, 3, 0) + bytes(9),
        packed_fits(),
    ],
    ids=["scans", "decoded in Python", "packed fits"],
)
def test_what_would_take_long_to_decode_is_refused(content: bytes) -> None:
    begin = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(ImageError, match=r"scans|slow|packed"):
        load_image(content)
    assert tracemalloc.get_traced_memory()[1] < 2e7
    tracemalloc.stop()
    assert time.perf_counter() - begin < 2


def test_usual_photos_in_several_scans_are_read() -> None:
    assert load_image(progressive(20)).size == SIZE


@pytest.mark.parametrize("byte_order", ["II", "MM"])
def test_the_numbers_in_a_tiff_file_are_those_that_pillow_reads(byte_order: str) -> None:
    file = io.BytesIO()
    prefix = b"II*\0\0\0\0\0" if byte_order == "II" else b"MM\0*\0\0\0\0"
    tags = TiffImagePlugin.ImageFileDirectory_v2(prefix)
    tags[TiffImagePlugin.IMAGEWIDTH] = 70_000
    tags[TiffImagePlugin.IMAGELENGTH] = 30
    tags.tagtype[TiffImagePlugin.BITSPERSAMPLE] = 3
    tags[TiffImagePlugin.BITSPERSAMPLE] = (16, 16, 16)
    tags[TiffImagePlugin.SAMPLESPERPIXEL] = 3
    tags.save(file)
    assert tiff_fields(file) == {256: 70_000, 257: 30, 258: 16, 277: 3}


def test_a_frame_that_is_within_the_limit_is_decoded_as_it_is(tmp_path: Path) -> None:
    for syntax in ("DeflatedExplicitVRLittleEndian", "RLELossless"):
        file = packed_dicom(tmp_path / "a.dcm", syntax, GREYS)
        plain = dicom(tmp_path / "b.dcm", GREYS)
        assert np.array_equal(grey(file), grey(plain))
