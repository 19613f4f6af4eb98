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
        return np.asarray(load_image(image, window))[:, :, 0]


def within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The values from low to high as 0-255, one by one."""
    shares = [min(max((float(value) - low) / (high - low), 0.0), 1.0) for value in values.flat]
    return np.array([round(255 * share) for share in shares]).reshape(values.shape)


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
    colors = np.repeat(greys[:, :, None], 3, 2)
    cv2.imwrite(str(tmp_path / "colors.png"), colors)
    for image in (greys, *(tmp_path / name for name in ("a.npy", "a.png", "a.tiff", "colors.png"))):
        shown = np.asarray(load_image(image, window))[:, :, 0]  # without a warning
        assert np.abs(shown - expected).max() <= 1
    with pytest.warns(ExplainWarning, match="shows nothing"):
        assert not np.asarray(load_image(greys, (9000, 10))).any()
    for wrong in ((40,), (40, 0), "40,400", (40, float("nan"))):
        with pytest.raises(ImageError, match="window must"):
            load_image(greys, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (np.array([[0.0, 0.5, 1.0]]), 0, 1),
        (np.array([[0.0, 100.5, 200.0]]), 0, 255),
        (np.array([[0.0, 100.0, 4000.0]]), 0, 4095),
        (np.array([[0, 100, 4000]], np.int64), 0, 4095),
        (np.array([[-1024.0, 0.0, 3000.0]]), -1024, 3000),
        (np.array([[-1024, -500, -100]], np.int16), -1024, -100),
        (np.array([[0, 2**20]], np.uint32), 0, 2**20),
    ],
)
def test_one_rule_says_the_range_of_arrays_and_files(
    values: np.ndarray, low: float, high: float, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", values)
    kind = "f" if values.dtype.kind == "f" else "i"
    for image in (values, tmp_path / "a.npy", Image.fromarray(values.astype(f"{kind}4"))):
        if high == 1:
            shown = np.asarray(load_image(image))[:, :, 0]
        else:
            with pytest.warns(ExplainWarning, match="are read"):
                shown = np.asarray(load_image(image))[:, :, 0]
        np.testing.assert_array_equal(shown, within(values, low, high))


def test_colours_of_12_bits_in_16_are_bright_and_upright(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 4096, (6, 9, 3)).astype(np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    cv2.imwrite(str(tmp_path / "a.png"), pixels[:, :, ::-1])
    with pytest.warns(ExplainWarning, match="12 bits"):
        shown = np.asarray(load_image(tmp_path / "a.png"))
    np.testing.assert_array_equal(shown, within(pixels, 0, 4095))
    floats = pixels[:, :, ::-1] / 4095
    for precision in ("f4", "f8"):
        cv2.imwrite(str(tmp_path / "a.tiff"), floats.astype(precision))
        np.testing.assert_array_equal(load_image(tmp_path / "a.tiff"), shown)
    turned = Image.fromarray(pixels[:, :, 0])
    turned.save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(
        grey(tmp_path / "turned.png"), np.rot90(within(pixels[:, :, 0], 0, 4095), -1)
    )


@pytest.mark.parametrize("order", ["HW", "1HW", "HWC", "CHW", "1CHW", "HW1"])
def test_arrays_of_one_photo_come_in_any_usual_order(order: str, tmp_path: Path) -> None:
    colors = np.random.default_rng(0).integers(0, 256, (8, 10, 3)).astype(np.uint8)
    array = {
        "HW": colors[:, :, 0],
        "1HW": colors[None, :, :, 0],
        "HWC": colors,
        "CHW": colors.transpose(2, 0, 1),
        "1CHW": colors.transpose(2, 0, 1)[None],
        "HW1": colors[:, :, :1],
    }[order]
    np.save(tmp_path / "a.npy", array)
    expected = colors if "C" in order else np.repeat(colors[:, :, :1], 3, 2)
    for image in (array, tmp_path / "a.npy", (tmp_path / "a.npy").read_bytes()):
        assert np.array_equal(np.asarray(load_image(image)), expected)
    assert slice_names(str(tmp_path / "a.npy")) == [str(tmp_path / "a.npy")]


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
    assert names == [f"{path} slice {number}" for number in range(5)]
    for name, one in zip(names, volume, strict=True):
        np.testing.assert_array_equal(grey(name), within(one, 0, 4095))
    for wrong in (path, f"{path} slice 5", path.read_bytes()):
        with pytest.raises(ImageError, match="slice"):
            load_image(wrong)
    with pytest.raises(ImageError, match="slices"):
        load_image(volume)
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    with pytest.raises(ImageError, match="slices"):
        load_image(f"{tmp_path / 'cat.png'} slice 0")


def test_dicom_is_shown_as_its_file_says(tmp_path: Path) -> None:
    stored = RAMP.astype(np.uint16)
    scale = {"RescaleSlope": 2, "RescaleIntercept": -1024}
    units = stored * 2.0 - 1024
    path = tmp_path / "a.dcm"
    expected = within(units, -160, 240)
    dicom(path, stored, WindowCenter=[40, 400], WindowWidth=[400, 1500], **scale)
    assert np.abs(np.asarray(load_image(path))[:, :, 0] - expected).max() <= 1  # not a warning
    assert np.abs(grey(path.read_bytes()) - expected).max() <= 1
    assert np.abs(grey(path, (0, 1000)) - within(units, -500, 500)).max() <= 1
    dicom(path, stored, "MONOCHROME1", WindowCenter=40, WindowWidth=400, **scale)
    assert np.abs(grey(path) - (255 - expected)).max() <= 1
    dicom(path, stored, **scale)
    with pytest.warns(ExplainWarning, match="-1024 to 7166"):
        shown = np.asarray(load_image(path))[:, :, 0]
    assert np.abs(shown - within(units, -1024, 7166)).max() <= 1
    dicom(path, (RAMP - 2048).astype(np.int16))
    assert np.abs(grey(path) - within(RAMP, 0, 4095)).max() <= 1
    colors = np.random.default_rng(0).integers(0, 256, (8, 10, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(load_image(dicom(path, colors, "RGB"))), colors)


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
        np.testing.assert_array_equal(grey(f"{path} slice {number}", (100, 200)), expected)


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_what_is_no_scan_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.npy"
    for array, message in (
        (np.array([Evil()], object), "objects"),
        (np.array([["a", "b"]]), "numbers"),
        (np.zeros((4, 4), complex), "numbers"),
        (np.zeros(4), "shape"),
        (np.zeros((2, 2, 2, 2, 2)), "shape"),
        (np.zeros((0, 4)), "shape"),
    ):
        np.save(path, array, allow_pickle=True)
        with pytest.raises(ImageError, match=message):
            load_image(path)
    assert not Path("touched").exists()
    np.save(path, np.zeros((40, 40)))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ImageError, match="truncated"):
        load_image(path)
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        huge, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    )
    path.write_bytes(huge.getvalue())
    with pytest.raises(ImageError, match="truncated"):
        load_image(path)
    pytest.importorskip("pydicom", reason="pydicom is an extra")
    for content in (b"\0" * 128 + b"DICM", b"\0" * 128 + b"DICM" + b"\xff" * 300, b"no scan"):
        (tmp_path / "a.dcm").write_bytes(content)
        with pytest.raises(ImageError):
            load_image(tmp_path / "a.dcm")
