"""How alike two maps are, against plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from explain.metrics.maps import hog, pearson, similarity, spearman, ssim


def pair(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(2, height, width, generator=generator, dtype=torch.float64)
    return one, 0.5 * one + torch.rand(one.shape, generator=generator, dtype=torch.float64)


def test_rank_correlation_shares_the_ranks_of_equal_values() -> None:
    one = torch.tensor([[[1.0, 2.0, 2.0, 5.0]]])
    other = torch.tensor([[[0.0, 3.0, 1.0, 1.0]]])
    ranks = torch.tensor([[0, 1.5, 1.5, 3], [0, 3, 1.5, 1.5]])
    assert spearman(one, other).item() == pytest.approx(ranks.corrcoef()[0, 1].item())
    values = torch.stack([one, other]).flatten(1)
    assert pearson(one, other).item() == pytest.approx(values.corrcoef()[0, 1].item())


def test_structural_similarity_window_by_window() -> None:
    one, other = pair(13, 9)
    x, y = [(m[0] - m[0].min()) / (m[0].max() - m[0].min()) for m in (one, other)]
    rows = torch.arange(13)[:, None]
    columns = torch.arange(9)
    total = 0.0
    for row in range(13):
        for column in range(9):
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
        cells = np.zeros((5, 4, 9))
        for y in range(20):
            for x in range(16):
                down = image[y + 1, x] - image[y - 1, x] if 0 < y < 19 else 0.0
                across = image[y, x + 1] - image[y, x - 1] if 0 < x < 15 else 0.0
                angle = math.degrees(math.atan2(down, across)) % 180
                length = math.hypot(down, across) / 16
                cells[y // 4, x // 4, min(8, int(angle / 20))] += length
        blocks = []
        for top in range(3):
            for left in range(2):
                block = cells[top : top + 3, left : left + 3].flatten()
                block = np.minimum(block / math.sqrt((block**2).sum() + 1e-10), 0.2)
                blocks += [*(block / math.sqrt((block**2).sum() + 1e-10))]
        features.append(blocks)
    assert hog(*maps)[0].item() == pytest.approx(np.corrcoef(features)[0, 1], abs=1e-10)


@pytest.mark.parametrize("how", ["spearman", "pearson", "ssim", "hog"])
def test_a_map_is_like_itself_and_a_flat_one_is_like_nothing(how: Any) -> None:
    one, _ = pair(16, 16)
    assert similarity(how, one, 3 * one + 1).tolist() == pytest.approx([1, 1])
    assert similarity(how, one, one * 0).tolist() == [0, 0]
