"""What speaks against the target is drawn: on the photo, in sheets and lines, in reports, runs and
saved files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import RISE, KernelSHAP, Method, Occlusion, PartitionSHAP
from explain.models import CenterCrop
from explain.report.item import Detail, item
from tests.conftest import Made

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


@pytest.mark.parametrize("method", METHODS)
def test_maps_of_contributions_have_the_sign_and_size_of_what_speaks_against(
    method: Method, tmp_path: Path
) -> None:
    explainer = explain.Explainer(LeftLessRight(), ["left", "right"], PLAIN)
    explanation = explainer(Image.new("RGB", (SIDE, SIDE), "white"), method, 0)
    a = explanation[method.name]
    values = a.values[0].double()
    assert values[:, : SIDE // 2].min() > 0 > values[:, SIDE // 2 :].max()
    assert_close(a.signed[0].double(), values / values.abs().max(), rtol=0, atol=1e-6)
    assert torch.equal(a.heatmap, a.signed.abs())
    assert item(explanation, Detail())["maps"][0][0]["kind"] == a.style == "signed"
    path, *_ = explanation.save(tmp_path)
    assert torch.equal(explain.load(path.with_suffix(".json")).attribution.signed, a.signed)
    with Image.open(path) as picture:
        red, _, blue = np.asarray(picture.convert("RGB")).astype(int).transpose(2, 0, 1)
    assert (red - blue).max() > 60 > -60 > (red - blue).min()


def test_pictures_of_rise_show_the_difference_from_the_mean_score_over_the_masks() -> None:
    """The middle of the photo adds a little to a large score, its upper left corner takes a
    little."""
    scores = []

    def noted(net: Any, x: Tensor) -> Tensor:
        score = 10 + x[:, :, 6:10, 6:10].mean((1, 2, 3)) - x[:, :, :4, :4].mean((1, 2, 3))
        scores.extend(score.tolist())
        return torch.stack([score, 0 * score], 1)

    rise = RISE(samples=400, grid=4, score="logit")
    x = torch.ones(1, 3, SIDE, SIDE)
    a = explain.attribute(Made(noted), x, rise, target=0)
    mean = float(a.neutral)
    assert min(scores) < mean < max(scores)
    difference = a.values[0].double() - mean
    assert_close(a.signed[0].double(), difference / difference.abs().max(), rtol=0, atol=1e-6)
    assert a.values.min() > 0.8 * a.values.max()  # the raw values stay
    assert a.heatmap.min() < 0.05
    # What is subtracted from each place is the mean score times how often the masks have shown it.
    centred = explain.attribute(Made(noted), x, replace(rise, centred=True), target=0)
    subtracted = (a.values - centred.values).double()
    assert float((subtracted / mean).mean()) == pytest.approx(1, abs=0.05)
