"""Scans in a run: slices are photos, a window holds for all that reads them again, and nothing is
said of photos without contrast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import explain
from explain.insight.reattribution import RunPhotos
from tests.conftest import TinyNet, settled
from tests.runs.networks import stored_run

LEVEL = 500.0
WIDTH = 2000.0


def test_slices_are_read_in_the_window_of_the_run_whoever_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    volume = np.random.default_rng(0).integers(-1000, 3000, (4, 40, 40)).astype(np.int16)
    np.save(folder / "scan.npy", volume)
    np.save(folder / "air.npy", np.full((40, 40), -1000))
    Image.new("RGB", (40, 40)).save(folder / "black.png")
    model = settled(TinyNet())
    network = explain.Explainer(model, size=40, mean=0.5, std=0.25, window=(LEVEL, WIDTH))
    run = stored_run(tmp_path, folder, network, "saliency", target=1)
    rows = list(run.rows())
    assert [row.name for row in rows] == [f"scan.npy slice {number}" for number in range(1, 5)]
    assert sorted(run.failures) == ["air.npy", "black.png"]
    photos = RunPhotos(explain.open_run(run.path), network)
    for scan, row in zip(volume, rows, strict=True):
        shares = (scan - (LEVEL - WIDTH / 2)) / WIDTH
        greys = np.round(shares.clip(0, 1) * 255).astype(np.uint8)
        x = network.preprocess(Image.fromarray(greys).convert("RGB"))[None]
        (batch,) = photos.batches([row])
        torch.testing.assert_close(batch.x, x)
        alone = explain.attribute(model, x, "saliency", target=1)
        torch.testing.assert_close(row.values, alone.values[0], rtol=1e-3, atol=1e-6)
