"""Regions switched off together: which, in what order, and how a value for each region is read off the scores."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from explain.baselines.base import Baseline
from explain.engine import Attributions, Evidence, Need
from explain.methods.estimates import Estimating, FromScores, Gradually, Guess
from explain.methods.masks import MaskedInputs, Score, ScoreOf, blank_score, whole_score
from explain.methods.regions import Regions, Squares


class CoalitionDesign(Hashable, Protocol):
    """Which of some regions are seen in each run, as a frozen value."""

    def rows(self, regions: int) -> torch.Tensor:
        """For each run and region ``(P, M)`` how much of it is seen: truth values, or numbers in [0, 1]."""
        ...

    def unit(self, regions: int) -> int:
        """How many runs mean something together only."""
        ...

    def most(self, regions: int) -> int:
        """How many runs there are at most."""
        ...


@dataclass(frozen=True)
class Solution:
    """A value for each region ``(M,)``, its standard error, and how well a surrogate fits."""

    values: torch.Tensor
    error: torch.Tensor | None = None
    r2: float | None = None


class Solver(Hashable, Protocol):
    """How values for regions are read off scores, as a frozen value.

    ``compares`` says whether it looks at the score of a photo of which nothing is left.
    """

    @property
    def compares(self) -> bool: ...

    def __call__(self, seen: torch.Tensor, scores: torch.Tensor, whole: float, blank: float) -> Solution:
        """From which regions were seen ``(n, M)``, the scores ``(n,)``, and those of the photo and of a blank one."""
        ...


@dataclass(frozen=True)
class Coalitions:
    """Masks that show some regions and cover the others."""

    regions: Regions
    design: CoalitionDesign

    needs: ClassVar[frozenset[Need[object]]] = frozenset()

    def __str__(self) -> str:
        return f"regions, {self.regions}"

    def most(self, size: tuple[int, ...]) -> int:
        return self.design.most(self.regions.most(size))

    def drawn(self, evidence: Evidence) -> DrawnCoalitions:
        return DrawnCoalitions(self, evidence)


class DrawnCoalitions:
    """Masks for the photos of a question that show some regions of each."""

    def __init__(self, of: Coalitions, evidence: Evidence) -> None:
        self.labels = of.regions(evidence.inputs)
        self.regions = [int(labels.max()) + 1 for labels in self.labels]
        known = {count: of.design.rows(count).to(evidence.inputs.device) for count in dict.fromkeys(self.regions)}
        self.rows = [known[count] for count in self.regions]
        self.counts = [len(rows) for rows in self.rows]
        self.unit = max((of.design.unit(count) for count in self.regions), default=1)
        self._like, self._places = evidence.inputs, [labels.flatten() for labels in self.labels]

    def keep(self, images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        found = [
            self.rows[image][number].to(self._like).index_select(0, self._places[image])
            for image, number in zip(images.tolist(), numbers.tolist(), strict=True)
        ]
        return torch.stack(found).reshape(-1, 1, *self._like.shape[2:])


@dataclass(frozen=True)
class OfRegions:
    """Reads a value for each region off the scores, and gives it to each of the region's pixels.

    With ``coarse``, the regions are a grid of cells, and the map has a value for each.
    """

    masks: Coalitions
    solver: Solver
    baseline: Baseline
    score: Score
    coarse: bool = False

    def begin(self, evidence: Evidence) -> Estimating:
        return _OfRegions(self, evidence)


class _OfRegions:
    def __init__(self, how: OfRegions, evidence: Evidence) -> None:
        self._how, self._drawn, self._like = how, how.masks.drawn(evidence), evidence.inputs
        self.counts, self.unit = self._drawn.counts, self._drawn.unit
        whole = evidence[whole_score(how.score)]
        blank = evidence[blank_score(how.baseline, how.score)] if how.solver.compares else torch.zeros_like(whole)
        self._ends = list(zip(whole.double().tolist(), blank.double().tolist(), strict=True))
        self._scores: list[list[torch.Tensor]] = [[] for _ in self.counts]
        self._known: dict[int, tuple[int, Guess]] = {}

    def take(self, image: int, first: int, scores: torch.Tensor) -> None:
        self._scores[image].append(scores.double())

    def guess(self, image: int) -> Guess:
        taken = sum(map(len, self._scores[image]))
        if image not in self._known or self._known[image][0] != taken:
            self._known[image] = taken, self._solved(image, taken)
        return self._known[image][1]

    def _solved(self, image: int, taken: int) -> Guess:
        seen = self._drawn.rows[image][:taken].double()
        scores = torch.cat([seen.new_zeros(0), *self._scores[image]])
        solved = self._how.solver(seen, scores, *self._ends[image])
        error = None if solved.error is None else self._laid_out(solved.error, image)
        return Guess(self._laid_out(solved.values, image), error, solved.r2)

    def _laid_out(self, values: torch.Tensor, image: int) -> torch.Tensor:
        values = values.to(self._like)
        regions = self._how.masks.regions
        if self._how.coarse and isinstance(regions, Squares):
            return values.reshape(regions.cells(tuple(self._like.shape[2:])))
        return values[self._drawn.labels[image]]


class FromRegions(FromScores):
    """What methods share that switch regions off. They have the fields ``regions``, ``baseline`` and ``score``."""

    regions: Regions
    baseline: Baseline
    score: Score
    coarse: ClassVar[bool] = False

    @property
    def design(self) -> CoalitionDesign:
        raise NotImplementedError

    @property
    def solver(self) -> Solver:
        raise NotImplementedError

    @property
    def found(self) -> Attributions:
        masks = Coalitions(self.regions, self.design)
        estimator = OfRegions(masks, self.solver, self.baseline, self.score, self.coarse)
        fold = Gradually(estimator, getattr(self, "tolerance", None), getattr(self, "max_seconds", None))
        return Attributions(MaskedInputs(masks, self.baseline), ScoreOf(self.score), fold)

    @property
    def beside(self) -> frozenset[Need[object]]:
        blank = {blank_score(self.baseline, self.score)} if self.solver.compares else set()
        return frozenset({whole_score(self.score), *blank})
