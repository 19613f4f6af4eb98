from __future__ import annotations

import io
import os
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from explain import ExplainWarning, ImageError
from explain.data.boxes import Box, locate
from explain.data.images import MAX_PIXELS, load_image
from explain.data.opening import hushed, photos_in
from explain.models import CenterCrop


@pytest.fixture
def gradient() -> Image.Image:
    ramp = np.linspace(0, 255, 40).astype(np.uint8)
    return Image.fromarray(np.stack([np.tile(ramp, (30, 1))] * 3, axis=2))


def test_paths_bytes_arrays_and_pictures_give_the_same(
    gradient: Image.Image, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    gradient.save(path)
    expected = np.asarray(gradient)
    for given in (path, str(path), path.read_bytes(), gradient, expected, expected / 255.0):
        assert np.array_equal(np.asarray(load_image(given)), expected)


@pytest.mark.parametrize("orientation", [*range(1, 9), 99])
def test_a_photo_that_was_loaded_can_be_loaded_again(
    orientation: int, gradient: Image.Image
) -> None:
    exif = Image.Exif()
    file = io.BytesIO()
    exif[0x0112] = orientation
    gradient.save(file, "JPEG", exif=exif)
    once = load_image(file.getvalue())
    assert once.info == {}
    assert once.size == ((30, 40) if 4 < orientation < 9 else (40, 30))
    assert np.array_equal(load_image(once), once)


def test_grey_cmyk_and_animations_become_rgb(gradient: Image.Image, tmp_path: Path) -> None:
    gradient.convert("L").save(tmp_path / "grey.png")
    gradient.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=98)
    gradient.save(
        tmp_path / "moving.gif", save_all=True, append_images=[Image.new("RGB", (40, 30), "red")]
    )
    for name in ("grey.png", "cmyk.jpg", "moving.gif"):
        found = load_image(tmp_path / name)
        assert found.mode == "RGB"
        difference = np.abs(np.asarray(found).astype(int) - np.asarray(gradient).astype(int))
        assert difference.max() <= 12, name


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    clear.putpixel((0, 0), (200, 0, 0, 255))
    palette = io.BytesIO()
    clear.quantize(8).save(palette, "PNG")
    assert Image.open(palette).mode == "P"
    for given in (clear, palette.getvalue(), clear.convert("LA")):
        assert load_image(given).getpixel((3, 3)) == (255, 255, 255)
    assert load_image(clear).getpixel((0, 0)) == (200, 0, 0)
    assert load_image(palette.getvalue()).getpixel((0, 0)) == (200, 0, 0)


def test_deep_greys_keep_their_range(tmp_path: Path) -> None:
    deep = np.array([[0, 32768, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.asarray(load_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 128, 255]
    assert np.asarray(load_image(deep))[0, :, 0].tolist() == [0, 128, 255]
    floats = Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32))
    assert np.asarray(load_image(floats))[0, :, 0].tolist() == [0, 128, 255]
    not_finite = np.array([[0.0, np.nan, np.inf, 0.5]], np.float32)
    for image in (not_finite, Image.fromarray(not_finite)):
        with pytest.warns(ExplainWarning, match="2 of"):
            assert np.asarray(load_image(image))[0, :, 0].tolist() == [0, 0, 0, 128]


@pytest.mark.parametrize("bits", [8, 10, 14, 16])
@pytest.mark.parametrize("kind", ["16-bit PNG", "16-bit TIFF", "32-bit TIFF", "array"])
def test_greys_of_fewer_bits_than_their_file_are_bright_and_said_to_be(
    kind: str, bits: int, tmp_path: Path
) -> None:
    greys = np.linspace(0, 2**bits - 2, 60).reshape(6, 10).round().astype(np.uint16)
    path = tmp_path / f"deep.{kind[-4:].strip().lower()}"
    if kind != "array":
        Image.fromarray(greys.astype(np.int32) if kind == "32-bit TIFF" else greys).save(path)
    expected = np.round(greys / (2.0**bits - 1) * 255)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        photo = load_image(greys if kind == "array" else path)
    assert np.abs(np.asarray(photo)[:, :, 0] - expected).max() <= 1e-6
    is_usual = bits == 16 or (kind, bits) == ("32-bit TIFF", 8)
    assert [f"{bits} bits" in str(each.message) for each in caught] == [True] * (not is_usual)


@pytest.mark.parametrize("values", [[-1000, 0, 3000], [-1.0, 0.0, 1.0], [0.0, 0.5, 1.02]])
def test_greys_below_zero_or_a_little_above_one_are_told_apart(values: list[float]) -> None:
    array = np.array([values], np.int32 if values[2] == 3000 else np.float32)
    with pytest.warns(ExplainWarning, match="brightest"):
        shown = np.asarray(load_image(Image.fromarray(array)))[0, :, 0]
    low = min(0, values[0])
    assert shown.tolist() == [round((value - low) / (values[2] - low) * 255) for value in values]


def test_what_is_no_image_or_cannot_be_read_is_named(gradient: Image.Image, tmp_path: Path) -> None:
    gradient.save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    contents = {
        "is empty": b"",
        "not an image": b"just some words",
        "truncated": whole[: len(whole) // 2],
    }
    for message, content in contents.items():
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(ImageError, match=message):
            load_image(tmp_path / "a.png")
    for path, message in (
        (tmp_path / "b.jpg", "b.jpg"),
        (tmp_path, "folder"),
        ("\0.jpg", "read"),
        ("x" * 300, "read"),
    ):
        with pytest.raises(ImageError, match=message):
            load_image(path)


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    side = 20_000
    assert side * side > MAX_PIXELS
    # Written a strip at a time would take long as well: only the header says how large the picture
    # is.
    small = io.BytesIO()
    Image.new("L", (8, 8)).save(small, "BMP")
    header = bytearray(small.getvalue())
    header[18:22] = header[22:26] = side.to_bytes(4, "little")
    (tmp_path / "bomb.bmp").write_bytes(header)
    with pytest.raises(ImageError, match="megapixels"):
        load_image(tmp_path / "bomb.bmp")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((0, 8, 3), np.uint8), "shape"),
        (np.zeros((8, 8, 3), complex), "complex128"),
        (np.full((8, 8), np.nan), "finite"),
    ],
)
def test_arrays_that_are_no_images_are_refused(array: np.ndarray, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        load_image(array)


@pytest.mark.parametrize("size", [(640, 427), (37, 64), (2000, 500)])
@pytest.mark.parametrize("crop", [0.875, 1.0])
def test_the_part_that_any_preprocessing_keeps_is_found_by_trying_it(
    size: tuple[int, int], crop: float
) -> None:
    ours = CenterCrop(64, crop)
    expected = ours.box(size)
    normalize = v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]),
        ]
    )
    theirs = v2.Compose([v2.Resize(round(64 / crop)), v2.CenterCrop(64), normalize])
    stretched = v2.Compose([v2.Resize((48, 64)), normalize])
    tolerance = 0.02 * max(size)
    for preprocess, box in (
        (theirs, expected),
        (lambda image: ours(image), expected),
        (stretched, Box(0, 0, *size)),
    ):
        found = locate(preprocess, size)
        for edge in ("left", "top", "right", "bottom"):
            assert getattr(found, edge) == pytest.approx(getattr(box, edge), abs=tolerance), edge
    assert locate(ours, size) == expected


def test_preprocessing_that_cannot_be_located_is_taken_to_show_the_whole_photo_and_says_so() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    random = v2.Lambda(lambda image: torch.rand(3, 8, 8, generator=generator))
    for preprocess in (random, lambda image: "nothing"):
        with pytest.warns(ExplainWarning, match="overlay"):
            assert locate(preprocess, (40, 20)) == Box(0, 0, 40, 20)  # type: ignore[arg-type]
    strip = v2.Compose([v2.Resize(8), v2.CenterCrop(8), v2.ToImage(), v2.ToDtype(torch.float32)])
    assert locate(strip, (1, 100)).top == pytest.approx(49.5, abs=3)


def test_named_pipes_devices_and_sockets_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("pipe.png")
    begun = time.monotonic()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s")  # the whole path may be longer than a socket's name may be
        for name, kind in [
            (tmp_path / "pipe.png", "a named pipe"),
            (tmp_path / "link.png", "a named pipe"),
            (tmp_path / "s", "a socket"),
            ("/dev/null", "a device"),
            ("/dev/zero", "a device"),
        ]:
            with pytest.raises(
                ImageError, match=rf"must be a file, got {kind}; save what it gives to a file first"
            ):
                load_image(name)
    assert time.monotonic() - begun < 5


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
    with pytest.raises(
        ImageError, match="a HEIC photo, which needs the package pillow-heif; run pip"
    ):
        load_image(file)
    reader = SimpleNamespace(open_heif=lambda file: SimpleNamespace(to_pillow=lambda: gradient))
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
        thread = threading.Thread(
            target=lambda: (
                time.sleep(0.05),
                writer.write((tmp_path / "a.png").read_bytes()),
                writer.close(),
            )
        )
        thread.start()
        assert load_image(f"/dev/fd/{ours}").size == (40, 30)
        thread.join()
