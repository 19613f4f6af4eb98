"""How alike two maps are, against plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from explain.metrics.maps import hog, pearson, similarity, spearman, ssim
from tests.methods.plain import unit


def pair(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.rand(2, height, width, dtype=torch.float64)
    return one, 0.5 * one + torch.rand_like(one)


def test_rank_correlation_shares_the_ranks_of_equal_values() -> None:
    one = torch.tensor([[[1.0, 2.0, 2.0, 5.0]]])
    other = torch.tensor([[[0.0, 3.0, 1.0, 1.0]]])
    ranks = torch.tensor([[0, 1.5, 1.5, 3], [0, 3, 1.5, 1.5]])
    assert spearman(one, other).item() == pytest.approx(ranks.corrcoef()[0, 1].item())
    values = torch.stack([one, other]).flatten(1)
    assert pearson(one, other).item() == pytest.approx(values.corrcoef()[0, 1].item())


def test_structural_similarity_window_by_window() -> None:
    one, other = pair(13, 9)
    x, y = (unit(values[0], shift=True) for values in (one, other))
    rows, columns = torch.meshgrid(torch.arange(13), torch.arange(9), indexing="ij")
    total = 0.0
    for row, column in np.ndindex(13, 9):
        down = rows - row
        across = columns - column
        weights = torch.exp(-(down**2 + across**2) / (2 * 1.5**2)).double()
        weights *= (down.abs() <= 5) & (across.abs() <= 5)
        weights /= weights.sum()
        mean_x = (weights * x).sum()
        mean_y = (weights * y).sum()
        variances = (weights * ((x - mean_x) ** 2 + (y - mean_y) ** 2)).sum()
        covariance = (weights * (x - mean_x) * (y - mean_y)).sum()
        light = (2 * mean_x * mean_y + 1e-4) / (mean_x**2 + mean_y**2 + 1e-4)
        total += (light * (2 * covariance + 9e-4) / (variances + 9e-4)).item()
    assert ssim(one, other)[0].item() == pytest.approx(total / (13 * 9), abs=1e-10)


def test_histograms_of_gradients_cell_by_cell() -> None:
    features = []
    maps = pair(20, 16)
    for values in maps:
        image = values[0].numpy()
        down = np.zeros((20, 16))
        down[1:-1] = image[2:] - image[:-2]
        across = np.zeros((20, 16))
        across[:, 1:-1] = image[:, 2:] - image[:, :-2]
        cells = np.zeros((5, 4, 9))
        for y, x in np.ndindex(20, 16):
            angle = math.degrees(math.atan2(down[y, x], across[y, x])) % 180
            cells[y // 4, x // 4, min(8, int(angle / 20))] += math.hypot(down[y, x], across[y, x])
        blocks = []
        for top, left in np.ndindex(3, 2):
            block = cells[top : top + 3, left : left + 3].flatten() / 16
            block = np.minimum(block / math.sqrt((block**2).sum() + 1e-10), 0.2)
            blocks.append(block / math.sqrt((block**2).sum() + 1e-10))
        features.append(np.concatenate(blocks))
    assert hog(*maps)[0].item() == pytest.approx(np.corrcoef(features)[0, 1], abs=1e-10)


@pytest.mark.parametrize("how", ["spearman", "pearson", "ssim", "hog"])
def test_a_map_is_like_itself_and_a_flat_one_is_like_nothing(how: Any) -> None:
    one, _ = pair(16, 16)
    assert similarity(how, one, 3 * one + 1).tolist() == pytest.approx([1, 1])
    assert similarity(how, one, one * 0).tolist() == [0, 0]
