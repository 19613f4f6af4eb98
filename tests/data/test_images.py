from __future__ import annotations

import io
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageChops, ImageColor
from torchvision.transforms import v2

from explain import ExplainWarning, ImageError
from explain.data.boxes import Box, locate
from explain.data.images import MAX_PIXELS, load_image
from explain.data.opening import hushed, photos_in
from explain.data.scans import slice_names
from explain.models import CenterCrop
from tests.data.test_limits import tiff


@pytest.fixture
def gradient() -> Image.Image:
    return Image.linear_gradient("L").rotate(90).resize((40, 30)).convert("RGB")


def test_paths_bytes_arrays_and_pictures_give_the_same(
    gradient: Image.Image, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    gradient.save(path)
    expected = np.asarray(gradient)
    for given in (path, str(path), path.read_bytes(), gradient, expected, expected / 255.0):
        assert np.array_equal(np.asarray(load_image(given)), expected)


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8, 99])
def test_a_photo_that_was_loaded_can_be_loaded_again(
    orientation: int, gradient: Image.Image
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    once = load_image(encoded(gradient, "JPEG", exif=exif))
    assert once.size == ((30, 40) if 4 < orientation < 9 else (40, 30))
    assert load_image(once) == once


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def test_grey_and_cmyk_become_rgb(gradient: Image.Image) -> None:
    for content in (
        encoded(gradient.convert("L"), "PNG"),
        encoded(gradient.convert("CMYK"), "JPEG", quality=98),
    ):
        photo = load_image(content)
        assert photo.mode == "RGB"
        assert np.asarray(ImageChops.difference(photo, gradient)).max() <= 12


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    clear.putpixel((0, 0), (200, 0, 0, 255))
    palette = encoded(clear.quantize(8), "PNG")
    for image in (clear, palette):
        photo = load_image(image)
        assert photo.getpixel((0, 0)) == (200, 0, 0)
        assert photo.getpixel((3, 3)) == (255, 255, 255)
    assert load_image(clear.convert("LA")).getpixel((3, 3)) == (255, 255, 255)


def test_values_that_are_not_finite_are_black_and_counted() -> None:
    not_finite = np.array([[0.0, np.nan, np.inf, 0.5]], np.float32)
    for image in (not_finite, Image.fromarray(not_finite)):
        with pytest.warns(ExplainWarning, match="2 of"):
            assert np.asarray(load_image(image))[0, :, 0].tolist() == [0, 0, 0, 128]


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    images: dict[str, Any] = {
        "b.jpg": tmp_path / "b.jpg",
        "directory": tmp_path,
        "read": "\0.jpg",
        "shape": np.zeros((0, 8, 3), np.uint8),
        "complex128": np.zeros((8, 8, 3), complex),
        "finite": np.full((8, 8), np.nan),
    }
    for message, image in images.items():
        with pytest.raises(ImageError, match=message):
            load_image(image)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_the_first_of_several_pages_is_read_with_a_note_and_any_by_its_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    colors = ("red", "lime", "blue")
    first, *others = (Image.new("RGB", (40, 30), color) for color in colors)
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(first, kind, save_all=True, append_images=others, **options)
    Path("a.file").write_bytes(content)
    for image, remedy in ((content, "save"), ("a.file", "'a.file slice 2'")):
        with pytest.warns(ExplainWarning, match=f"3 pages.*{remedy}"):
            assert load_image(image).getpixel((9, 9)) == ImageColor.getrgb("red")
    for page, color in enumerate(colors, start=1):
        photo = load_image(f"a.file slice {page}")
        assert (photo.size, photo.getpixel((9, 9))) == ((40, 30), ImageColor.getrgb(color))
    with pytest.raises(ImageError, match="slices 1 to 3"):
        load_image("a.file slice 4")
    with pytest.raises(ImageError, match="2 slices"):
        load_image("a.file slices 2:")
    stack = load_image("a.file slices 2:", stack=True)
    assert list(stack.cells) == ["slice 2", "slice 3"]
    corners = [cell[:2] for cell in stack.cells.values()]
    assert [stack.getpixel(corner) for corner in corners] == [(0, 255, 0), (0, 0, 255)]
    assert slice_names("a.file") == ["a.file"]
    assert slice_names("a.file", pages=True) == [f"a.file slice {page}" for page in (1, 2, 3)]


def test_pages_of_deep_greys_have_one_range_and_deep_colours_are_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    levels = (1000, 5000, 60)
    pages = [np.full((8, 9), level, np.uint16) for level in levels]
    greys = [Image.fromarray(page) for page in pages]
    greys[0].save("a.tif", save_all=True, append_images=greys[1:])
    with pytest.warns(ExplainWarning, match="as 14 bits"):
        stack = load_image("a.tif slices :", stack=True)
    shown = [stack.getpixel(cell[:2])[0] for cell in stack.cells.values()]
    assert shown == [round(255 * level / (2**14 - 1)) for level in levels]
    cv2.imwritemulti("b.tif", [np.dstack([page, page + 9, page + 1000]) for page in pages])
    blue = load_image("b.tif slice 2", window=(5000, 10_000)).getpixel((0, 0))
    assert blue == tuple(round(255 * level / 10_000) for level in (6000, 5009, 5000))


BEGINNINGS = {
    "video": [
        b"\0\0\0 ftypisom\0\0\2\0isomiso2avc1mp41",
        b"\0\0\0\x14ftypqt  \0\0\2\0",
        b"\x1aE\xdf\xa3" + bytes(99),
        b"RIFF\0\0\0\0AVI LIST",
        b"\0\0\1\xba" + bytes(99),
    ],
}


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_volumes_and_films_are_named_with_what_helps(kind: str, tmp_path: Path) -> None:
    for content in BEGINNINGS[kind]:
        with pytest.raises(ImageError, match=f"photo, got a {kind}.*(npy|frames)"):
            load_image(content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bands": 7, "kind": np.uint8, "form": 1}, "got 7"),
        ({"bands": 5, "kind": np.float32}, "got 5"),
        ({"bands": 1, "kind": np.complex64, "form": 6}, "complex"),
    ],
)
def test_tiff_files_that_are_no_photos_are_told_without_what_libraries_print(
    options: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ImageError, match=message):
        load_image(tiff(**options))
    assert capfd.readouterr() == ("", "")


def test_a_decompression_bomb_is_refused_before_it_is_unpacked() -> None:
    side = 20_000
    assert side * side > MAX_PIXELS
    # only the header says how large the picture is
    content = bytearray(encoded(Image.new("L", (8, 8)), "BMP"))
    content[18:22] = content[22:26] = side.to_bytes(4, "little")
    with pytest.raises(ImageError, match="megapixels"):
        load_image(bytes(content))


@pytest.mark.parametrize("size", [(640, 427), (37, 64), (2000, 500)])
@pytest.mark.parametrize("crop", [0.875, 1.0])
def test_the_part_that_any_preprocessing_keeps_is_found_by_trying_it(
    size: tuple[int, int], crop: float
) -> None:
    ours = CenterCrop(64, crop)
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    normalize = v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    theirs = [v2.Resize(round(64 / crop)), v2.CenterCrop(64), *to_tensor, normalize]
    expected = ours.box(size)
    assert locate(ours, size) == expected
    for preprocess, box in (
        (v2.Compose(theirs), expected),
        (lambda image: ours(image), expected),
        (v2.Compose([v2.Resize((48, 64)), *to_tensor]), Box(0, 0, *size)),
    ):
        located = vars(locate(preprocess, size))
        assert located == pytest.approx(vars(box), abs=0.02 * max(size))


def test_preprocessing_that_cannot_be_located_is_taken_to_show_the_whole_photo_and_says_so() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    random = v2.Lambda(lambda image: torch.rand(3, 8, 8, generator=generator))
    for preprocess in (random, lambda image: "nothing"):
        with pytest.warns(ExplainWarning, match="overlay"):
            assert locate(preprocess, (40, 20)) == Box(0, 0, 40, 20)  # type: ignore[arg-type]


def test_named_pipes_devices_and_sockets_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.png")
    Path("link.png").symlink_to("pipe.png")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s")  # the whole path may be longer than a socket's name may be
        for name in ("pipe.png", "link.png", "/dev/zero", "s"):
            with pytest.raises(ImageError, match=r"must be a file, got .* or a device; save"):
                load_image(name)


def test_libraries_in_c_are_heard_without_being_printed_and_for_a_while_only(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ZeroDivisionError), hushed() as said:
        os.write(2, b"from a library\n")
        raise ZeroDivisionError
    os.write(2, b"afterwards\n")
    assert said == ["from a library"]
    assert capfd.readouterr().err == "afterwards\n"


def test_photos_of_phones_are_named_and_read_where_a_package_can(
    gradient: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "photo.heic"
    file.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageError, match=r"the HEIC photo .*; run pip install .*heic"):
        load_image(file)
    opened = SimpleNamespace(to_pillow=lambda: gradient, size=gradient.size)
    reader = SimpleNamespace(open_heif=lambda file: opened)
    monkeypatch.setitem(sys.modules, "pillow_heif", reader)
    assert load_image(file).size == gradient.size
    assert [name for name, _ in photos_in(str(tmp_path))] == ["photo.heic"]


def test_open_files_and_pipes_that_are_open_already_are_read(
    gradient: Image.Image, tmp_path: Path
) -> None:
    gradient.save(tmp_path / "a.png")
    with (tmp_path / "a.png").open("rb") as file:
        assert load_image(file).size == (40, 30)
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "wb") as writer:
        writer.write((tmp_path / "a.png").read_bytes())
        writer.close()
        assert load_image(f"/dev/fd/{ours}").size == (40, 30)
