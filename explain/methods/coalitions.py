"""Regions that are covered together: which, in what order, and one value for each region from the scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from explain.baselines.base import Baseline
from explain.engine import Evidence, Need, Perturbation
from explain.methods.estimates import EstimateMethod, Estimator, Guess
from explain.methods.masks import DrawnMasks, MaskedInputs, Masks, blank_score, whole_score
from explain.methods.regions import Regions, Squares


class CoalitionDesign(ABC):
    """Which of some regions are seen in each run. Subclasses are frozen dataclasses."""

    @abstractmethod
    def rows(self, regions: int) -> torch.Tensor:
        """For each run and region ``(P, M)`` how much of it is seen: truth values, or numbers in [0, 1]."""

    @abstractmethod
    def most(self, regions: int) -> int:
        """How many runs there are at most."""

    def unit(self, regions: int) -> int:
        """How many runs mean something only together."""
        return 1


@dataclass(frozen=True)
class Coalitions(Masks):
    """Masks that show some regions and cover the others."""

    regions: Regions
    design: CoalitionDesign

    def __str__(self) -> str:
        return f"regions, {self.regions}"

    def most(self, size: tuple[int, ...]) -> int:
        return self.design.most(self.regions.most(size))

    def runs(self, labels: torch.Tensor) -> list[torch.Tensor]:
        """For each image, given the number of each pixel's region, which regions are seen in each run ``(P, M)``."""
        counts = [int(of_image.max()) + 1 for of_image in labels]
        designs = {count: self.design.rows(count).to(labels.device) for count in dict.fromkeys(counts)}
        return [designs[count] for count in counts]

    def drawn(self, evidence: Evidence) -> DrawnMasks:
        x = evidence.inputs
        labels = self.regions(x)
        runs, places = self.runs(labels), labels.flatten(1)

        def keep(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            pairs = zip(images.tolist(), numbers.tolist(), strict=True)
            masks = [runs[image][number].to(x).index_select(0, places[image]) for image, number in pairs]
            return torch.stack(masks).reshape(-1, 1, *x.shape[2:])

        return DrawnMasks([len(each) for each in runs], keep)


class RegionMethod(EstimateMethod):
    """A method that covers regions and estimates a value for each. It has the fields ``regions`` and ``baseline``."""

    regions: Regions
    baseline: Baseline
    needs_blank = True
    """Whether it compares with the score of a fully covered photo."""
    coarse = False
    """Whether the map has a value for each cell of a grid, and not for each pixel."""

    @property
    def design(self) -> CoalitionDesign:
        raise NotImplementedError

    def solve(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Guess:
        """A value for each region ``(M,)``.

        Args:
            seen: which regions were seen in each run ``(n, M)``.
            scores: of the runs ``(n,)``.
            whole, blank: the scores of the photo and of a fully covered one.
        """
        raise NotImplementedError

    @property
    def coalitions(self) -> Coalitions:
        return Coalitions(self.regions, self.design)

    @property
    def perturbation(self) -> Perturbation:
        return MaskedInputs(self.coalitions, self.baseline)

    @property
    def references(self) -> frozenset[Need[Any]]:
        blank = {blank_score(self.baseline, self.score)} if self.needs_blank else set()
        return frozenset({whole_score(self.score), *blank})

    def estimator(self, evidence: Evidence) -> Estimator:
        return _RegionEstimator(self, evidence)


class _RegionEstimator(Estimator):
    def __init__(self, method: RegionMethod, evidence: Evidence) -> None:
        self._method, self._like = method, evidence.inputs
        self._labels = method.regions(evidence.inputs)
        self._runs = method.coalitions.runs(self._labels)
        self.counts = [len(runs) for runs in self._runs]
        self.unit = max((method.design.unit(runs.shape[1]) for runs in self._runs), default=1)
        whole = evidence[whole_score(method.score)]
        blank = evidence[blank_score(method.baseline, method.score)] if method.needs_blank else torch.zeros_like(whole)
        self._ends = list(zip(whole.double().tolist(), blank.double().tolist(), strict=True))
        self._scores = [evidence.inputs.new_zeros(0, dtype=torch.float64) for _ in self.counts]
        self._guesses: dict[int, Guess] = {}

    def take(self, image: int, first: int, scores: torch.Tensor) -> None:
        self._scores[image] = torch.cat([self._scores[image], scores.double()])
        self._guesses.pop(image, None)

    def guess(self, image: int) -> Guess:
        if image not in self._guesses:
            seen = self._runs[image][: len(self._scores[image])].double()
            solved = self._method.solve(seen, self._scores[image], *self._ends[image])
            error = None if solved.error is None else self._laid_out(solved.error, image)
            self._guesses[image] = replace(solved, values=self._laid_out(solved.values, image), error=error)
        return self._guesses[image]

    def _laid_out(self, values: torch.Tensor, image: int) -> torch.Tensor:
        """The value of its region for each pixel, or for each cell."""
        values, regions = values.to(self._like), self._method.regions
        if self._method.coarse and isinstance(regions, Squares):
            return values.reshape(regions.cells(tuple(self._like.shape[2:])))
        return values[self._labels[image]]
