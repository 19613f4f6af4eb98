"""Scans of 16 bits, NumPy arrays and DICOM files: in which range they are read, and slice by
slice."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from explain import ExplainWarning, ImageError
from explain.data.images import load_image
from explain.data.scans import slice_names


def grey(image: Any, window: Any = None) -> np.ndarray:
    """What is shown, without what is said of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExplainWarning)
        return np.asarray(load_image(image, window))[:, :, 0].astype(int)


def within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The values from low to high as 0-255."""
    shares = (values.astype(np.float64) - low) / (high - low)
    return np.round(255 * shares.clip(0, 1))


def dicom(path: Path, pixels: np.ndarray, kind: str = "MONOCHROME2", **tags: Any) -> Path:
    """Write a DICOM file of these pixels: ``(H, W)``, ``(F, H, W)``, or ``(H, W, 3)`` for RGB."""
    pydicom = pytest.importorskip("pydicom", reason="pydicom is an extra")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    in_color = kind == "RGB"
    frames = pixels if pixels.ndim > 2 + in_color else pixels[None]
    data.Rows, data.Columns = frames.shape[1:3]
    data.SamplesPerPixel = 3 if in_color else 1
    data.PlanarConfiguration = 0
    data.NumberOfFrames = len(frames)
    data.PhotometricInterpretation = kind
    data.BitsAllocated = data.BitsStored = 8 * pixels.itemsize
    data.HighBit = data.BitsStored - 1
    data.PixelRepresentation = int(pixels.dtype.kind == "i")
    data.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    pydicom.dcmwrite(path, data, enforce_file_format=True)
    return path


RAMP = np.arange(4096).reshape(64, 64)


COLORS = np.random.default_rng(0).integers(0, 256, (8, 10, 3)).astype(np.uint8)


@pytest.mark.parametrize("window", [(40, 400), (-600.0, 1500.0), (2048, 4096)])
def test_a_window_says_what_is_black_and_white_in_any_kind_of_image(
    window: tuple[float, float], tmp_path: Path
) -> None:
    level, width = window
    expected = within(RAMP, level - width / 2, level + width / 2)
    greys = RAMP.astype(np.uint16)
    np.save(tmp_path / "a.npy", greys)
    Image.fromarray(greys).save(tmp_path / "a.png")
    Image.fromarray(greys.astype(np.float32)).save(tmp_path / "a.tiff")
    cv2.imwrite(str(tmp_path / "colors.png"), np.dstack([greys] * 3))
    for image in (greys, *tmp_path.iterdir()):
        shown = np.asarray(load_image(image, window))[:, :, 0]  # without a warning
        assert np.abs(shown - expected).max() <= 1
    with pytest.warns(ExplainWarning, match="shows nothing"):
        assert not np.asarray(load_image(greys, (9000, 10))).any()
    for wrong in ((40,), (40, 0), "40,400"):
        with pytest.raises(ImageError, match="window must"):
            load_image(greys, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "kind", "low", "high"),
    [
        ([0.0, 0.5, 1.0], "f4", 0, 1),
        ([0.0, 0.5, 1.02], "f4", 0, 1.02),
        ([0.0, 100.5, 200.0], "f8", 0, 255),
        ([0, 100, 4000], "i8", 0, 4095),
        ([0, 100, 1000], "u2", 0, 1023),
        ([0, 100, 200], "u2", 0, 255),
        ([0, 100, 65000], "u2", 0, 65535),
        ([-1000, 0, 3000], "f8", -1000, 3000),
        ([-1024, -500, -100], "i2", -1024, -100),
        ([0, 2**20], "i4", 0, 2**20),
    ],
)
def test_one_rule_says_the_range_of_arrays_and_files(
    values: list[float], kind: str, low: float, high: float, tmp_path: Path
) -> None:
    array = np.array([values], kind)
    np.save(tmp_path / "a.npy", array)
    of_picture = {"u": "u2", "i": "i4", "f": "f4"}[kind[0]]
    picture = Image.fromarray(array.astype(of_picture))
    for image in (array, tmp_path / "a.npy", picture):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shown = np.asarray(load_image(image))[:, :, 0]
        np.testing.assert_array_equal(shown, within(array, low, high))
        told = ["are read" in str(warning.message) for warning in caught]
        assert told == [True] * (high not in (1, 65535))


def test_colours_of_12_bits_in_16_are_bright_and_upright(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 4096, (6, 9, 3)).astype(np.uint16)
    cv2.imwrite(str(tmp_path / "a.png"), pixels[:, :, ::-1])
    with pytest.warns(ExplainWarning, match="12 bits"):
        shown = np.asarray(load_image(tmp_path / "a.png"))
    np.testing.assert_array_equal(shown, within(pixels, 0, 4095))
    for precision in ("f4", "f8"):
        cv2.imwrite(str(tmp_path / "a.tiff"), (pixels[:, :, ::-1] / 4095).astype(precision))
        np.testing.assert_array_equal(load_image(tmp_path / "a.tiff"), shown)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(grey(tmp_path / "turned.png"), np.rot90(shown[:, :, 0], -1))


@pytest.mark.parametrize(
    "array",
    [
        *(COLORS, COLORS.transpose(2, 0, 1), COLORS.transpose(2, 0, 1)[None]),
        *(COLORS[:, :, 0], COLORS[None, :, :, 0], COLORS[:, :, :1]),
    ],
    ids=["HWC", "CHW", "1CHW", "HW", "1HW", "HW1"],
)
def test_arrays_of_one_photo_come_in_any_usual_order(array: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array)
    expected = COLORS if array.size == COLORS.size else COLORS[:, :, :1].repeat(3, 2)
    for image in (array, path, path.read_bytes()):
        assert np.array_equal(np.asarray(load_image(image)), expected)
    assert slice_names(str(path)) == [str(path)]


@pytest.mark.parametrize("kind", ["npy", "dcm"])
def test_slices_are_photos_in_one_range(kind: str, tmp_path: Path) -> None:
    volume = np.random.default_rng(0).integers(0, 300, (5, 8, 10)).astype(np.uint16)
    volume[3] *= 10
    path = tmp_path / f"scan.{kind}"
    if kind == "npy":
        np.save(path, volume)
    else:
        dicom(path, volume)
    names = slice_names(str(path))
    assert names == [f"{path} slice {number}" for number in range(1, 6)]
    for name, one in zip(names, volume, strict=True):
        np.testing.assert_array_equal(grey(name), within(one, 0, 4095))
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    absent = (
        f"{path} slice 0",
        f"{path} slices 0:2",
        f"{path} slice 6",
        f"{tmp_path}/cat.png slice 1",
    )
    for wrong in (path, *absent, path.read_bytes(), volume):
        with pytest.raises(ImageError, match="slice"):
            load_image(wrong)


def test_dicom_is_shown_as_its_file_says(tmp_path: Path) -> None:
    stored = RAMP.astype(np.uint16)
    scale = {"RescaleSlope": 2, "RescaleIntercept": -1024}
    units = stored * 2.0 - 1024
    path = tmp_path / "a.dcm"
    expected = within(units, -160, 240)
    dicom(path, stored, WindowCenter=[40, 400], WindowWidth=[400, 1500], **scale)
    shown = np.asarray(load_image(path))[:, :, 0]  # not a warning
    assert np.abs(shown - expected).max() <= 1
    assert np.abs(grey(path.read_bytes()) - expected).max() <= 1
    assert np.abs(grey(path, (0, 1000)) - within(units, -500, 500)).max() <= 1
    dicom(path, stored, "MONOCHROME1", WindowCenter=40, WindowWidth=400, **scale)
    assert np.abs(grey(path) - (255 - expected)).max() <= 1
    dicom(path, stored, **scale)
    with pytest.warns(ExplainWarning, match="-1024 to 7166"):
        load_image(path)
    assert np.abs(grey(path) - within(units, -1024, 7166)).max() <= 1
    dicom(path, (RAMP - 2048).astype(np.int16))
    assert np.abs(grey(path) - within(RAMP, 0, 4095)).max() <= 1
    assert np.array_equal(np.asarray(load_image(dicom(path, COLORS, "RGB"))), COLORS)


def test_frames_of_an_enhanced_dicom_have_their_own_scale(tmp_path: Path) -> None:
    pytest.importorskip("pydicom", reason="pydicom is an extra")
    from pydicom.dataset import Dataset

    stored = np.random.default_rng(0).integers(0, 100, (3, 8, 10)).astype(np.uint16)
    groups = []
    for slope in (1, 2, 3):
        scale = Dataset()
        scale.RescaleSlope = slope
        scale.RescaleIntercept = -5
        group = Dataset()
        group.PixelValueTransformationSequence = [scale]
        groups.append(group)
    path = dicom(tmp_path / "a.dcm", stored, PerFrameFunctionalGroupsSequence=groups)
    for number, slope in enumerate((1, 2, 3)):
        expected = within(stored[number] * float(slope) - 5, 0, 200)
        np.testing.assert_array_equal(grey(f"{path} slice {number + 1}", (100, 200)), expected)


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_what_is_no_scan_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arrays = {
        "got object": np.array([Evil()], object),
        "numbers": np.array([["a", "b"]]),
        r"shape \(2, 2, 2, 2, 2\)": np.zeros((2, 2, 2, 2, 2)),
        r"shape \(0, 4\)": np.zeros((0, 4)),
    }
    for message, array in arrays.items():
        np.save("a.npy", array, allow_pickle=True)
        with pytest.raises(ImageError, match=message):
            load_image("a.npy")
    assert not Path("touched").exists()
    header = io.BytesIO()
    shape = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    np.lib.format.write_array_header_1_0(header, shape)
    with pytest.raises(ImageError, match="truncated"):
        load_image(header.getvalue())
    pytest.importorskip("pydicom", reason="pydicom is an extra")
    for content in (b"\0" * 128 + b"DICM" + b"\xff" * 300, b"no scan"):
        Path("a.dcm").write_bytes(content)
        with pytest.raises(ImageError):
            load_image("a.dcm")
