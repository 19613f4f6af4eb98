"""How the map of a photo moved: what a film holds, its files, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

import explain
from explain import RunError
from explain.cli import main
from explain.training import film
from tests.training.test_watch import Training, picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, and a training that was watched on them, once with 6 looks and once
    with 3."""
    made = tmp_path_factory.mktemp("film")
    for number, name in enumerate(("cat.png", "old/cat.png", "dog.png")):
        (made / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number, (40, 30)).save(made / "photos" / name)
    for file, every in (("t.sqlite", 2), ("short.sqlite", 5)):
        training = Training()
        options: Any = {"every": every, "output": made / file, "methods": ["gradcam", "saliency"]}
        with training.monitor(made / "photos", target=1, **options) as watch:
            training.through(10, watch)
    return made


def test_a_film_has_the_stored_maps_in_the_order_of_the_steps(folder: Path) -> None:
    run = explain.open_run(folder / "t.sqlite")
    found = film(run, "dog.png", method="saliency")
    assert (found.name, found.method, found.steps) == ("dog.png", "saliency", (0, 2, 4, 6, 8, 10))
    stored = {row.name: row for row in run.rows("saliency")}
    for step, row in zip(found.steps, found.rows, strict=True):
        assert torch.equal(row.values, stored[f"step {step:08}/dog.png"].values)
    last = found.rows[-1].values.flatten().numpy()
    expected = [np.corrcoef(row.values.flatten().numpy(), last)[0, 1] for row in found.rows]
    assert found.similarity == pytest.approx(expected)


def test_a_photo_is_found_by_its_name_and_the_end_of_it(folder: Path) -> None:
    file = folder / "t.sqlite"
    assert film(file, "cat.png", method="saliency").name == "cat.png"
    assert film(file, "old/cat.png", method="saliency").name == "old/cat.png"
    assert film(file, folder / "photos" / "dog.png", method="saliency").name == "dog.png"
    with pytest.raises(RunError, match="photo must"):
        film(file, "dgo.png")


def test_a_film_is_drawn_on_the_photo_that_was_watched_only(folder: Path) -> None:
    file, photos = folder / "t.sqlite", folder / "photos"
    assert film(file, "dog.png", method="saliency", image=photos / "dog.png").name == "dog.png"
    with pytest.raises(RunError, match=r"dog\.png.*changed"):
        film(file, "dog.png", method="saliency", image=photos / "cat.png")


@pytest.mark.long
def test_the_command_writes_a_film_that_holds_the_last_look_and_a_figure(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["film", str(folder / "short.sqlite"), "dog.png", "--method", "saliency"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("dog.png, saliency: 3 snapshots from step 0")
    with Image.open("film.gif") as moving:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(moving)]
    pictures = film(folder / "short.sqlite", "dog.png", method="saliency").pictures()
    for frame, expected in zip(frames, pictures, strict=True):
        assert frame.size == expected.size
        assert np.abs(np.asarray(frame, float) - np.asarray(expected, float)).mean() < 8
    assert main([*words, "--force", "--output", "a/dog.webp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["films"][0]["steps"] == [0, 5, 10]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"dog.png", "dog.webp"}
    assert main([*words, "--output", "dog.mp4"]) == 1
    assert "film must end in .gif or .webp, got 'dog.mp4'" in capsys.readouterr().err
