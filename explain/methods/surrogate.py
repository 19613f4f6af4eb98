"""One region at a time, LIME, and regions permuted between images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain._utils.errors import MethodError
from explain._utils.random_numbers import uniform
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.engine.perturbations import interleaved
from explain.methods.bibliography import cited
from explain.methods.coalitions import CoalitionDesign, Coalitions, RegionMethod
from explain.methods.estimates import Guess, honest
from explain.methods.masks import Score
from explain.methods.regions import Regions, Squares
from explain.methods.registry import register

FEWEST = 3  # runs more than regions, before the misses of a linear model say how far it may be off


@dataclass(frozen=True)
class LeaveOneOut(CoalitionDesign):
    """One region covered at a time."""

    def rows(self, regions: int) -> torch.Tensor:
        return ~torch.eye(regions, dtype=torch.bool, device="cpu")

    def most(self, regions: int) -> int:
        return regions


class DropMethod(RegionMethod):
    """A method whose values are what the score loses without each region."""

    needs_blank = False
    style = "signed"

    @property
    def design(self) -> LeaveOneOut:
        return LeaveOneOut()

    def solve(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
        return Guess((whole - scores) @ (1 - seen))


@register
@dataclass(frozen=True)
class FeatureAblation(DropMethod):
    r"""What the score loses without each region: :math:`y(x) - y(x_{\setminus R})`.

    Args:
        regions: ``(H, W)`` whole numbers, the number of each pixel's region; `Squares`, `Quadtree` or `Superpixels`;
            or how many squares across.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.

    Returns:
        ``(N, H, W)``, each pixel with its region's value, in units of the score.

    Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014; named as in Captum.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, FeatureAblation(regions=[[0, 0], [1, 1]]), target=1)
    >>> torch.allclose(a.values[:, :, 0], (model[1].weight[1].reshape(3, 2, 2) * x).sum((1, 3)))
    True
    """

    regions: Regions = field(default_factory=Squares)
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"

    name = "featureablation"
    about = "drop of the score without each region"
    source = cited("zeiler2014occlusion")


@dataclass(frozen=True)
class RandomCoalitions(CoalitionDesign):
    """Each region covered or not by the toss of a coin."""

    samples: int
    seed: int

    def rows(self, regions: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        return uniform((self.samples, regions), generator) < 0.5

    def most(self, regions: int) -> int:
        return self.samples


@register
@dataclass(frozen=True)
class LIME(RegionMethod):
    r"""A linear model of the score in which regions are covered, near the photo.

    Regions are covered by the toss of a coin. A run in which z of M regions are seen weighs
    :math:`\exp(-d^2/\text{width}^2)`, with d the cosine distance :math:`1 - \sqrt{z/M}` to the whole photo. The model
    is fitted by ridge regression, whose intercept is free: the Lasso of the paper may set everything to zero on
    probabilities. Its coefficients are the values; ``r2`` says how much of the weighted variance of the scores they
    explain.

    Args:
        samples: how many covered photos, at most.
        regions: as for `KernelSHAP`.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        width: of the kernel.
        ridge: the penalty on the sum of squared coefficients.
        seed: of the coins.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at most ``tolerance``,
            or after so many seconds.

    Returns:
        ``(N, H, W)``, each pixel with its region's coefficient, in units of the score, with errors from M + 3 runs on.

    Ribeiro, Singh and Guestrin, "Why Should I Trust You?", KDD 2016 (arXiv:1602.04938).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, LIME(samples=50, regions=2, ridge=0), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1)), f"{a.r2.item():.3f}"
    (True, '1.000')
    """

    samples: int = 500
    regions: Regions = field(default_factory=Squares)
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"
    width: float = 0.25
    ridge: float = 1.0
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    name = "lime"
    about = "a linear model of the score with regions covered"
    source = cited("ribeiro2016lime")
    minimums: ClassVar[Mapping[str, float]] = {"samples": 1, "width": 1e-6, "ridge": 0}
    needs_blank = False
    style = "signed"

    @property
    def design(self) -> RandomCoalitions:
        return RandomCoalitions(self.samples, self.seed)

    def solve(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
        """Weighted least squares with an intercept; the photo itself is one more sample, of weight 1."""
        z = torch.cat([torch.ones_like(seen[:1]), seen])
        y = torch.cat([scores.new_full((1,), whole), scores])
        distance = 1 - (z.sum(1) / z.shape[1]).sqrt()
        weights = torch.exp(-((distance / self.width) ** 2))
        total = weights.sum()
        x, t = z - weights @ z / total, y - weights @ y / total
        curvature = (x * weights[:, None]).T @ x
        penalty = self.ridge * torch.eye(z.shape[1], dtype=torch.float64, device=z.device)
        inverse = torch.linalg.pinv(curvature + penalty, hermitian=True)
        values = inverse @ (x * (weights * t)[:, None]).sum(0)
        rest = t - x @ values
        spread = float(weights @ t.square())
        leverage = ((x @ inverse * x).sum(1) * weights + weights / total).clamp(max=0.99)
        pulls = x * (weights * rest / (1 - leverage))[:, None]
        variance = (inverse @ (pulls.T @ pulls) @ inverse).diagonal().clamp(min=0)
        r2 = 1 - float(weights @ rest.square()) / spread if spread > 0 else 1.0
        freedom = len(seen) - seen.shape[1]
        if freedom < FEWEST:
            return Guess(values, None, r2)
        shrunk = self.ridge * inverse @ values  # by the penalty, to first order
        shrunk = shrunk + self.ridge * inverse @ shrunk
        return Guess(values, torch.hypot(honest(variance, freedom), shrunk), r2)


@dataclass(frozen=True)
class PermutedRegions(Perturbation):
    """Photos of which one region is that of another image of the batch."""

    masks: Coalitions
    seed: int

    def __str__(self) -> str:
        return "photos with a region of another image"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.masks.most(size) if size else 0

    def others(self, images: int) -> torch.Tensor:
        """Which image each one gets its region from: all stand in a random circle, and look to their neighbour."""
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        circle = torch.randperm(images, generator=generator, device="cpu")
        found = torch.empty_like(circle)
        found[circle] = circle.roll(1)
        return found

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        if len(x) < 2:
            raise MethodError(
                "featurepermutation must have a batch of several images, between which regions are exchanged, got 1; "
                "give more, or take featureablation"
            )
        drawn = self.masks.drawn(evidence)
        owners, numbers = interleaved(drawn.counts, x.device)
        others = self.others(len(x)).to(x.device)

        def make(rows: torch.Tensor) -> torch.Tensor:
            images = owners[rows]
            keep = drawn.keep(images, numbers[rows]) > 0
            return torch.where(keep, x[images], x[others[images]])

        return PerturbedRows(owners, make)


@register
@dataclass(frozen=True)
class FeaturePermutation(DropMethod):
    """What the score loses if a region is that of another image of the batch.

    What stands in its place is thus a photo too, and no colour that the network has never seen. The values depend on
    the other images.

    Args:
        regions: as for `FeatureAblation`; they should be the same for all images.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: says which image gets the regions of which.

    Returns:
        ``(N, H, W)``, each pixel with its region's value, in units of the score.

    Fisher, Rudin and Dominici, "All Models are Wrong, but Many are Useful", JMLR 2019 (arXiv:1801.01489); for single
    images as in Captum.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    >>> x = torch.rand(2, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, FeaturePermutation(regions=2), target=1)
    >>> torch.allclose(a.values[0], (model[1].weight[1].reshape(3, 2, 2) * (x[0] - x[1])).sum(0))
    True
    """

    regions: Regions = field(default_factory=Squares)
    score: Score = "logit"
    seed: int = 0

    name = "featurepermutation"
    about = "drop of the score with a region of another image"
    source = cited("fisher2019permutation")
    only_for = "batches of several images"

    @property
    def perturbation(self) -> PermutedRegions:
        return PermutedRegions(self.coalitions, self.seed)
