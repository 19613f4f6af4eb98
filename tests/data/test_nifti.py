"""NIfTI files: slices as radiologists see them, and maps beside them."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ImageError, OutputError
from explain.data.images import load_image
from explain.data.nifti import read_nifti, write_nifti
from explain.data.scans import slice_names, stem_of

nibabel = pytest.importorskip("nibabel", reason="nibabel is an extra")

VALUES = np.random.default_rng(2).integers(0, 200, (5, 7, 4)).astype(np.uint8)
"""Voxels from the left to the right, from the back to the front, and from the feet up."""
AXES = [("R", "A", "S"), ("L", "P", "S"), ("P", "I", "R"), ("A", "L", "I")]


def written(path: Path, axes: tuple[str, ...] = ("R", "A", "S"), kind: str = "Nifti1Image") -> Path:
    """`VALUES` in a file whose voxels are stored in this order of axes."""
    image = getattr(nibabel, kind)(VALUES, np.diag([2.0, 3.0, 4.0, 1.0]))
    to_axes = nibabel.orientations.axcodes2ornt(axes)
    nibabel.save(image.as_reoriented(to_axes), path)
    return path


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_slices_lie_alike_whatever_the_order_in_the_file(
    tmp_path: Path, axes: tuple[str, ...], ending: str
) -> None:
    path = written(tmp_path / f"scan{ending}", axes)
    slices = read_nifti(path)
    assert slices.shape == (4, 7, 5)
    for foot in range(4):
        for row in range(7):
            for column in range(5):  # the front is above, and the right on the left
                assert slices[foot, row, column] == VALUES[4 - column, 6 - row, foot]
    photo = load_image(f"{path} slice 3")
    assert np.array_equal(np.asarray(photo)[..., 0], slices[2])
    assert slice_names(str(path)) == [f"{path} slice {number}" for number in range(1, 5)]
    assert stem_of(f"{path} slice 2") == "scan slice 2"


@pytest.mark.parametrize("axes", AXES)
def test_maps_lie_where_the_scan_does(tmp_path: Path, axes: tuple[str, ...]) -> None:
    path = written(tmp_path / "scan.nii.gz", axes)
    maps = torch.from_numpy(read_nifti(path).astype(np.float32))
    target = write_nifti(tmp_path / "map.nii.gz", maps, path)
    scan = nibabel.load(path)
    found = nibabel.load(target)
    np.testing.assert_array_equal(found.get_fdata(), scan.get_fdata())
    np.testing.assert_allclose(found.affine, scan.affine)
    assert found.header.get_zooms() == scan.header.get_zooms()
    with pytest.raises(OutputError):
        write_nifti(target, maps, path)
    write_nifti(target, maps, path, overwrite=True)
    with pytest.raises(ImageError, match="voxel"):
        write_nifti(tmp_path / "other.nii", maps[:, :3], path)
    with pytest.raises(ImageError, match=r"\.nii"):
        write_nifti(tmp_path / "other.png", maps, path)


def test_a_folder_of_scans_is_explained_slice_by_slice(tmp_path: Path) -> None:
    written(tmp_path / "scan.nii.gz", kind="Nifti2Image")
    run = explain.run(tmp_path, "tiny", ["saliency"], output=tmp_path / "run.sqlite")
    assert len(run) == 4


def test_what_is_no_volume_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = nibabel.Nifti1Image(np.zeros((4, 4, 3, 2), np.float32), np.eye(4))
    nibabel.save(series, tmp_path / "series.nii")
    path = written(tmp_path / "scan.nii")
    content = path.read_bytes()
    (tmp_path / "short.nii").write_bytes(content[:-20])
    (tmp_path / "short.nii.gz").write_bytes(gzip.compress(content)[:-30])
    Image.new("RGB", (4, 4)).save(tmp_path / "photo.png")
    for name in ("series.nii", "short.nii", "short.nii.gz", "photo.png", "none.nii"):
        with pytest.raises(ImageError) as refused:
            read_nifti(tmp_path / name)
        assert "\n" not in str(refused.value)
    for name in ("series.nii", "short.nii", "short.nii.gz"):
        with pytest.raises(ImageError):
            load_image(tmp_path / name)
    with pytest.raises(ImageError, match="slices 1 to 4"):
        load_image(f"{path} slice 9")
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ImageError, match="installed"):
        load_image(written(tmp_path / "other.nii"))
