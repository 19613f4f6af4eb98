"""Gradients added up while a blurred photo becomes sharp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from explain._utils.errors import MethodError
from explain.engine import Accumulator, Attributions, Evidence, Perturbation, PerturbedRows, Reducer
from explain.engine.perturbations import OneForEach, Scores, SumOfRows, copies
from explain.methods.bibliography import cited
from explain.methods.gradients import Saliency
from explain.methods.path import CompleteMethod
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
        return copies(x, self.steps, lambda image, step: self.at(x[image], step + self.middle / 2))

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
class Blurriest(OneForEach):
    """The photo at the beginning of a path of blurs."""

    of: BlurPath

    def __str__(self) -> str:
        return "the blurred photo"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        return self.of.at(self.of.checked(evidence.inputs), 0)


@dataclass(frozen=True)
class _Sharpening(Reducer):
    """Adds up gradients, each times what its step changes of the photo."""

    along: BlurPath

    def begin(self, evidence: Evidence) -> Accumulator:
        def weigh(images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            steps = numbers % self.along.steps
            changes = [
                self.along.at(evidence.inputs[image], step + 1) - self.along.at(evidence.inputs[image], step)
                for image, step in zip(images.tolist(), steps.tolist(), strict=True)
            ]
            return values * torch.stack(changes)

        return SumOfRows(len(evidence.inputs), weigh)


@register
@dataclass(frozen=True)
class BlurIntegratedGradients(CompleteMethod):
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
    about = "gradients integrated while a blurred photo becomes sharp"
    source = cited("xu2020blurintegratedgradients")
    minimums: ClassVar[Mapping[str, float]] = {"steps": 1, "sigma": 0}

    def along(self, *, middle: bool) -> BlurPath:
        """The photos that gradients are taken at."""
        return BlurPath(self.steps, self.sigma, middle)

    @property
    def baseline_score(self) -> Scores:
        return Scores(Blurriest(self.along(middle=True)))

    @property
    def gradients(self) -> Attributions:
        along = self.along(middle=True)
        return Attributions(along, Saliency(absolute=False), _Sharpening(along))
