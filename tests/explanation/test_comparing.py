"""Maps of several models side by side."""

from __future__ import annotations

from dataclasses import replace

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
    parts = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    model = nn.Sequential(*parts)
    explainer = explain.Explainer(model, preprocess=CenterCrop(16, crop))
    photo = Image.radial_gradient("L").resize((40, 30))
    return explainer(photo, ["gradcam", "saliency"], targets=[0, 1])


def test_the_share_elsewhere_is_that_of_the_maps_in_pixels() -> None:
    models = {"one": explained(0, 1.0), "other": explained(1, 0.5)}
    comparison = compare(models)
    questions = [(0, "gradcam"), (0, "saliency"), (1, "gradcam"), (1, "saliency")]
    for (target, method), row in zip(questions, comparison.summary["maps"], strict=True):
        p, q = (heatmap.astype(np.float64) for heatmap in heat(models, target, method))
        # both see the middle of the photo alone
        middle = p[:, 12:29].sum() + q[:, 12:29].sum()
        assert middle == p.sum() + q.sum() > 0
        apart = np.abs(p / p.sum() - q / q.sum()).sum() / 2
        assert (row["target"], row["method"]) == (models["one"].targets[target], method)
        assert row["elsewhere"] == {"one": 0.0, "other": pytest.approx(apart, rel=1e-4)}
    assert "in other places than that of one" in comparison.to_html()
    # of detections, a later model may have fewer
    fewer = replace(models["other"], results=models["other"].results[:1])
    assert (
        compare({"one": models["one"], "other": fewer}).summary["maps"]
        == (comparison.summary["maps"][:2])
    )
