"""What each step of a path changes of the score, shared out along the gradient alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explain.engine import Alteration, Attributions, Collected, Evidence, Need, Reruns
from explain.errors import MethodError
from explain.methods import sources_of_paths as sources
from explain.methods.base import Method, Style, over_all
from explain.methods.blurred import BlurIntegratedGradients
from explain.methods.checks import check_options
from explain.methods.guided import GuidedIntegratedGradients, ScoreAndGradient
from explain.methods.path import IntegratedGradients, PathStart, StraightPath
from explain.methods.sources import Source


@dataclass(frozen=True)
class ByDirection:
    """Shares out the change of the score from each point to the next; the last point's next is the photo."""

    steps: int

    def begin(self, evidence: Evidence) -> Collected:
        return _Changes(self.steps, evidence)


class _Changes:
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

    def enough(self) -> bool:
        return False

    def result(self) -> torch.Tensor:
        for image in list(self._before):
            self._until(image, self._last[image])
        return self._total


def _direction(gradient: torch.Tensor) -> torch.Tensor:
    """The square of a gradient, which adds up to one; zeros where all of it is zero."""
    square = (gradient / gradient.abs().max().clamp(min=torch.finfo(gradient.dtype).tiny)).square()
    total = square.sum()
    return square / total if bool(total > 0) else square


@dataclass(frozen=True)
class IDGI:
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

    name: ClassVar[str] = "idgi"
    about: ClassVar[str] = "changes of the score along a path, shared out by the squared gradient"
    paper: ClassVar[str] = "Yang et al., CVPR 2023"
    source: ClassVar[Source] = sources.IDGI
    style: ClassVar[Style] = "signed"
    one_input: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)
        if not isinstance(self.path, (IntegratedGradients, BlurIntegratedGradients, GuidedIntegratedGradients)):
            raise MethodError(
                f"path of {self.name} must be integratedgradients, blurintegratedgradients or "
                f"guidedintegratedgradients, got {self.path.name}; take one of these"
            )

    @property
    def _points(self) -> Alteration | None:
        """The points, if they can be named before the first of them is run."""
        if isinstance(self.path, BlurIntegratedGradients):
            return self.path.along(middle=False)
        if isinstance(self.path, IntegratedGradients):
            return StraightPath(self.path.steps, PathStart(self.path.baseline), "left")
        return None

    @property
    def _changes(self) -> Attributions | None:
        points = self._points
        return None if points is None else Attributions(points, ScoreAndGradient(), ByDirection(points.count(0)))

    @property
    def _below(self) -> Need[torch.Tensor]:
        assert isinstance(self.path, (IntegratedGradients, BlurIntegratedGradients, GuidedIntegratedGradients))
        return self.path.below

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Reruns() if self._changes is None else self._changes, self._below})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        if self._changes is not None:
            found: torch.Tensor = evidence[self._changes]
            return found
        kept = evidence[Reruns()].kept
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

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values miss the difference of the scores at both ends of the path."""
        return values.flatten(1).sum(1) - self.promised(evidence)

    def promised(self, evidence: Evidence) -> torch.Tensor:
        """The difference of the scores at both ends of the path."""
        return evidence.score - evidence[self._below]


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
