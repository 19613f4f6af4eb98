"""Scores of randomly masked photos: does a map predict them better than the same map in other
places?"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist

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

CELLS = (6, 8, 10, 12)
"""Cells along each side of the grids that masks are drawn on."""

BASELINES = 4
"""How many baselines fill the masks in turn."""

SHARES = ((0.03, 0.12), (0.12, 0.25))
"""Shares of the cells that masks cover: of every other mask fewer, and of the others more. They are
few, so that what a mask takes is close to the sum of what its cells take."""


@dataclass(frozen=True)
class Rolled(Baseline):
    """The photo itself, flipped and rolled by half of its height and width: its colours and edges
    in other places."""

    name = "rolled"

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return images.flip(3).roll((images.shape[2] // 2, images.shape[3] // 2), (2, 3))


def strong_blur(shape: Sequence[int]) -> Blur:
    """The blur that leaves no detail of photos of this ``shape`` ``(..., H, W)``, one of the four
    baselines of random masks."""
    side = min(shape[-2:])
    return Blur(2 * (side // 8) + 1, max(1.0, side / 12))


def random_masks(size: tuple[int, int], count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw masks ``(K, H, W)``, True where a photo is covered: cells of grids of several sizes at
    random offsets.

    >>> masks = random_masks((32, 48), 10, torch.Generator().manual_seed(0))
    >>> masks.shape, bool((masks[0::2].float().mean() < masks[1::2].float().mean()).item())
    (torch.Size([10, 32, 48]), True)
    """
    draws = torch.rand(count, 4, generator=generator).tolist()
    masks = []
    for number, (cells_draw, down_offset, across_offset, share_draw) in enumerate(draws):
        cell_count = CELLS[int(cells_draw * len(CELLS))]
        smallest_share, largest_share = SHARES[number % len(SHARES)]
        covered_share = smallest_share + (largest_share - smallest_share) * share_draw
        grid = torch.rand(cell_count + 1, cell_count + 1, generator=generator) < covered_share
        rows = (torch.arange(size[0]) * cell_count / size[0] + down_offset).long()
        columns = (torch.arange(size[1]) * cell_count / size[1] + across_offset).long()
        masks.append(grid[rows][:, columns])
    return torch.stack(masks)


PHOTO_MAPS = 23
"""How many maps of a photo alone there are."""


def photo_maps(image: torch.Tensor) -> torch.Tensor:
    """Maps of a photo ``(C, H, W)`` that know nothing of a model: ``(m, H, W)``, m = `PHOTO_MAPS`;
    controls that a faithful map must beat.

    They say which parts of a photo change most when they are covered, what stands out, and where
    photographers put what they show: the distance from the mean colour, as it is and blurred; local
    contrast; edges, as they are and blurred; details and large blobs, which differ from the mean of
    their surroundings; the same of red less green, and of blue less yellow; the spectral residual;
    saturation, and each channel; blobs in the middle, a wide one, and one below; the height; and
    products of these.

    Hou and Zhang, "Saliency Detection: A Spectral Residual Approach", CVPR 2007.
    """
    grey = image.mean(0)
    height, width = image.shape[1:]
    shorter = min(height, width)
    side = _odd(shorter // 10)
    distance = (image - image.mean((1, 2), keepdim=True)).square().sum(0).sqrt()
    contrast = _mean_around((grey - _mean_around(grey, side)).square(), side).clamp(min=0).sqrt()
    edges = F.pad(grey.diff(dim=0).abs(), (0, 0, 0, 1)) + F.pad(grey.diff(dim=1).abs(), (0, 1))
    distance_from_middle = _from_middle(height)[:, None] + _from_middle(width)
    middle = torch.exp(-distance_from_middle / (2 * 0.2**2)).to(image)
    wide = torch.exp(-distance_from_middle / (2 * 0.35**2)).to(image)
    away_from_below = _from_middle(height, 0.65)[:, None] + _from_middle(width)
    below = torch.exp(-away_from_below / (2 * 0.25**2)).to(image)
    large_side = _odd(shorter // 3)
    blobs = _from_surroundings(image, large_side)
    red, green, blue = image if len(image) == 3 else grey.expand(3, -1, -1)
    yellow = (red + green) / 2
    residual = spectral_residual(grey)
    rows = torch.linspace(1, 0, height).to(image)
    return torch.stack(
        [
            distance,
            _mean_around(distance, _odd(shorter // 4)),
            contrast,
            edges,
            _mean_around(edges, _odd(shorter // 8)),
            _from_surroundings(image, _odd(shorter // 16)),
            blobs,
            _from_surroundings((red - green)[None], large_side),
            _from_surroundings((blue - yellow)[None], large_side),
            residual,
            image.amax(0) - image.amin(0),
            red,
            green,
            blue,
            middle,
            wide,
            below,
            rows[:, None].expand(height, width),
            contrast * middle,
            distance * middle,
            blobs * middle,
            residual * middle,
            edges * wide,
        ]
    )


def spectral_residual(grey: torch.Tensor) -> torch.Tensor:
    """The spectral residual of a grey photo ``(H, W)``, a map of what stands out: where the log
    spectrum differs from its own surroundings."""
    small = F.interpolate(grey[None, None], size=(SIDE, SIDE), mode="bilinear", antialias=True)
    spectrum = torch.fft.fft2(small[0, 0])
    sizes = spectrum.abs().clamp(min=1e-9).log()
    residual = (sizes - _mean_around(sizes, 3)).exp()
    power = torch.fft.ifft2(torch.polar(residual, spectrum.angle())).abs().square()
    smooth = _mean_around(_mean_around(power, 7), 7)
    return F.interpolate(smooth[None, None], size=list(grey.shape), mode="bilinear")[0, 0]


def _from_surroundings(image: torch.Tensor, side: int) -> torch.Tensor:
    """How far the colour of each pixel ``(H, W)`` is from the mean of a square of ``side`` pixels
    around it, in a photo ``(C, H, W)``."""
    differences = [channel - _mean_around(channel, side) for channel in image]
    return torch.stack(differences).square().sum(0).sqrt()


def _odd(side: int) -> int:
    """An odd side of a square, of at least 3 pixels."""
    return max(3, side | 1)


def _mean_around(values: torch.Tensor, side: int) -> torch.Tensor:
    """The mean of ``values`` ``(H, W)`` over a square of ``side`` pixels (odd) around each pixel,
    cut at the borders: first over columns of pixels, then over rows of those."""
    for kernel in ((side, 1), (1, side)):
        padding = (kernel[0] // 2, kernel[1] // 2)
        values = F.avg_pool2d(values[None, None], kernel, 1, padding, count_include_pad=False)[0, 0]
    return values


def _from_middle(count: int, middle: float = 0.5) -> torch.Tensor:
    """The squared distances of ``count`` pixels from the middle of their line, in shares of its
    length."""
    return ((torch.arange(count) + 0.5) / count - middle).square()


def count_of_placements(size: tuple[int, int]) -> int:
    """How many placements a map of this size has: it is turned by quarters if it is square, and
    else by halves.

    >>> count_of_placements((12, 12)), count_of_placements((12, 18))
    (288, 144)
    """
    return (8 if size[0] == size[1] else 4) * STEPS**2


def placements(maps: torch.Tensor, numbers: Sequence[int] | None = None) -> torch.Tensor:
    """Maps ``(m, H, W)`` in all other places, as the null hypothesis of the tests has them: turned,
    flipped, and rolled by sixths, ``(P, m, H, W)``, the maps as they are first; with ``numbers``,
    in these placements only.

    >>> placements(torch.zeros(1, 12, 18)).shape[0], placements(torch.zeros(1, 12, 18), [5]).shape
    (144, torch.Size([1, 1, 12, 18]))
    """
    height, width = maps.shape[1:]
    turns = range(4) if height == width else (0, 2)
    turned = [torch.rot90(maps, turn, (1, 2)) for turn in turns]
    flipped = [placed for map_turned in turned for placed in (map_turned, map_turned.flip(2))]
    shifts = [
        (round(i * height / STEPS), round(j * width / STEPS))
        for i in range(STEPS)
        for j in range(STEPS)
    ]
    if numbers is None:
        numbers = range(len(flipped) * len(shifts))
    placed = [flipped[n // len(shifts)].roll(shifts[n % len(shifts)], (1, 2)) for n in numbers]
    return torch.stack(placed)


def covered_in_turn(
    photos: torch.Tensor,
    images: torch.Tensor,
    keep: torch.Tensor,
    covers: Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]],
    turns: torch.Tensor,
) -> torch.Tensor:
    """Cover photos ``(b, C, H, W)`` in place, each with one of several baselines, where ``keep``
    ``(b, 1, H, W)`` is 0; returns them.

    Args:
        photos: what is covered, in place.
        images: ``(b,)``, which images these are.
        keep: which pixels stay.
        covers: what covers pixels of images (`Baseline.covering`).
        turns: ``(b,)``, which of these it is.
    """
    for number, cover in enumerate(covers):
        rows = (turns == number).nonzero()[:, 0]
        photos[rows] = cover(images[rows], keep[rows])
    return photos


def strata_of(count: int) -> torch.Tensor:
    """The stratum of each of so many masks: those with the same baseline, ``stratum // 2``, that
    all cover fewer cells, or more."""
    return torch.arange(count) % (2 * BASELINES)


@dataclass(frozen=True)
class RandomMasks(Perturbation):
    """Photos under random masks, each covered by one of several baselines in turn.

    The draw depends on the seed and on the photo, so that no two photos share it.
    """

    samples: int
    seed: int

    words = "photos covered at random"

    def baselines(self, images: torch.Tensor) -> Sequence[Baseline]:
        return Mean(), strong_blur(images.shape), Noise(seed=self.seed), Rolled()

    def masks(self, images: torch.Tensor) -> torch.Tensor:
        """The random masks of photos ``(N, C, H, W)`` for the check `Faithful`: ``(N, K, H, W)``,
        True where a photo is covered. The seed and the photo's values draw them, whatever batch it
        is in."""
        size = (images.shape[2], images.shape[3])
        numbers = [int.from_bytes(digest_of_tensor(image)[:6], "big") for image in images]
        generators = [seeded(number + self.seed) for number in numbers]
        return torch.stack(
            [random_masks(size, self.samples, generator) for generator in generators]
        )

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """The randomly masked photos: a row for each of K masks of each photo; mask ``number`` has
        baseline ``number // 2 % BASELINES``, as `strata_of` says."""
        x = evidence.inputs
        shown = ~self.masks(x).to(x.device)
        covers = [baseline.covering(x) for baseline in self.baselines(x)]

        def masked(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            keep = shown[images, numbers][:, None].to(x)
            return covered_in_turn(x[images], images, keep, covers, numbers // 2 % BASELINES)

        return rows_of([self.samples] * len(x), x.device, masked)


@dataclass(frozen=True)
class Placed:
    """The partial correlation of a map with drops of the score, among those of its placements.

    ``p_value`` is the share of placements, its own among them, whose correlation is not smaller;
    ``opposite`` the share whose correlation is not larger. ``spread`` is the mean square of all
    these correlations, and ``freedom`` how many independent values they are taken over.
    ``controls`` is how many maps of the photo alone do as well: their correlation, each given all
    others, is not smaller.
    """

    correlation: float
    p_value: float
    opposite: float
    spread: float
    freedom: int
    controls: int = 0

    def needed(self, share: float) -> float:
        """About how many independent values, masks less what the nuisance takes, a p-value of
        ``share`` would need; infinite if no number would do.

        The correlations of other places vary because the map is wide, which more masks do not
        change, and by chance, with a variance of one by the number of values.

        >>> round(Placed(0.2, 0.1, 0.9, 1 / 50, 50).needed(0.05))
        68
        """
        if self.correlation <= 0:
            return math.inf
        because_wide = max(0.0, self.spread - 1 / self.freedom)
        by_chance = (self.correlation / NormalDist().inv_cdf(1 - share)) ** 2 - because_wide
        return 1 / by_chance if by_chance > 0 else math.inf


@dataclass(frozen=True, eq=False)
class MaskedScores:
    """How much of each score a ``photo`` ``(C, H, W)`` loses under random ``masks`` ``(K, H, W)``
    of some ``strata`` ``(K,)`` (`strata_of`).

    ``drops`` ``(K,)`` are those of the target; ``other_drops`` has those of other classes, ``(V,
    K)`` for V of them, and ``copy_drops`` ``(V, K)`` those of V random copies of the model, of none
    if they were not run.
    """

    photo: torch.Tensor
    masks: torch.Tensor
    strata: torch.Tensor
    drops: torch.Tensor
    other_drops: Mapping[int, torch.Tensor] = field(default_factory=dict)
    copy_drops: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    @cached_property
    def covered(self) -> torch.Tensor:
        """The share of each pixel that each mask covers, at a resolution of at most `SIDE`: ``(K,
        h, w)``."""
        return _smaller(self.masks.double())

    @cached_property
    def nuisance(self) -> torch.Tensor:
        """What explains drops of the score without any model, ``(K, c)`` columns over the masks:
        the covered area, for each baseline, and how much each mask covers of the maps of the photo
        alone, which are the last `PHOTO_MAPS` columns."""
        area = self.covered.flatten(1).mean(1)
        baseline_columns = F.one_hot(self.strata // 2, BASELINES).to(area)
        area_columns = [baseline_columns, baseline_columns * area[:, None], area.square()[:, None]]
        maps = _smaller(photo_maps(self.photo.detach().cpu().double()))
        return torch.cat([*area_columns, self.covered.flatten(1) @ maps.flatten(1).T], 1)

    def weights(self, drops: torch.Tensor) -> torch.Tensor:
        """The weight of each mask ``(K,)`` for the ``drops`` ``(K,)``: the inverse of their
        standard deviation in the mask's stratum, after the nuisance has been taken out. Where more
        cells are covered, scores vary more."""
        squared_residuals = _without(drops, _basis(self.nuisance)).square()
        count = 2 * BASELINES
        sums = (
            torch.zeros(count).to(squared_residuals).index_add_(0, self.strata, squared_residuals)
        )
        deviation = (sums / torch.bincount(self.strata, minlength=count).clamp(min=1)).sqrt()
        typical = squared_residuals.mean().sqrt()
        if not typical > 0:  # nothing is left
            return torch.ones_like(squared_residuals)
        return typical / deviation.clamp(min=0.1 * typical)[self.strata]

    def test(self, maps: torch.Tensor, drops: torch.Tensor) -> Placed:
        """Test whether maps predict drops of the score under the masks: the weighted partial
        correlation, given the `nuisance`, among those of all placements of the maps.

        Args:
            maps: ``(m, H, W)``, which are placed together; the correlation is the mean over them.
            drops: ``(K,)`` for all maps, or ``(m, K)``.

        Returns:
            The correlation among those of all placements. A map whose covered sums the nuisance
            explains has no correlation left (-1), and a p-value of 1.
        """
        small = _smaller(maps.detach().cpu().double())
        sums = placements(small).flatten(2) @ self.covered.flatten(1).T  # (P, m, K)
        map_correlations = []
        photo_correlations = []
        freedom = 0
        for covered, map_drops in zip(sums.unbind(1), drops.expand(len(small), -1), strict=True):
            weights = self.weights(map_drops)
            basis = _basis(self.nuisance * weights[:, None])
            residual_sums = _without(covered * weights, basis)
            residual_drops = _without(map_drops * weights, basis)
            length = residual_sums.norm(dim=1)
            products = (
                residual_sums @ residual_drops / (length * residual_drops.norm()).clamp(min=1e-300)
            )
            varied = (covered - covered.mean(1, keepdim=True)) * weights
            # nothing is left of sums that the nuisance explains, but rounding errors
            map_correlations.append(torch.where(length <= 1e-6 * varied.norm(dim=1), -1, products))
            freedom = len(weights) - basis.shape[1]
            photo_correlations.append(
                _partial(self.nuisance * weights[:, None], map_drops * weights, freedom)
            )
        controls = torch.stack(photo_correlations)[:, -PHOTO_MAPS:].mean(0)
        correlations = torch.stack(map_correlations).mean(0).nan_to_num(-1)
        own_correlation = correlations[0]
        return Placed(
            float(own_correlation),
            float((correlations >= own_correlation - 1e-12).double().mean()),
            float((correlations <= own_correlation + 1e-12).double().mean()),
            float(correlations.square().mean()),
            freedom,
            int((controls >= own_correlation).sum()),
        )


def _partial(columns: torch.Tensor, values: torch.Tensor, freedom: int) -> torch.Tensor:
    """The partial correlation ``(c,)`` of each column ``(K, c)`` with values ``(K,)``, given all
    other columns, from the t-statistics of one regression with ``freedom`` degrees of freedom."""
    scaled = columns / columns.norm(dim=0).clamp(min=1e-300)
    inverse = torch.linalg.pinv(scaled, rtol=1e-9)
    coefficients = inverse @ values
    variance = (values - scaled @ coefficients).square().sum() / max(freedom, 1)
    statistics = coefficients / (variance * inverse.square().sum(1)).sqrt().clamp(min=1e-300)
    correlations: torch.Tensor = statistics / (statistics.square() + freedom).sqrt()
    return correlations


def _basis(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis ``(K, rank)`` of the span of columns ``(K, c)``, whose lengths do not
    count."""
    scaled = columns / columns.norm(dim=0).clamp(min=1e-300)
    left, values, _ = torch.linalg.svd(scaled, full_matrices=False)
    basis: torch.Tensor = left[:, values > 1e-9 * values[0]]
    return basis


def _without(values: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Values ``(..., K)`` less their projection onto an orthonormal basis ``(K, c)``."""
    return values - (values @ basis) @ basis.T


def _smaller(maps: torch.Tensor) -> torch.Tensor:
    """Average maps ``(m, H, W)`` over squares so that no side is longer than `SIDE` pixels."""
    factor = math.ceil(max(maps.shape[1:]) / SIDE)
    smaller: torch.Tensor = F.avg_pool2d(maps[None], factor, ceil_mode=True)
    return smaller[0]
