"""Maps from the scores of perturbed images: what methods that run these share, standard errors, and
when to stop.

- `ScoredSamplesMethod`: makes perturbed images, and a map from all of their scores
- `EstimateMethod`: estimates the map of each image as scores come, with an `Estimator`
- `SearchMethod`: chooses what to run by the scores so far
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from explain.engine import Accumulator, Attributions, Evidence, Need, Perturbation, PerturbedRows
from explain.engine.perturbations import (
    Attributor,
    KeepAll,
    ScoreOf,
    Scores,
    Search,
    Searches,
    Unperturbed,
)
from explain.methods.base import PERTURBATION, Method, Outcome, relative_error
from explain.methods.masking import Score, whole_score

TOGETHER = 16  # scores in a round, if no method has a reason for more
NEW = 8  # a map is worked out again when the scores have become more by one in so many
# standard errors to each side within which a normal mean lies in 95 of 100 cases
NORMAL = 1.959963984540
STUDENT = (12.706204736175, 4.302652729749, 3.182446305284, 2.776445105198)
# the same where the error is known with 1 to 4 degrees of freedom
SERIES = (
    np.array([1, 1]) / 4,
    np.array([5, 16, 3]) / 96,
    np.array([3, 19, 17, -15]) / 384,
    np.array([79, 776, 1482, -1920, -945]) / 92160,
)  # of Student's quantile, in powers of one over the freedom: Abramowitz and Stegun 26.7.5


def student_factor(freedom: int) -> float:
    """Return the factor that widens a standard error with ``freedom`` (from 1) degrees of freedom,
    so that the value ± 1.96 errors is a 95 % interval of Student's t."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1] / NORMAL
    terms = (
        float(np.polyval(coefficients, NORMAL**2)) / freedom**power
        for power, coefficients in enumerate(SERIES, 1)
    )
    return float(1 + sum(terms))


def floored_error(variance: torch.Tensor, freedom: int) -> torch.Tensor:
    """The standard errors ``(M,)`` from sample variances with ``freedom`` degrees of freedom, each
    at least the mean over all: a small sample may miss what moves a value seldom.
    """
    return student_factor(freedom) * variance.clamp(min=variance.mean()).sqrt()


@dataclass(frozen=True)
class Estimate:
    """What one image's scores say so far, with standard errors ``error`` in the shape of ``values``
    (None before any is known). The other fields are as in `Outcome`, for one image."""

    values: torch.Tensor
    error: torch.Tensor | None = None
    r2: float | None = None
    neutral: float | None = None
    interactions: torch.Tensor | None = None
    centres: torch.Tensor | None = None


class Estimator(ABC):
    """Takes the scores of one image's ``count`` perturbed images in order, and estimates its map.
    Scores mean something only ``unit`` at a time, such as 2 for a mask and its opposite."""

    count: int
    unit: int = 1
    decided: bool = False
    """Whether it needs no more scores."""

    @abstractmethod
    def take(self, first: int, scores: torch.Tensor) -> None:
        """Take the scores of perturbed inputs from the ``first`` on, up to `next_look` at most."""

    @property
    def next_look(self) -> int:
        """The number of scores after which it may be ``decided``."""
        return self.count

    @abstractmethod
    def estimate(self) -> Estimate: ...


class _ImageScores:
    """Hands the scores of one image to its estimator, and keeps the estimate. With a tolerance, the
    error is checked at fixed numbers of scores, whatever the batch size."""

    def __init__(self, estimator: Estimator, tolerance: float | None, inputs: torch.Tensor) -> None:
        """``tolerance`` is the relative error at which the runs end early, None for never; the
        ``inputs`` give the type and the device of estimates."""
        self.estimator = estimator
        self.taken = 0
        self.done = estimator.count == 0
        self._tolerance = tolerance
        self._inputs = inputs
        # scores whose unit is not complete
        self._waiting = inputs.new_zeros(0)
        # at least TOGETHER scores, in whole units
        self._round_length = estimator.unit * math.ceil(TOGETHER / estimator.unit)
        # the numbers of scores at the last check of the error, and at the latest estimate
        self._checked = 0
        self._estimated = 0
        self._latest: Estimate | None = None

    @property
    def has_estimate(self) -> bool:
        return self.done or self.taken > 0

    def add(self, scores: torch.Tensor) -> None:
        """Hand the ``scores`` ``(b, ...)`` of the next perturbed inputs to the estimator, up to the
        next check of the error. Those whose unit is not complete wait.
        """
        unit = self.estimator.unit
        self._waiting = torch.cat([self._waiting, scores])
        while not self.done and len(self._waiting) >= unit:
            next_check = self._next_check()
            count = min(len(self._waiting) // unit * unit, next_check - self.taken)
            self.estimator.take(self.taken, self._waiting[:count])
            self._waiting = self._waiting[count:]
            self.taken += count
            if self.taken == next_check:
                is_last = self.taken == self.estimator.count
                self.done = is_last or self.estimator.decided or self._check_error()

    def estimate(self, *, recent: bool = False) -> Estimate:
        """The estimate from the scores taken, in the image's precision. It is kept; with
        ``recent``, an old one will do that lacks the latest eighth of the scores.
        """
        slack = self._estimated // NEW if recent and not self.done else 0
        if self._latest is None or self.taken > self._estimated + slack:
            estimate = self.estimator.estimate()
            error = None if estimate.error is None else estimate.error.to(self._inputs)
            self._latest = replace(estimate, values=estimate.values.to(self._inputs), error=error)
            self._estimated = self.taken
        return self._latest

    def _next_check(self) -> int:
        """The number of scores after which the error is checked next: a whole number of rounds, and
        about an eighth more than at the last check."""
        if self._tolerance is None:
            return self.estimator.next_look
        rounds = max(1, math.ceil(self._checked // NEW / self._round_length))
        return min(self._checked + rounds * self._round_length, self.estimator.count)

    def _check_error(self) -> bool:
        """Whether the relative error of the estimate is within the tolerance; notes the number of
        scores at this check."""
        self._checked = self.taken
        estimate = self.estimate()
        if estimate.error is None or self._tolerance is None:
            return False
        return bool(relative_error(estimate.values[None], estimate.error[None]) <= self._tolerance)


class _Estimating(Accumulator):
    """Estimates the map of each image as the scores come."""

    def __init__(self, method: "EstimateMethod", evidence: Evidence) -> None:
        """Begin with a new estimator for each image of the ``evidence``."""
        x = evidence.inputs
        tolerance: float | None = getattr(method, "tolerance", None)
        self._images = [
            _ImageScores(estimator, tolerance, x) for estimator in method.estimators(evidence)
        ]
        self._device = x.device

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Take the scores ``values`` ``(b, ...)`` of perturbed inputs, which come in order for each
        image.
        """
        for image in dict.fromkeys(images.tolist()):
            self._images[image].add(values[images == image])

    def done(self) -> torch.Tensor:
        return torch.tensor([image.done for image in self._images], device=self._device)

    def enough(self) -> bool:
        return all(image.done for image in self._images)

    def has_result(self) -> bool:
        return all(image.has_estimate for image in self._images)

    def so_far(self) -> torch.Tensor | None:
        """The maps ``(N, ...)`` by now, for progress callbacks: zeros for an image without a score,
        None if no image has one."""
        maps = [
            image.estimate(recent=True).values if image.taken else None for image in self._images
        ]
        first = next((values for values in maps if values is not None), None)
        if first is None:
            return None
        zeros = torch.zeros_like(first)
        return torch.stack([zeros if values is None else values for values in maps])

    def result(self) -> tuple[torch.Tensor, Outcome]:
        return self._collected(finished=True)

    def partial(self) -> tuple[torch.Tensor, Outcome] | None:
        return self._collected(finished=False) if self.has_result() else None

    def _collected(self, *, finished: bool) -> tuple[torch.Tensor, Outcome]:
        """The maps ``(N, ...)`` of all images, and the `Outcome` with errors and runs. ``finished``
        is false after an interrupt, or where time was up."""
        ended = [finished or image.done for image in self._images]
        estimates = [image.estimate() for image in self._images]
        errors = [estimate.error for estimate in estimates]
        unknown = torch.full_like(estimates[0].values, torch.nan)
        errors_or_nan = [unknown if error is None else error for error in errors]
        outcome = Outcome(
            error=None if all(error is None for error in errors) else torch.stack(errors_or_nan),
            spent=self._of_images([image.taken for image in self._images]),
            planned=self._of_images([image.estimator.count for image in self._images]),
            finished=self._of_images(ended),
            r2=self._of_images([estimate.r2 for estimate in estimates]),
            neutral=self._of_images([estimate.neutral for estimate in estimates]),
            interactions=_padded([estimate.interactions for estimate in estimates]),
            centres=_padded([estimate.centres for estimate in estimates]),
        )
        return torch.stack([estimate.values for estimate in estimates]), outcome

    def _of_images(self, figures: Sequence[float | None]) -> Any:
        """One figure of each image as a tensor ``(N,)``; None where the figure of any image is not
        known."""
        if None in figures:
            return None
        dtype = torch.float64 if isinstance(figures[0], float) else None
        return torch.tensor(figures, dtype=dtype, device=self._device)


def _padded(tables: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Tables ``(M, ...)`` of all images as one, with zeros for the regions that some lack; None
    where any image has none."""
    complete = [table for table in tables if table is not None]
    if len(complete) < len(tables):
        return None
    largest_shape = np.max([table.shape for table in complete], axis=0)
    padded = complete[0].new_zeros(len(complete), *largest_shape)
    for table, of_image in zip(complete, padded, strict=True):
        of_image[tuple(map(slice, table.shape))] = table  # in the first rows and columns
    return padded


class PerturbationMethod(Method):
    """A method that runs the model on perturbed images; its budget is checked."""

    family = PERTURBATION

    below = {"tolerance": math.inf, "max_seconds": math.inf}


@dataclass(frozen=True)
class _SamplesOf(Perturbation):
    """The perturbation that makes the inputs of a `ScoredSamplesMethod`."""

    method: "ScoredSamplesMethod"

    @property
    def of_tokens(self) -> bool:  # type: ignore[override]
        return self.method.of_tokens

    @property
    def of_layer(self) -> bool:
        return self.method.alters_layer

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.method.looks_at

    def __str__(self) -> str:
        return self.method.words

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.method.count(channels, size)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        return self.method.perturbed(evidence)


class ScoredSamplesMethod(PerturbationMethod):
    """A perturbation method in one class: `perturbed` makes the inputs, `map` the map from their
    scores. Both need what ``looks_at`` says; ``words`` names the inputs in a plan."""

    score: Score = "logit"
    looks_at: ClassVar[frozenset[Need[Any]]] = frozenset()
    words = "perturbed photos"
    of_tokens: ClassVar[bool] = False
    """Whether they say which tokens of a transformer stay."""
    alters_layer: ClassVar[bool] = False
    """Whether they are feature maps ``(b, C, h, w)`` of the layer that ``looks_at`` has."""

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        """How many perturbed inputs each image has, for the plan of the runs; 0 where that is not
        known before. ``channels`` and ``size`` are those of the layer and the image.
        """
        return 0

    def perturbed(self, evidence: Evidence) -> PerturbedRows:
        """The perturbed images ``(b, C, H, W)``; `samples_of` makes them."""
        raise NotImplementedError

    def map(self, evidence: Evidence, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """The map, from the scores ``(K,)`` of the perturbed inputs of each image."""
        raise NotImplementedError

    @property
    def whole(self) -> Scores:
        """The need for the score ``(N,)`` of the image, or of the layer's maps, as it is."""
        return Scores(Unperturbed(of_layer=self.alters_layer), ScoreOf(self.score))

    @property
    def scores(self) -> Scores:
        """The need for the scores of all perturbed inputs, by image."""
        return Scores(_SamplesOf(self), ScoreOf(self.score), KeepAll(by_image=True))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.looks_at | {self.scores, self.whole}

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return self.map(evidence, evidence[self.scores])

    def outcome(self, evidence: Evidence) -> Outcome:
        counts = [len(of_image) for of_image in evidence[self.scores]]
        return Outcome(spent=torch.tensor(counts, device=evidence.inputs.device))


class SearchMethod(PerturbationMethod):
    """A method that chooses which perturbed images to run next by the scores so far, in a search
    for each image, or one for several."""

    def search(self, evidence: Evidence, image: int) -> Search:
        """A new search in one image."""
        raise NotImplementedError

    def searches(self, evidence: Evidence) -> Sequence[Search]:
        return [self.search(evidence, image) for image in range(len(evidence.inputs))]

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Searches(self)})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The maps ``(N, H, W)`` of the searches, which the engine has run to their end."""
        return torch.cat([search.map() for search in evidence[Searches(self)]])

    def outcome(self, evidence: Evidence) -> Outcome:
        """How many perturbed images were run of each image, and whether its search came to an end.
        The runs of a search for several images count evenly for each of them."""

        def of_images(figure: Callable[[Search], float]) -> torch.Tensor:
            """A figure of each search, once for each of its images: ``(N,)``."""
            figures: list[float] = []
            for search in evidence[Searches(self)]:
                figures += [figure(search)] * search.images
            return torch.tensor(figures, device=evidence.inputs.device)

        return Outcome(
            spent=of_images(lambda search: search.samples // search.images),
            planned=of_images(lambda search: search.planned // search.images),
            finished=of_images(lambda search: search.finished),
        )


class EstimateMethod(PerturbationMethod):
    """A method that estimates its map from the scores of perturbed images. ``tolerance`` ends it at
    a relative error, where it has this option, and ``max_seconds`` after a time."""

    score: Score

    @property
    def perturbation(self) -> Perturbation:
        """How the images that are run are perturbed; equal perturbations run once for all methods
        of a call."""
        raise NotImplementedError

    def estimators(self, evidence: Evidence) -> Sequence[Estimator]:
        """New estimators, one for the map of each image, in the order of the images."""
        raise NotImplementedError

    @property
    def read(self) -> Attributor:
        """The number that is read from the model's output for each perturbed image, and that
        estimators take."""
        return ScoreOf(self.score)

    @property
    def references(self) -> frozenset[Need[Any]]:
        """The scores that those of the perturbed images are compared with."""
        return frozenset({whole_score(self.score)})

    @property
    def _estimate(self) -> Attributions:
        return Attributions(self.perturbation, self.read, self)

    def begin(self, evidence: Evidence) -> Accumulator:
        return _Estimating(self, evidence)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.references | {self._estimate}

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[self._estimate][0]  # type: ignore[no-any-return]

    def outcome(self, evidence: Evidence) -> Outcome:
        return evidence[self._estimate][1]  # type: ignore[no-any-return]
