"""Figures that metrics are made of, on numbers that are worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from explain.data.inputs import Inputs
from explain.methods.estimates import NORMAL, student_factor
from explain.methods.regions import pixels_near
from explain.metrics.covering import elsewhere
from explain.metrics.evaluation import EvaluationPlan
from explain.metrics.localisation import boxes_per_image
from explain.metrics.maps import (
    area_under_curve,
    as_tensor,
    gini,
    gradient_histograms,
    grid_regions,
    mid_ranks,
    steps_of,
)
from explain.metrics.randomisation import entropy
from explain.metrics.randomised import layers_with_weights


def test_areas_elsewhere_keep_their_size() -> None:
    assert elsewhere(torch.eye(3)[None], 2, seed=0).sum((2, 3)).tolist() == [[3.0, 3.0]]


def test_a_plan_names_its_passes() -> None:
    words = str(EvaluationPlan(480, 30720, 8640, 500.0))
    assert all(number in words for number in ("39,840", "8 min", "480", "30,720", "8,640"))


@pytest.mark.parametrize(("freedom", "tabled"), [(1, 12.706), (9, 2.262), (99, 1.984)])
def test_quantiles_are_those_of_tables(freedom: int, tabled: float) -> None:
    assert NORMAL * student_factor(freedom) == pytest.approx(tabled, abs=1e-3)


def test_pixels_near_a_region() -> None:
    near = pixels_near(torch.tensor([[[True, False, False]]]), 1.0)
    assert near.tolist() == [[[True, True, False]]]


def test_boxes_end_at_the_photo() -> None:
    [boxes] = boxes_per_image([[-2, 0, 4, 3]], 1, (8, 8))
    assert boxes.tolist() == [[0, 0, 4, 3]]


def test_arrays_of_any_order_become_tensors() -> None:
    turned = as_tensor(np.eye(2, dtype=">i2")[::-1])
    assert turned is not None
    assert turned.tolist() == [[0, 1], [1, 0]]
    assert as_tensor("two") is None


def test_squares_and_steps() -> None:
    assert grid_regions((2, 3), 2, torch.zeros(1)).tolist() == [[[0, 0, 1], [0, 0, 1]]]
    assert steps_of(10, 4) == [0, 2, 5, 8, 10]
    assert steps_of(2, 4) == [0, 1, 2]


def test_areas_under_curves_with_unequal_steps() -> None:
    curve = torch.tensor([[1.0, 0.0, 1.0]])
    assert area_under_curve(curve, [0, 1, 2]).tolist() == [0.5]
    assert area_under_curve(curve, [0, 1, 4]).tolist() == [0.5]
    rising = torch.tensor([[0.0, 0.0, 1.0]])
    assert area_under_curve(rising, [0, 1, 4]).tolist() == [0.375]


def test_gini_ranks_and_entropy() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, -3.0]])
    torch.testing.assert_close(gini(values), torch.tensor([0.0, 0.75]))
    assert mid_ranks(torch.tensor([[3.0, 1.0, 3.0]])).tolist() == [[1.5, 0.0, 1.5]]
    [one_bit] = entropy(torch.tensor([[[0.0, 1.0]]]), 100).tolist()
    assert one_bit == pytest.approx(math.log(2))


def test_histograms_have_four_blocks_of_nine_cells() -> None:
    # 4 x 4 cells, so 2 x 2 blocks of 3 x 3 cells with 9 directions
    assert gradient_histograms(torch.rand(1, 64, 64)).shape == (1, 4 * 9 * 9)


def test_layers_with_weights_in_the_order_of_use() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    layers = layers_with_weights(model, Inputs((torch.ones(1, 3, 4, 4),)))
    assert [layer.name for layer in layers] == ["0", "3"]
