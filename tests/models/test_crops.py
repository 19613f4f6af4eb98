"""The centre, the whole of a photo, what the model sees, and where the overlay lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from explain import ModelError
from explain.data.boxes import Box
from explain.models import CenterCrop, WholePhoto
from explain.models.preprocessing import cropped, takes_any_size
from tests.conftest import TinyNet, settled


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (10, 16, 3)).astype(np.uint8))


def averaging() -> nn.Module:
    return settled(TinyNet()).eval()


def test_the_whole_photo_is_scaled_with_its_proportions_kept(photo: Image.Image) -> None:
    view = WholePhoto(10, pad=False)
    for size, shape in (((16, 10), (10, 16)), ((1, 100), (40, 1)), ((7, 7), (10, 10))):
        assert view(photo.resize(size)).shape == (3, *shape)
        assert view.box(size) == Box(0, 0, *size)
    exact = WholePhoto(10, (0.0,) * 3, (1.0,) * 3, pad=False)(photo)
    assert np.array_equal((exact * 255).round().permute(1, 2, 0).numpy(), np.asarray(photo))


@pytest.mark.parametrize("size", [(16, 10), (10, 16), (31, 7), (12, 12), (5, 400)])
def test_padding_is_the_mean_colour_and_lies_outside_of_the_photo(size: tuple[int, int]) -> None:
    view = WholePhoto(16, (0.5,) * 3, (0.25,) * 3)
    x = view(Image.new("RGB", size, "white"))
    inside = (x - 2).abs() < 1e-5
    assert x.shape == (3, 16, 16)
    assert bool((x[~inside] == 0).all())
    box = view.box(size)
    middles = (torch.arange(16) + 0.5) / 16
    rows = box.top + middles * box.height
    columns = box.left + middles * box.width
    in_photo = ((rows > 0) & (rows < size[1]))[:, None] & (columns > 0) & (columns < size[0])
    assert torch.equal(inside.all(0), in_photo)


def test_crops_are_made_of_what_the_model_brings() -> None:
    net = averaging()
    plain = CenterCrop(32, 0.5, (0.1,) * 3, (0.2,) * 3, "bicubic")
    assert cropped(plain, "center", net) is plain
    for pad, of_net in ((False, net), (True, nn.Flatten())):
        whole = WholePhoto(32, (0.1,) * 3, (0.2,) * 3, "bicubic", pad=pad)
        assert cropped(plain, "whole", of_net) == whole
    published = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    assert cropped(published, 0.5, net) == CenterCrop(224, 0.5)
    with pytest.raises(ModelError, match="crop 'whole' needs a"):
        cropped(lambda image: torch.zeros(3, 8, 8), "whole", net)
    with pytest.raises(ModelError, match="crop must"):
        cropped(plain, "left", net)  # type: ignore[arg-type]


def test_networks_that_take_any_size_are_told_by_what_they_average() -> None:
    with torch.device("meta"):
        assert takes_any_size(torchvision.models.resnet18())
        for fixed in (torchvision.models.vit_b_32(), torchvision.models.swin_t(), nn.Flatten()):
            assert not takes_any_size(fixed)
