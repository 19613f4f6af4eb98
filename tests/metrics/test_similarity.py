"""How alike two maps are, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from explain.metrics.maps import gradient_histograms, hog, pearson, similarity, spearman, ssim


def pair(size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(2, *size, generator=generator, dtype=torch.float64)
    return one, 0.5 * one + torch.rand(2, *size, generator=generator, dtype=torch.float64)


def test_rank_correlation_shares_the_ranks_of_equal_values() -> None:
    one = torch.tensor([[[1.0, 2.0, 2.0, 5.0]]])
    other = torch.tensor([[[0.0, 3.0, 1.0, 1.0]]])
    ranks = [0, 1.5, 1.5, 3], [0, 3, 1.5, 1.5]
    assert spearman(one, other).item() == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)
    assert pearson(one, other).item() == pytest.approx(
        np.corrcoef(one.flatten(), other.flatten())[0, 1], abs=1e-12
    )


def test_structural_similarity_window_by_window() -> None:
    one, other = pair((13, 9))
    similarities = ssim(one, other)
    x, y = [(m[0] - m[0].min()) / (m[0].max() - m[0].min()) for m in (one, other)]
    rows, columns = torch.meshgrid(torch.arange(13), torch.arange(9), indexing="ij")
    expected = []
    for row in range(13):
        for column in range(9):
            down = rows - row
            across = columns - column
            weights = torch.exp(-(down**2 + across**2) / (2 * 1.5**2)).double()
            weights[(down.abs() > 5) | (across.abs() > 5)] = 0
            weights /= weights.sum()
            mean_x = (weights * x).sum()
            mean_y = (weights * y).sum()
            variances = (weights * ((x - mean_x) ** 2 + (y - mean_y) ** 2)).sum()
            covariance = (weights * (x - mean_x) * (y - mean_y)).sum()
            light = (2 * mean_x * mean_y + 1e-4) / (mean_x**2 + mean_y**2 + 1e-4)
            expected.append((light * (2 * covariance + 9e-4) / (variances + 9e-4)).item())
    assert similarities[0].item() == pytest.approx(np.mean(expected), abs=1e-10)
    assert ssim(one, 3 * one + 1).tolist() == pytest.approx([1, 1])


def test_histograms_of_gradients_cell_by_cell() -> None:
    one, other = pair((20, 16))
    cell = 4
    features = []
    image = one[0].numpy()
    cells = np.zeros((5, 4, 9))
    for y in range(20):
        for x in range(16):
            down = image[y + 1, x] - image[y - 1, x] if 0 < y < 19 else 0.0
            across = image[y, x + 1] - image[y, x - 1] if 0 < x < 15 else 0.0
            angle = math.degrees(math.atan2(down, across)) % 180
            cells[y // cell, x // cell, min(8, int(angle / 20))] += (
                math.hypot(down, across) / cell**2
            )
    for top in range(3):
        for left in range(2):
            block = cells[top : top + 3, left : left + 3].flatten()
            block = np.minimum(block / math.sqrt((block**2).sum() + 1e-10), 0.2)
            features += list(block / math.sqrt((block**2).sum() + 1e-10))
    assert gradient_histograms(one)[0].tolist() == pytest.approx(features, abs=1e-10)
    both = [gradient_histograms(maps)[1].numpy() for maps in (one, other)]
    assert hog(one, other)[1].item() == pytest.approx(np.corrcoef(*both)[0, 1], abs=1e-10)


@pytest.mark.parametrize("how", ["spearman", "pearson", "ssim", "hog"])
def test_a_map_is_like_itself_and_a_flat_one_is_like_nothing(how: str) -> None:
    one, _ = pair((16, 16))
    assert similarity(how, one, one).tolist() == pytest.approx([1, 1])  # type: ignore[arg-type]
    assert similarity(how, one, torch.zeros_like(one)).tolist() == [0, 0]  # type: ignore[arg-type]
