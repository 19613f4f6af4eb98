"""Rankings of pixels and regions, steps through them, and rank correlation."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def ranks_of(maps: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Rank the pixels of each map ``(N, H, W)``, 0 for the largest value: ``(N, H, W)`` whole numbers.

    Equal values are ordered by a shuffle with a seed, the same for every image: ordered by their index, they would be
    taken from the top of the photo. The ranks of a constant map are that shuffle.

    >>> ranks_of(torch.tensor([[[1.0, 3.0, 2.0]]]))
    tensor([[[2, 0, 1]]])
    """
    flat = maps.flatten(1)
    generator = torch.Generator("cpu").manual_seed(seed % 2**63)
    shuffle = torch.randperm(flat.shape[1], generator=generator, device="cpu").to(flat.device)
    order = shuffle[torch.argsort(flat[:, shuffle], dim=1, descending=True, stable=True)]
    ranks = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks).reshape(maps.shape)


def region_ranks(maps: torch.Tensor, regions: torch.Tensor, seed: int = 0, *, mean: bool = False) -> torch.Tensor:
    """Rank regions by the sum of the map in each, or its mean; every pixel gets the rank of its region.

    Args:
        maps: ``(N, H, W)``.
        regions: ``(N, H, W)`` whole numbers from 0 without gaps.
    """
    sums = by_region(maps, regions)
    if mean:
        sums = sums / by_region(torch.ones_like(maps), regions)
    ranks = [
        ranks_of(row[None, None, : int(region.max()) + 1], seed)[0, 0][region]
        for row, region in zip(sums, regions, strict=True)
    ]
    return torch.stack(ranks)


def by_region(maps: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """Add up maps ``(N, H, W)`` over regions ``(N, H, W)``: ``(N, R)``."""
    sums = maps.new_zeros(len(maps), int(regions.max()) + 1)
    return sums.scatter_add_(1, regions.flatten(1), maps.flatten(1))


def grid_regions(size: tuple[int, int], side: int, like: torch.Tensor) -> torch.Tensor:
    """Cut photos into squares, those at the right and the bottom as large as is left: ``(N, H, W)``.

    >>> grid_regions((2, 3), 2, torch.zeros(1))
    tensor([[[0, 0, 1],
             [0, 0, 1]]])
    """
    rows, columns = (torch.arange(length, device=like.device) // side for length in size)
    across = (size[1] + side - 1) // side
    return (rows[:, None] * across + columns[None]).expand(len(like), *size).contiguous()


def steps_of(count: int, steps: int) -> list[int]:
    """Go from 0 to ``count`` in equal steps, but not in more than there are.

    >>> steps_of(10, 4), steps_of(2, 4)
    ([0, 2, 5, 8, 10], [0, 1, 2])
    """
    steps = min(steps, count)
    return [round(count * step / steps) for step in range(steps + 1)]


def area(curve: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The area under curves ``(N, n)`` over the share of what is covered: ``counts`` of it at each step.

    By trapezia, since steps are not equal where they do not divide the number of pixels.

    >>> area(torch.tensor([[1.0, 0.0, 1.0]]), [0, 1, 2]), area(torch.tensor([[1.0, 0.0, 1.0]]), [0, 1, 4])
    (tensor([0.5000]), tensor([0.5000]))
    """
    at = torch.tensor(counts, dtype=torch.float64, device=curve.device) / counts[-1]
    return torch.trapezoid(curve.double(), at, dim=1).to(curve)


def correlation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of each row ``(N, K)``; NaN where one of them does not vary."""
    a, b = (rows - rows.mean(1, keepdim=True) for rows in (one.double(), other.double()))
    scale = a.norm(dim=1) * b.norm(dim=1)
    tiny = 1e-12 * one.double().norm(dim=1) * other.double().norm(dim=1)
    return torch.where(scale > tiny, (a * b).sum(1) / torch.where(scale > tiny, scale, 1), torch.nan)


def mid_ranks(rows: torch.Tensor) -> torch.Tensor:
    """The ranks of each row's values ``(N, K)``, equal ones share the mean of theirs.

    >>> mid_ranks(torch.tensor([[3.0, 1.0, 3.0]]))
    tensor([[1.5000, 0.0000, 1.5000]], dtype=torch.float64)
    """
    ordered, order = rows.sort(dim=1)
    ranks = torch.arange(rows.shape[1], device=rows.device).expand_as(order)
    changes = ordered[:, 1:] != ordered[:, :-1]
    edge = changes.new_ones(len(rows), 1)
    first = torch.where(torch.cat([edge, changes], 1), ranks, 0).cummax(1).values
    last = torch.where(torch.cat([changes, edge], 1), ranks, rows.shape[1]).flip(1).cummin(1).values.flip(1)
    return torch.empty_like(ordered, dtype=torch.float64).scatter_(1, order, (first + last).double() / 2)
