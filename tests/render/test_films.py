"""Films of videos and volumes: their frames, the sheet, and the moving picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops, ImageSequence

from explain import ImageError
from explain.render import film, overlay

VOLUME = torch.randint(0, 256, (1, 5, 90, 64), generator=torch.Generator().manual_seed(0)) / 51 - 2
MAPS = torch.rand(5, 90, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("style", ["heat", "contour"])
def test_each_picture_is_the_overlay_of_a_slice_on_one_scale(style: str) -> None:
    clip = film(VOLUME, MAPS, style, unit="slice")
    # enlarged to 320 pixels or more
    grey = ((VOLUME[0, 1] + 2) * 51).round().byte().numpy().repeat(4, 0).repeat(4, 1)
    assert clip.pictures[1] == overlay(Image.fromarray(grey), MAPS[1], style)
    assert clip.names[1] == "slice 2 of 5"


def test_frames_may_have_colours_in_any_place() -> None:
    video = np.random.default_rng(0).integers(0, 256, (4, 30, 40, 3), np.uint8)
    maps = np.zeros((4, 30, 40), np.float32)
    expected = film(list(video), maps).pictures
    tensor = torch.as_tensor(video)
    pictures = [Image.fromarray(frame) for frame in video]
    for frames in (video, tensor.movedim(3, 0), tensor.movedim(3, 1), pictures):
        assert film(frames, maps).pictures == expected
    three = film(tensor[:3].movedim(3, 1), maps[:3], layout="NTCHW")
    assert three.pictures == expected[:3]


@pytest.mark.parametrize("ending", ["gif", "webp"])
def test_a_film_moves_through_all_frames_and_its_sheet_shows_some(
    ending: str, tmp_path: Path
) -> None:
    clip = film(VOLUME, MAPS)
    with Image.open(clip.save(tmp_path / f"volume.{ending}", seconds=0.1)) as moving:
        pauses = []
        for frame, picture in zip(ImageSequence.Iterator(moving), clip.pictures, strict=True):
            left = (frame.width - picture.width) // 2
            part = frame.convert("RGB").crop((left, 0, left + picture.width, picture.height))
            pauses.append(frame.info["duration"])
            assert np.asarray(ImageChops.difference(part, picture)).mean() < 12
    assert pauses == [100] * 4 + [400]
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
