"""Shapley values of regions: by weighted regression, and by permutations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch

from explain.engine import Evidence
from explain.errors import MethodError
from explain.fills import Fill, Zero
from explain.methods import sources_of_masks as sources
from explain.methods.base import Style
from explain.methods.checks import check_options
from explain.methods.coalitions import FromRegions, Solved
from explain.methods.estimates import check_budget
from explain.methods.masks import Score, blank_score, fill_of, whole_score
from explain.methods.regions import Regions, Squares, regions_of
from explain.methods.sources import Source

AT_ONCE = 256  # coalitions that are drawn together


@dataclass(frozen=True)
class Pairs:
    """Coalitions of regions and their opposites, by the Shapley kernel; each pair once.

    Sizes k are drawn in proportion to (M − 1) / (k (M − k)). A pair that is drawn again is not run again. Where so
    many runs are enough for all coalitions, all of them are run, in random order.
    """

    runs: int
    seed: int

    def rows(self, regions: int) -> torch.Tensor:
        half = drawn_pairs(regions, self.runs // 2, self.seed)[0]
        return torch.stack([half, ~half], 1).flatten(0, 1)

    def unit(self, regions: int) -> int:
        return 2

    def most(self, regions: int) -> int:
        return min(self.runs // 2 * 2, 2**regions - 2) if regions else self.runs // 2 * 2


@lru_cache(maxsize=8)
def drawn_pairs(regions: int, pairs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One coalition of each pair ``(n, M)``, and how many draws it took to come to it ``(n,)``; 0 if all are there."""
    generator = torch.Generator("cpu").manual_seed(seed % 2**63)
    if regions <= 24 and pairs >= 2 ** (regions - 1) - 1:
        numbers = torch.arange(1, 2 ** (regions - 1), device="cpu")
        found = (numbers[:, None] >> torch.arange(regions, device="cpu")) & 1 == 1
        order = torch.randperm(len(found), generator=generator, device="cpu")
        return found[order], torch.zeros(len(found), dtype=torch.float64, device="cpu")
    chances = torch.tensor([1 / (k * (regions - k)) for k in range(1, regions)], dtype=torch.float64, device="cpu")
    seen, kept, draws, drawn = set[bytes](), list[torch.Tensor](), list[int](), 0
    while len(kept) < pairs:
        sizes = torch.multinomial(chances, AT_ONCE, replacement=True, generator=generator) + 1
        ranks = torch.rand(AT_ONCE, regions, generator=generator, device="cpu").argsort(1).argsort(1)
        for coalition in ranks < sizes[:, None]:
            drawn += 1
            key = (coalition ^ coalition[0]).numpy().tobytes()  # the same for a coalition and its opposite
            if key not in seen and len(kept) < pairs:
                seen.add(key)
                kept.append(coalition)
                draws.append(drawn)
    return torch.stack(kept), torch.tensor(draws, dtype=torch.float64, device="cpu")


def chance_of_pair(size: torch.Tensor, regions: int) -> torch.Tensor:
    """How probable it is to draw a coalition of this size, or its opposite."""
    weights = [1 / (k * (regions - k)) for k in range(1, regions)]
    chances = [2 * w / sum(weights) / math.comb(regions, k) for k, w in enumerate(weights, start=1)]
    of_sizes = torch.tensor([0.0, *chances, 0.0], dtype=torch.float64, device=size.device)
    return of_sizes.index_select(0, size.long())


@dataclass(frozen=True)
class KernelRegression:
    """The Shapley values that fit the scores of pairs best, and add up to the difference between the ends exactly.

    A pair (z, 1 − z) says how much more z gives than 1 − z, whatever regions do in twos. What a pair stands for is its
    probability over the chance that so many draws come to it. With few pairs, values are drawn a little towards each
    other, by 0.3 ((M − 1) / n)² of the mean curvature. The standard error is that of leaving out one pair in turn
    (MacKinnon and White's third), over the pairs that were not drawn.
    """

    pairs: int
    seed: int

    compares: ClassVar[bool] = True

    def __call__(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Solved:
        regions, gain = seen.shape[1], whole - blank
        even = torch.full((regions,), gain / regions, dtype=torch.float64, device=seen.device)
        z, n = seen[::2], len(seen) // 2
        if regions == 1:
            return Solved(even, torch.zeros_like(even))
        if not n:
            return Solved(even)
        chance, share = self._shares(z)
        weights = chance / share
        more = (scores[::2] - scores[1::2] + gain) / 2 - z.sum(1) * gain / regions
        x = z - z.mean(1, keepdim=True)
        curvature = (x * weights[:, None]).T @ x
        flat = torch.eye(regions, dtype=torch.float64, device=seen.device) - 1 / regions
        everything = bool((share == 1).all())
        ridge = 0.0 if everything else 0.3 * ((regions - 1) / n) ** 2 * float(curvature.trace()) / (regions - 1)
        inverse = torch.linalg.pinv(curvature + ridge * flat, hermitian=True, rtol=1e-10)
        values = inverse @ (x * (weights * more)[:, None]).sum(0)
        leverage = ((x @ inverse * x).sum(1) * weights).clamp(max=0.99)
        spread = values.square().sum() / min(n, regions - 1)  # as large as what so few pairs can say
        pulls = x * (weights * (more - x @ values) / (1 - leverage))[:, None]
        middle = (pulls * (1 - share)[:, None]).T @ pulls + ridge**2 * spread * flat
        error = (inverse @ middle @ inverse).diagonal().clamp(min=0).sqrt()
        return Solved(even + values - values.mean(), error if n > 1 or everything else None)

    def _shares(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How probable each pair is, and the chance that it is among those that were run."""
        regions, n = z.shape[1], len(z)
        chance = chance_of_pair(z.sum(1), regions)
        draws = drawn_pairs(regions, self.pairs, self.seed)[1]
        if not len(draws) or not draws[-1]:
            return chance, torch.full_like(chance, n / len(draws) if len(draws) else 1.0)
        return chance, 1 - (1 - chance) ** draws[n - 1].to(chance.device)


class AddsUp(FromRegions):
    """What methods share whose values add up to the difference between the score and that of a blank photo."""

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values of the regions miss it ``(N,)``."""
        labels = self.regions(evidence.inputs)
        gain: torch.Tensor = evidence[whole_score(self.score)] - evidence[blank_score(self.fill, self.score)]
        sums = [
            torch.stack([each[of == number].mean() for number in range(int(of.max()) + 1)]).sum()
            for of, each in zip(labels, values, strict=True)
        ]
        return torch.stack(sums) - gain


@dataclass(frozen=True)
class KernelSHAP(AddsUp):
    r"""The Shapley values of regions, by weighted regression on the scores of random coalitions.

    A region's value is what it adds to the score on average, over all orders in which regions may be uncovered; the
    values of all regions add up to :math:`y(x) - y(\text{fill})`, exactly. Coalitions come in pairs with their
    opposites (Covert and Lee, 2021), none twice, and the sum is a condition of the regression, not a sample with a
    large weight. Where ``runs`` are enough for all coalitions, these are run, and the values are exact.

    Args:
        runs: how many covered photos, at most; the photo itself and the blank one are not counted.
        regions: ``(H, W)`` whole numbers, the number of each pixel's region; `Squares`, `Quadtree` or `Superpixels`;
            or how many squares across.
        fill: what takes the place of what is covered: one of `explain.fills`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the coalitions.
        until, seconds: stop early, when the largest standard error over the largest magnitude is at most ``until``, or
            after so many seconds.

    Returns:
        ``(N, H, W)``, each pixel with its region's value, in units of the score, with standard errors; ``delta`` is by
        how much the regions' values miss the sum.

    Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017 (arXiv:1705.07874).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, KernelSHAP(regions=2), target=1)  # four regions: exact
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1)), a.runs
    (True, 14)
    """

    runs: int = 500
    regions: Regions = field(default_factory=Squares)
    fill: Fill = field(default_factory=Zero)
    score: Score = "logit"
    seed: int = 0
    until: float | None = None
    seconds: float | None = None

    name: ClassVar[str] = "kernelshap"
    about: ClassVar[str] = "Shapley values of regions by weighted regression"
    paper: ClassVar[str] = "Lundberg and Lee, NeurIPS 2017"
    source: ClassVar[Source] = sources.KERNELSHAP
    style: ClassVar[Style] = "heat"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fill", fill_of(self.name, self.fill))
        object.__setattr__(self, "regions", regions_of(self.name, self.regions))
        check_options(self, runs=2)
        check_budget(self)

    @property
    def design(self) -> Pairs:
        return Pairs(self.runs, self.seed)

    @property
    def solver(self) -> KernelRegression:
        return KernelRegression(self.runs // 2, self.seed)


@dataclass(frozen=True)
class Permutations:
    """Regions uncovered one after the other in random orders, each order followed by its reverse."""

    runs: int
    seed: int

    def rows(self, regions: int) -> torch.Tensor:
        if regions < 2:
            return torch.zeros(0, regions, dtype=torch.bool, device="cpu")
        if self.runs < self.unit(regions):
            raise MethodError(
                f"runs of shapleysampling must be at least {self.unit(regions)} for {regions} regions (an order and "
                f"its reverse), got {self.runs}; give more, or fewer regions"
            )
        generator = torch.Generator("cpu").manual_seed(self.seed % 2**63)
        found = []
        for _ in range(self.runs // self.unit(regions)):
            order = torch.randperm(regions, generator=generator, device="cpu")
            for each in (order, order.flip(0)):
                place = torch.empty_like(each)
                place[each] = torch.arange(regions, device="cpu")
                found.append(place < torch.arange(1, regions, device="cpu")[:, None])
        return torch.cat(found)

    def unit(self, regions: int) -> int:
        return max(1, 2 * (regions - 1))

    def most(self, regions: int) -> int:
        return self.runs // self.unit(regions) * self.unit(regions) if regions > 1 else 0


@dataclass(frozen=True)
class MeanGain:
    """What each region adds when it is uncovered, on average over the orders; the error is that over pairs of them."""

    compares: ClassVar[bool] = True

    def __call__(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Solved:
        regions = seen.shape[1]
        if regions == 1:
            values = torch.full((1,), whole - blank, dtype=torch.float64, device=seen.device)
            return Solved(values, torch.zeros_like(values))
        seen, scores = seen.reshape(-1, regions - 1, regions), scores.reshape(-1, regions - 1)
        steps = torch.cat([torch.zeros_like(seen[:, :1]), seen, torch.ones_like(seen[:, :1])], 1).diff(dim=1)
        ends = torch.ones_like(scores[:, :1])
        gains = torch.cat([blank * ends, scores, whole * ends], 1).diff(dim=1)
        each = (steps * gains[..., None]).sum(1).reshape(-1, 2, regions).mean(1)
        n = len(each)
        return Solved(each.mean(0), each.std(0) / math.sqrt(n) if n > 1 else None)


@dataclass(frozen=True)
class ShapleySampling(AddsUp):
    r"""The Shapley values of regions, by uncovering them one after the other in random orders.

    A region's value is the mean of what the score gains when it is uncovered. Each order is followed by its reverse,
    which makes the mean more exact. The values of all regions add up to :math:`y(x) - y(\text{fill})`, exactly.

    Args:
        runs: how many covered photos, at most; an order and its reverse take 2 (M − 1) for M regions.
        regions: as for `KernelSHAP`.
        fill: what takes the place of what is covered: one of `explain.fills`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seed: of the orders.
        until, seconds: stop early, when the largest standard error over the largest magnitude is at most ``until``, or
            after so many seconds.

    Returns:
        ``(N, H, W)``, each pixel with its region's value, in units of the score, with standard errors where there is
        more than one pair of orders.

    Štrumbelj and Kononenko, "Explaining prediction models and individual predictions with feature contributions",
    Knowledge and Information Systems 2014.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, ShapleySampling(regions=2), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1))
    True
    """

    runs: int = 500
    regions: Regions = field(default_factory=Squares)
    fill: Fill = field(default_factory=Zero)
    score: Score = "logit"
    seed: int = 0
    until: float | None = None
    seconds: float | None = None

    name: ClassVar[str] = "shapleysampling"
    about: ClassVar[str] = "Shapley values of regions by uncovering them in random orders"
    paper: ClassVar[str] = "Štrumbelj and Kononenko, KAIS 2014"
    source: ClassVar[Source] = sources.SHAPLEYSAMPLING
    style: ClassVar[Style] = "heat"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fill", fill_of(self.name, self.fill))
        object.__setattr__(self, "regions", regions_of(self.name, self.regions))
        check_options(self, runs=1)
        check_budget(self)

    @property
    def design(self) -> Permutations:
        return Permutations(self.runs, self.seed)

    @property
    def solver(self) -> MeanGain:
        return MeanGain()
