"""How alike two maps are, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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


def windowed(values: torch.Tensor) -> torch.Tensor:
    """The mean around each pixel of a map ``(H, W)``, weighted by a Gaussian of deviation 1.5."""
    apart = torch.arange(-5, 6).double() ** 2
    weights = torch.exp(-(apart[:, None] + apart) / (2 * 1.5**2))[None, None]
    both = torch.stack([values, torch.ones_like(values)])[:, None]
    total, count = F.conv2d(both, weights, padding=5)[:, 0]
    return total / count


def test_structural_similarity_window_by_window() -> None:
    one, other = pair(13, 9)
    x, y = (unit(values[0], shift=True) for values in (one, other))
    mean_x = windowed(x)
    mean_y = windowed(y)
    variances = windowed(x * x) - mean_x**2 + windowed(y * y) - mean_y**2
    covariance = windowed(x * y) - mean_x * mean_y
    light = (2 * mean_x * mean_y + 1e-4) / (mean_x**2 + mean_y**2 + 1e-4)
    expected = (light * (2 * covariance + 9e-4) / (variances + 9e-4)).mean()
    assert ssim(one, other)[0].item() == pytest.approx(expected.item(), abs=1e-10)


def test_histograms_of_gradients_are_those_of_scikit_image() -> None:
    feature = pytest.importorskip("skimage.feature", reason="comes with the extra 'peers'")
    maps = [values[:1] for values in pair(20, 16)]
    options: Any = {"pixels_per_cell": (4, 4), "cells_per_block": (3, 3)}
    features = [feature.hog(values[0].numpy(), orientations=9, **options) for values in maps]
    assert hog(*maps).item() == pytest.approx(np.corrcoef(features)[0, 1], abs=1e-6)


@pytest.mark.parametrize("how", ["spearman", "pearson", "ssim", "hog"])
def test_a_map_is_like_itself_and_a_flat_one_is_like_nothing(how: Any) -> None:
    one, _ = pair(16, 16)
    assert similarity(how, one, 3 * one + 1).tolist() == pytest.approx([1, 1])
    assert similarity(how, one, one * 0).tolist() == [0, 0]
