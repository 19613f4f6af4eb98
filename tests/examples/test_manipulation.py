"""Manipulated networks and photos, in small: what is wanted is reached, and answers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import explain
from tests.hooks.test_tour import example


@pytest.fixture
def manipulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With photos of small batches and plain marks, which are learned soon."""
    module = example("manipulation")
    monkeypatch.setattr(module, "BATCH", 8)
    monkeypatch.setattr(module, "CONTRAST", 1.0)
    monkeypatch.setattr(module, "STEPS", 12)
    return module


def test_a_network_shows_less_and_less_and_answers_as_before(manipulation: Any) -> None:
    model = manipulation.trained(80, 0.0)
    x, _ = manipulation.photos(8, 3)
    target = model(x).argmax(1)
    false = manipulation.fooled(model, "nothing", 40)
    assert (false(x).argmax(1) == target).all()
    methods = ["gradcam(relu=False)"]
    before, after = (
        explain.attribute(network, x, methods, target=target)["gradcam"].values
        for network in (model, false)
    )
    assert after.clamp(min=0).sum() < 0.7 * before.clamp(min=0).sum()


def test_a_photo_moves_within_the_limit_to_the_map_of_another(manipulation: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 5), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    ).eval()
    x, _ = manipulation.photos(4, 1)
    target = model(x).argmax(1)
    maps = manipulation.heatmaps(model, x, "inputxgradient", target)
    moved = manipulation.moved(model, x, "inputxgradient", limit=0.1)
    assert (moved - x).abs().max() <= 0.1 + 1e-6
    assert (model(moved).argmax(1) == target).all()
    wanted = manipulation.seen(maps.roll(-1, 0))
    at_first = manipulation.alike(manipulation.seen(maps), wanted)
    maps = manipulation.heatmaps(model, moved, "inputxgradient", target)
    after = manipulation.alike(manipulation.seen(maps), wanted)
    assert (after >= at_first).all()
    assert (after - at_first).mean() > 0.03


def test_a_map_of_nothing_is_marked_and_counted(manipulation: Any) -> None:
    model = manipulation.network().requires_grad_(False)
    nothing = manipulation.network().requires_grad_(False)
    nothing[-1].weight.zero_()  # the answer is the bias, whatever the photo
    nothing[-1].bias.copy_(torch.tensor([5.0, 0, 0, 0]))
    model[-1].bias.copy_(torch.tensor([5.0, 0, 0, 0]))
    x, _ = manipulation.photos(2, 1)
    case = manipulation.Case("nothing", (model, x), (nothing, x), None)
    with pytest.warns(explain.ExplainWarning, match="zero everywhere"):
        rows = list(manipulation.measured([case], "gradcam", certified=1))
    assert [row["after"]["covering"] for row in rows] == ["✗", "✗"]
    assert all(row["false"] and row["same answer"] for row in rows)
    head, _, line, *_ = manipulation.table(rows)
    assert line.count("|") == head.count("|")
    assert line.startswith("| gradcam | 100 (")
