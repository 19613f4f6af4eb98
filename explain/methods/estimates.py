"""Maps that are read off altered photos as their scores come: how far they are, how sure, and when to stop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from explain._utils.errors import MethodError, shown
from explain.engine import Accumulator, Attributions, Evidence, Need, Reducer
from explain.methods.base import ALTERED, Method, Outcome, options, relative_error
from explain.methods.masks import Order, baseline_of
from explain.methods.regions import regions_of

TOGETHER = 16  # scores that are looked at together, if no method has a reason for more
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
    """The map of one image by now, its standard error where there is one yet, and how well a surrogate fits.

    ``neutral`` is the value of a place that makes no difference, where it is not zero.
    """

    values: torch.Tensor
    error: torch.Tensor | None = None
    r2: float | None = None
    neutral: float | None = None


class Estimating(Protocol):
    """Takes the scores of each image in the order of its masks.

    ``unit`` scores mean something together only, such as a mask and its opposite.
    """

    counts: list[int]
    unit: int

    def take(self, image: int, first: int, scores: torch.Tensor) -> None:
        """Take the scores of masks from the ``first`` on."""
        ...

    def guess(self, image: int) -> Guess: ...


class Estimator(Protocol):
    """A way to read a map off scores, as a frozen value."""

    def begin(self, evidence: Evidence) -> Estimating: ...


@dataclass(frozen=True)
class Estimate:
    """Maps ``(N, ...)`` with their standard errors, and how they came about."""

    values: torch.Tensor
    error: torch.Tensor | None
    samples: torch.Tensor
    finished: torch.Tensor
    planned: torch.Tensor
    r2: torch.Tensor | None = None
    neutral: torch.Tensor | None = None


@dataclass(frozen=True)
class Gradually(Reducer):
    """Reads a map off scores as they come, and stops early.

    It does so when there is an error, and the largest is at most ``tolerance`` times the largest magnitude, or when
    ``max_seconds`` are over. Scores are looked at in rounds of a fixed number, so that it stops at the same one
    whatever the batch size; as they become more, an eighth has to be new, for the looking not to take longer than the
    runs.
    """

    estimator: Estimator
    tolerance: float | None = None
    max_seconds: float | None = None

    def begin(self, evidence: Evidence) -> Accumulator:
        return _Gradually(self, self.estimator.begin(evidence), evidence)


@dataclass
class _OfImage:
    count: int
    waiting: list[torch.Tensor] = field(default_factory=list)
    taken: int = 0
    done: bool = False
    next_look: int = 0
    shown: tuple[int, torch.Tensor] | None = None
    """At how many scores a map was last shown, and the map."""

    @property
    def ready(self) -> int:
        return sum(map(len, self.waiting))


class _Gradually(Accumulator):
    def __init__(self, how: Gradually, estimating: Estimating, evidence: Evidence) -> None:
        self._how, self._with, self._device = how, estimating, evidence.inputs.device
        self._order = Order.of(estimating.counts, self._device)
        self._images = [_OfImage(count, done=count == 0) for count in estimating.counts]
        unit = estimating.unit
        self._round = unit * max(1, -(-TOGETHER // unit))
        self._end = None if how.max_seconds is None else time.monotonic() + how.max_seconds

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        for image in dict.fromkeys(images.tolist()):
            mine = self._images[image]
            if not mine.done:
                mine.waiting.append(values[images == image])
                self._look(image, mine)

    def _look(self, image: int, mine: _OfImage) -> None:
        """Take full rounds, and what is left at the end; see whether that is enough."""
        while not mine.done and (mine.ready >= self._round or (mine.ready and mine.taken + mine.ready >= mine.count)):
            self._take(image, mine, min(self._round, mine.ready))
            if mine.taken >= mine.count:
                mine.done = True
            elif self._how.tolerance is not None and mine.taken >= mine.next_look:
                guess, mine.next_look = self._with.guess(image), mine.taken + mine.taken // NEW
                if guess.error is not None:
                    reached = relative_error(guess.values[None], guess.error[None])
                    mine.done = bool(reached <= self._how.tolerance)

    def _take(self, image: int, mine: _OfImage, count: int) -> None:
        scores = torch.cat(mine.waiting)
        self._with.take(image, mine.taken, scores[:count])
        mine.waiting, mine.taken = [scores[count:]], mine.taken + count

    def done(self) -> torch.Tensor:
        return torch.tensor([each.done for each in self._images], device=self._device)

    def enough(self) -> bool:
        return all(each.done for each in self._images) or (self._is_over() and self._has_something())

    def _is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def _has_something(self) -> bool:
        return all(each.done or each.taken + each.ready >= self._with.unit for each in self._images)

    def so_far(self) -> torch.Tensor | None:
        guesses = [self._shown(i, each) if each.taken else None for i, each in enumerate(self._images)]
        some = next((guess for guess in guesses if guess is not None), None)
        if some is None:
            return None
        return torch.stack([torch.zeros_like(some) if guess is None else guess for guess in guesses])

    def _shown(self, image: int, mine: _OfImage) -> torch.Tensor:
        """The map of an image by now, or the last one that was shown if there is little new."""
        if mine.shown is None or mine.done or mine.taken > mine.shown[0] + mine.shown[0] // NEW:
            mine.shown = mine.taken, self._with.guess(image).values
        return mine.shown[1]

    def result(self) -> Estimate:
        return self._result(finished=True)

    def partial(self) -> Estimate | None:
        return self._result(finished=self.enough()) if self._has_something() else None

    def _result(self, *, finished: bool) -> Estimate:
        complete = [each.done for each in self._images]
        for image, mine in enumerate(self._images):
            whole = mine.ready // self._with.unit * self._with.unit
            if not mine.done and whole:
                self._take(image, mine, whole)
        guesses = [self._with.guess(image) for image in range(len(self._images))]
        r2 = [guess.r2 for guess in guesses if guess.r2 is not None]
        neutral = [guess.neutral for guess in guesses if guess.neutral is not None]
        return Estimate(
            values=torch.stack([guess.values for guess in guesses]),
            error=_errors(guesses),
            samples=torch.tensor([each.taken for each in self._images], device=self._device),
            finished=torch.tensor([finished or each for each in complete], device=self._device),
            planned=torch.tensor([each.count for each in self._images], device=self._device),
            r2=torch.tensor(r2, dtype=torch.float64, device=self._device) if len(r2) == len(guesses) else None,
            neutral=torch.tensor(neutral, dtype=torch.float64, device=self._device) if neutral else None,
        )


def _errors(guesses: list[Guess]) -> torch.Tensor | None:
    """The errors of all images, NaN for those that have none yet; None if no image has one."""
    if all(guess.error is None for guess in guesses):
        return None
    return torch.stack(
        [torch.full_like(each.values, torch.nan) if each.error is None else each.error for each in guesses]
    )


class PerturbationMethod(Method):
    """What methods share that run the model on altered photos: options ``baseline``, ``regions`` and budgets."""

    family: ClassVar[str] = ALTERED

    def __post_init__(self) -> None:
        given = {name: value for name, value in options(self).items() if value is not None}
        for option, read in (("baseline", baseline_of), ("regions", regions_of)):
            if option in given:
                object.__setattr__(self, option, read(self.name, given[option]))
        super().__post_init__()
        for option in ("tolerance", "max_seconds"):
            if option in given and (value := getattr(self, option)) <= 0:
                raise MethodError(f"{option} of {self.name} must be a number above 0, got {shown(value)}; leave it out")


class FromScores(PerturbationMethod):
    """What methods share whose map is read off the scores of altered photos."""

    @property
    def found(self) -> Attributions:
        """The estimate that is asked for."""
        raise NotImplementedError

    @property
    def beside(self) -> frozenset[Need[Any]]:
        """What is asked for to compare with."""
        return frozenset()

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.found}) | self.beside

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return self._estimate(evidence).values

    def outcome(self, evidence: Evidence) -> Outcome:
        found = self._estimate(evidence)
        return Outcome(found.error, found.samples, found.finished, found.r2, found.planned, found.neutral)

    def _estimate(self, evidence: Evidence) -> Estimate:
        found: Estimate = evidence[self.found]
        return found
