"""Regions ranked by their pixels' attributions, and what is made of the range of the input."""

from __future__ import annotations

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
from explain.methods.regions import GivenRegions, joined_pixels
from explain.models import CenterCrop
from tests.conftest import Made, TinyNet, settled
from tests.relevance.test_relevance import random


def plain_ranked(pixels: Tensor, masks: Tensor, least: int) -> Tensor:
    """Again and again the region whose uncovered pixels have the largest mean, looked for from the
    beginning."""
    found = torch.zeros_like(pixels)
    left = torch.ones_like(pixels, dtype=torch.bool)
    while True:
        new = [mask & left for mask in masks if int((mask & left).sum()) >= least]
        if not new:
            break
        best = max(new, key=lambda each: float(pixels[each].mean()))
        found[best] = pixels[best].mean()
        left &= ~best
    if left.any():
        found[left] = pixels[left].mean()
    return found


def plain_xrai(model: nn.Module, x: Tensor, regions: Tensor) -> Tensor:
    ends = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    both = [
        explain.attribute(
            model, x[None], IntegratedGradients(4, end.expand_as(x)), target=1
        ).values[0]
        for end in ends
    ]
    pixels = ((both[0] + both[1]) / 2).amax(0)
    return plain_ranked(pixels, torch.stack([regions == number for number in regions.unique()]), 1)


def test_it_is_its_formula() -> None:
    model = settled(TinyNet()).double().eval()
    x = random(0, 2, 3, 12, 10)
    regions = torch.arange(12)[:, None] // 5 * 3 + torch.arange(10) // 4
    found = explain.attribute(model, x, XRAI(4, regions), target=1).values
    for i in range(2):
        assert_close(found[i], plain_xrai(model, x[i], regions), rtol=1e-9, atol=1e-12)
    alone = explain.attribute(
        model.requires_grad_(False), x[1:], XRAI(4, GivenRegions(regions)), target=1
    ).values
    assert_close(alone, found[1:], rtol=1e-9, atol=1e-12)


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


def pixels() -> nn.Module:
    made = Made(
        lambda net, x: net.head(net.conv(x).relu().mean((2, 3))),
        conv=nn.Conv2d(3, 4, 3),
        head=nn.Linear(4, 3),
    )
    return settled(made).eval()


MEAN = (0.5, 0.4, 0.3)
STD = (0.2, 0.25, 0.1)
BLACK, WHITE = (tuple((v - m) / s for m, s in zip(MEAN, STD, strict=True)) for v in (0, 1))


@pytest.mark.parametrize(
    "name", ["lrp(composite=EpsilonGammaBox)", "lrp(composite=DeepTaylor)", "xrai(steps=2)"]
)
def test_an_explainer_says_what_black_and_white_are(name: str) -> None:
    model = pixels()
    explainer = explain.Explainer(
        model, preprocess=CenterCrop(12, mean=MEAN, std=STD), categories=["a", "b", "c"]
    )
    photo = Image.new("RGB", (30, 24), (90, 120, 60))
    photo.paste((200, 30, 80), (8, 6, 20, 15))
    explanation = explainer(photo, name, target="b")
    (found,) = explanation.results[0].values()
    assert found.options["low"] == pytest.approx(BLACK, rel=1e-5)
    assert found.options["high"] == pytest.approx(WHITE, rel=1e-5)
    method: Any = get_method(name)
    x = explainer.as_input(photo)
    told = explain.attribute(
        model, x, method.within(found.options["low"], found.options["high"]), target=1
    )
    assert torch.equal(found.values, told.values)
    own = explain.attribute(model, x, method, target=1).values
    assert (own - told.values).abs().max() > 1e-3 * own.abs().max()


@pytest.mark.filterwarnings("ignore:preprocess must keep a rectangle")
def test_a_preprocessing_that_does_more_leaves_each_photo_its_own_range() -> None:
    def squared(photo: Image.Image) -> Tensor:
        return CenterCrop(12)(photo) ** 2

    explainer = explain.Explainer(pixels(), preprocess=squared, categories=["a", "b", "c"])
    (found,) = (
        explainer(Image.new("RGB", (20, 20), "orange"), LRP("EpsilonBox"), target="b")
        .results[0]
        .values()
    )
    assert found.options["low"] is None


def test_a_range_of_values_has_two_ends_in_order() -> None:
    with pytest.raises(MethodError):
        XRAI(low=(1.0,), high=(0.0,))
    with pytest.raises(MethodError):
        XRAI(low=(0.0,))
