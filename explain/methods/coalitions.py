"""Methods that cover some regions of an image in each run, and estimate a value for each region
from the scores.

A `RegionMethod` names a `CoalitionDesign`, which says what is seen in each run, and solves for the
values (`RegionMethod.solve`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence, Need, PerturbedRows
from explain.engine.perturbations import one_by_one, samples_of
from explain.methods.estimates import Estimate, EstimateMethod, Estimator
from explain.methods.masking import MaskedInputs, Score, blank_score, whole_score
from explain.methods.regions import Regions, Squares


@dataclass(frozen=True)
class CoalitionDesign(ABC):
    """Which of M regions are seen in each run: at most ``samples`` runs, drawn by ``seed``."""

    samples: int
    seed: int

    @abstractmethod
    def rows(self, regions: int) -> torch.Tensor:
        """How much of each of M regions is seen in each of P runs, ``(P, M)``, in [0, 1] or bool:
        the same for every call, as estimators take scores in this order.
        """

    def most(self, regions: int) -> int:
        """How many runs there are at most for so many regions."""
        return self.samples // self.unit(regions) * self.unit(regions)

    def unit(self, regions: int) -> int:
        """How many successive runs mean something only together, such as those of one order of
        regions.
        """
        return 1


@dataclass(frozen=True)
class Coalitions(MaskedInputs):
    """Images that show some regions and cover the others."""

    baseline: Baseline
    regions: Regions
    design: CoalitionDesign

    @property
    def covered_by(self) -> str:  # type: ignore[override]
        return f"regions, {self.regions}"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.design.most(self.regions.most(size)) if size else 0

    def shown(self, labels: torch.Tensor) -> list[torch.Tensor]:
        """Which regions of each image are seen in each run, a list of ``(P, M)``, from region
        numbers ``labels`` ``(N, H, W)``. Images with as many regions share one design.
        """
        counts = [int(image_labels.max()) + 1 for image_labels in labels]
        designs = {
            count: self.design.rows(count).to(labels.device) for count in dict.fromkeys(counts)
        }
        return [designs[count] for count in counts]

    def masks(self, evidence: Evidence) -> PerturbedRows:
        """The masks ``(b, 1, H, W)`` of the runs: 1 in regions that are seen, 0 in those that the
        baseline replaces. Mask ``number`` of an image is that of run ``number`` of the design.
        """
        x = evidence.inputs
        labels = self.regions(x)
        shown = self.shown(labels)

        mask_of = one_by_one(lambda image, run: shown[image][run].to(x)[labels[image]][None])
        return samples_of([len(runs) for runs in shown], x.device, mask_of)


class RegionMethod(EstimateMethod):
    """A method that covers regions and estimates a value for each. It has the fields ``regions``
    and ``baseline``."""

    regions: Regions
    baseline: Baseline
    needs_blank = True
    """Whether it compares with the score of a fully covered image."""
    designed_by: ClassVar[type[CoalitionDesign]]
    coarse = False
    """Whether the map has a value for each cell of a grid, and not for each pixel."""

    @property
    def design(self) -> CoalitionDesign:
        return self.designed_by(getattr(self, "samples", 0), getattr(self, "seed", 0))

    def solve(
        self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float
    ) -> Estimate:
        """A value for each region ``(M,)`` from the first ``n`` runs, as a pure function: ``seen``
        ``(n, M)``, their scores ``(n,)``, and those of the ``whole`` image and a ``blank`` one.
        """
        raise NotImplementedError

    @property
    def perturbation(self) -> Coalitions:
        return Coalitions(self.baseline, self.regions, self.design)

    @property
    def references(self) -> frozenset[Need[Any]]:
        """The scores that the method compares with: of the whole image, and of the fully covered
        one if ``needs_blank``."""
        blank = {blank_score(self.baseline, self.score)} if self.needs_blank else set()
        return frozenset({whole_score(self.score), *blank})

    def estimators(self, evidence: Evidence) -> list[Estimator]:
        """One estimator for each image, with its regions, its runs, and the scores of the whole and
        the fully covered image."""
        labels = self.regions(evidence.inputs)
        whole = evidence[whole_score(self.score)]
        blank = torch.zeros_like(whole)  # not used without needs_blank
        if self.needs_blank:
            blank = evidence[blank_score(self.baseline, self.score)]
        shown = self.perturbation.shown(labels)
        per_image = zip(labels, shown, whole.tolist(), blank.tolist(), strict=True)
        return [
            _RegionEstimator(
                self, labels=image_labels, shown=runs, whole=score, blank=score_of_blank
            )
            for image_labels, runs, score, score_of_blank in per_image
        ]


@dataclass(frozen=True)
class CoveredRegions(RegionMethod):
    """The options of methods that cover random sets of regions, without those for an early end."""

    samples: int = 500
    regions: Regions = Squares()
    baseline: Baseline = Zero()
    score: Score = "logit"

    style = "signed"


@dataclass(frozen=True)
class SampledRegions(CoveredRegions):
    """The options of methods that cover random sets of regions."""

    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None


@dataclass(eq=False)
class _RegionEstimator(Estimator):
    """Estimates the values of one image's regions, and lays them out as a map. ``labels`` ``(H,
    W)`` has each pixel's region; ``shown`` ``(P, M)`` the regions that each run sees."""

    method: RegionMethod
    labels: torch.Tensor
    shown: torch.Tensor
    # the scores of the image, and of a fully covered one
    whole: float
    blank: float

    def __post_init__(self) -> None:
        """Derive how many runs there are, and how many of these belong together; no score has been
        taken yet.
        """
        self.count = len(self.shown)
        self.unit = self.method.design.unit(self.shown.shape[1])
        self.scores = self.labels.new_zeros(0, dtype=torch.float64)

    def take(self, first: int, scores: torch.Tensor) -> None:
        self.scores = torch.cat([self.scores, scores.double()])

    def estimate(self) -> Estimate:
        """Solve for the values of the regions by the scores so far, and lay values and errors out
        as maps.
        """
        shown = self.shown[: len(self.scores)].double()
        solved = self.method.solve(shown, self.scores, self.whole, self.blank)
        error = None if solved.error is None else self._laid_out(solved.error)
        # pictures draw interactions from centre to centre
        centres = None if solved.interactions is None else centres_of(self.labels)
        values = self._laid_out(solved.values)
        return replace(solved, values=values, error=error, centres=centres)

    def _laid_out(self, values: torch.Tensor) -> torch.Tensor:
        """Give each pixel the value of its region: ``(M,)`` to ``(H, W)``; for methods with
        ``coarse`` maps, each cell of the grid, ``(cells, cells)``."""
        regions = self.method.regions
        if self.method.coarse and isinstance(regions, Squares):
            return values.reshape(regions.cells(tuple(self.labels.shape)))
        return values[self.labels]


def centres_of(labels: torch.Tensor) -> torch.Tensor:
    """Return the centre of each region ``(M, 2)``, in parts of the image's height and width, from
    the region of each pixel ``(H, W)``."""
    sides = labels.new_tensor(labels.shape)
    pixels = (torch.ones_like(labels).nonzero() + 0.5) / sides
    numbers = labels.flatten()
    sums = pixels.new_zeros(int(numbers.max()) + 1, labels.ndim).index_add_(0, numbers, pixels)
    return sums / numbers.bincount()[:, None]
