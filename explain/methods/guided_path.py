"""Integrated gradients along a path that the network itself chooses (GIG), and important direction gradients (IDGI)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError, in_short
from explain.baselines.base import Baseline
from explain.engine import (
    Accumulator,
    Attributions,
    Evidence,
    Need,
    Perturbation,
    Reducer,
)
from explain.engine.perturbations import InOrder, OneForEach, PerturbationRuns, Scores
from explain.methods.base import Method, over_all
from explain.methods.bibliography import cited
from explain.methods.blur_path import BlurIntegratedGradients
from explain.methods.path import (
    CompleteMethod,
    IntegratedGradients,
    PathStart,
    ScoreAndGradient,
    StraightPath,
    path_baseline,
    score_of,
)
from explain.methods.registry import register

TINY = 1e-12  # of the whole way: what rounding leaves


def _ranked(gradient: torch.Tensor) -> torch.Tensor:
    """Magnitudes in steps so coarse that rounding does not decide which of two equal ones is smaller."""
    size = gradient.abs()
    step = size.max().clamp(min=torch.finfo(size.dtype).tiny) * torch.finfo(size.dtype).eps ** (2 / 3)
    ranked: torch.Tensor = (size / step).double().round()
    return ranked


@dataclass(frozen=True, eq=False)
class Points(OneForEach):
    """One point for each image, found by looking at those before it."""

    at: torch.Tensor

    def __str__(self) -> str:
        return "points of a path"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        return self.at


@dataclass(frozen=True)
class Stretch:
    """One step of a path: the score and the gradient where it begins, and how far it goes, of all images."""

    score: torch.Tensor
    gradient: torch.Tensor
    moved: torch.Tensor


@register
@dataclass(frozen=True)
class GuidedIntegratedGradients(CompleteMethod):
    r"""Add up gradients along a path that goes first where the gradient is small.

    In each of equal steps the distance to the photo (the sum of magnitudes) falls by the same amount. Of the values
    that are not there yet, those move whose gradient is among the smallest ``fraction``, until the distance is right;
    gradients that differ by no more than rounding does count as equal.
    No value may be further ahead of the straight line, or behind it, than ``distance``. The values add up to
    :math:`y(x) - y(b)`, and by how much the steps miss that is the attribution's ``delta``.

    Args:
        steps: how many; each needs the gradient of the one before. The authors take 200.
        baseline: as for integrated gradients.
        fraction: the share of values that may move at once.
        distance: how far from the straight line, as a share of the way. 1 leaves the path free, as in the paper's first
            algorithm; the default is that of the authors' program, for their path with anchors.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Kapishnikov et al., "Guided Integrated Gradients: An Adaptive Path Method for Removing Noise", CVPR 2021.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 2, 2), GuidedIntegratedGradients(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 0.05).all())
    (torch.Size([2, 3, 2, 2]), True)
    """

    steps: int = 50
    baseline: float | str | torch.Tensor | Baseline = 0.0
    fraction: float = 0.25
    distance: float = 0.02

    __repr__ = in_short

    name = "guidedintegratedgradients"
    about = "gradients integrated along a path that changes pixels with small gradients first"
    source = cited("kapishnikov2021guidedintegratedgradients")
    minimums: ClassVar[Mapping[str, float]] = {"steps": 1, "fraction": 0, "distance": 0}
    one_input = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "baseline", path_baseline(self.name, self.baseline))
        for option in ("fraction", "distance"):
            if getattr(self, option) > 1:
                raise MethodError(
                    f"{option} of {self.name} must be a number from 0 to 1, got {getattr(self, option)}; it is a share"
                )

    @property
    def baseline_score(self) -> Scores:
        return score_of(self.baseline, self.name)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({PerturbationRuns(), self.baseline_score})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        kept = evidence[PerturbationRuns()].kept
        if self not in kept:
            kept[self] = sum((s.gradient * s.moved for s in self.walked(evidence)), torch.zeros_like(evidence.inputs))
        found: torch.Tensor = kept[self]
        return found

    def walked(self, evidence: Evidence) -> Iterator[Stretch]:
        """The steps of the path, one after the other."""
        x, runner = evidence.inputs, evidence[PerturbationRuns()]
        start = PathStart(self.baseline, self.name).perturbed(evidence)
        way = x - start
        share = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for step in range(self.steps):
            found = runner.read_once(Points(start + share.to(x) * way), ScoreAndGradient(), InOrder())
            gradient = found[:, 1:].reshape(x.shape)
            rows = zip(share.flatten(1), gradient.flatten(1), way.flatten(1), strict=True)
            further = torch.stack([self._further(*row, step) for row in rows]).reshape(x.shape)
            yield Stretch(found[:, 0], gradient, (further - share).to(x) * way)
            share = further
            runner.tell((step + 1) * len(x), self.steps * len(x))

    def _further(self, share: torch.Tensor, gradient: torch.Tensor, way: torch.Tensor, step: int) -> torch.Tensor:
        """How far each value of an image is after a step, from how far it was before; all are ``(D,)``."""
        done = (step + 1) / self.steps
        lowest, highest = max(done - self.distance, 0.0), min(done + self.distance, 1.0)
        if step == self.steps - 1:
            return torch.ones_like(share)
        length, size = way.abs().double(), _ranked(gradient)
        whole, share = length.sum(), share.clamp(min=lowest)
        rank = int((len(share) - 1) * self.fraction) + 1
        while True:
            left = (length * (1 - share)).sum() - whole * (1 - done)
            free = (share < highest) & (length > 0)
            if left <= TINY * whole or not bool(free.any()):
                return share
            threshold = torch.where(free, size, torch.inf).kthvalue(rank).values
            chosen = free & (size <= threshold)
            gain = (length * (highest - share))[chosen].sum()
            if bool(left < gain):
                return torch.where(chosen, share + left / gain * (highest - share), share)
            share = torch.where(chosen, highest, share)


@dataclass(frozen=True)
class ByDirection(Reducer):
    """Shares out the change of the score from each point to the next; the last point's next is the photo."""

    steps: int

    def begin(self, evidence: Evidence) -> Accumulator:
        return _Changes(self.steps, evidence)


class _Changes(Accumulator):
    def __init__(self, steps: int, evidence: Evidence) -> None:
        self._steps, self._x, self._last = steps, evidence.inputs, evidence.score
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._total = torch.zeros_like(evidence.inputs)

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        for image, found in zip(images.tolist(), values, strict=True):  # those of an image come in their order
            score, gradient = found[0], found[1:].reshape(self._x.shape[1:])
            self._until(image, score)
            self._before[image] = score, _direction(gradient)

    def _until(self, image: int, score: torch.Tensor) -> None:
        """Share out what the score has changed by since the point before."""
        if image in self._before:
            before, direction = self._before.pop(image)
            self._total[image] += (score - before).to(direction) * direction

    def result(self) -> torch.Tensor:
        for image in list(self._before):
            self._until(image, self._last[image])
        return self._total


def _direction(gradient: torch.Tensor) -> torch.Tensor:
    """The square of a gradient, which adds up to one; zeros where all of it is zero."""
    square = (gradient / gradient.abs().max().clamp(min=torch.finfo(gradient.dtype).tiny)).square()
    total = square.sum()
    return square / total if bool(total > 0) else square


@register
@dataclass(frozen=True)
class IDGI(CompleteMethod):
    r"""Share out what each step of a path changes of the score in proportion to the squared gradient.

    :math:`\sum_j \frac{\nabla y(x_j) \odot \nabla y(x_j)}{\lVert\nabla y(x_j)\rVert^2}\,(y(x_{j+1}) - y(x_j))`: a step
    counts only along the gradient, in whose direction alone the score changes; what it moves besides is noise. The
    values add up to :math:`y(x) - y(b)` exactly, but for steps from where the gradient is zero, which ``delta`` has.

    Args:
        path: the method whose path is taken: integrated gradients, also guided, or blurred. Points lie at the
            beginnings of its steps, whatever its rule.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Yang, Wang and Bilgic, "IDGI: A Framework to Eliminate Explanation Noise from Integrated Gradients", CVPR 2023.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 2, 2), IDGI(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 2, 2]), True)
    """

    path: Method = field(default_factory=IntegratedGradients)

    name = "idgi"
    about = "changes of the score along a path, distributed by the squared gradient"
    source = cited("yang2023idgi")
    one_input = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.path, (IntegratedGradients, BlurIntegratedGradients, GuidedIntegratedGradients)):
            raise MethodError(
                f"path of {self.name} must be integratedgradients, blurintegratedgradients or "
                f"guidedintegratedgradients, got {self.path.name}; take one of these"
            )

    @property
    def _points(self) -> Perturbation | None:
        """The points, if they can be named before the first of them is run."""
        if isinstance(self.path, BlurIntegratedGradients):
            return self.path.along(middle=False)
        if isinstance(self.path, IntegratedGradients):
            return StraightPath(self.path.steps, PathStart(self.path.baseline), "left")
        return None

    @property
    def _changes(self) -> Attributions | None:
        points = self._points
        return None if points is None else Attributions(points, ScoreAndGradient(), ByDirection(points.count(0, ())))

    @property
    def baseline_score(self) -> Scores:
        assert isinstance(self.path, CompleteMethod)
        return self.path.baseline_score

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({PerturbationRuns() if self._changes is None else self._changes, self.baseline_score})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        if self._changes is not None:
            found: torch.Tensor = evidence[self._changes]
            return found
        kept = evidence[PerturbationRuns()].kept
        if self not in kept:
            kept[self] = self._walked(evidence)
        return kept[self]  # type: ignore[no-any-return]

    def _walked(self, evidence: Evidence) -> torch.Tensor:
        """The values along a path that is found on the way."""
        assert isinstance(self.path, GuidedIntegratedGradients)
        total = torch.zeros_like(evidence.inputs)
        for score, gradient, following in _with_next(self.path, evidence):
            directions = torch.stack([_direction(each) for each in gradient])
            total += directions * over_all(following - score, directions)
        return total


def _with_next(
    path: GuidedIntegratedGradients, evidence: Evidence
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The scores and gradients where each step begins, with the scores where it ends."""
    before = None
    for stretch in path.walked(evidence):
        if before is not None:
            yield before.score, before.gradient, stretch.score
        before = stretch
    assert before is not None
    yield before.score, before.gradient, evidence.score
