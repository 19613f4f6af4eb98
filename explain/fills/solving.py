"""Covered pixels as weighted means of their neighbours: one linear system for each mask, many of them at once.

It is solved by conjugate gradients, with a cycle over coarser and coarser grids for a preconditioner: the number of
rounds hardly grows with the size of what is covered, where plain conjugate gradients take hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

DAMPING = 0.8
ROUNDS = 200  # some ten are enough; what is met then is as near as rounding lets it


def interpolated(images: torch.Tensor, covered: torch.Tensor) -> torch.Tensor:
    """Replace covered pixels by the weighted means of their neighbours, all of them at once.

    Args:
        images: ``(b, C, H, W)`` in single or double precision.
        covered: ``(b, 1, H, W)``, truth values. Where all is covered, the result is the image's mean.

    Returns:
        ``(b, C, H, W)``; the pixels that are not covered are as they were.
    """
    known = (~covered).to(images)
    count = known.sum((2, 3), keepdim=True)
    of_known = (images * known).sum((2, 3), keepdim=True) / count.clamp(min=1)
    mean = torch.where(count > 0, of_known, images.mean((2, 3), keepdim=True))
    unknown = 1 - known
    right = unknown * _around((images - mean) * known)  # a solution about 0, which is right where nothing is known
    found = _solved(right, _levels(unknown, unknown * _around(known)))
    return torch.where(covered, mean + found, images)


@dataclass(frozen=True, eq=False)
class _Level:
    """The system on one grid: ``share`` ``(b, 1, h, w)`` of each cell is unknown; ``held`` ties it to what is known.

    The matrix takes u to ``share * (around(share) * u - around(share * u)) + held * u``: differences between unknown
    neighbours, and the distance from what is known. On the finest grid, this is the system itself.
    """

    share: torch.Tensor
    held: torch.Tensor
    beside: torch.Tensor
    inverse: torch.Tensor
    """1 by the matrix's diagonal; 0 where nothing is unknown."""

    @classmethod
    def of(cls, share: torch.Tensor, held: torch.Tensor) -> _Level:
        beside = share * _around(share) + held
        some = beside > 0
        return cls(share, held, beside, torch.where(some, 1 / torch.where(some, beside, 1), 0))

    def times(self, u: torch.Tensor) -> torch.Tensor:
        return self.beside * u - self.share * _around(self.share * u)


def _levels(unknown: torch.Tensor, held: torch.Tensor) -> list[_Level]:
    """The system on finer to coarser grids: each cell is four of the grid before."""
    levels = [_Level.of(unknown, held)]
    while min(levels[-1].share.shape[2:]) > 3:
        last = levels[-1]
        share, held = (F.avg_pool2d(_even(each), 2) for each in (last.share, last.held))
        levels.append(_Level.of(share, 4 * held))
    return levels


def _solved(right: torch.Tensor, levels: list[_Level]) -> torch.Tensor:
    """Conjugate gradients for each image and channel at once."""
    finest = levels[0]
    found, residue = torch.zeros_like(right), right
    direction = scaled = _cycle(residue, levels)
    now = _dot(residue, scaled)
    enough = 8 * torch.finfo(right.dtype).eps * scaled.abs().amax((2, 3), keepdim=True)
    for _ in range(ROUNDS):
        open_ = (scaled.abs().amax((2, 3), keepdim=True) > enough) & (now > 0)  # it is about what is still wrong
        if not bool(open_.any()):
            break
        applied = finest.times(direction)
        step = torch.where(open_, now / _dot(direction, applied), 0)
        found = found + step * direction
        residue = residue - step * applied
        scaled = _cycle(residue, levels)
        then = _dot(residue, scaled)
        direction = scaled + torch.where(open_, then / now, 0) * direction
        now = then
    return found


def _cycle(right: torch.Tensor, levels: list[_Level]) -> torch.Tensor:
    """Solve roughly: smooth, correct from the coarser grid, smooth once more. It is symmetric, as it has to be."""
    level, coarser = levels[0], levels[1:]
    u = DAMPING * level.inverse * right
    for _ in range(0 if coarser else 6):
        u = u + DAMPING * level.inverse * (right - level.times(u))
    if not coarser:
        return u
    inside = (level.inverse > 0).to(right)
    u = u + inside * _finer(_cycle(_coarser(right - level.times(u)), coarser), right.shape[2:])
    return u + DAMPING * level.inverse * (right - level.times(u))


def _coarser(maps: torch.Tensor) -> torch.Tensor:
    """Add up what falls to each coarser cell, linearly: the transpose of `_finer`."""
    even = _even(maps)
    for dim in (2, 3):
        first, second = (even.movedim(dim, 0)[start::2] for start in (0, 1))
        cells = 0.75 * (first + second)
        cells[1:] += 0.25 * second[:-1]
        cells[:-1] += 0.25 * first[1:]
        even = cells.movedim(0, dim)
    return even


def _finer(maps: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Spread coarser cells over finer ones, linearly between their middles."""
    for dim in (3, 2):
        cells = maps.movedim(dim, 0)
        first, second = 0.75 * cells, 0.75 * cells
        first[1:] += 0.25 * cells[:-1]
        second[:-1] += 0.25 * cells[1:]
        maps = torch.stack([first, second], 1).flatten(0, 1).movedim(0, dim)
    return maps[..., : size[0], : size[1]]


def _even(maps: torch.Tensor) -> torch.Tensor:
    height, width = maps.shape[2:]
    return F.pad(maps, (0, width % 2, 0, height % 2)) if height % 2 or width % 2 else maps


def _around(maps: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the eight neighbours of each pixel; there is nothing outside.

    With 1, 2, 1 down and across, direct neighbours weigh 2 and diagonal ones 1 of 12, and the pixel itself 4.
    """
    down = 2 * maps
    down[:, :, 1:] += maps[:, :, :-1]
    down[:, :, :-1] += maps[:, :, 1:]
    both = 2 * down
    both[..., 1:] += down[..., :-1]
    both[..., :-1] += down[..., 1:]
    return both.sub_(maps, alpha=4).div_(12)


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum((2, 3), keepdim=True)
