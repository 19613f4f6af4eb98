"""Integrated gradients along a path that the network itself lays: where its gradient is small, it goes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from explain.engine import Evidence, InputGradients, Need, Reruns, Rows
from explain.errors import MethodError, in_short
from explain.methods import sources_of_paths as sources
from explain.methods.base import Style
from explain.methods.checks import check_options
from explain.methods.masks import InOrder
from explain.methods.path import PathStart, check_baseline, score_of
from explain.methods.sources import Source

TINY = 1e-12  # of the whole way: what rounding leaves


def _ranked(gradient: torch.Tensor) -> torch.Tensor:
    """Magnitudes in steps so coarse that rounding does not decide which of two equal ones is smaller."""
    size = gradient.abs()
    step = size.max().clamp(min=torch.finfo(size.dtype).tiny) * torch.finfo(size.dtype).eps ** (2 / 3)
    ranked: torch.Tensor = (size / step).double().round()
    return ranked


@dataclass(frozen=True, eq=False)
class Points:
    """One point for each image, found by looking at those before it."""

    at: torch.Tensor

    of_layer: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __str__(self) -> str:
        return "points of a path"

    def count(self, channels: int) -> int:
        return 1

    def rows(self, evidence: Evidence) -> Rows:
        return Rows(torch.arange(len(self.at), device=self.at.device), lambda rows: self.at[rows].clone())


@dataclass(frozen=True)
class ScoreAndGradient:
    """The score of each image, and behind it the gradient's values: ``(N, 1 + C * H * W)``."""

    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.cat([evidence.score[:, None], evidence[InputGradients()].flatten(1)], 1)


@dataclass(frozen=True)
class Stretch:
    """One step of a path: the score and the gradient where it begins, and how far it goes, of all images."""

    score: torch.Tensor
    gradient: torch.Tensor
    moved: torch.Tensor


@dataclass(frozen=True)
class GuidedIntegratedGradients:
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
    baseline: float | str | torch.Tensor = 0.0
    fraction: float = 0.25
    distance: float = 0.02

    __repr__ = in_short

    name: ClassVar[str] = "guidedintegratedgradients"
    about: ClassVar[str] = "gradients added up along a path that goes first where they are small"
    paper: ClassVar[str] = "Kapishnikov et al., CVPR 2021"
    source: ClassVar[Source] = sources.GUIDEDINTEGRATEDGRADIENTS
    style: ClassVar[Style] = "signed"
    one_input: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, steps=1, fraction=0, distance=0)
        check_baseline(self.name, self.baseline)
        for option in ("fraction", "distance"):
            if getattr(self, option) > 1:
                raise MethodError(
                    f"{option} of {self.name} must be a number from 0 to 1, got {getattr(self, option)}; it is a share"
                )

    @property
    def below(self) -> Need[torch.Tensor]:
        """What asks for the score at the beginning of the path."""
        return score_of(self.baseline, self.name)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Reruns(), self.below})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        kept = evidence[Reruns()].kept
        if self not in kept:
            kept[self] = sum((s.gradient * s.moved for s in self.walked(evidence)), torch.zeros_like(evidence.inputs))
        found: torch.Tensor = kept[self]
        return found

    def walked(self, evidence: Evidence) -> Iterator[Stretch]:
        """The steps of the path, one after the other."""
        x, runner = evidence.inputs, evidence[Reruns()]
        start = PathStart(self.baseline, self.name).of(evidence)
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

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor:
        """By how much the values miss the difference of the scores at the photo and at the baseline."""
        return values.flatten(1).sum(1) - self.promised(evidence)

    def promised(self, evidence: Evidence) -> torch.Tensor:
        """The difference of the scores at the photo and at the baseline."""
        return evidence.score - evidence[self.below]
