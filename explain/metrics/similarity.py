"""How alike two maps are: rank correlation, structure (SSIM), histograms of oriented gradients (HOG)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from explain.metrics.rankings import correlation, mid_ranks

Similarity = Literal["spearman", "pearson", "ssim", "hog"]


def spearman(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation of maps ``(N, H, W)``: ``(N,)``; NaN where one of them does not vary.

    >>> round(spearman(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[1.0, 4.0, 9.0]]])).item(), 9)
    1.0
    """
    return correlation(mid_ranks(one.flatten(1)), mid_ranks(other.flatten(1)))


def pearson(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of maps ``(N, H, W)``: ``(N,)``; NaN where one of them does not vary."""
    return correlation(one.flatten(1), other.flatten(1))


def ssim(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The mean structural similarity of maps ``(N, H, W)``, each brought to [0, 1]: ``(N,)``.

    Windows are Gaussian, 11 × 11 with σ 1.5; at the edges, the weights of what lies outside are left out.

    Wang et al., "Image Quality Assessment", TIP 2004.

    >>> ssim(torch.rand(1, 16, 16), torch.rand(1, 16, 16)).shape
    torch.Size([1])
    """
    x, y = (_to_unit(maps.double()) for maps in (one, other))
    mean_x, mean_y = _windowed(x), _windowed(y)
    var_x, var_y = _windowed(x * x) - mean_x**2, _windowed(y * y) - mean_y**2
    both = _windowed(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    found = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return found.mean((1, 2))


def hog(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of two maps' histograms of oriented gradients: ``(N,)``; NaN where one has no gradient."""
    return correlation(gradient_histograms(one), gradient_histograms(other))


def gradient_histograms(maps: torch.Tensor, cell: int = 16) -> torch.Tensor:
    """Histograms of oriented gradients ``(N, D)`` of maps ``(N, H, W)``: nine directions in cells of 16 × 16 pixels,
    normalised in blocks of 3 × 3 cells (L2, clipped at 0.2, L2 again). Small maps have smaller cells, four across.

    Dalal and Triggs, "Histograms of Oriented Gradients for Human Detection", CVPR 2005.

    >>> gradient_histograms(torch.rand(1, 64, 64)).shape
    torch.Size([1, 324])
    """
    maps = maps.double()
    largest = maps.abs().amax((1, 2), keepdim=True)
    maps = maps / torch.where(largest == 0, 1, largest)  # so that what blocks are divided by fits any unit
    cell = max(1, min(cell, min(maps.shape[1:]) // 4))
    down, across = torch.zeros_like(maps), torch.zeros_like(maps)
    down[:, 1:-1] = maps[:, 2:] - maps[:, :-2]
    across[:, :, 1:-1] = maps[:, :, 2:] - maps[:, :, :-2]
    strength = torch.hypot(down, across)
    angle = torch.rad2deg(torch.atan2(down, across)) % 180
    directions = (angle / 20).long().clamp(max=8)
    split = F.one_hot(directions, 9).movedim(-1, 1) * strength[:, None]
    cells = F.avg_pool2d(split, cell)  # (N, 9, cells down, cells across)
    side = min(3, *cells.shape[2:])
    blocks = cells.unfold(2, side, 1).unfold(3, side, 1).movedim(1, -1).flatten(3)  # (N, y, x, side * side * 9)
    clipped = _to_length_one(blocks).clamp(max=0.2)
    return _to_length_one(clipped).flatten(1)


def _to_length_one(blocks: torch.Tensor) -> torch.Tensor:
    return blocks / (blocks.square().sum(-1, keepdim=True) + 1e-10).sqrt()


def _to_unit(maps: torch.Tensor) -> torch.Tensor:
    least, most = (ends.reshape(-1, 1, 1) for ends in maps.flatten(1).aminmax(dim=1))
    return (maps - least) / torch.where(most > least, most - least, 1)


def _windowed(maps: torch.Tensor) -> torch.Tensor:
    places = torch.arange(-5, 6, dtype=maps.dtype, device=maps.device)
    weights = torch.exp(-(places**2) / (2 * 1.5**2))

    def summed(maps: torch.Tensor) -> torch.Tensor:
        rows = F.conv2d(maps[:, None], weights.view(1, 1, -1, 1), padding=(5, 0))
        return F.conv2d(rows, weights.view(1, 1, 1, -1), padding=(0, 5))[:, 0]

    return summed(maps) / summed(torch.ones_like(maps[:1]))


OF: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "spearman": spearman,
    "pearson": pearson,
    "ssim": ssim,
    "hog": hog,
}


def similarity(how: Similarity, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How alike maps ``(N, H, W)`` are: ``(N,)``. Where one of them says the same everywhere, they are not: 0."""
    found = OF[how](one, other)
    constant = [(maps.flatten(1).amax(1) == maps.flatten(1).amin(1)) for maps in (one, other)]
    return torch.where(constant[0] | constant[1] | found.isnan(), 0, found)
