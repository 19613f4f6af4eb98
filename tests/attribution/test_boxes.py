"""Parts of maps: their masks and boxes, drawn on photos and as annotations of COCO."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops
from scipy import ndimage
from torch import nn

import explain
from explain.attribution.result import Attribution
from explain.explanation.coco import to_coco
from explain.models import CenterCrop, WholePhoto
from tests.conftest import Made, settled

SHARES = (0.2, 0.5, 0.9, 1.0)


def of_maps(values: torch.Tensor) -> Attribution:
    size = tuple(values.shape[1:])
    return Attribution("gradcam", values, "score", values.flatten(1)[:, 0], None, size)


def blobs(seed: int, count: int = 3) -> torch.Tensor:
    noise = np.random.default_rng(seed).random((count, 17, 23))
    return torch.from_numpy(ndimage.gaussian_filter(noise, (0, 1.5, 1.5))) - 0.4


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(3))
def test_boxes_are_those_of_connected_parts_the_brightest_first(seed: int, share: float) -> None:
    a = of_maps(blobs(seed))
    for heatmap, mask, boxes in zip(a.heatmap, a.mask(share), a.boxes(share), strict=True):
        heat = heatmap.double().numpy()
        above = heat >= np.float32(share) * heat.max()
        assert np.array_equal(mask.numpy(), above)
        numbers, count = ndimage.label(above, np.ones((3, 3)))
        expected = []
        for number, (rows, columns) in enumerate(ndimage.find_objects(numbers), 1):
            box = (columns.start, rows.start, columns.stop, rows.stop)
            expected.append((-heat[numbers == number].sum(), box))
        assert boxes == [box for _, box in sorted(expected)]
        assert len(boxes) == count


def test_a_map_of_zeros_has_no_parts() -> None:
    a = of_maps(torch.zeros(2, 4, 5))
    assert not a.mask(0.1).any()
    assert a.boxes(0.1) == [[], []]


def test_boxes_lie_at_the_resolution_of_the_input() -> None:
    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.AdaptiveAvgPool2d(1)))
    maps = explain.attribute(model, torch.rand(2, 3, 40, 64), ["lafam", "saliency"], target=1)
    for a in maps.values():
        assert a.mask().shape == (2, 40, 64)
        for mask, boxes in zip(a.mask(), a.boxes(), strict=True):
            rows, columns = mask.nonzero().T
            x0, y0, x1, y1 = zip(*boxes, strict=True)
            assert (min(x0), min(y0)) == (columns.min(), rows.min())
            assert (max(x1), max(y1)) == (columns.max() + 1, rows.max() + 1)


@pytest.mark.parametrize("share", [0, 1.5, -1, True, "half", None, float("nan")])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    for ask in (of_maps(blobs(0)).boxes, of_maps(blobs(0)).mask):
        with pytest.raises(explain.ArgumentError, match="threshold") as refused:
            ask(share)
        assert "\n" not in str(refused.value)


def test_videos_have_masks_and_no_boxes() -> None:
    a = of_maps(torch.rand(2, 3, 4, 5))
    assert a.mask().shape == (2, 3, 4, 5)
    with pytest.raises(explain.ImageError, match="boxes"):
        a.boxes()


def bright() -> nn.Module:
    """One score, from how bright each pixel is."""
    light = nn.Conv2d(3, 1, 1, bias=False)
    nn.init.constant_(light.weight, 1 / 3)
    return Made(lambda net, x: net.light(x).mean((2, 3)), light=light).eval()


def two_spots(size: tuple[int, int] = (90, 60)) -> Image.Image:
    picture = Image.new("RGB", size)
    picture.paste("white", (30, 20, 44, 30))
    picture.paste("white", (56, 36, 60, 44))
    return picture


PLAIN: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
VIEWS = [CenterCrop(60, 1.0, **PLAIN), WholePhoto(30, **PLAIN)]


def decoded(segmentation: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Run lengths as COCO has them: column by column, zeros first."""
    pixels: list[int] = []
    for place, count in enumerate(segmentation["counts"]):
        pixels += [place % 2] * count
    height, width = segmentation["size"]
    return np.array(pixels).reshape(width, height).T


@pytest.mark.parametrize("preprocess", VIEWS, ids=["cropped", "padded"])
def test_coco_has_the_parts_at_the_pixels_of_the_photo(preprocess: Any) -> None:
    explainer = explain.Explainer(bright(), ["light"], preprocess, activation="sigmoid")
    photo = two_spots()
    document = to_coco([explainer(photo, "lafam"), explainer(photo, "lafam")])
    assert [image["id"] for image in document["images"]] == [1, 2]
    assert document["images"][0] | {"id": 0} == {
        "id": 0,
        "file_name": "image 1",
        "width": 90,
        "height": 60,
    }
    assert document["categories"] == [{"id": 1, "name": "light"}]
    annotations = document["annotations"]
    assert [part["image_id"] for part in annotations] == [1, 1, 2, 2]
    assert [part["id"] for part in annotations] == [1, 2, 3, 4]
    numbers, _ = ndimage.label(np.array(photo.convert("L")) > 127)
    for number, part in enumerate(annotations[:2], 1):
        mask = decoded(part["segmentation"])
        rows, columns = mask.nonzero()
        assert part["area"] == mask.sum()
        width = columns.max() - columns.min() + 1
        height = rows.max() - rows.min() + 1
        assert part["bbox"] == [columns.min(), rows.min(), width, height]
        spot = numbers == number
        assert (mask & spot).sum() / (mask | spot).sum() >= (1 if preprocess is VIEWS[0] else 0.6)
        assert 0.5 <= part["score"] <= 1
        assert (part["method"], part["category_id"], part["iscrowd"]) == ("lafam", 1, 0)


def test_the_parts_are_drawn_where_they_lie_on_the_photo() -> None:
    explainer = explain.Explainer(bright(), ["light"], VIEWS[0], activation="sigmoid")
    explanation = explainer(two_spots(), "lafam")
    plain = explanation.overlay()
    drawn = explanation.overlay(boxes=0.5)
    left, top, right, bottom = ImageChops.difference(plain, drawn).getbbox() or (0, 0, 0, 0)
    assert left in range(26, 31)  # the frames are around the spots
    assert top in range(16, 21)
    assert right in range(60, 65)
    assert bottom in range(44, 49)
    sheet = explanation.sheet()
    assert explanation.sheet(boxes=0.5).size == sheet.size
    assert ImageChops.difference(explanation.sheet(boxes=0.5), sheet).getbbox()
    with pytest.raises(explain.ArgumentError, match="threshold"):
        explanation.overlay(boxes=3)
