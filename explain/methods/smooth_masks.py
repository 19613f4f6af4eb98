"""Smooth masks of extremal perturbations: each pixel is the smooth maximum of what the points around it give."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

COLDNESS = 20.0  # the inverse of the temperature of the smooth maximum


class SmoothMasks:
    r"""Masks ``(b, 1, H, W)`` that are made of values ``(b, 1, h, w)`` on a lattice, with a point at each ``step``.

    A pixel u is the smooth maximum of :math:`k(|u - v| / \sigma)\, \bar m(v)` over the points v around it, with
    :math:`k(z) = \exp(-2 \max(0, z - \tfrac12)^2)`: the mean of these numbers, weighted by :math:`\exp(20\,\cdot)`.
    Points beyond the lattice are 0. Masks reach beyond the photo by sigma, for their area to be counted there too.

    >>> masks = SmoothMasks((6, 6), step=2, sigma=2.0, like=torch.zeros(1, dtype=torch.float64))
    >>> values = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    >>> full = masks.full(values)
    >>> full.shape, masks.cropped(full).shape
    (torch.Size([1, 1, 9, 9]), torch.Size([1, 1, 6, 6]))
    """

    def __init__(self, size: tuple[int, ...], step: int, sigma: float, like: torch.Tensor) -> None:
        self._size, self._step = size, step
        self.lattice = tuple(math.ceil(side / step) for side in size)
        self._beyond = math.ceil(sigma / step)  # cells beyond the lattice
        self._radius = 1 + self._beyond  # points around a pixel that count, in each direction
        self._cells = tuple(points + 2 * self._beyond for points in self.lattice)
        within = torch.arange(step, dtype=torch.float64)
        points = torch.arange(-self._radius, self._radius + 1, dtype=torch.float64)
        apart = (within - step * points[:, None]).square()  # of a pixel within a cell and each point, (2r + 1, step)
        distance = (apart[:, None, :, None] + apart[None, :, None, :]).sqrt() / sigma
        kernel = torch.exp(-2 * (distance - 0.5).clamp(min=0).square())  # (2r + 1, 2r + 1, step, step)
        self._kernel = kernel.to(like)[:, :, None, :, None, :]

    def full(self, values: torch.Tensor) -> torch.Tensor:
        """The masks with what lies beyond the photo."""
        weighted = weights = values.new_zeros(())
        for row in range(2 * self._radius + 1):
            around = self._around(values, row)
            cold = torch.exp(COLDNESS * around)
            weighted, weights = weighted + (around * cold).sum(1), weights + cold.sum(1)
        return self._without_rest(weighted / weights)

    def cropped(self, full: torch.Tensor) -> torch.Tensor:
        """The part of them that lies on the photo."""
        start = self._beyond * self._step
        height, width = self._size
        return full[..., start : start + height, start : start + width]

    def back(self, values: torch.Tensor, full: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """From the gradient in the masks, with what lies beyond the photo, to that in the values."""
        masks, slope = self._with_rest(full), self._with_rest(gradient)
        every = [self._around(values, row) for row in range(2 * self._radius + 1)]
        cold = [torch.exp(COLDNESS * around) for around in every]
        slope = slope / sum(each.sum(1) for each in cold)
        parts = []
        for row, around in enumerate(every):
            share = cold[row] * (1 + COLDNESS * (around - masks[:, None])) * slope[:, None]
            parts.append((share * self._kernel[row][None]).sum((3, 5)))
        windows = torch.cat(parts, 1).flatten(2)
        side = 2 * self._radius + 1
        folded = F.fold(windows, self._padded, side)
        cut = self._beyond + self._radius
        return folded[..., cut : cut + self.lattice[0], cut : cut + self.lattice[1]]

    @property
    def _padded(self) -> tuple[int, ...]:
        return tuple(points + 2 * (self._beyond + self._radius) for points in self.lattice)

    def _around(self, values: torch.Tensor, row: int) -> torch.Tensor:
        """What a row of the points around each pixel gives it: ``(b, 2r + 1, cells, step, cells, step)``."""
        reach, side = self._beyond + self._radius, 2 * self._radius + 1
        padded = F.pad(values, (reach, reach, reach, reach))
        rows = padded[:, 0, row : row + self._cells[0]]
        points = torch.stack([rows[:, :, column : column + self._cells[1]] for column in range(side)], 1)
        return points[:, :, :, None, :, None] * self._kernel[row][None]

    def _without_rest(self, masks: torch.Tensor) -> torch.Tensor:
        """From cells to pixels; of the last cells, the first pixel counts, which is where their point lies."""
        rows, columns = (cells * self._step for cells in self._cells)
        return masks.reshape(-1, 1, rows, columns)[..., : rows - self._step + 1, : columns - self._step + 1]

    def _with_rest(self, masks: torch.Tensor) -> torch.Tensor:
        padded = F.pad(masks, (0, self._step - 1, 0, self._step - 1))
        return padded.reshape(len(masks), self._cells[0], self._step, self._cells[1], self._step)
