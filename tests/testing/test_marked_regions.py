"""Regions that a caller gives for photos, and figures in words."""

from __future__ import annotations

import torch
from PIL import Image

from explain.metrics import MeanInterval
from explain.testing.assertions import in_points, points
from explain.testing.regions import is_one_region, mask_on_photo, region_for


def test_shares_in_hundredths() -> None:
    assert [points(0.123), points(-0.0001)] == ["12.3", "0.0"]
    interval = in_points(MeanInterval.of(torch.tensor([0.0, 1.0] * 8)))
    # 1.96 times the factor of Student for 15 degrees, 2.131, and the error 0.5164 / 4
    assert all(number in interval for number in ("50.0", "22.5", "77.5"))


def test_regions_of_one_photo_and_of_several() -> None:
    photo = Image.new("RGB", (8, 6))
    assert region_for(lambda photo: (0, 0, photo.width, 2), photo, 0) == (0, 0, 8, 2)
    boxes = [(0, 0, 2, 2), (0, 0, 3, 3)]
    assert is_one_region(boxes[0])
    assert not is_one_region(boxes)
    assert region_for(boxes, photo, 1) == (0, 0, 3, 3)


def test_boxes_in_shares_and_in_pixels() -> None:
    left_half = mask_on_photo((0.0, 0.0, 0.5, 1.0), (1, 4))
    last_pixel = mask_on_photo((3, 0, 4, 1), (1, 4))
    assert left_half.tolist() == [[True, True, False, False]]
    assert last_pixel.tolist() == [[False, False, False, True]]
