"""The person segmenter: its published mask, who is cut out of photos, and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

import explain
from explain.models import Classifier, load
from explain.models.small_networks import Hardswish
from explain.targets import Segmentation
from tests.conftest import ROOT

GOLDEN = Path(__file__).with_name("golden") / "person_segmenter.safetensors"
EVERY = 3  # rows and columns of the published mask, of which these are stored


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load("person-segmenter")


def probabilities(classifier: Classifier, name: str) -> torch.Tensor:
    """The mask ``(H, W)`` of a photo."""
    with Image.open(ROOT / "assets" / name) as photo, torch.no_grad():
        return classifier.model(classifier.preprocess(photo.convert("RGB"))[None]).sigmoid()[0, 0]


def test_its_mask_is_the_published_one(classifier: Classifier) -> None:
    mask = probabilities(classifier, "astronaut.png")
    assert mask.shape == (256, 256)
    expected = load_file(GOLDEN)["mask"].float()
    assert_close(mask[::EVERY, ::EVERY], expected, atol=1e-3, rtol=0)


def test_a_person_is_explained_where_there_is_one() -> None:
    explainer = explain.Explainer("person-segmenter")
    explanation = explainer(
        ROOT / "assets" / "astronaut.png", ["gradcam", "saliency"], Segmentation("person")
    )
    person = probabilities(load("person-segmenter"), "astronaut.png") > 0.5
    heat = explanation.attributions["gradcam"].heatmap[0]
    assert heat[person].mean() > 5 * heat[~person].mean()
    assert explanation.attributions["saliency"].values.abs().sum() > 0


def test_its_activation_is_rounded_as_in_half_precision() -> None:
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    exact = x * (x + 3).clamp(0, 6) * 0.166626
    assert_close(Hardswish()(x), exact)
