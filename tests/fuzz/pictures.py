"""Small pictures in every format and mode that Pillow writes, made on the spot: what the mutations
start from."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

ASSETS = Path(__file__).resolve().parents[2] / "assets"
SUFFIXES = {
    "AVIF": ".avif",
    "BLP": ".blp",
    "BMP": ".bmp",
    "CUR": ".cur",
    "DDS": ".dds",
    "DIB": ".dib",
    "EPS": ".eps",
    "GIF": ".gif",
    "ICNS": ".icns",
    "ICO": ".ico",
    "IM": ".im",
    "JPEG": ".jpg",
    "JPEG2000": ".jp2",
    "MPO": ".mpo",
    "MSP": ".msp",
    "PCX": ".pcx",
    "PNG": ".png",
    "PPM": ".ppm",
    "QOI": ".qoi",
    "SGI": ".sgi",
    "SPIDER": ".spi",
    "TGA": ".tga",
    "TIFF": ".tif",
    "WEBP": ".webp",
    "XBM": ".xbm",
    "XPM": ".xpm",
}
ORIENTATIONS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 99, 65535)  # those from 1 to 8 mean something
# what Pillow raises where a codec was left out
UNSUPPORTED = (OSError, KeyError, ValueError, AttributeError)


@dataclass(frozen=True)
class Picture:
    """A file that is right: what is in it, its format, and its content."""

    about: str
    format: str
    content: bytes

    @property
    def suffix(self) -> str:
        return SUFFIXES[self.format]


def pictures(seed: int) -> list[Picture]:
    """Return pictures of random content and size (8 to 120 pixels), in every format and mode at
    hand."""
    draw = random.Random(f"pictures {seed}")
    found: list[Picture] = []
    for about, format, make in _recipes(draw):
        with suppress(*UNSUPPORTED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats that Pillow is about to give up
            found.append(Picture(f"{format} {about}", format, make()))
    return found


def _recipes(draw: random.Random) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yield what is special about a picture, its format, and a function that makes the file."""
    for format, modes in {
        "PNG": "1 L LA P RGB RGBA I;16",
        "JPEG": "L RGB CMYK YCbCr",
        "GIF": "1 L P RGB RGBA",
        "BMP": "1 L P RGB RGBA",
        "TIFF": "1 L LA P PA RGB RGBA I I;16 I;16B F CMYK YCbCr LAB",
        "WEBP": "L RGB RGBA",
        "AVIF": "L RGB RGBA",
        "ICO": "1 L P RGB RGBA",
        "ICNS": "RGBA",
        "PPM": "1 L RGB I F",
        "TGA": "1 L LA P RGB RGBA",
        "PCX": "1 L P RGB",
        "SGI": "L RGB RGBA",
        "DDS": "L LA RGB RGBA",
        "JPEG2000": "L LA RGB RGBA I;16",
        "DIB": "L RGB",
        "IM": "1 L P RGB I F CMYK YCbCr",
        "MSP": "1",
        "QOI": "RGB RGBA",
        "SPIDER": "F",
        "XBM": "1",
        "BLP": "P",
        "EPS": "L RGB",
    }.items():
        for mode in modes.split():
            yield (
                mode,
                format,
                lambda format=format, mode=mode: saved(in_mode(picture(draw), mode), format),
            )
    yield from _special_png(draw)
    yield from _special_jpeg(draw)
    yield from _special_tiff(draw)
    yield from _special_rest(draw)


def _special_png(draw: random.Random) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    text = PngImagePlugin.PngInfo()
    text.add_text("Title", "a picture")
    text.add_text("Comment", "long " * 200, zip=True)
    text.add_itxt("Author", "Zoë 猫", lang="en", tkey="Author")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for about, mode, options in (
        ("text", "RGB", {"pnginfo": text}),
        ("profile", "RGB", {"icc_profile": profile}),
        ("clear colour", "RGB", {"transparency": (10, 20, 30)}),
        ("clear grey", "L", {"transparency": 17}),
        ("clear entry", "P", {"transparency": 3}),
        ("clear entries", "P", {"transparency": bytes(range(0, 200, 7))}),
        ("2 bits", "P", {"bits": 2}),
        ("orientation", "RGB", {"exif": exif(6)}),
        ("resolution", "L", {"dpi": (72, 72)}),
    ):
        yield (
            about,
            "PNG",
            lambda mode=mode, options=options: saved(
                in_mode(picture(draw), mode), "PNG", **options
            ),
        )
    yield "animated", "PNG", lambda: animation(draw, "PNG")
    yield "interlaced", "PNG", lambda: written_png(draw, interlaced=True)
    yield "16 bits a channel", "PNG", lambda: written_png(draw, depth=16)
    yield "interlaced, 16 bits", "PNG", lambda: written_png(draw, depth=16, interlaced=True)


def _special_jpeg(draw: random.Random) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    options: dict[str, dict[str, Any]] = {
        "progressive": {"progressive": True},
        "quality 1": {"quality": 1},
        "4:4:4": {"subsampling": 0},
        "restarts": {"restart_marker_rows": 1},
        "comment": {"comment": "said\0with\x1b[31mcontrol"},
        "broken EXIF": {"exif": b"Exif\0\0II*\0\xff\xff\xff\x7f"},
        "no EXIF": {"exif": b"Exif\0\0" + bytes(40)},
        "text EXIF": {"exif": b"Exif\0\0" + b"no tags at all " * 9},
        "profile": {"icc_profile": b"not a profile"},
    }
    options |= {f"orientation {o}": {"exif": exif(o)} for o in ORIENTATIONS}
    for about, given in options.items():
        yield about, "JPEG", lambda given=given: saved(picture(draw), "JPEG", **given)
    yield (
        "progressive CMYK",
        "JPEG",
        lambda: saved(picture(draw).convert("CMYK"), "JPEG", progressive=True),
    )
    yield "two pictures", "MPO", lambda: animation(draw, "MPO")


def _special_tiff(draw: random.Random) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    # to try zstd crashes Pillow 11 without
    for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "lzma"):
        yield name, "TIFF", lambda name=name: saved(picture(draw), "TIFF", compression=name)
    for name in ("group3", "group4", "tiff_ccitt"):
        yield (
            name,
            "TIFF",
            lambda name=name: saved(picture(draw).convert("1"), "TIFF", compression=name),
        )
    yield (
        "LZW floats",
        "TIFF",
        lambda: saved(in_mode(picture(draw), "F"), "TIFF", compression="tiff_lzw"),
    )
    yield "NaN", "TIFF", lambda: saved(_odd_floats(draw), "TIFF")
    yield "pages", "TIFF", lambda: animation(draw, "TIFF")
    yield "big", "TIFF", lambda: saved(picture(draw), "TIFF", big_tiff=True)
    yield (
        "orientation",
        "TIFF",
        lambda: saved(picture(draw), "TIFF", tiffinfo={274: draw.choice(ORIENTATIONS)}),
    )


def _special_rest(draw: random.Random) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    yield "animated", "GIF", lambda: animation(draw, "GIF")
    yield "clear", "GIF", lambda: saved(in_mode(picture(draw), "P"), "GIF", transparency=0)
    yield (
        "comment",
        "GIF",
        lambda: saved(in_mode(picture(draw), "P"), "GIF", comment=b"\x1b[2J" * 70),
    )
    yield "lossless", "WEBP", lambda: saved(in_mode(picture(draw), "RGBA"), "WEBP", lossless=True)
    yield "animated", "WEBP", lambda: animation(draw, "WEBP")
    yield "orientation", "WEBP", lambda: saved(picture(draw), "WEBP", exif=exif(8))
    yield "animated", "AVIF", lambda: animation(draw, "AVIF")
    yield "orientation", "AVIF", lambda: saved(picture(draw), "AVIF", exif=exif(5))
    yield "run lengths", "TGA", lambda: saved(picture(draw), "TGA", compression="tga_rle")
    yield "run lengths", "SGI", lambda: saved(picture(draw), "SGI", rle=True)
    yield "tiles", "JPEG2000", lambda: saved(picture(draw), "JPEG2000", tile_size=(16, 16))
    yield "no box", "JPEG2000", lambda: saved(picture(draw), "JPEG2000", no_jp2=True)
    yield "pointer", "CUR", lambda: _pointer(draw)
    yield "text", "PPM", lambda: b"P3\n# a comment\n3 2\n255\n" + b"255 0 17 " * 6
    yield "text", "XPM", lambda: _XPM
    for name in ("DXT1", "DXT3", "DXT5", "BC5"):
        # Blocks of 4 x 4, so that the sides must be a multiple of four.
        yield (
            name,
            "DDS",
            lambda name=name: saved(
                in_mode(picture(draw).resize((32, 24)), "RGB" if name == "BC5" else "RGBA"),
                "DDS",
                pixel_format=name,
            ),
        )


_XPM = b"""/* XPM */
static char *dots[] = {
"4 3 2 1",
"a c #ff0000",
"b c #0000ff",
"abab",
"baba",
"abab",
};
"""


def picture(draw: random.Random) -> Image.Image:
    """Return an RGB picture: coloured noise on a ramp, a flat one, or a piece of a photo."""
    size = (draw.randint(8, 120), draw.randint(8, 120))
    kind = draw.randrange(4)
    if kind == 0:
        return Image.new("RGB", size, tuple(draw.randbytes(3)))
    if kind == 1:
        with Image.open(ASSETS / "coffee.png") as photo:
            left = draw.randrange(photo.width - 120)
            top = draw.randrange(photo.height - 120)
            return photo.convert("RGB").crop((left, top, left + size[0], top + size[1]))
    noise = np.random.default_rng(draw.getrandbits(64)).integers(0, 60, (size[1], size[0], 3))
    ramp = np.linspace(0, 195, size[0])[None, :, None] * np.array([1, draw.random(), draw.random()])
    return Image.fromarray((noise + ramp).astype(np.uint8))


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Return a picture in another mode, with an uneven alpha channel where there is one."""
    if mode == "LAB":
        return Image.frombytes("LAB", image.size, image.tobytes())
    if mode == "I;16B":
        deep = np.asarray(image.convert("L")).astype(np.uint16) * 257
        return Image.frombytes(mode, image.size, deep.astype(">u2").tobytes())
    if mode in ("I", "I;16"):
        deep = np.asarray(image.convert("L")).astype(np.uint16) * 257
        return Image.fromarray(deep if mode == "I;16" else deep.astype(np.int32))
    if mode == "F":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.float32) / 255)
    if mode in ("RGBA", "LA"):
        image = image.convert("RGBA")
        image.putalpha(image.getchannel("G"))
    return image.convert(mode)


def _odd_floats(draw: random.Random) -> Image.Image:
    values = np.array(in_mode(picture(draw), "F")) * 1e30
    values[::2, ::3] = np.nan
    values[1::3, ::2] = np.inf
    values[::5, 1::2] = -np.inf
    return Image.fromarray(values)


def _pointer(draw: random.Random) -> bytes:
    icon = saved(in_mode(picture(draw), "RGBA"), "ICO", bitmap_format="bmp")
    # the byte in which an icon and a pointer differ
    return icon.replace(b"\0\0\1\0", b"\0\0\2\0", 1)


def exif(orientation: int) -> Image.Exif:
    """Return an EXIF block that says how the camera was held."""
    block = Image.Exif()
    block[0x0112] = orientation
    block[0x010F] = "a camera"
    return block


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    """Return a picture as a file."""
    buffer = io.BytesIO()
    if format == "ICO":  # into which Pillow writes nothing that is smaller
        image = image.resize((max(16, image.width), max(16, image.height)))
    image.save(buffer, format, **options)
    return buffer.getvalue()


def animation(draw: random.Random, format: str) -> bytes:
    """Return several pictures of one size in a file."""
    first = picture(draw)
    return saved(
        first, format, save_all=True, append_images=[first.rotate(angle) for angle in (90, 180)]
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file, with the checksum that belongs to it."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def written_png(draw: random.Random, depth: int = 8, interlaced: bool = False) -> bytes:
    """Return an RGB picture in the kinds of PNG that Pillow reads but does not write."""
    pixels = np.asarray(picture(draw)).astype(">u2" if depth == 16 else "u1")
    if depth == 16:
        pixels = (pixels.astype(np.uint32) * 257).astype(">u2")
    seven = (
        (0, 0, 8, 8),
        (0, 4, 8, 8),
        (4, 0, 8, 4),
        (0, 2, 4, 4),
        (2, 0, 4, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 1),
    )
    parts = [pixels[y::dy, x::dx] for y, x, dy, dx in seven] if interlaced else [pixels]
    lines = b"".join(b"\0" + row.tobytes() for part in parts if part.size for row in part)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, 2, 0, 0, interlaced)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )
