"""Films of videos and volumes: their frames, the sheet, and the moving picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from explain import ImageError
from explain.render import film, overlay

VOLUME = torch.randint(0, 256, (1, 5, 90, 64), generator=torch.Generator().manual_seed(0)) / 51 - 2
MAPS = torch.rand(5, 90, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("style", ["heat", "contour"])
def test_each_picture_is_the_overlay_of_a_slice_on_one_scale(style: str) -> None:
    clip = film(VOLUME, MAPS, style, unit="slice")
    grey = ((VOLUME + 2) * 51).round().byte()[0].numpy()
    for i, picture in enumerate(clip.pictures[:2]):
        # enlarged to 320 pixels or more
        photo = Image.fromarray(np.kron(grey[i], np.ones((4, 4), np.uint8)))
        np.testing.assert_array_equal(
            np.asarray(picture), np.asarray(overlay(photo, MAPS[i], style))
        )
    assert clip.names[1] == "slice 2 of 5"


def test_frames_may_have_colours_in_any_place() -> None:
    video = np.random.default_rng(0).integers(0, 256, (4, 30, 40, 3), np.uint8)
    maps = np.zeros((4, 30, 40), np.float32)
    wanted = [np.asarray(picture) for picture in film(list(video), maps).pictures]
    tensor = torch.as_tensor(video)
    for frames in (
        video,
        tensor.movedim(3, 0),
        tensor.movedim(3, 1),
        [Image.fromarray(frame) for frame in video],
    ):
        for picture, expected in zip(film(frames, maps).pictures, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(picture), expected)
    three = zip(
        film(tensor[:3].movedim(3, 1), maps[:3], layout="NTCHW").pictures, wanted, strict=False
    )
    for picture, expected in three:
        np.testing.assert_array_equal(np.asarray(picture), expected)


@pytest.mark.parametrize("ending", [".gif", ".webp"])
def test_a_film_moves_through_all_frames_and_its_sheet_shows_some(
    ending: str, tmp_path: Path
) -> None:
    clip = film(VOLUME, MAPS)
    path = clip.save(tmp_path / f"volume{ending}", seconds=0.1)
    with Image.open(path) as moving:
        frames = [
            (frame.convert("RGB"), frame.info["duration"])
            for frame in ImageSequence.Iterator(moving)
        ]
    assert [pause for _, pause in frames] == [100] * 4 + [400]
    for (frame, _), picture in zip(frames, clip.pictures, strict=True):
        centre = frame.crop(
            (
                (frame.width - picture.width) // 2,
                0,
                (frame.width + picture.width) // 2,
                picture.height,
            )
        )
        assert np.abs(np.asarray(centre, float) - np.asarray(picture, float)).mean() < 12
    assert clip.sheet(3, tile=100).width < clip.sheet(5, tile=100).width
    assert clip._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: film(VOLUME, MAPS[:4]), "frames must"),
        (lambda: film(list(VOLUME[0].sigmoid().numpy()), MAPS[:4]), "heatmap must"),
        (lambda: film(VOLUME, MAPS).save("a.mp4"), "film must end"),
        (lambda: film(VOLUME, MAPS).save("a.gif", seconds=0), "seconds must"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        make()
