"""What speaks against the target is drawn: on the photo, in sheets and lines, in reports, runs and
saved files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import RISE, KernelSHAP, Occlusion, PartitionSHAP
from explain.models import CenterCrop
from explain.report.item import Detail, item

SIDE = 16
PLAIN = CenterCrop(SIDE, 1.0, (0.0,) * 3, (1.0,) * 3)
METHODS = [Occlusion(window=4, stride=4), KernelSHAP(samples=60, regions=4), PartitionSHAP()]


class LeftLessRight(nn.Module):
    """The score is the light on the left less twice the light on the right."""

    def forward(self, x: Tensor) -> Tensor:
        light = x.mean((1, 2))
        half = light.shape[1] // 2
        score = light[:, :half].sum(1) - 2 * light[:, half:].sum(1)
        return torch.stack([score, -score], 1)


class OnTop(nn.Module):
    """A large score that the middle of the photo adds a little to, and its upper left corner takes
    a little from."""

    def forward(self, x: Tensor) -> Tensor:
        score = 10 + x[:, :, 6:10, 6:10].mean((1, 2, 3)) - x[:, :, :4, :4].mean((1, 2, 3))
        return torch.stack([score, 0 * score], 1)


@pytest.fixture(scope="module")
def explanation() -> explain.Explanation:
    explainer = explain.Explainer(LeftLessRight(), ["left", "right"], PLAIN)
    return explainer(Image.new("RGB", (SIDE, SIDE), "white"), METHODS, 0)


def has_red_and_blue(picture: Image.Image) -> bool:
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    difference = pixels[..., 0] - pixels[..., 2]
    return bool(difference.min() < -60 and difference.max() > 60)


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_maps_of_contributions_have_the_sign_and_size_of_what_speaks_against(
    method: str, explanation: explain.Explanation, tmp_path: Path
) -> None:
    a = explanation[method]
    values = a.values[0].double()
    assert values[:, : SIDE // 2].min() > 0 > values[:, SIDE // 2 :].max()
    expected = values / values.abs().max()
    assert a.style == "signed"
    assert_close(a.signed[0].double(), expected, rtol=0, atol=1e-6)
    assert_close(a.heatmap[0].double(), expected.abs(), rtol=0, atol=1e-6)
    page_map = item(explanation, Detail())["maps"][0][explanation.methods.index(method)]
    assert page_map["kind"] == "signed"
    assert page_map["plane"]["signed"]
    explanation.save(tmp_path, stem="photo")
    saved = explain.load(tmp_path / f"photo-{method}.json")
    assert torch.equal(saved.attribution.signed, a.signed)
    with Image.open(tmp_path / f"photo-{method}.png") as picture:
        assert has_red_and_blue(picture)


def test_pictures_of_rise_show_the_difference_from_the_mean_score_over_the_masks() -> None:
    scores = []

    class Noted(OnTop):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            scores.extend(result[:, 0].tolist())
            return result

    rise = RISE(samples=400, grid=4, score="logit")
    x = torch.ones(1, 3, SIDE, SIDE)
    a = explain.attribute(Noted(), x, rise, target=0, batch_size=400)
    mean = float(a.neutral)
    assert min(scores) < mean < max(scores)
    centred = explain.attribute(OnTop(), x, replace(rise, centred=True), target=0)
    # What is subtracted from each place is the mean score times how often the masks have shown it.
    subtracted = (a.values - centred.values).double()
    assert float((subtracted / mean).mean()) == pytest.approx(1, abs=0.05)
    difference = a.values[0].double() - mean
    assert_close(a.signed[0].double(), difference / difference.abs().max(), rtol=0, atol=1e-6)
    assert a.values.min() > 0.8 * a.values.max()  # the raw values stay
    assert a.heatmap.min() < 0.05
    assert a.heatmap.max() == 1
