"""Photos that are partly masked, and maps estimated from their scores as they come: standard errors, when to stop, and
regions that are covered together."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Accumulator, Attributions, Evidence, Need, Perturbation, PerturbedRows, Reducer
from explain.engine.perturbations import OneForEach, PerturbationRuns, ScoreOf, Scores, Unperturbed, interleaved
from explain.methods.base import PERTURBATION, Method, Outcome, relative_error
from explain.methods.regions import Cell, Regions, Squares

T = TypeVar("T")
Score = Literal["logit", "probability"]
"""What is explained: the score as the target picks it, or the probability of its class."""


class DrawnMasks(NamedTuple):
    """Masks for some photos.

    ``counts`` says how many each image has. ``keep(images, numbers)`` gives those with some numbers, of some images:
    ``(b, 1, H, W)`` in [0, 1], 1 where the photo stays as it is.
    """

    counts: list[int]
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Masks(ABC):
    """A plan of masks. Subclasses are frozen dataclasses: equal ones are run once for all methods of a call."""

    words: str = ""
    """What a plan of runs calls them."""

    @abstractmethod
    def most(self, size: tuple[int, ...]) -> int:
        """How many there are at most for a photo of this size; 0 if that is not known."""

    @abstractmethod
    def drawn(self, evidence: Evidence) -> DrawnMasks: ...


@dataclass(frozen=True)
class MaskedInputs(Perturbation):
    """Photos covered by masks."""

    masks: Masks
    baseline: Baseline

    def __str__(self) -> str:
        return f"photos covered by {self.masks.words}; baseline: {self.baseline.name}"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.masks.most(size) if size else 0

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        if not evidence.size:  # no picture to cover
            return PerturbedRows(torch.arange(len(x), device=x.device), lambda rows: x[rows % len(x)])
        drawn = self.masks.drawn(evidence)
        images, numbers = interleaved(drawn.counts, x.device)
        return self._covered(x, images, lambda rows: drawn.keep(images[rows], numbers[rows]).to(x))

    def matching_rows(self, evidence: Evidence, first: PerturbedRows) -> PerturbedRows:
        """Cover the same part of another input: the masks of the first one, brought to its size.

        Raises:
            MethodError: one is a photo, the other a video.
        """
        x, keep = evidence.inputs, first.keep
        if not evidence.size or keep is None:
            return PerturbedRows(first.owners, lambda rows: x[first.owners[rows].to(x.device)])

        def resized(rows: torch.Tensor) -> torch.Tensor:
            masks = keep(rows).to(x)
            if masks.ndim != x.ndim:
                got = f"got {masks.ndim} and {x.ndim} dimensions; leave out words=True, or use integratedgradients"
                raise MethodError(f"explained must name inputs of one kind where parts are covered, {got}")
            return F.interpolate(masks, evidence.size, mode="nearest-exact")

        return self._covered(x, first.owners.to(x.device), resized)

    def _covered(self, x: torch.Tensor, owners: torch.Tensor, keep: Any) -> PerturbedRows:
        cover = self.baseline.covering(x)
        return PerturbedRows(owners, lambda rows: cover(owners[rows], keep(rows)), keep=keep)


@dataclass(frozen=True)
class FullyMasked(OneForEach):
    """Photos of which nothing is left but the baseline: a reference for the scores of others."""

    baseline: Baseline

    is_reference = True

    def __str__(self) -> str:
        return f"photos covered wholly; baseline: {self.baseline.name}"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        x = evidence.inputs
        if not evidence.size:
            return x
        nothing = x.new_zeros(len(x), 1, *x.shape[2:])
        return self.baseline.covering(x)(torch.arange(len(x), device=x.device), nothing)


def box_mask(cells: Sequence[Cell], like: torch.Tensor) -> torch.Tensor:
    """A mask ``(1, H, W)`` for photos such as ``like``: 1 in the cells, 0 elsewhere."""
    mask = like.new_zeros(1, *like.shape[2:])
    for cell in cells:
        mask[0][tuple(slice(*ends) for ends in cell)] = 1
    return mask


def blank_score(baseline: Baseline, score: Score) -> Scores:
    """The need for the score ``(N,)`` of fully masked photos."""
    return Scores(FullyMasked(baseline), ScoreOf(score))


def whole_score(score: Score) -> Scores:
    """The need for the score ``(N,)`` of the photos as they are, in the precision of the perturbed ones."""
    return Scores(Unperturbed(), ScoreOf(score))


TOGETHER = 16  # scores in a round, if no method has a reason for more
NEW = 8  # a map is worked out again when the scores have become more by one in so many
NORMAL = 1.959963984540  # standard errors to each side within which a normal mean lies in 95 of 100 cases
STUDENT = (12.706204736175, 4.302652729749, 3.182446305284, 2.776445105198)
# the same where the error is known with 1 to 4 degrees of freedom


def widened(freedom: int) -> float:
    """By how much a standard error is too small that is known with so few degrees of freedom.

    Errors are multiplied by this, so that the value ± 1.96 errors is a 95 % interval of Student's t, however few scores
    there are by now.

    >>> round(1.96 * widened(2), 2), round(1.96 * widened(9), 2), round(1.96 * widened(1000), 2)
    (4.3, 2.26, 1.96)
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1] / NORMAL
    z, n = NORMAL, freedom  # Abramowitz and Stegun 26.7.5
    terms = (
        (z**2 + 1) / 4 / n,
        (5 * z**4 + 16 * z**2 + 3) / 96 / n**2,
        (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384 / n**3,
        (79 * z**8 + 776 * z**6 + 1482 * z**4 - 1920 * z**2 - 945) / 92160 / n**4,
    )
    return 1 + sum(terms)


def honest(variance: torch.Tensor, freedom: int) -> torch.Tensor:
    """The standard errors of some values, from the variance that a sample gives each, with so many degrees of freedom.

    A small sample may not meet what moves a value seldom, and give it none: a variance is taken to be at least the mean
    over all values.
    """
    return widened(freedom) * variance.clamp(min=variance.mean()).sqrt()


@dataclass(frozen=True)
class Guess:
    """The estimate for one image so far: values, standard errors if there are any yet, and the fit of a surrogate.

    ``neutral`` is the value of a pixel that makes no difference, where it is not zero.
    """

    values: torch.Tensor
    error: torch.Tensor | None = None
    r2: float | None = None
    neutral: float | None = None


class Estimator(ABC):
    """Takes the scores of each image in the order of its rows, and estimates its map.

    ``counts`` says how many rows each image has. ``unit`` scores mean something only together, such as those of a mask
    and its opposite.
    """

    counts: list[int]
    unit: int = 1

    @abstractmethod
    def take(self, image: int, first: int, scores: torch.Tensor) -> None:
        """Take the scores of rows from the ``first`` on."""

    @abstractmethod
    def guess(self, image: int) -> Guess: ...


@dataclass(frozen=True)
class Gradually(Reducer):
    """Estimates the map of a method as the scores come, and stops early.

    It stops when there is an error, and the largest is at most ``tolerance`` times the largest magnitude, or after
    ``max_seconds``. Scores are taken in rounds of a fixed number, so that it stops at the same one whatever the batch
    size. The estimate is repeated when an eighth of the scores is new, so that it does not take longer than the runs.
    """

    method: "EstimateMethod"

    def begin(self, evidence: Evidence) -> Accumulator:
        return _Gradually(self.method, evidence)


@dataclass
class _OfImage:
    """The scores of one image: how many there will be, those not yet taken, and how many were."""

    count: int
    waiting: torch.Tensor
    taken: int = 0
    done: bool = False
    next_check: int = 0
    shown: tuple[int, torch.Tensor] | None = None
    """At how many scores a map was last shown, and the map."""


class _Gradually(Accumulator):
    def __init__(self, method: "EstimateMethod", evidence: Evidence) -> None:
        self._estimator, self._device = method.estimator(evidence), evidence.inputs.device
        nothing = evidence.inputs.new_zeros(0)
        self._images = [_OfImage(count, nothing, done=count == 0) for count in self._estimator.counts]
        self._unit = self._estimator.unit
        self._round = self._unit * max(1, -(-TOGETHER // self._unit))
        self._tolerance: float | None = getattr(method, "tolerance", None)
        seconds: float | None = getattr(method, "max_seconds", None)
        self._end = float("inf") if seconds is None else time.monotonic() + seconds

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        for image in dict.fromkeys(images.tolist()):
            self._images[image].waiting = torch.cat([self._images[image].waiting, values[images == image]])
            self._take_rounds(image, self._images[image])

    def _take_rounds(self, image: int, mine: _OfImage) -> None:
        """Take full rounds, and the rest at the end; check whether that is enough."""
        while not mine.done and len(mine.waiting) >= min(self._round, max(1, mine.count - mine.taken)):
            self._take(image, mine, min(self._round, len(mine.waiting)))
            if mine.taken >= mine.count:
                mine.done = True
            elif self._tolerance is not None and mine.taken >= mine.next_check:
                guess, mine.next_check = self._estimator.guess(image), mine.taken + mine.taken // NEW
                if guess.error is not None:
                    mine.done = bool(relative_error(guess.values[None], guess.error[None]) <= self._tolerance)

    def _take(self, image: int, mine: _OfImage, count: int) -> None:
        self._estimator.take(image, mine.taken, mine.waiting[:count])
        mine.waiting, mine.taken = mine.waiting[count:], mine.taken + count

    def done(self) -> torch.Tensor:
        return torch.tensor([each.done for each in self._images], device=self._device)

    def enough(self) -> bool:
        return all(each.done for each in self._images) or (time.monotonic() >= self._end and self._has_something())

    def _has_something(self) -> bool:
        return all(each.done or each.taken + len(each.waiting) >= self._unit for each in self._images)

    def so_far(self) -> torch.Tensor | None:
        maps = {i: self._shown(i, each) for i, each in enumerate(self._images) if each.taken}
        if not maps:
            return None
        zero = torch.zeros_like(next(iter(maps.values())))
        return torch.stack([maps.get(image, zero) for image in range(len(self._images))])

    def _shown(self, image: int, mine: _OfImage) -> torch.Tensor:
        """The map of an image so far, or the last one that was shown if few scores are new."""
        if mine.shown is None or mine.done or mine.taken > mine.shown[0] + mine.shown[0] // NEW:
            mine.shown = mine.taken, self._estimator.guess(image).values
        return mine.shown[1]

    def result(self) -> tuple[torch.Tensor, Outcome]:
        return self._result(finished=True)

    def partial(self) -> tuple[torch.Tensor, Outcome] | None:
        return self._result(finished=self.enough()) if self._has_something() else None

    def _result(self, *, finished: bool) -> tuple[torch.Tensor, Outcome]:
        complete = [finished or each.done for each in self._images]
        for image, mine in enumerate(self._images):
            units = len(mine.waiting) // self._unit * self._unit
            if not mine.done and units:
                self._take(image, mine, units)
        guesses = [self._estimator.guess(image) for image in range(len(self._images))]
        errors = [torch.full_like(each.values, torch.nan) if each.error is None else each.error for each in guesses]
        error = None if all(each.error is None for each in guesses) else torch.stack(errors)
        counts = [(each.taken, each.count, end) for each, end in zip(self._images, complete, strict=True)]
        spent, planned, ended = torch.tensor(counts, device=self._device).reshape(-1, 3).unbind(1)
        r2, neutral = (self._of_all([getattr(guess, name) for guess in guesses]) for name in ("r2", "neutral"))
        outcome = Outcome(error=error, spent=spent, planned=planned, finished=ended.bool(), r2=r2, neutral=neutral)
        return torch.stack([guess.values for guess in guesses]), outcome

    def _of_all(self, figures: list[float | None]) -> torch.Tensor | None:
        if not figures or None in figures:
            return None
        return torch.tensor(figures, dtype=torch.float64, device=self._device)


def remembered(method: Method, evidence: Evidence, make: Callable[[], T]) -> T:
    """What a method works out from its own runs; it is made once, and kept with the evidence."""
    kept = evidence[PerturbationRuns()].kept
    if method not in kept:
        kept[method] = make()
    return kept[method]  # type: ignore[no-any-return]


class PerturbationMethod(Method):
    """A method that runs the model on perturbed photos; its budget is checked."""

    family = PERTURBATION

    below = {"tolerance": math.inf, "max_seconds": math.inf}


@dataclass(frozen=True)
class Searched:
    """What a search gave for one image: its map ``(H, W)``, and how many photos were run and how many there would be
    without an early end; ``finished`` is false after an interrupt. ``found`` is what else there is to say."""

    map: torch.Tensor
    samples: int
    planned: int
    finished: bool
    found: Any = None


Report = Callable[[int, Callable[[], torch.Tensor]], None]
"""Reports how many photos were run for an image, and its map so far."""


class SearchMethod(PerturbationMethod):
    """A method that chooses which photos to run next by the scores so far, in one image after the other."""

    samples: int
    max_seconds: float | None

    def search(self, evidence: Evidence, image: int, end: float, report: Report) -> Searched:
        """Search in one image, up to the time ``end`` of ``time.monotonic``."""
        raise NotImplementedError

    def searched(self, evidence: Evidence) -> list[Searched]:
        """The result for each image, which share the time."""
        return remembered(self, evidence, lambda: self._search_all(evidence))

    def _search_all(self, evidence: Evidence) -> list[Searched]:
        runner, count, done = evidence[PerturbationRuns()], len(evidence.inputs), list[Searched]()

        def report(samples: int, so_far: Callable[[], torch.Tensor]) -> None:
            def maps() -> dict[str, torch.Tensor]:
                found = [*(each.map for each in done), so_far()]
                return {self.name: torch.stack(found + [torch.zeros_like(found[0])] * (count - len(found)))}

            runner.report_progress(len(done) * self.samples + samples, count * self.samples, maps)

        began = time.monotonic()
        for image in range(count):
            end = math.inf if self.max_seconds is None else began + self.max_seconds * (image + 1) / count
            done.append(self.search(evidence, image, end, report))
        return done

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.stack([each.map for each in self.searched(evidence)])

    def outcome(self, evidence: Evidence) -> Outcome:
        figures = [(each.samples, each.planned, each.finished) for each in self.searched(evidence)]
        samples, planned, finished = torch.tensor(figures, device=evidence.inputs.device).unbind(1)
        return Outcome(spent=samples, planned=planned, finished=finished.bool())


class EstimateMethod(PerturbationMethod):
    """A method whose map is estimated from the scores of perturbed photos."""

    score: Score

    @property
    def perturbation(self) -> Perturbation:
        """Which photos are run."""
        raise NotImplementedError

    def estimator(self, evidence: Evidence) -> Estimator:
        """A new estimator of the maps."""
        raise NotImplementedError

    @property
    def read(self) -> ScoreOf:
        """What is computed for each perturbed photo: one number."""
        return ScoreOf(self.score)

    @property
    def references(self) -> frozenset[Need[Any]]:
        """The scores that those of the perturbed photos are compared with."""
        return frozenset({whole_score(self.score)})

    @property
    def _estimate(self) -> Attributions:
        return Attributions(self.perturbation, self.read, Gradually(self))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.references | {self._estimate}

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[self._estimate][0]  # type: ignore[no-any-return]

    def outcome(self, evidence: Evidence) -> Outcome:
        return evidence[self._estimate][1]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CoalitionDesign(ABC):
    """Which of some regions are seen in each run: at most so many ``samples``, drawn by a seed."""

    samples: int
    seed: int

    @abstractmethod
    def rows(self, regions: int) -> torch.Tensor:
        """For each run and region ``(P, M)`` how much of it is seen: truth values, or numbers in [0, 1]."""

    def most(self, regions: int) -> int:
        """How many runs there are at most."""
        return self.samples // self.unit(regions) * self.unit(regions)

    def unit(self, regions: int) -> int:
        """How many runs mean something only together."""
        return 1


@dataclass(frozen=True)
class Coalitions(Masks):
    """Masks that show some regions and cover the others."""

    regions: Regions
    design: CoalitionDesign

    @property
    def words(self) -> str:  # type: ignore[override]
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
    designed_by: ClassVar[type[CoalitionDesign]]
    coarse = False
    """Whether the map has a value for each cell of a grid, and not for each pixel."""

    @property
    def design(self) -> CoalitionDesign:
        return self.designed_by(getattr(self, "samples", 0), getattr(self, "seed", 0))

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


@dataclass(frozen=True)
class CoveredRegions(RegionMethod):
    """The first options of methods that cover random sets of regions."""

    samples: int = 500
    regions: Regions = field(default_factory=Squares)
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"

    style = "signed"


@dataclass(frozen=True)
class SampledRegions(CoveredRegions):
    """Options of methods that cover random sets of regions."""

    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None


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
