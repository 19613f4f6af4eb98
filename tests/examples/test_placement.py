"""The tables of where maps lie, in small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import explain
from tests.hooks.test_tour import example


@pytest.fixture(scope="module")
def placement() -> Any:
    return example("placement")


def figures(row: str) -> list[float]:
    return [float(cell) for cell in row.strip("| ").split(" | ")[1:]]


def test_maps_behind_the_frame_of_a_detector_are_within_two_pixels(placement: Any) -> None:
    head, *rows = placement.detectors_table()
    assert head.startswith("|")
    assert len(rows) == 4
    for row in rows:
        even, placed = figures(row)
        assert placed < 2
        assert placed < even


@pytest.mark.long
def test_all_methods_of_layers_lie_within_a_cell_of_occlusion(placement: Any) -> None:
    _, *rows = placement.changes_table()
    assert len(rows) == len(placement.METHODS) == 10
    for row in rows:
        assert figures(row)[1] < 8


def test_a_changed_spot_is_drawn_where_it_is(placement: Any) -> None:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.ReLU()) for i, o in ((3, 16), (16, 16), (16, 16))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)]
    model = nn.Sequential(nn.Sequential(*blocks), *head).eval().requires_grad_(False)
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    beside = placement.of_spots(model, "0", x, 8)
    assert beside["cells"] < 0.75 * beside["even"]
    looked = placement.looked_at(model, "0", x).mean(0)
    followed = explain.layers.cell_centres(model, x, "0")
    even = placement.even_centres(looked.shape[:2], (64, 64))
    assert float((followed - looked).norm(dim=-1).mean()) < 2
    assert float((even - looked).norm(dim=-1).mean()) > 4


@pytest.mark.long
def test_the_map_of_a_network_that_has_found_a_spot_lies_on_it(placement: Any) -> None:
    model = placement.finder(0, placement.STEPS)
    x, labels, boxes = placement.with_spots(20, 999)
    middles = torch.tensor([[(box[1] + box[3]) / 2, (box[0] + box[2]) / 2] for box in boxes])
    beside = {}
    for mode in ("even", "cells"):
        found = explain.attribute(model, x, "gradcam", target=labels, layer="0", placement=mode)
        centres = torch.stack([placement.bright_centre(each) for each in found.heatmap])
        beside[mode] = float((centres - middles).norm(dim=1).nanmean())
    assert beside["cells"] < 0.7 * beside["even"]
