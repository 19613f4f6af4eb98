"""Methods of regions: one covered at a time, LIME, regions permuted between images, total Sobol
indices, and HSIC."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from explain._utils.errors import MethodError
from explain._utils.random_numbers import permutation, seeded, uniform
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.methods.base import ratio, register
from explain.methods.coalitions import CoalitionDesign, CoveredRegions, RegionMethod
from explain.methods.estimates import Estimate, floored_error
from explain.methods.masking import Score
from explain.methods.regions import Regions, Squares

FEWEST = 3  # runs more than regions, before the misses of a linear model say how far it may be off


class LeaveOneOut(CoalitionDesign):
    """One region covered at a time."""

    def rows(self, regions: int) -> torch.Tensor:
        return ~torch.eye(regions, dtype=torch.bool, device="cpu")

    def most(self, regions: int) -> int:
        return regions


class DropMethod(RegionMethod):
    """A method whose values are what the score loses without each region."""

    designed_by = LeaveOneOut
    needs_blank = False
    style = "signed"

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        return Estimate((whole - scores) @ (1 - seen))


@register
class FeatureAblation(DropMethod):
    r"""Drop of the score without each region.

    What the score loses without each region: :math:`y(x) - y(x_{\setminus R})`.

    Args:
        regions: ``(H, W)`` whole numbers, the number of each pixel's region; `Squares`, `Quadtree`
            or `Superpixels`; or how many squares across.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.

    Returns:
        ``(N, H, W)``, each pixel with its region's value, in units of the score.

    Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014; named as
    in Captum.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, FeatureAblation(regions=[[0, 0], [1, 1]]), target=1)
    >>> torch.allclose(a.values[:, :, 0], (model[1].weight[1].reshape(3, 2, 2) * x).sum((1, 3)))
    True
    """

    regions: Regions = Squares()
    baseline: Baseline = Zero()
    score: Score = "logit"


class RandomCoalitions(CoalitionDesign):
    """Each region covered or not by the toss of a coin."""

    def rows(self, regions: int) -> torch.Tensor:
        return uniform((self.samples, regions), seeded(self.seed)) < 0.5


@register
class LIME(CoveredRegions):
    r"""A linear model of the score with regions covered.

    A linear model of the score in which regions are covered, near the photo.

    Regions are covered by the toss of a coin. A run in which z of M regions are seen weighs
    :math:`\exp(-d^2/\text{width}^2)`, with d the cosine distance :math:`1 - \sqrt{z/M}` to the
    whole photo. The model is fitted by ridge regression, whose intercept is free: the Lasso of the
    paper may set everything to zero on probabilities. Its coefficients are the values; ``r2`` says
    how much of the weighted variance of the scores they explain.

    Args:
        samples: how many covered photos, at most.
        regions: as for `KernelSHAP`.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        width: of the kernel.
        ridge: the penalty on the sum of squared coefficients.
        seed: of the coins.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at
            most ``tolerance``, or after so many seconds.

    Returns:
        ``(N, H, W)``, each pixel with its region's coefficient, in units of the score, with errors
        from M + 3 runs on.

    Ribeiro, Singh and Guestrin, "Why Should I Trust You?", KDD 2016 (arXiv:1602.04938).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, LIME(samples=50, regions=2, ridge=0), target=1)
    >>> (
    ...     torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1)),
    ...     f"{a.r2.item():.3f}",
    ... )
    (True, '1.000')
    """

    width: float = 0.25
    ridge: float = 1.0
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    minimums = {"samples": 1, "width": 1e-6, "ridge": 0}
    designed_by = RandomCoalitions
    needs_blank = False

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        """Fit the linear model by weighted ridge regression with an intercept, the whole photo as
        one more sample of weight 1: coefficients ``(M,)``, their errors, and the r² of the fit.

        ``seen`` is ``(n, M)``, ``scores`` ``(n,)``. Errors are robust (HC3) and count the shrinkage
        by the penalty; there are none before M + 3 runs.
        """
        runs, regions = seen.shape
        samples = torch.cat([torch.ones_like(seen[:1]), seen])
        targets = torch.cat([scores.new_tensor([whole]), scores])
        # the cosine distance of what is seen to the whole photo
        distance = 1 - samples.mean(1).sqrt()
        weights = torch.exp(-((distance / self.width) ** 2))
        total = weights.sum()
        # centring takes the free intercept out of the regression
        centred_samples = samples - weights @ samples / total
        centred_targets = targets - weights @ targets / total
        penalty = self.ridge * torch.eye(
            regions, dtype=centred_samples.dtype, device=centred_samples.device
        )
        inverse = torch.linalg.pinv(
            (centred_samples * weights[:, None]).T @ centred_samples + penalty, hermitian=True
        )
        values = inverse @ (centred_samples.T @ (weights * centred_targets))
        residuals = centred_targets - centred_samples @ values
        spread = float(weights @ centred_targets.square())
        # scores that are all equal are explained in full
        r2 = 1 - float(weights @ residuals.square()) / spread if spread > 0 else 1.0
        degrees_of_freedom = runs - regions
        if degrees_of_freedom < FEWEST:
            return Estimate(values, r2=r2)
        # weights / total is the intercept's part; a leverage of 1 would leave nothing to divide by
        leverage = (
            (centred_samples @ inverse * centred_samples).sum(1) * weights + weights / total
        ).clamp(max=0.99)
        # robust (HC3): each residual as if its run had not been fitted
        influences = centred_samples * (weights * residuals / (1 - leverage))[:, None]
        variance = (inverse @ (influences.T @ influences) @ inverse).diagonal().clamp(min=0)
        # how far the penalty has moved values, to second order: from larger ones than these
        first_order = self.ridge * inverse @ values
        shrinkage = first_order + self.ridge * inverse @ first_order
        error = torch.hypot(floored_error(variance, degrees_of_freedom), shrinkage)
        return Estimate(values, error, r2=r2)


@dataclass(frozen=True)
class NeighbourImage(Baseline):
    """Another image of the batch: all images stand in a random circle, and each shows its
    neighbour."""

    seed: int = 0

    name = "another image of the batch"

    def givers(self, images: int) -> torch.Tensor:
        """The number of the image that each one shows ``(N,)``."""
        circle = permutation(images, self.seed)
        return circle.roll(1)[circle.argsort()]

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        """Another image of the batch for each of ``(N, C, H, W)``; a batch of one is refused."""
        if len(images) < 2:
            raise MethodError(
                "featurepermutation must have a batch of several images, got 1; take "
                "featureablation"
            )
        return images[self.givers(len(images)).to(images.device)]


@register
class FeaturePermutation(DropMethod):
    """Drop of the score with a region of another image.

    What the score loses if a region is that of another image of the batch.

    What stands in its place is thus a photo too, and no colour that the network has never seen. The
    values depend on the other images.

    Args:
        regions: as for `FeatureAblation`; they should be the same for all images.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: says which image gets the regions of which.

    Returns:
        ``(N, H, W)``, each pixel with its region's value, in units of the score.

    Fisher, Rudin and Dominici, "All Models are Wrong, but Many are Useful", JMLR 2019
    (arXiv:1801.01489); for single images as in Captum.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.rand(2, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, FeaturePermutation(regions=2), target=1)
    >>> torch.allclose(a.values[0], (model[1].weight[1].reshape(3, 2, 2) * (x[0] - x[1])).sum(0))
    True
    """

    regions: Regions = Squares()
    score: Score = "logit"
    seed: int = 0

    only_for = "batches of several images"

    @property
    def baseline(self) -> Baseline:  # type: ignore[override]
        return NeighbourImage(self.seed)


DESIGNS = 4  # pairs of points of one scrambled sequence
FEWEST_PARTS = 3  # sequences, or groups of masks, that say how far they differ


@dataclass(frozen=True)
class GridSensitivity(RegionMethod):
    """Options of methods that cover the cells of a grid."""

    samples: int = 2112
    grid: int = 8
    baseline: Baseline = Zero()
    score: Score = "logit"
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    needs_blank = False
    coarse = True

    @property
    def regions(self) -> Regions:  # type: ignore[override]
        return Squares(self.grid)


class SobolPoints(CoalitionDesign):
    """Points A and B of scrambled Sobol sequences, and A with each coordinate in turn from B:
    `DESIGNS` such designs of M + 2 points for each sequence, which has a seed of its own."""

    def rows(self, regions: int) -> torch.Tensor:
        """How much of each cell is seen in each run ``(P, M)``, in [0, 1]: for each design the
        point A, the point B, then A with one coordinate after the other taken from B.
        """
        if self.samples < self.unit(regions):
            raise MethodError(
                f"samples of sobol must be at least {self.unit(regions)}, got {self.samples}; give "
                "more"
            )
        engine: Any = torch.quasirandom.SobolEngine  # torch has no types for it
        rows = []
        for sequence in range(self.samples // self.unit(regions)):
            # another one for each sequence, and none that a near seed of the method has too
            seed = (self.seed * 1_000_003 + sequence) % 2**31
            # The first point is rounded to the default dtype; in float32 it is the same under each.
            points = engine(2 * regions, scramble=True, seed=seed).draw(
                DESIGNS, dtype=torch.float32
            )
            # the first half of a point's 2 M coordinates is A, the second B
            a, b = points.double().reshape(DESIGNS, 2, 1, regions).unbind(1)
            one_from_b = torch.where(torch.eye(regions, dtype=torch.bool), b, a)
            rows.append(torch.cat([a, b, one_from_b], 1).flatten(0, 1))
        return torch.cat(rows)

    def unit(self, regions: int) -> int:
        return DESIGNS * (regions + 2)


def left_out_error(without: Iterable[torch.Tensor]) -> torch.Tensor:
    """The standard errors ``(M,)`` of values by the jackknife, from the values ``(M,)`` that are
    left without each part of the sample in turn."""
    values = torch.stack(list(without))
    parts = len(values)
    return floored_error((parts - 1) / parts * (values - values.mean(0)).square().sum(0), parts - 1)


def _indices(halves: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The total Sobol index of each cell ``(M,)``: the mean of half the squared differences
    ``halves`` ``(sequences, M)``, over the variance of the scores ``ends`` at all points A and B.
    """
    return ratio(halves.mean(0), ends.var(correction=1))


@register
class Sobol(GridSensitivity):
    r"""Share of the score's variance that involves each cell.

    How much of the variance of the score each cell of a grid has a part in, when cells fade at
    random.

    The total Sobol index of a cell is :math:`E[\mathrm{Var}(y \mid \text{all others})] /
    \mathrm{Var}(y)`, by Jansen's estimator :math:`\frac{1}{2n}\sum_j (y(A_j) - y(A_j^{(i)}))^2 /
    \mathrm{Var}(y)`, in which :math:`A_j^{(i)}` is
    :math:`A_j` with its i-th cell taken from :math:`B_j`. Points are those of scrambled Sobol
    sequences, four pairs of each; the error is that of leaving out one sequence in turn. Indices
    have no sign.

    Args:
        samples: how many covered photos, at most; a design takes M + 2 for M cells, 32 of them
            2,112 for a grid of 8.
        grid: cells along a side.
        baseline: what cells fade to: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the sequences.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at
            most ``tolerance``, or after so many seconds.

    Returns:
        ``(N, grid, grid)``, indices from 0, with errors from three sequences on.

    Fel et al., "Look at the Variance! Efficient Black-box Explanations with Sobol-based Sensitivity
    Analysis", NeurIPS 2021 (arXiv:2111.04138).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 2, 2), Sobol(samples=48, grid=2), target=1
    ... ).values.shape
    torch.Size([1, 2, 2])
    """

    minimums = {"samples": 1, "grid": 1}
    designed_by = SobolPoints

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        """The total Sobol index of each cell ``(M,)`` by Jansen's estimator, from the scores in the
        order of `SobolPoints.rows`; its error from leaving out one sequence in turn, from three
        sequences on."""
        # the scores of each design are those at A, at B, and with one cell after the other from B
        designs = scores.reshape(-1, DESIGNS, seen.shape[1] + 2)
        at_a = designs[:, :, :1]
        halves = (at_a - designs[:, :, 2:]).square().sum(1) / (2 * DESIGNS)  # (sequences, M)
        at_a_and_b = designs[:, :, :2].flatten(1)
        values = _indices(halves, at_a_and_b)
        sequences = len(designs)
        # equal but for rounding, which would be all that errors tell
        all_equal = bool(scores.max() - scores.min() <= 1e-6 * scores.abs().max())
        if sequences < FEWEST_PARTS or all_equal:
            return Estimate(values)
        numbers = torch.arange(sequences, device=scores.device)
        all_but_one = [numbers != left_out for left_out in range(sequences)]
        without = (_indices(halves[rows], at_a_and_b[rows]) for rows in all_but_one)
        return Estimate(values, left_out_error(without))


class HalfMasks(CoalitionDesign):
    """Each cell seen or not at random, in groups of `GROUP` runs: each cell is seen in half of a
    group."""

    def rows(self, regions: int) -> torch.Tensor:
        """Which cells are seen in each run ``(P, M)``, in groups of `GROUP` runs; in each group,
        each cell is seen in half of the runs.
        """
        generator = seeded(self.seed)
        groups = [uniform((GROUP, regions), generator) for _ in range(self.samples // GROUP)]
        return torch.cat([group.argsort(0).argsort(0) < GROUP // 2 for group in groups])

    def unit(self, regions: int) -> int:
        return GROUP


GROUP = 20  # masks in which each cell is seen as often as not


def hsic(seen: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
    """The biased HSIC, tr(K H L H) / n², of each region and the score ``(M,)``: ``seen`` ``(n,
    M)``, the scores' kernel ``alike`` ``(n, n)``; a cell's is 1 where two masks agree on it.
    """
    centred = seen - seen.mean(0)
    return 2 * (centred * (alike @ centred)).sum(0) / len(seen) ** 2


@register
class HSIC(GridSensitivity):
    r"""Dependence of the score on whether each cell is visible.

    How much the score depends on whether each cell of a grid is seen, in whatever way it does.

    The Hilbert-Schmidt independence criterion :math:`\mathrm{tr}(K_i H L H)/n^2`, with :math:`H = I
    - 1/n`. The kernel of a cell is 1 where two masks agree on it, and 0 elsewhere; that of the
    score is Gaussian, as wide as the median distance between two scores. Values have no sign. They
    are a little above 0 for cells that do nothing, by 1/n.

    Args:
        samples: how many covered photos, at most, in groups of 20 in which each cell is seen ten
            times.
        grid: cells along a side.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the masks.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at
            most ``tolerance``, or after so many seconds.

    Returns:
        ``(N, grid, grid)``, from 0 to 1/4, with errors from 60 runs on: of the mean over seeds, not
        of the limit.

    Novello, Fel and Vigouroux, "Making Sense of Dependence: Efficient Black-box Explanations Using
    Dependence Measure", NeurIPS 2022 (arXiv:2206.06219).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 2, 2), HSIC(samples=40, grid=2), target=1
    ... ).values.shape
    torch.Size([1, 2, 2])
    """

    samples: int = 500

    minimums = {"samples": GROUP, "grid": 1}
    designed_by = HalfMasks

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        """The HSIC of each cell with the score ``(M,)``, with a Gaussian kernel as wide as the
        median distance of two scores; its error from leaving out one part of the masks in
        turn, from three parts on."""
        distances = (scores[:, None] - scores).abs()
        # the same mask, drawn twice, scores the same but for rounding
        differ = distances > 1e-6 * distances.max()
        width = float(distances[differ].median()) if bool(differ.any()) else 1.0
        kernel = torch.exp(-((distances / width) ** 2) / 2)
        values = hsic(seen, kernel)
        parts = min(10, len(seen) // GROUP)
        if parts < FEWEST_PARTS or not bool(differ.any()):
            return Estimate(values)
        # whole groups, in each of which every cell is seen in half of the runs
        part = torch.arange(len(seen), device=seen.device) // GROUP % parts
        all_but_one = [part != left_out for left_out in range(parts)]
        without = (hsic(seen[rows], kernel[rows][:, rows]) for rows in all_but_one)
        return Estimate(values, left_out_error(without))
