"""Maps that are estimated from the scores of perturbed photos as they come: standard errors, and when to stop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from explain._utils.errors import MethodError, shown
from explain.engine import Accumulator, Attributions, Evidence, Need, Perturbation, Reducer
from explain.engine.perturbations import Attributor
from explain.methods.base import ALTERED, Method, Outcome, relative_error
from explain.methods.masks import Score, ScoreOf, whole_score

TOGETHER = 16  # scores in a round, if no method has a reason for more
NEW = 8  # a map is worked out again when the scores have become more by one in so many
NORMAL = 1.959963984540  # standard errors to each side within which a normal mean lies in 95 of 100 cases
STUDENT = (
    12.706204736175,
    4.302652729749,
    3.182446305284,
    2.776445105198,
)  # the same where the error is known with 1 to 4 degrees of freedom


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

    method: EstimateMethod

    def begin(self, evidence: Evidence) -> Accumulator:
        return _Gradually(self.method, evidence)


@dataclass
class _OfImage:
    """The scores of one image: how many there will be, those not yet taken, and how many were."""

    count: int
    waiting: list[torch.Tensor] = field(default_factory=list)
    taken: int = 0
    done: bool = False
    next_check: int = 0
    shown: tuple[int, torch.Tensor] | None = None
    """At how many scores a map was last shown, and the map."""

    @property
    def ready(self) -> int:
        return sum(map(len, self.waiting))


class _Gradually(Accumulator):
    def __init__(self, method: EstimateMethod, evidence: Evidence) -> None:
        self._estimator, self._device = method.estimator(evidence), evidence.inputs.device
        self._images = [_OfImage(count, done=count == 0) for count in self._estimator.counts]
        self._unit = self._estimator.unit
        self._round = self._unit * max(1, -(-TOGETHER // self._unit))
        self._tolerance: float | None = getattr(method, "tolerance", None)
        seconds: float | None = getattr(method, "max_seconds", None)
        self._end = float("inf") if seconds is None else time.monotonic() + seconds

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        for image in dict.fromkeys(images.tolist()):
            mine = self._images[image]
            if not mine.done:
                mine.waiting.append(values[images == image])
                self._take_rounds(image, mine)

    def _take_rounds(self, image: int, mine: _OfImage) -> None:
        """Take full rounds, and the rest at the end; check whether that is enough."""
        while not mine.done and (mine.ready >= self._round or (mine.ready and mine.taken + mine.ready >= mine.count)):
            self._take(image, mine, min(self._round, mine.ready))
            if mine.taken >= mine.count:
                mine.done = True
            elif self._tolerance is not None and mine.taken >= mine.next_check:
                guess, mine.next_check = self._estimator.guess(image), mine.taken + mine.taken // NEW
                if guess.error is not None:
                    mine.done = bool(relative_error(guess.values[None], guess.error[None]) <= self._tolerance)

    def _take(self, image: int, mine: _OfImage, count: int) -> None:
        scores = torch.cat(mine.waiting)
        self._estimator.take(image, mine.taken, scores[:count])
        mine.waiting, mine.taken = [scores[count:]], mine.taken + count

    def done(self) -> torch.Tensor:
        return torch.tensor([each.done for each in self._images], device=self._device)

    def enough(self) -> bool:
        return all(each.done for each in self._images) or (time.monotonic() >= self._end and self._has_something())

    def _has_something(self) -> bool:
        return all(each.done or each.taken + each.ready >= self._unit for each in self._images)

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
            units = mine.ready // self._unit * self._unit
            if not mine.done and units:
                self._take(image, mine, units)
        guesses = [self._estimator.guess(image) for image in range(len(self._images))]
        return torch.stack([guess.values for guess in guesses]), Outcome(
            error=_errors(guesses),
            samples=torch.tensor([each.taken for each in self._images], device=self._device),
            finished=torch.tensor(complete, device=self._device),
            r2=self._of_all([guess.r2 for guess in guesses]),
            planned=torch.tensor([each.count for each in self._images], device=self._device),
            neutral=self._of_all([guess.neutral for guess in guesses]),
        )

    def _of_all(self, figures: list[float | None]) -> torch.Tensor | None:
        known = [figure for figure in figures if figure is not None]
        complete = len(known) == len(figures) > 0
        return torch.tensor(known, dtype=torch.float64, device=self._device) if complete else None


def _errors(guesses: list[Guess]) -> torch.Tensor | None:
    """The errors of all images, NaN for those that have none yet; None if no image has one."""
    if all(guess.error is None for guess in guesses):
        return None
    return torch.stack(
        [torch.full_like(each.values, torch.nan) if each.error is None else each.error for each in guesses]
    )


class PerturbationMethod(Method):
    """A method that runs the model on perturbed photos; its budget is checked."""

    family = ALTERED

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("tolerance", "max_seconds"):
            value = getattr(self, option, None)
            if value is not None and value <= 0:
                raise MethodError(f"{option} of {self.name} must be a number above 0, got {shown(value)}; leave it out")


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
    def read(self) -> Attributor:
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
        values: torch.Tensor = evidence[self._estimate][0]
        return values

    def outcome(self, evidence: Evidence) -> Outcome:
        outcome: Outcome = evidence[self._estimate][1]
        return outcome
