"""Maps of several models side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.explanation.comparison import compare, heat
from explain.models import CenterCrop


def explained(seed: int, crop: float) -> explain.Explanation:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    photo = Image.radial_gradient("L").resize((40, 30))
    return explain.Explainer(model, preprocess=CenterCrop(16, crop))(
        photo, ["gradcam", "saliency"], targets=[0, 1]
    )


def test_the_share_elsewhere_is_that_of_the_maps_in_pixels() -> None:
    models = {"one": explained(0, 1.0), "other": explained(1, 0.5)}
    comparison = compare(models)
    rows = [(0, "gradcam"), (0, "saliency"), (1, "gradcam"), (1, "saliency")]
    for row, found in zip(rows, comparison.summary["maps"], strict=True):
        p, q = heat(models, *row)
        seen = [
            (x, y) for y in range(30) for x in range(40) if 12.5 <= x < 27.5 and 7.5 <= y < 22.5
        ]
        assert all(
            heat[y, x] == 0
            for heat in (p, q)
            for y in range(30)
            for x in range(40)
            if not 12 <= x <= 28
        )
        total = [sum(float(heat[y, x]) for x, y in np.ndindex(40, 30)) for heat in (p, q)]
        assert total[0] > 0
        assert len(seen) == 15 * 15
        apart = sum(abs(p[y, x] / total[0] - q[y, x] / total[1]) for x, y in np.ndindex(40, 30)) / 2
        assert (found["target"], found["method"]) == (models["one"].targets[row[0]], row[1])
        assert found["elsewhere"] == {"one": 0.0, "other": pytest.approx(apart, rel=1e-4)}
    assert comparison.picture().width > comparison.picture().height / 2
    assert "in other places than that of one" in comparison.to_html()
