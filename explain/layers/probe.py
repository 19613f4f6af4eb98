"""Which reading of a tensor is right: the network is run on inputs that are altered in one corner only.

If the corner moves along the height of the input, the change in a map moves along its height and nowhere else. This
holds although layers mix positions: a position still depends most on its own part of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from explain.layers.grid import MAPS, Grid
from explain.random_numbers import normal

Corner: TypeAlias = "tuple[bool, ...]"
"""For each spatial dimension of the input, whether the altered half of it is the far one."""

CLEAR = 0.1  # of a map's length: how far the answer has to move; where a reading is wrong, it moves by some 0.03


def corners(dims: int) -> list[Corner]:
    """The near corner, and for each dimension the corner that is far in this one alone.

    >>> corners(2)
    [(False, False), (True, False), (False, True)]
    """
    return [(False,) * dims, *(tuple(i == j for j in range(dims)) for i in range(dims))]


def altered(x: torch.Tensor, corner: Corner) -> torch.Tensor:
    """Return the input ``(N, C, H, W)`` with noise added in one corner, half as long as the input in each dimension."""
    halves = [_half(length, far) for length, far in zip(x.shape[2:], corner, strict=True)]
    part = (slice(None), slice(None), *halves)
    generator = torch.Generator("cpu").manual_seed(len(corner))
    spread = x.detach().double().std(correction=0)
    noise = normal(x[part].shape, generator).double().to(x.device)
    found = x.clone()
    found[part] += (noise * torch.where(spread > 0, spread, 1)).to(x.dtype)
    return found


def _half(length: int, far: bool) -> slice:
    half = max(1, length // 2)
    return slice(length - half, length) if far else slice(half)


def decide(grids: Sequence[Grid], changes: Sequence[torch.Tensor]) -> Grid | None:
    """Return the grid along which the change moves with the altered corner, or None if it is not clear.

    How many tokens there are does not tell their height and width: of tokens, other heights and widths are tried too.

    Args:
        grids: the readings to decide between.
        changes: the change of the tensor for each of the `corners`, in their order.
    """
    expected, other = ({g: _clarity(g, changes) for g in each} for each in (grids, _of_other_sizes(grids)))
    clarity = {**other, **expected}
    best = max(clarity, key=lambda grid: clarity[grid])
    rivals = [clarity[g] for g in (expected if best in expected else clarity) if g != best]
    return best if clarity[best] > CLEAR and all(clarity[best] > 2 * rival for rival in rivals) else None


def _of_other_sizes(grids: Sequence[Grid]) -> list[Grid]:
    """The grids of pictures with as many tokens, in other rows and columns."""
    found = []
    for grid in grids:
        if grid.layout not in MAPS and grid.frames is None:
            cells = grid.height * grid.width
            sizes = [(h, cells // h) for h in range(2, cells // 2 + 1) if cells % h == 0]
            found += [replace(grid, height=h, width=w) for h, w in sizes if h != grid.height]
    return found


def _clarity(grid: Grid, changes: Sequence[torch.Tensor]) -> float:
    """How far the change moves along the dimension that the corner moves along, and not along others."""
    near, *far = [_centre(grid.spread(change.double()).square().sum((0, 1))) for change in changes]
    moved = [(centre - near).tolist() for centre in far]
    own = [
        shifts[i] - max((abs(shift) for j, shift in enumerate(shifts) if j != i), default=0.0)
        for i, (shifts, length) in enumerate(zip(moved, grid.size, strict=True))
        if length > 1
    ]
    return min(own, default=0.0)


def _centre(change: torch.Tensor) -> torch.Tensor:
    """The centre of a map, between 0 and 1 in each dimension."""
    total = change.sum()
    if not total > 0 or not torch.isfinite(total):
        return torch.zeros(change.ndim, dtype=torch.float64)
    sums = [change.sum([j for j in range(change.ndim) if j != i]) for i in range(change.ndim)]
    return torch.stack([(each @ _positions(each) / total).cpu() for each in sums])


def _positions(values: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0, 1, len(values), dtype=torch.float64, device=values.device)
