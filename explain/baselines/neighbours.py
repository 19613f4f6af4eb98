"""A baseline from the pixels around what is absent: ROAD's noisy linear interpolation."""

import torch
import torch.nn.functional as F

from explain.baselines.base import Baseline, blend, check_mask, register
from explain.baselines.replacements import in_single_or_double, normal_draw

IN_CACHE = 2**18
"""How many values are worked on at once on a CPU: more of them would leave its cache between one
step and the next."""
ROUNDS = 200  # some ten are enough; what is met then is as near as rounding lets it


def interpolated(images: torch.Tensor, covered: torch.Tensor) -> torch.Tensor:
    """Replace pixels ``covered`` ``(b, 1, H, W)`` of ``images`` ``(b, C, H, W)`` by weighted means
    of their neighbours, all at once; the image's mean where all is covered.
    """
    # on a CPU, as many at a time as its cache holds
    batch_size = (
        max(1, IN_CACHE // images[0].numel()) if images.device.type == "cpu" else len(images)
    )
    if len(images) > batch_size:
        parts = zip(torch.split(images, batch_size), torch.split(covered, batch_size), strict=True)
        return torch.cat([interpolated(batch, batch_covered) for batch, batch_covered in parts])
    kept = (~covered).to(images)
    unknown = 1 - kept
    count = kept.sum((2, 3), keepdim=True)
    known_mean = (images * kept).sum((2, 3), keepdim=True) / count.clamp(min=1)
    mean = torch.where(count > 0, known_mean, images.mean((2, 3), keepdim=True))
    # the system is for differences from the mean: a solution of 0 is right where nothing is known
    right = unknown * _around((images - mean) * kept)
    held = unknown * _around(kept)  # how strongly known neighbours hold each
    return torch.where(covered, mean + _solved(right, _levels(unknown, held)), images)


class _Level:
    """The linear system on one grid: which cells are ``unknown`` ``(b, 1, h, w)``, and ``held``,
    how strongly each is tied to known neighbours. The finest grid has the system itself."""

    def __init__(self, unknown: torch.Tensor, held: torch.Tensor) -> None:
        """The ``diagonal`` of a grid's matrix and its ``inverse``, from cells that are ``unknown``
        (1: covered) and how strongly known neighbours hold each: ``(b, 1, h, w)`` both.
        """
        self.unknown = unknown
        self.held = held
        self.diagonal = unknown * _around(unknown) + held
        self.inverse = torch.where(self.diagonal > 0, 1 / self.diagonal, 0)
        """1 by the matrix's diagonal; 0 where nothing is unknown."""

    def times(self, u: torch.Tensor) -> torch.Tensor:
        # For u that is zero where all is known: unknown * (around(unknown) * u - around(u)), the
        # differences between unknown neighbours, and held * u, those from what is known.
        return torch.addcmul(self.diagonal * u, self.unknown, _around(u), value=-1)

    def smoothed(self, u: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """One step of Jacobi's; this stencil needs no damping."""
        return torch.addcmul(u, self.inverse, right - self.times(u))


def _levels(unknown: torch.Tensor, held: torch.Tensor) -> list[_Level]:
    """The equations on grids from fine to coarse, for multigrid: a cell is four of the level
    before, unknown if one is. The last is a single cell.
    """
    levels = [_Level(unknown, held)]
    while levels[-1].unknown[0].numel() > 1:
        last = levels[-1]
        levels.append(
            _Level(F.max_pool2d(_even(last.unknown), 2), 4 * F.avg_pool2d(_even(last.held), 2))
        )
    return levels


def _solved(right: torch.Tensor, levels: list[_Level]) -> torch.Tensor:
    """Solve for covered pixels ``(b, C, h, w)``, with ``right`` on the system's right side, by
    conjugate gradients with multigrid; images and channels stop each for themselves, so that
    results do not depend on the batch."""
    finest = levels[0]
    solution = torch.zeros_like(right)
    residue = right
    direction = preconditioned = _cycle(residue, levels)
    residue_norm = _dot(residue, preconditioned)
    # the largest error that rounding leaves
    enough = 16 * torch.finfo(right.dtype).eps * preconditioned.abs().amax((2, 3), keepdim=True)
    for _ in range(ROUNDS):
        # the preconditioned residue is about as large as the error of the solution
        unsolved = (preconditioned.abs().amax((2, 3), keepdim=True) > enough) & (residue_norm > 0)
        if not bool(unsolved.any()):
            break
        # steps of 0 keep those that are solved as they are
        times_direction = finest.times(direction)
        step = torch.where(unsolved, residue_norm / _dot(direction, times_direction), 0)
        solution = torch.addcmul(solution, step, direction)
        residue = torch.addcmul(residue, step, times_direction, value=-1)
        preconditioned = _cycle(residue, levels)
        next_norm = _dot(residue, preconditioned)
        direction = preconditioned + torch.where(unsolved, next_norm / residue_norm, 0) * direction
        residue_norm = next_norm
    return solution


def _cycle(right: torch.Tensor, levels: list[_Level]) -> torch.Tensor:
    """Solve roughly by one multigrid cycle: smooth, correct from the coarser grid, smooth.
    Symmetric, as a preconditioner of conjugate gradients has to be.
    """
    level = levels[0]
    smooth = level.inverse * right
    if len(levels) == 1:
        return smooth
    correction = _cycle(_coarser(right - level.times(smooth)), levels[1:])
    finer = F.interpolate(correction, scale_factor=2, mode="bilinear", align_corners=False)
    finer = finer[..., : right.shape[2], : right.shape[3]]
    return level.smoothed(torch.addcmul(smooth, level.unknown, finer), right)


def _coarser(maps: torch.Tensor) -> torch.Tensor:
    """The sums ``(b, C, h / 2, w / 2)`` of what falls to each coarser cell, linearly: the transpose
    of the interpolation in `_cycle`, which keeps it symmetric.
    """
    summed = _even(maps)
    for dim in (2, 3):
        # each coarser cell has a first and a second pixel along this side
        first, second = (summed.movedim(dim, 0)[start::2] for start in (0, 1))
        # an interpolated pixel is 3/4 its own cell and 1/4 the nearer neighbour
        cells = (first + second).mul_(0.75)
        cells[1:].add_(second[:-1], alpha=0.25)
        cells[:-1].add_(first[1:], alpha=0.25)
        # the outermost pixels have no neighbour there: they are their own cell alone
        cells[0].add_(first[0], alpha=0.25)
        cells[-1].add_(second[-1], alpha=0.25)
        summed = cells.movedim(0, dim)
    return summed


def _even(maps: torch.Tensor) -> torch.Tensor:
    """Pad maps ``(b, C, h, w)`` with zeros below and on the right, so that both sides are even."""
    height, width = maps.shape[2:]
    if height % 2 == width % 2 == 0:
        return maps
    return F.pad(maps, (0, width % 2, 0, height % 2))


def _around(maps: torch.Tensor) -> torch.Tensor:
    """The weighted sum over each pixel's eight neighbours in maps ``(b, C, h, w)``, nothing
    outside: by 1, 2, 1 down and across without the middle, direct 2 and diagonal 1 of 12.
    """
    # 1, 2, 1 down, in twelfths
    down = maps / 6
    down[:, :, 1:].add_(maps[:, :, :-1], alpha=1 / 12)
    down[:, :, :-1].add_(maps[:, :, 1:], alpha=1 / 12)
    # 1, 2, 1 of these across
    summed = 2 * down
    summed[..., 1:].add_(down[..., :-1])  # and not +=, which would copy the result onto itself
    summed[..., :-1].add_(down[..., 1:])
    # without the middle, which has 4 of 12
    return summed.sub_(maps, alpha=1 / 3)


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum((2, 3), keepdim=True)


@register
class Neighbours(Baseline):
    """Interpolated from the pixels around, with a little noise (ROAD).

    Each covered pixel is the weighted mean of its eight neighbours, covered ones included, and a
    little noise.

    Direct neighbours weigh 1/6 and diagonal ones 1/12; at the edges, the weights of those that
    there are. This is a linear system for all covered pixels together. What is left of the photo
    shows no border, so that the network does not recognise the mask's shape. A pixel that is kept
    in part counts as covered, and is blended.

    Where nothing is kept, there is nothing to interpolate from: the result is then the photo's mean
    colour, and noise.

    Args:
        noise: the standard deviation of the noise, in the units of the images.
        seed: of the noise; every photo gets the same draw.

    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods", ICML 2022
    (arXiv:2202.00449).

    >>> keep = torch.tensor([[[[1.0, 0.0, 1.0]]]])
    >>> Neighbours(noise=0)(torch.tensor([[[[1.0, 9.0, 2.0]]]]), keep)
    tensor([[[[1.0000, 1.5000, 2.0000]]]])
    """

    noise: float = 0.01
    seed: int = 0

    depends_on_mask = True

    minimums = {"noise": 0}

    def __call__(self, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """The images with covered pixels (``keep`` below 1) interpolated from those around them,
        plus a little noise against recognising the mask. Videos are filled frame by frame."""
        check_mask(images, keep)
        frames = _frames(in_single_or_double(images))
        masks = _frames(keep.expand([len(images), *keep.shape[1:]]))
        filled = interpolated(frames, masks < 1)
        by_photo = filled.reshape([len(images), -1, *filled.shape[1:]])  # (N, T, C, H, W)
        filled = by_photo.movedim(1, 2).reshape(images.shape)
        if self.noise:
            filled = filled + self.noise * normal_draw(self.seed, images).to(filled)
        return blend(images, filled.to(images), keep)


def _frames(images: torch.Tensor) -> torch.Tensor:
    """Photos ``(N, C, H, W)`` as they are, and the frames of videos ``(N, C, T, H, W)`` one by
    one."""
    return images.movedim(1, -3).flatten(0, -4)
