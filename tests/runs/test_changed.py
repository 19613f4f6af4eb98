"""Photos that are other ones than the run explained are named, and neither drawn nor given to the
model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain._utils.errors import ExplainError, RunError
from explain.insight import RunPhotos
from explain.render.styles import get_style
from explain.store.lists import source_of
from tests.runs.networks import explainer, folder_of, picture, stored_run


def exchange(folder: Path) -> None:
    (folder / "000.png").rename(folder / "between")
    (folder / "001.png").rename(folder / "000.png")
    (folder / "between").rename(folder / "001.png")


def edit(folder: Path) -> None:
    """In one pixel, and with the same size and time of the content."""
    for name in ("000.png", "001.png"):
        file = folder / name
        before = file.stat()
        image = Image.open(file)
        image.putpixel((3, 3), (1, 2, 3))
        image.save(file)
        file.write_bytes(file.read_bytes().ljust(before.st_size, b"\0")[: before.st_size])
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def turn(folder: Path) -> None:
    """The same bytes of pixels, in another shape."""
    for name in ("000.png", "001.png"):
        pixels = np.asarray(Image.open(folder / name))
        Image.fromarray(pixels.reshape(pixels.shape[1], pixels.shape[0], 3)).save(folder / name)


CHANGES = [exchange, edit, turn]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("named", [False, True])
def test_changed_photos_are_named_and_not_drawn(
    change: Callable[[Path], None], named: bool, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "photos", 3)
    run = stored_run(tmp_path, folder, target=1)
    rows = list(run.rows())
    change(folder)
    source: Any = source_of(folder) if named else None
    written, failures = run.write_pictures("source", tmp_path / "out", source=source)
    assert [path.name for path in written] == ["3-002-class-1-gradcam.png"]
    assert list(failures) == ["000.png", "001.png"]
    assert all(repr(name) in failures[name] for name in failures)
    _, failures = run.to_html(tmp_path / "run.html", source=source)
    assert list(failures) == ["000.png", "001.png"]
    with pytest.raises(RunError, match=r"000\.png"):
        rows[0].overlay(get_style("heat"), folder / "000.png" if named else None)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("named", [False, True])
def test_changed_photos_are_named_and_not_given_to_the_model(
    change: Callable[[Path], None], named: bool, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "photos", 3)
    network = explainer()
    run = stored_run(tmp_path, folder, network, target=1)
    change(folder)
    photos = RunPhotos(run, network, folder if named else None)
    with pytest.warns(explain.ExplainWarning, match=r"'000\.png' \(and 1 more\) is left out"):
        (batch,) = photos.batches()
    assert [row.name for row in batch.rows] == ["002.png"]
    assert list(photos.missing) == ["000.png", "001.png"]
    torch.testing.assert_close(batch.x[0], explainer().preprocess(picture(2)))


def test_photos_that_moved_are_read_where_the_caller_says(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "photos", 2)
    run = stored_run(tmp_path, folder, target=1)
    first, _ = run.write_pictures("source", tmp_path / "first")
    shutil.copytree(folder, tmp_path / "moved")
    shutil.rmtree(folder)
    written, failures = run.write_pictures("source", tmp_path / "second")
    assert (written, list(failures)) == ([], ["000.png", "001.png"])
    source = source_of(tmp_path / "moved")
    second, failures = run.write_pictures("source", tmp_path / "second", source=source)
    assert failures == {}
    assert [path.read_bytes() for path in second] == [path.read_bytes() for path in first]
    row = next(run.rows())
    assert row.overlay(get_style("heat"), tmp_path / "moved" / "000.png")


def test_a_run_reads_no_file_that_it_only_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes up a run may know a path, and even the pixels, but not the file's times."""
    secret = tmp_path / "secret.png"
    picture(0).save(secret)
    run = stored_run(tmp_path, [secret], target=1)
    content = secret.read_bytes()
    secret.unlink()
    secret.write_bytes(content)
    opened = []
    read = Path.open

    def noted(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "open", noted)
    _, failures = run.write_pictures("source", tmp_path / "out")
    assert "source" in failures[str(secret)]
    with pytest.raises(RunError):
        next(run.rows()).overlay(get_style("heat"))
    with pytest.raises(ExplainError, match="source"):
        run.to_html(tmp_path / "run.html")
    assert secret not in opened
    written, _ = run.write_pictures("source", tmp_path / "out", source=source_of([secret]))
    assert (len(written), secret in opened) == (1, True)


def test_scans_are_drawn_in_the_window_of_the_run(tmp_path: Path) -> None:
    volume = np.random.default_rng(0).integers(-900, 900, (2, 20, 24))
    np.save(tmp_path / "scan.npy", volume)
    network = explainer(window=(40, 400))
    run = stored_run(tmp_path, [str(tmp_path / "scan.npy slice 2")], network, target=1)
    row = next(run.rows())
    greys = explain.data.images.load_image(volume[1], (40, 400))
    style = get_style("heat")
    assert row.overlay(style).tobytes() == row.overlay(style, greys).tobytes()


def test_tensors_are_compared_as_well(tmp_path: Path) -> None:
    tensors = list(torch.rand(2, 3, 20, 24))
    network = explainer()
    run = stored_run(tmp_path, tensors, network, target=1)
    (batch,) = RunPhotos(run, network, tensors).batches()
    assert torch.equal(batch.x, torch.stack(tensors))
    photos = RunPhotos(run, network, tensors[::-1])
    with pytest.warns(explain.ExplainWarning, match="left out"):
        assert list(photos.batches()) == []
