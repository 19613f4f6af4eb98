"""What speaks against the target is drawn: on the photo, in sheets and lines, in reports, runs and
saved files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def has_both(picture: Image.Image) -> bool:
    return all(colour.any() for colour in red_and_blue(picture))


def red_and_blue(picture: Image.Image) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pixels = np.asarray(picture).astype(int)
    return pixels[..., 0] > pixels[..., 2] + 60, pixels[..., 2] > pixels[..., 0] + 60


@pytest.mark.parametrize("method", [method.name for method in METHODS])
class TestMethodsOfContributions:
    def test_heatmaps_have_the_size_of_what_speaks_against(
        self, method: str, explanation: explain.Explanation
    ) -> None:
        a = explanation[method]
        values = a.values[0].double()
        assert values[:, : SIDE // 2].min() > 0 > values[:, SIDE // 2 :].max()
        expected = values / values.abs().max()
        assert a.style == "signed"
        assert_close(a.signed[0].double(), expected, rtol=0, atol=1e-6)
        assert_close(a.heatmap[0].double(), expected.abs(), rtol=0, atol=1e-6)

    def test_saved_maps_and_reports_have_signs(
        self, method: str, explanation: explain.Explanation, tmp_path: Path
    ) -> None:
        page_map = item(explanation, Detail())["maps"][0][explanation.methods.index(method)]
        assert page_map["kind"] == "signed"
        assert page_map["plane"]["signed"]
        explanation.save(tmp_path, stem="photo")
        saved = explain.load(tmp_path / f"photo-{method}.json")
        assert torch.equal(saved.attribution.signed, explanation[method].signed)
        with Image.open(tmp_path / f"photo-{method}.png") as picture:
            assert has_both(picture.convert("RGB"))


@pytest.fixture(scope="module")
def of_rise() -> explain.Explanation:
    explainer = explain.Explainer(OnTop(), ["one", "other"], PLAIN)
    return explainer(
        Image.new("RGB", (SIDE, SIDE), "white"), RISE(samples=400, grid=4, score="logit"), 0
    )


class TestRISE:
    def test_pictures_show_the_difference_from_the_mean_score_over_the_masks(
        self, of_rise: explain.Explanation
    ) -> None:
        a = of_rise["rise"]
        x = torch.ones(1, 3, SIDE, SIDE)
        scores = []

        class Noted(OnTop):
            def forward(self, x: Tensor) -> Tensor:
                result = super().forward(x)
                scores.extend(result[:, 0].tolist())
                return result

        again = explain.attribute(
            Noted(), x, RISE(samples=400, grid=4, score="logit"), target=0, batch_size=400
        )
        assert_close(again.values, a.values)
        mean = float(a.neutral)
        assert min(scores) < mean < max(scores)
        centred = explain.attribute(
            OnTop(), x, RISE(samples=400, grid=4, score="logit", centred=True), target=0
        )
        # What is subtracted from each place is the mean score times how often the masks have shown
        # it.
        assert float(((a.values - centred.values).double() / mean).mean()) == pytest.approx(
            1, abs=0.05
        )
        difference = a.values[0].double() - mean
        assert_close(a.signed[0].double(), difference / difference.abs().max(), rtol=0, atol=1e-6)
        assert a.values.min() > 0.8 * a.values.max()  # the raw values stay
        assert a.heatmap.min() < 0.05
        assert a.heatmap.max() == 1
