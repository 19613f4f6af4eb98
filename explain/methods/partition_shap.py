"""Owen values along a hierarchy of cells: fine where it matters, for few runs."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Attributions, Evidence, Need
from explain.engine.perturbations import InOrder, PerturbationRuns
from explain.engine.reruns import PerturbationRunner
from explain.methods.base import Outcome
from explain.methods.bibliography import cited
from explain.methods.estimates import PerturbationMethod
from explain.methods.masks import DrawnMasks, MaskedInputs, Masks, Score, ScoreOf, blank_score, box_mask, whole_score
from explain.methods.regions import Cell
from explain.methods.registry import register

TOGETHER = 8  # cells that are cut in one go, so that their runs share full pieces


@dataclass(frozen=True)
class Cells(Masks):
    """Masks that show some cells, for one image; others of the batch have none."""

    image: int
    shown: tuple[tuple[Cell, ...], ...]

    def __str__(self) -> str:
        return "cells of a hierarchy"

    def most(self, size: tuple[int, ...]) -> int:
        return len(self.shown)

    def drawn(self, evidence: Evidence) -> DrawnMasks:
        def keep(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return torch.stack([box_mask(self.shown[number], evidence.inputs) for number in numbers.tolist()])

        count = len(evidence.inputs)
        return DrawnMasks([len(self.shown) if image == self.image else 0 for image in range(count)], keep)


@dataclass(frozen=True)
class Part:
    """A cell, what else is seen while it is valued, and the scores without and with it.

    ``share`` is the part that this setting has in the cell's value.
    """

    cell: Cell
    seen: tuple[Cell, ...]
    without: float
    within: float
    share: float = 1.0

    @property
    def value(self) -> float:
        return self.share * (self.within - self.without)


def cut(cell: Cell) -> tuple[Cell, Cell] | None:
    """Cut a cell in two across its longest side, of equal ones the first, as shap does; None for a single pixel.

    >>> cut(((0, 4), (0, 4)))
    (((0, 2), (0, 4)), ((2, 4), (0, 4)))
    >>> cut(((0, 2), (0, 5)))
    (((0, 2), (0, 2)), ((0, 2), (2, 5)))
    """
    sides = [end - start for start, end in cell]
    longest = max(range(len(sides)), key=lambda dim: sides[dim])  # the first of equal ones
    if sides[longest] < 2:
        return None
    start, end = cell[longest]
    middle = (start + end) // 2
    first, second = ((*cell[:longest], ends, *cell[longest + 1 :]) for ends in ((start, middle), (middle, end)))
    return first, second


@register
@dataclass(frozen=True)
class PartitionSHAP(PerturbationMethod):
    r"""Owen values along a hierarchy of cells, each cut in two across its longest side, down to pixels.

    A square is cut into an upper and a lower half first, as in shap; the values depend on it.

    What a cell adds is shared out between its halves as Shapley would with two players: the mean of what each half adds
    without and with the other. Each half is thus valued in two settings, and cut further in each of them where it adds
    most, so that runs are spent where they matter; a cell that is not cut any more spreads its value evenly over its
    pixels. With runs enough for all pixels, these are the Owen values. Nothing is drawn at random, and there is no
    standard error.

    Args:
        samples: how many covered photos, at most.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.
        seconds: stop after so many seconds, which the images share; each target has as many.

    Returns:
        ``(N, H, W)`` in units of the score; the values of all pixels add up to :math:`y(x) - y(\text{baseline})`.

    Owen, "Values of Games with a Priori Unions", 1977; the hierarchy on photos as in Lundberg's shap package.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2, bias=False)).double()
    >>> x = torch.rand(1, 3, 2, 2, dtype=torch.float64)
    >>> a = explain.attribute(model, x, PartitionSHAP(), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1))
    True
    """

    samples: int = 500
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"
    max_seconds: float | None = None

    name = "partitionshap"
    about = "Owen values along a hierarchy of cells, fine where it matters"
    source = cited("owen1977values")
    minimums: ClassVar[Mapping[str, float]] = {"samples": 2}
    style = "signed"

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({PerturbationRuns(), whole_score(self.score), blank_score(self.baseline, self.score)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.stack([self._grown(evidence, image).laid_out(evidence) for image in range(len(evidence.inputs))])

    def outcome(self, evidence: Evidence) -> Outcome:
        grown = [self._grown(evidence, image) for image in range(len(evidence.inputs))]
        device = evidence.inputs.device
        return Outcome(
            samples=torch.tensor([tree.samples for tree in grown], device=device),
            finished=torch.tensor([tree.finished for tree in grown], device=device),
            planned=torch.tensor([tree.planned for tree in grown], device=device),
        )

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values miss the difference between the scores ``(N,)``."""
        gain: torch.Tensor = evidence[whole_score(self.score)] - evidence[blank_score(self.baseline, self.score)]
        return values.flatten(1).sum(1) - gain

    def _grown(self, evidence: Evidence, image: int) -> _Tree:
        """The cells of one image; what has been run for it is remembered with the evidence, and not run again."""
        runner = evidence[PerturbationRuns()]
        known = runner.kept.setdefault((self, image), [])
        if not known:
            tree, end = _Tree(self, evidence, image), None
            if self.max_seconds is not None:
                began = runner.kept.setdefault((self, "began"), time.monotonic())
                end = began + self.max_seconds * (image + 1) / len(evidence.inputs)
            tree.grow(evidence, runner, end)
            known.append(tree)
        found: _Tree = known[0]
        return found


class _Tree:
    """The cells of one image, cut further and further."""

    def __init__(self, how: PartitionSHAP, evidence: Evidence, image: int) -> None:
        self._how, self._image = how, image
        whole = float(evidence[whole_score(how.score)][image])
        blank = float(evidence[blank_score(how.baseline, how.score)][image])
        cell = tuple((0, side) for side in evidence.size)
        self._asked = dict[tuple[Cell, ...], float]()
        self._known: dict[tuple[Cell, ...], float] | None = None
        self.samples, self.finished = 0, True
        first = Part(cell, (), blank, whole)
        self._parts: list[tuple[float, int, Part]] = [(-abs(first.value), 0, first)]
        self._leaves: list[Part] = []
        self._number = 1

    @property
    def planned(self) -> int:
        """How many runs there would be without an early end: fewer than are allowed where no cell is left to cut."""
        return self._how.samples if self._parts and self._how.samples - self.samples >= 2 else self.samples

    def grow(self, evidence: Evidence, runner: PerturbationRunner, end: float | None) -> None:
        """Cut cells, those of the largest values first, until the runs are spent, or it is that time."""
        before = list(self._parts), list(self._leaves)
        try:
            while not runner.ended and self._parts and (end is None or time.monotonic() < end):
                chosen = self._next()
                if not chosen:
                    return
                self._cut(chosen, runner)
                before = list(self._parts), list(self._leaves)
                self._tell(evidence, runner)
        except KeyboardInterrupt as error:
            self._parts, self._leaves = before  # it may have come while cells were cut
            runner.end(error, partial=self.samples > 0)
        self.finished = not runner.ended

    def _tell(self, evidence: Evidence, runner: PerturbationRunner) -> None:
        """Tell how far it is, and show the maps so far."""

        def maps() -> dict[str, torch.Tensor]:
            found = evidence.inputs.new_zeros(len(evidence.inputs), *evidence.size)
            for image, mine in enumerate(found):
                tree = self if image == self._image else next(iter(runner.kept.get((self._how, image), ())), None)
                if tree is not None:
                    mine.copy_(tree.laid_out(evidence))
            return {self._how.name: found}

        most = self._how.samples
        runner.tell(self._image * most + self.samples, len(evidence.inputs) * most, maps)

    def _next(self) -> list[tuple[Part, tuple[Cell, Cell]]]:
        """The cells to cut now, as far as runs are left for them; few at first, when little is known."""
        chosen: list[tuple[Part, tuple[Cell, Cell]]] = []
        left = self._how.samples - self.samples
        while self._parts and len(chosen) < min(TOGETHER, 1 + self.samples // 8) and left >= 2 * len(chosen) + 2:
            part = heapq.heappop(self._parts)[2]
            halves = cut(part.cell)
            if halves is None:
                self._leaves.append(part)
            else:
                chosen.append((part, halves))
        return chosen

    def _cut(self, chosen: list[tuple[Part, tuple[Cell, Cell]]], runner: PerturbationRunner) -> None:
        wanted = [(*part.seen, half) for part, halves in chosen for half in halves]
        scores = iter(self._scores(wanted, runner))
        for part, (one, other) in chosen:
            with_one, with_other, half = next(scores), next(scores), part.share / 2
            self._add(Part(one, part.seen, part.without, with_one, half))
            self._add(Part(one, (*part.seen, other), with_other, part.within, half))
            self._add(Part(other, part.seen, part.without, with_other, half))
            self._add(Part(other, (*part.seen, one), with_one, part.within, half))

    def _add(self, part: Part) -> None:
        heapq.heappush(self._parts, (-abs(part.value), self._number, part))
        self._number += 1

    def _scores(self, wanted: list[tuple[Cell, ...]], runner: PerturbationRunner) -> list[float]:
        """The scores of photos that show these cells only; each is run once."""
        if self._known is None:
            self._known = dict(self._run_for_others(runner))
        asked = [cells for cells in dict.fromkeys(wanted) if cells not in self._asked]
        new = tuple(cells for cells in asked if cells not in self._known)
        if new:
            covered = MaskedInputs(Cells(self._image, new), self._how.baseline)
            found = runner.read_for_all(covered, ScoreOf(self._how.score), InOrder())
            self._known.update(zip(new, found.double().tolist(), strict=True))
        self._asked.update((cells, self._known[cells]) for cells in asked)
        self.samples += len(asked)  # as many as it would have taken alone
        return [self._asked[cells] for cells in wanted]

    def _run_for_others(self, runner: PerturbationRunner) -> Iterator[tuple[tuple[Cell, ...], float]]:
        """What photos that were run for other targets of the call score for this one."""
        for need, found in runner.remembered():
            of = need.of if isinstance(need, Attributions) else None
            if not isinstance(of, MaskedInputs) or not isinstance(of.masks, Cells) or of.masks.image != self._image:
                continue
            if of.baseline == self._how.baseline and need == Attributions(of, ScoreOf(self._how.score), InOrder()):
                yield from zip(of.masks.shown, found.double().tolist(), strict=True)

    def laid_out(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(H, W)``: each cell's value, spread evenly over its pixels."""
        found = evidence.inputs.new_zeros(evidence.size)
        for part in (*self._leaves, *(part for _, _, part in self._parts)):
            where = tuple(slice(*ends) for ends in part.cell)
            found[where] += part.value / found[where].numel()
        return found
