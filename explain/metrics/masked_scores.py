"""Scores of randomly masked photos: does a map predict them better than the same map in other
places?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F

from explain._utils.random_numbers import seeded
from explain.baselines.base import Baseline
from explain.baselines.replacements import Blur, Mean, Noise
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.engine.perturbations import rows_of
from explain.metrics.base import digest_of_tensor

SIDE = 64
"""Masks and maps are averaged to at most so many pixels a side before they are multiplied."""

STEPS = 6
"""Maps are rolled by sixths of the height and width."""

CELLS = (4, 5, 6, 7, 8)
"""Cells along each side of the grids that masks are drawn on."""

BASELINES = 4
"""How many baselines fill the masks in turn."""

SHARES = ((0.03, 0.25), (0.25, 0.85))
"""Shares of the cells that masks cover: of every other mask a few, and of the others many."""


@dataclass(frozen=True)
class Rolled(Baseline):
    """The photo itself, flipped and rolled by half of its height and width: its colours and edges
    in other places."""

    name = "rolled"

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return images.flip(3).roll((images.shape[2] // 2, images.shape[3] // 2), (2, 3))


def random_masks(size: tuple[int, int], count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw masks ``(K, H, W)``, True where a photo is covered: cells of grids of several sizes at
    random offsets.

    >>> masks = random_masks((32, 48), 10, torch.Generator().manual_seed(0))
    >>> masks.shape, bool((masks[0::2].float().mean() < masks[1::2].float().mean()).item())
    (torch.Size([10, 32, 48]), True)
    """
    draws = torch.rand(count, 4, generator=generator).tolist()
    masks = []
    for number, (cells, down, across, share) in enumerate(draws):
        along = CELLS[int(cells * len(CELLS))]
        least, most = SHARES[number % len(SHARES)]
        grid = (
            torch.rand(along + 1, along + 1, generator=generator) < least + (most - least) * share
        )
        rows = (torch.arange(size[0]) * along / size[0] + down).long()
        columns = (torch.arange(size[1]) * along / size[1] + across).long()
        masks.append(grid[rows][:, columns])
    return torch.stack(masks)


def photo_maps(image: torch.Tensor) -> torch.Tensor:
    """Maps of a photo ``(C, H, W)`` that know nothing of a model: ``(m, H, W)``.

    They are the distance from the mean colour, local contrast, edges, blurred edges, a blob in the
    middle and a wider one, and contrast and distance times the blob. They say which parts of a
    photo change most when they are covered, and where photographers put what they show.
    """
    grey = image.mean(0)
    height, width = image.shape[1:]
    side = max(3, min(height, width) // 10 | 1)
    distance = (image - image.mean((1, 2), keepdim=True)).square().sum(0).sqrt()
    contrast = _mean_around((grey - _mean_around(grey, side)).square(), side).clamp(min=0).sqrt()
    edges = F.pad(grey.diff(dim=0).abs(), (0, 0, 0, 1)) + F.pad(grey.diff(dim=1).abs(), (0, 1))
    away = _from_middle(height)[:, None] + _from_middle(width)
    middle = torch.exp(-away / (2 * 0.2**2)).to(image)
    wide = torch.exp(-away / (2 * 0.35**2)).to(image)
    blurred = _mean_around(edges, max(3, min(height, width) // 8 | 1))
    return torch.stack(
        [distance, contrast, edges, blurred, middle, wide, contrast * middle, distance * middle]
    )


def _mean_around(values: torch.Tensor, side: int) -> torch.Tensor:
    """Means over squares, which are cut at the borders: first over columns of pixels, then over
    rows of those."""
    for kernel in ((side, 1), (1, side)):
        padding = (kernel[0] // 2, kernel[1] // 2)
        values = F.avg_pool2d(values[None, None], kernel, 1, padding, count_include_pad=False)[0, 0]
    return values


def _from_middle(count: int) -> torch.Tensor:
    """The squared distances of pixels from the middle, in shares of the length."""
    return ((torch.arange(count) + 0.5) / count - 0.5).square()


def placements(maps: torch.Tensor) -> torch.Tensor:
    """Maps ``(m, H, W)`` in all places ``(P, m, H, W)``, their own first: turned, flipped, and
    rolled by sixths.

    They are turned by quarters if they are square, and else by halves.

    >>> placements(torch.zeros(1, 12, 12)).shape[0], placements(torch.zeros(1, 12, 18)).shape[0]
    (288, 144)
    """
    height, width = maps.shape[1:]
    turns = range(4) if height == width else (0, 2)
    turned = [torch.rot90(maps, turn, (1, 2)) for turn in turns]
    flipped = [placed for one in turned for placed in (one, one.flip(2))]
    shifts = [
        (round(i * height / STEPS), round(j * width / STEPS))
        for i in range(STEPS)
        for j in range(STEPS)
    ]
    return torch.stack([placed.roll(shift, (1, 2)) for placed in flipped for shift in shifts])


def filling(numbers: torch.Tensor) -> torch.Tensor:
    """Which baseline fills masks with these numbers: each fills pairs of few and many cells in
    turn."""
    return numbers // 2 % BASELINES


@dataclass(frozen=True)
class RandomMasks(Perturbation):
    """Photos under random masks, each covered by one of several baselines in turn.

    The draw depends on the seed and on the photo, so that no two photos share it.
    """

    samples: int
    seed: int

    words = "photos covered at random"

    def baselines(self, images: torch.Tensor) -> Sequence[Baseline]:
        side = min(images.shape[2:])
        return (
            Mean(),
            Blur(2 * (side // 8) + 1, max(1.0, side / 12)),
            Noise(seed=self.seed),
            Rolled(),
        )

    def masks(self, images: torch.Tensor) -> torch.Tensor:
        """The masks of photos ``(N, C, H, W)``: ``(N, K, H, W)``, True where a photo is covered."""
        size = (int(images.shape[2]), int(images.shape[3]))
        seeds = [int.from_bytes(digest_of_tensor(image)[:6], "big") + self.seed for image in images]
        return torch.stack([random_masks(size, self.samples, seeded(seed)) for seed in seeds])

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        shown = ~self.masks(x).to(x.device)
        covers = [baseline.covering(x) for baseline in self.baselines(x)]

        def masked(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            photos = x[images]
            keep = shown[images, numbers][:, None].to(x)
            for number, cover in enumerate(covers):
                rows = (filling(numbers) == number).nonzero()[:, 0]
                photos[rows] = cover(images[rows], keep[rows])
            return photos

        return rows_of([self.samples] * len(x), x.device, masked)


@dataclass(frozen=True, eq=False)
class MaskedScores:
    """How much of each score a ``photo`` ``(C, H, W)`` loses under random ``masks`` ``(K, H, W)``.

    ``drops`` ``(K,)`` are those of the target; ``other_drops`` has those of other classes, ``(V,
    K)`` for V of them.
    """

    photo: torch.Tensor
    masks: torch.Tensor
    drops: torch.Tensor
    other_drops: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def covered(self) -> torch.Tensor:
        """The share of each pixel that each mask covers, at a resolution of at most `SIDE`: ``(K,
        h, w)``."""
        return _smaller(self.masks.double())

    @cached_property
    def nuisance(self) -> torch.Tensor:
        """A basis of what explains drops without any model: the covered area, for each baseline,
        and maps of the photo alone (`photo_maps`)."""
        area = self.covered.flatten(1).mean(1)
        of_baselines = F.one_hot(filling(torch.arange(len(self.masks)))).to(area)
        by_area = [of_baselines, of_baselines * area[:, None], area.square()[:, None]]
        maps = _smaller(photo_maps(self.photo.detach().cpu().double()))
        return _basis(torch.cat([*by_area, self.covered.flatten(1) @ maps.flatten(1).T], 1))

    def test(self, maps: torch.Tensor, drops: torch.Tensor) -> tuple[float, float]:
        """The partial correlation of what masks cover of maps with drops, given the `nuisance`, and
        its p-value among all placements.

        Args:
            maps: ``(m, H, W)``, which are placed together; the correlation is the mean over them.
            drops: ``(K,)`` for all maps, or ``(m, K)``.

        Returns:
            The correlation, and the share of placements, its own among them, whose correlation is
            not smaller. A map whose covered sums the nuisance explains has no correlation left,
            and a p-value of 1.
        """
        small = _smaller(maps.detach().cpu().double())
        sums = placements(small).flatten(2) @ self.covered.flatten(1).T  # (P, m, K)
        rest = _without(sums, self.nuisance)
        lost = _without(drops.expand(len(small), -1), self.nuisance)
        length = rest.norm(dim=-1)
        products = (rest * lost).sum(-1) / (length * lost.norm(dim=-1)).clamp(min=1e-300)
        explained = length <= 1e-6 * (sums - sums.mean(-1, keepdim=True)).norm(dim=-1)
        correlations = torch.where(explained, -1, products).mean(1)
        p_value = (correlations >= correlations[0] - 1e-12).double().mean()
        return float(correlations[0]), float(p_value)


def _basis(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the span of columns ``(K, c)``."""
    left, values, _ = torch.linalg.svd(
        columns / columns.norm(dim=0).clamp(min=1e-300), full_matrices=False
    )
    basis: torch.Tensor = left[:, values > 1e-9 * values[0]]
    return basis


def _without(values: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    return values - (values @ basis) @ basis.T


def _smaller(maps: torch.Tensor) -> torch.Tensor:
    """Maps ``(m, H, W)`` averaged over squares so that no side is longer than `SIDE`."""
    factor = math.ceil(max(maps.shape[1:]) / SIDE)
    smaller: torch.Tensor = F.avg_pool2d(maps[None], factor, ceil_mode=True)
    return smaller[0]
