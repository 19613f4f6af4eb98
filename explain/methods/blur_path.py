"""Gradients added up while a blurred photo becomes sharp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError
from explain.engine import Accumulator, Attributions, Evidence, Need, Perturbation, PerturbedRows, Reducer
from explain.engine.perturbations import Scores
from explain.methods.base import GRADIENTS, Method
from explain.methods.bibliography import cited
from explain.methods.gradients import Saliency
from explain.methods.registry import register


def blurred(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Blur pictures ``(..., H, W)`` with a Gaussian of a standard deviation in pixels; 0 leaves them as they are.

    At the edges, the weights of what would lie outside are left out, so that no colour is invented there.

    >>> blurred(torch.tensor([[0.0, 4.0]]), 1e6)
    tensor([[2., 2.]])
    """
    if sigma == 0:
        return x
    down, across = (_weights(side, sigma).to(x) for side in x.shape[-2:])
    return down @ x @ across.T


def _weights(side: int, sigma: float) -> torch.Tensor:
    """What each place takes of each other one: ``(side, side)``, rows that add up to one."""
    places = torch.arange(side, dtype=torch.float64)
    weights = torch.exp(-0.5 * ((places[:, None] - places) / sigma) ** 2)
    return weights / weights.sum(1, keepdim=True)


@dataclass(frozen=True)
class BlurPath(Perturbation):
    """The photo, less and less blurred.

    ``sigma`` is the first blur's standard deviation as a share of the shorter side; it falls in equal ``steps``. Each
    point is at a step's beginning, or with ``middle`` at its middle.
    """

    steps: int
    sigma: float
    middle: bool

    def __str__(self) -> str:
        return "the photo, less and less blurred"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.steps

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = self.checked(evidence.inputs)
        owners = torch.arange(len(x), device=x.device).repeat_interleave(self.steps)

        def make(rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.at(x[row // self.steps], row % self.steps + self.middle / 2)
                                for row in rows.tolist()])  # fmt: skip

        return PerturbedRows(owners, make)

    def at(self, x: torch.Tensor, step: float) -> torch.Tensor:
        """The photo after so many steps; after all of them, it is sharp."""
        return blurred(x, self.sigma * min(x.shape[-2:]) * (1 - step / self.steps))

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        """The photos; an input that is no picture cannot be blurred."""
        if x.ndim < 4:
            raise MethodError(
                f"input of blurintegratedgradients must be a picture (N, C, H, W), got shape {tuple(x.shape)}; take "
                "integratedgradients"
            )
        return x


@dataclass(frozen=True)
class Blurriest(Perturbation):
    """The photo at the beginning of a path of blurs."""

    of: BlurPath

    def __str__(self) -> str:
        return "the blurred photo"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return 1

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = self.of.checked(evidence.inputs)
        return PerturbedRows(torch.arange(len(x), device=x.device), lambda rows: self.of.at(x[rows], 0))


@dataclass(frozen=True)
class _Sharpening(Reducer):
    """Adds up gradients, each times what its step changes of the photo."""

    along: BlurPath

    def begin(self, evidence: Evidence) -> Accumulator:
        return _Sum(self.along, evidence.inputs)


class _Sum(Accumulator):
    def __init__(self, along: BlurPath, x: torch.Tensor) -> None:
        self._along, self._x, self._total = along, x, torch.zeros_like(x)

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        for image, number, gradient in zip(images.tolist(), numbers.tolist(), values, strict=True):
            step, x = number % self._along.steps, self._x[image]
            self._total[image] += gradient.to(x) * (self._along.at(x, step + 1) - self._along.at(x, step))

    def result(self) -> torch.Tensor:
        return self._total


@register
@dataclass(frozen=True)
class BlurIntegratedGradients(Method):
    r"""Add up gradients while a blurred photo becomes sharp, each times what has changed.

    :math:`\sum_i \nabla y(L_{\sigma_i}) \odot (L_{\sigma_{i+1/2}} - L_{\sigma_{i-1/2}})`, where :math:`L_\sigma` is the
    photo behind a Gaussian blur whose standard deviation falls to zero in equal steps. No colour has to be chosen as a
    baseline. The values add up to :math:`y(x) - y(L_{\sigma_0})`, and by how much the steps miss that is ``delta``.

    Args:
        steps: how many; the authors take 100.
        sigma: the first standard deviation, as a share of the photo's shorter side; the authors take 50 pixels.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Xu, Venugopalan and Sundararajan, "Attribution in Scale and Space", CVPR 2020. The authors multiply the gradient at
    the beginning of each step with a derivative of the blur; here it is taken at the middle, and multiplied with the
    difference of two blurs, so that a linear model's values add up exactly.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 4, 4), BlurIntegratedGradients(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 0.01).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    steps: int = 50
    sigma: float = 0.2

    name = "blurintegratedgradients"
    about = "gradients added up while a blurred photo becomes sharp"
    source = cited("xu2020blurintegratedgradients")
    family = GRADIENTS
    minimums: ClassVar[Mapping[str, float]] = {"steps": 1, "sigma": 0}
    style = "signed"

    def along(self, *, middle: bool) -> BlurPath:
        """The photos that gradients are taken at."""
        return BlurPath(self.steps, self.sigma, middle)

    @property
    def below(self) -> Scores:
        """What asks for the score at the beginning of the path."""
        return Scores(Blurriest(self.along(middle=True)))

    @property
    def _gradients(self) -> Attributions:
        along = self.along(middle=True)
        return Attributions(along, Saliency(absolute=False), _Sharpening(along))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._gradients, self.below})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        found: torch.Tensor = evidence[self._gradients]
        return found

    def expected_sum(self, evidence: Evidence) -> torch.Tensor:
        """The difference of the scores at the photo and at its first blur."""
        return evidence.score - evidence[self.below]
