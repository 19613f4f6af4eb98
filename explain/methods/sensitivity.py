"""How much the score depends on each cell of a grid: total Sobol indices, and HSIC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError
from explain._utils.random_numbers import uniform
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.methods.bibliography import cited
from explain.methods.coalitions import CoalitionDesign, RegionMethod
from explain.methods.estimates import Guess, honest
from explain.methods.masks import Score
from explain.methods.regions import Regions, Squares
from explain.methods.registry import register

DESIGNS = 4  # pairs of points of one scrambled sequence
FEWEST = 3  # sequences, or groups of masks, that say how far they differ


@dataclass(frozen=True)
class GridSensitivity(RegionMethod):
    """Options of methods that cover the cells of a grid."""

    samples: int = 2112
    grid: int = 8
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    needs_blank = False
    coarse = True

    @property
    def regions(self) -> Regions:  # type: ignore[override]
        return Squares(self.grid)


@dataclass(frozen=True)
class SobolPoints(CoalitionDesign):
    """Points A and B of scrambled Sobol sequences, and A with each coordinate in turn taken from B.

    A sequence gives a few such designs; the next is scrambled otherwise, so that the sequences are independent.
    """

    samples: int
    seed: int

    def rows(self, regions: int) -> torch.Tensor:
        if self.samples < self.unit(regions):
            raise MethodError(
                f"samples of sobol must be at least {self.unit(regions)} for {regions} cells ({DESIGNS} designs of "
                f"M + 2 runs), got {self.samples}; give more, or a smaller grid"
            )
        found = []
        for sequence in range(self.samples // self.unit(regions)):
            seed = (self.seed * 1_000_003 + sequence) % 2**31
            engine: Any = torch.quasirandom.SobolEngine  # which has no types
            # The first point is rounded to the default dtype; in float32 it is the same under each.
            points = engine(2 * regions, scramble=True, seed=seed).draw(DESIGNS, dtype=torch.float32).double()
            for a, b in zip(points[:, :regions], points[:, regions:], strict=True):
                mixed = a.repeat(regions, 1)
                mixed.diagonal().copy_(b)
                found.append(torch.cat([a[None], b[None], mixed]))
        return torch.cat(found)

    def unit(self, regions: int) -> int:
        return DESIGNS * (regions + 2)

    def most(self, regions: int) -> int:
        return self.samples // self.unit(regions) * self.unit(regions)


def _but(rows: torch.Tensor, one: int) -> torch.Tensor:
    return torch.cat([rows[:one], rows[one + 1 :]])


def _indices(halves: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    variance = ends.var(correction=1)
    return halves.mean(0) / variance if float(variance) > 0 else torch.zeros_like(halves[0])


@register
@dataclass(frozen=True)
class Sobol(GridSensitivity):
    r"""How much of the variance of the score each cell of a grid has a part in, when cells fade at random.

    The total Sobol index of a cell is :math:`E[\mathrm{Var}(y \mid \text{all others})] / \mathrm{Var}(y)`, by Jansen's
    estimator :math:`\frac{1}{2n}\sum_j (y(A_j) - y(A_j^{(i)}))^2 / \mathrm{Var}(y)`, in which :math:`A_j^{(i)}` is
    :math:`A_j` with its i-th cell taken from :math:`B_j`. Points are those of scrambled Sobol sequences, four pairs of
    each; the error is that of leaving out one sequence in turn. Indices have no sign.

    Args:
        samples: how many covered photos, at most; a design takes M + 2 for M cells, 32 of them 2,112 for a grid of 8.
        grid: cells along a side.
        baseline: what cells fade to: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the sequences.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at most ``tolerance``,
            or after so many seconds.

    Returns:
        ``(N, grid, grid)``, indices from 0, with errors from three sequences on.

    Fel et al., "Look at the Variance! Efficient Black-box Explanations with Sobol-based Sensitivity Analysis", NeurIPS
    2021 (arXiv:2111.04138).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> explain.attribute(model, torch.rand(1, 3, 2, 2), Sobol(samples=48, grid=2), target=1).values.shape
    torch.Size([1, 2, 2])
    """

    name = "sobol"
    about = "share of the score's variance that involves each cell"
    source = cited("fel2021sobol")
    minimums: ClassVar[Mapping[str, float]] = {"samples": 1, "grid": 1}

    @property
    def design(self) -> SobolPoints:
        return SobolPoints(self.samples, self.seed)

    def solve(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
        regions = seen.shape[1]
        each = scores.reshape(-1, DESIGNS, regions + 2)
        halves = (each[:, :, :1] - each[:, :, 2:]).square().sum(1) / (2 * DESIGNS)  # (sequences, M)
        ends = each[:, :, :2].flatten(1)
        values = _indices(halves, ends)
        n = len(each)
        if n < FEWEST or bool(scores.max() - scores.min() <= 1e-6 * scores.abs().max()):
            return Guess(values)
        without = torch.stack([_indices(_but(halves, k), _but(ends, k)) for k in range(n)])
        return Guess(values, honest((n - 1) / n * (without - without.mean(0)).square().sum(0), n - 1))


@dataclass(frozen=True)
class HalfMasks(CoalitionDesign):
    """Each cell seen or not by the toss of a coin, in groups that are even: each cell is seen in half of a group."""

    samples: int
    seed: int

    def rows(self, regions: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        found = []
        for _ in range(self.samples // GROUP):
            ranks = uniform((GROUP, regions), generator).argsort(0).argsort(0)
            found.append(ranks < GROUP // 2)
        return torch.cat(found)

    def unit(self, regions: int) -> int:
        return GROUP

    def most(self, regions: int) -> int:
        return self.samples // GROUP * GROUP


GROUP = 20  # masks in which each cell is seen as often as not


def hsic(seen: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
    """The biased estimate of HSIC for each column of truth values ``(n, M)`` and a kernel ``(n, n)``.

    With the kernel of a cell 1 where two masks agree on it and 0 elsewhere: tr(K H L H) / n².
    """
    centred = seen - seen.mean(0)
    found: torch.Tensor = 2 * (centred * (alike @ centred)).sum(0) / len(seen) ** 2
    return found


@register
@dataclass(frozen=True)
class HSIC(GridSensitivity):
    r"""How much the score depends on whether each cell of a grid is seen, in whatever way it does.

    The Hilbert-Schmidt independence criterion :math:`\mathrm{tr}(K_i H L H)/n^2`, with :math:`H = I - 1/n`. The kernel
    of a cell is 1 where two masks agree on it, and 0 elsewhere; that of the score is Gaussian, as wide as the median
    distance between two scores. Values have no sign. They are a little above 0 for cells that do nothing, by 1/n.

    Args:
        samples: how many covered photos, at most, in groups of 20 in which each cell is seen ten times.
        grid: cells along a side.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the masks.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at most ``tolerance``,
            or after so many seconds.

    Returns:
        ``(N, grid, grid)``, from 0 to 1/4, with errors from 60 runs on: of the mean over seeds, not of the
        limit.

    Novello, Fel and Vigouroux, "Making Sense of Dependence: Efficient Black-box Explanations Using Dependence Measure",
    NeurIPS 2022 (arXiv:2206.06219).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> explain.attribute(model, torch.rand(1, 3, 2, 2), HSIC(samples=40, grid=2), target=1).values.shape
    torch.Size([1, 2, 2])
    """

    samples: int = 500

    name = "hsic"
    about = "dependence of the score on whether each cell is visible"
    source = cited("novello2022hsic")
    minimums: ClassVar[Mapping[str, float]] = {"samples": GROUP, "grid": 1}

    @property
    def design(self) -> HalfMasks:
        return HalfMasks(self.samples, self.seed)

    def solve(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
        apart = (scores[:, None] - scores).abs()
        differ = apart > 1e-6 * apart.max()  # the same mask, drawn twice, scores the same but for rounding
        width = float(apart[differ].median()) if bool(differ.any()) else 1.0
        alike = torch.exp(-((apart / width) ** 2) / 2)
        values = hsic(seen, alike)
        groups = min(10, len(seen) // GROUP)
        if groups < FEWEST or not bool(differ.any()):
            return Guess(values)
        of = torch.arange(len(seen), device=seen.device) // GROUP % groups
        without = torch.stack([hsic(seen[of != k], alike[of != k][:, of != k]) for k in range(groups)])
        variance = (groups - 1) / groups * (without - without.mean(0)).square().sum(0)
        return Guess(values, honest(variance, groups - 1))
