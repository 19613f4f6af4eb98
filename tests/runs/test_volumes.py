"""Volumes in a run: a file of several slices, pages or frames is one input of a model of volumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.insight.reattribution import RunPhotos
from explain.render.styles import get_style
from tests.conftest import Made, settled
from tests.runs.networks import assert_same, stored_run

SIDE = 20
WINDOW = (1000.0, 4000.0)


def network(channels: int = 1, window: tuple[float, float] | None = WINDOW) -> explain.Explainer:
    parts = {"conv": nn.Conv3d(channels, 4, 3, padding=1), "head": nn.Linear(4, 3)}
    model = Made(lambda net, x: 5 * net.head(net.conv(x).relu().mean((2, 3, 4))), **parts)
    model = settled(model).eval()
    return explain.Explainer(model, size=SIDE, crop=1, mean=0.5, std=0.25, window=window)


def volume(number: int, count: int = 5, size: tuple[int, int] = (SIDE, SIDE)) -> np.ndarray:
    return np.random.default_rng(number).integers(-1000, 3000, (count, *size)).astype(np.int16)


def test_volumes_have_the_maps_and_figures_that_they_have_alone(tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    for number in range(3):
        np.save(folder / f"{number}.npy", volume(number))
    np.save(folder / "wide.npy", volume(3, 4, (SIDE, 32)))  # gaps between slices
    explainer = network()
    methods = ["saliency", "gradcam", "rise(samples=20, grid=3)"]
    metrics = ["deletion(steps=4)", "covering", "pointinggame"]
    with pytest.warns(explain.ExplainWarning, match="no photo has boxes"):
        run = stored_run(tmp_path, folder, explainer, methods, target=1, metrics=metrics)
    assert not run.failures
    rows = list(run.rows())
    assert [row.name for row in rows[::3]] == ["0.npy", "1.npy", "2.npy", "wide.npy"]
    for row in rows:
        alone = explainer(folder / row.name, methods, target=1)
        assert row.score == pytest.approx(float(alone[row.method].score[0]), rel=1e-4)
        torch.testing.assert_close(
            row.values, alone[row.method].values[0], rtol=2e-3, atol=1e-5, check_dtype=False
        )
        assert row.metrics["pointinggame"] is None
        inputs = explainer.as_input(folder / row.name)
        method = next(method for method in methods if method.startswith(row.method))
        table = explain.evaluate(explainer.model, inputs, method, metrics[:2], target=1)
        for name, figures in table[row.method].items():
            assert row.metrics[name] == pytest.approx(float(figures[0]), abs=1e-4)
        if row.name != "wide.npy" and row.method != "rise":  # whose neutral value runs estimate
            style = get_style("heat")
            expected = np.asarray(alone.overlay(row.method, style=style)).astype(int)
            assert np.abs(np.asarray(row.overlay(style)) - expected).max() <= 2
    with pytest.warns(explain.ExplainWarning, match="no photo has boxes"):
        again = stored_run(tmp_path, folder, explainer, methods, target=1, metrics=metrics)
    assert_same(run, again)
    assert "4 photos" in repr(again)
    page, failures = again.to_html(tmp_path / "run.html")
    assert page.exists()
    assert not failures
    assert "4 maps" in str(again.insight("gradcam"))
    with pytest.raises(explain.ExplainError, match="volumes") as error:
        list(RunPhotos(run, explainer).batches())
    assert "\n" not in str(error.value)


def test_pages_and_frames_are_volumes_where_the_model_takes_them(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    frames = np.random.default_rng(5).integers(0, 256, (4, SIDE, SIDE, 3)).astype(np.uint8)
    pictures = [Image.fromarray(frame) for frame in frames]
    pictures[0].save(folder / "film.tif", save_all=True, append_images=pictures[1:])
    pictures[0].save(folder / "film.webp", save_all=True, append_images=pictures[1:], lossless=True)
    explainer = network(channels=3, window=None)
    x = torch.from_numpy((frames / 255 - 0.5) / 0.25).permute(3, 0, 1, 2)[None].float()
    run = stored_run(tmp_path, folder, explainer, "saliency", target=1)
    assert not run.failures
    with torch.no_grad():
        score = float(explainer.model(x)[0, 1])
    rows = list(run.rows())
    assert [row.name for row in rows] == ["film.tif", "film.webp"]
    assert [row.score for row in rows] == pytest.approx([score, score], rel=1e-4)
    read = explainer.as_input(folder / "film.tif")
    torch.testing.assert_close(read, x)


def test_boxes_of_photos_are_refused_for_a_volume(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", volume(0))
    listed = tmp_path / "list.csv"
    listed.write_text("path,x0,y0,x1,y1\nscan.npy,1,1,5,5\n")
    run = stored_run(tmp_path, listed, network(), "saliency", target=1)
    assert "boxes must" in run.failures["scan.npy"]


def test_nifti_volumes_run_from_a_folder(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="an optional package reads NIfTI")
    folder = tmp_path / "scans"
    folder.mkdir()
    values = volume(0).transpose(2, 1, 0).astype(np.float32)
    affine = np.diag([-1.0, -1.0, 1.0, 1.0])
    nibabel.save(nibabel.Nifti1Image(values, affine), folder / "scan.nii.gz")
    explainer = network()
    run = stored_run(tmp_path, folder, explainer, "saliency", target=1)
    (row,) = run.rows()
    alone = explainer(folder / "scan.nii.gz", "saliency", target=1)
    torch.testing.assert_close(row.values, alone.values, rtol=2e-3, atol=1e-5)
    assert row.name == "scan.nii.gz"
