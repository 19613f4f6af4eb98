"""Regions ranked by their pixels' attributions, and what is made of the range of the input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import MethodError
from explain.methods import LRP, XRAI, IntegratedGradients
from explain.methods.base import get_method
from explain.methods.regions import joined_pixels
from explain.models import CenterCrop
from tests.conftest import TinyNet, settled
from tests.relevance.test_relevance import random


def plain_ranked(pixels: Tensor, masks: Tensor) -> Tensor:
    """Again and again the region whose uncovered pixels have the largest mean, looked for from the
    beginning."""
    ranked = torch.zeros_like(pixels)
    left = torch.ones_like(pixels, dtype=torch.bool)
    while left.any():
        best = max(
            (mask & left for mask in masks if (mask & left).any()), key=lambda m: pixels[m].mean()
        )
        ranked[best] = pixels[best].mean()
        left &= ~best
    return ranked


def plain_xrai(model: nn.Module, x: Tensor, regions: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for end in (x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)):
        method = IntegratedGradients(4, end.expand_as(x))
        total += explain.attribute(model, x[None], method, target=1).values[0]
    masks = torch.stack([regions == number for number in regions.unique()])
    return plain_ranked((total / 2).amax(0), masks)


@pytest.mark.parametrize("scale", [1, 5])
def test_it_is_its_formula(scale: int) -> None:
    model = settled(TinyNet()).double().eval()
    height, width = 12 * scale, 10 * scale
    x = random(0, 2, 3, height, width)
    rows = torch.arange(height)[:, None] // (5 * scale)
    regions = rows * 3 + torch.arange(width) // (4 * scale)
    values = explain.attribute(model, x, XRAI(4, regions), target=1).values
    for of_image, image in zip(values, x, strict=True):
        assert_close(of_image, plain_xrai(model, image, regions), rtol=1e-9, atol=1e-12)


def test_regions_are_those_of_scikit_image() -> None:
    segmentation = pytest.importorskip(
        "skimage.segmentation", reason="scikit-image comes with the extra 'regions'"
    )
    image = torch.rand(3, 20, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for scale in (10, 100, 400):
        ours = joined_pixels(image, scale / 255, 5)
        theirs = segmentation.felzenszwalb(
            image.movedim(0, -1).numpy(), scale=scale, sigma=0, min_size=5
        )
        pairs = set(zip(ours.flatten().tolist(), theirs.flatten().tolist(), strict=True))
        assert len(pairs) == ours.max() + 1 == theirs.max() + 1


# The range of the input


MEAN = (0.5, 0.4, 0.3)
STD = (0.2, 0.25, 0.1)
BLACK, WHITE = (tuple((v - m) / s for m, s in zip(MEAN, STD, strict=True)) for v in (0, 1))


@pytest.mark.parametrize(
    "name", ["lrp(composite=EpsilonGammaBox)", "lrp(composite=DeepTaylor)", "xrai(steps=2)"]
)
def test_an_explainer_says_what_black_and_white_are(name: str) -> None:
    model = settled(TinyNet()).eval()
    preprocess = CenterCrop(12, mean=MEAN, std=STD)
    explainer = explain.Explainer(model, preprocess=preprocess, categories=[*"abcde"])
    photo = Image.new("RGB", (30, 24), (90, 120, 60))
    photo.paste((200, 30, 80), (8, 6, 20, 15))
    attribution = explainer(photo, name, target="b").results[0].popitem()[1]
    low, high = (attribution.options[end] for end in ("low", "high"))
    assert low == pytest.approx(BLACK, rel=1e-5)
    assert high == pytest.approx(WHITE, rel=1e-5)
    method: Any = get_method(name)
    x = explainer.as_input(photo)
    bounded = explain.attribute(model, x, replace(method, low=low, high=high), target=1).values
    assert torch.equal(attribution.values, bounded)
    own = explain.attribute(model, x, method, target=1).values
    assert (own - bounded).abs().max() > 1e-3 * own.abs().max()


@pytest.mark.filterwarnings(
    "ignore:preprocess must keep a rectangle",
    "ignore:lrp misses the score",  # of one colour: z^B divides by rounding errors
)
def test_a_preprocessing_that_does_more_leaves_each_photo_its_own_range() -> None:
    model = settled(TinyNet()).eval()
    squared: Any = lambda photo: CenterCrop(12)(photo) ** 2  # noqa: E731
    explainer = explain.Explainer(model, preprocess=squared, categories=[*"abcde"])
    photo = Image.new("RGB", (20, 20), "orange")
    attribution = explainer(photo, LRP("EpsilonBox"), target="b").results[0].popitem()[1]
    assert attribution.options["low"] is None


def test_a_range_of_values_has_two_ends_in_order() -> None:
    with pytest.raises(MethodError):
        XRAI(low=(1.0,), high=(0.0,))
    with pytest.raises(MethodError):
        XRAI(low=(0.0,))


def test_a_range_has_one_value_or_one_for_each_channel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 8), nn.Flatten())
    with pytest.raises(MethodError, match="baseline must have 3 values"):
        explain.attribute(
            model, torch.rand(1, 3, 8, 8), XRAI(low=(0.0, 0.0), high=(1.0, 1.0)), target=0
        )
