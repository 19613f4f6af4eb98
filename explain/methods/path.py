"""Attribution along a path: what each input value contributes between a baseline and the photo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from explain._utils.errors import BaselineError, MethodError, in_short
from explain.baselines.base import Baseline
from explain.baselines.registry import get_baseline
from explain.engine import (
    Accumulator,
    Attributions,
    Evidence,
    InputGradients,
    Need,
    Perturbation,
    PerturbedRows,
    Reducer,
)
from explain.engine.perturbations import OneForEach, Scores, SumOfRows, ZeroInput, copies
from explain.layers.feature_maps import Grids
from explain.methods.base import GRADIENTS, Method, at_least, over_all, spatial_dims
from explain.methods.bibliography import cited
from explain.methods.gradients import Saliency
from explain.methods.registry import register

PathBaseline: TypeAlias = float | str | tuple[float, ...] | torch.Tensor | Baseline
Rule = Literal["gausslegendre", "left", "right", "midpoint", "trapezoid"]


def quadrature(rule: Rule, steps: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Points in [0, 1] and weights that add up to one.

    >>> points, weights = quadrature("trapezoid", 3)
    >>> points.tolist(), weights.tolist()
    ([0.0, 0.5, 1.0], [0.25, 0.5, 0.25])
    """
    if rule == "gausslegendre":
        points, weights = np.polynomial.legendre.leggauss(steps)
        return (points + 1) / 2, weights / 2
    if rule == "trapezoid":
        weights = np.full(steps, 1 / (steps - 1))
        weights[[0, -1]] /= 2
        return np.linspace(0, 1, steps), weights
    first = {"left": 0.0, "midpoint": 0.5, "right": 1.0}[rule]
    return (np.arange(steps) + first) / steps, np.full(steps, 1 / steps)


BASELINES = ("mean", "blur", "least", "most")
"""Baselines by name: the photo's mean colour, the photo blurred, and the least and largest value of each channel."""


@dataclass(frozen=True)
class PathStart(OneForEach):
    """The photo's baseline: a number for all values or for each channel, one of `BASELINES`, or a tensor that holds it.

    ``method`` is what errors call the method; equal baselines of two methods are one.
    """

    full_precision = True

    baseline: PathBaseline = 0.0
    method: str = field(default="integratedgradients", compare=False)

    def __str__(self) -> str:
        return "the baseline"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """The baseline of each image: ``(N, C, H, W)``."""
        x = evidence.inputs
        if isinstance(self.baseline, torch.Tensor):
            own = self.baseline.detach().to(x)
            own = own[None] if own.ndim == x.ndim - 1 else own
            if own.shape[1:] != x.shape[1:] or len(own) not in (1, evidence.images):
                raise MethodError(
                    f"baseline of {self.method} must have the shape {tuple(x.shape[1:])} of an image, got "
                    f"{tuple(self.baseline.shape)}; give it one that the model would take"
                )
            return evidence.of_images(own)
        if isinstance(self.baseline, tuple):
            if len(self.baseline) not in (1, x.shape[1]):
                raise MethodError(
                    f"{self.method} must be given a value for each of the {x.shape[1]} channels, got "
                    f"{len(self.baseline)}; give one for all, or {x.shape[1]}"
                )
            return torch.tensor(self.baseline).to(x).reshape(1, -1, *[1] * (x.ndim - 2)).expand_as(x)
        if isinstance(self.baseline, (str, Baseline)) and x.ndim < 4:  # an input beside the photo that is no picture
            raise MethodError(
                f"baseline of {self.method} must be a number for inputs that are no pictures, got "
                f"{self.baseline!r} for one of shape {tuple(x.shape)}; use 0"
            )
        if self.baseline == "mean":
            return x.mean(spatial_dims(x), keepdim=True).expand_as(x)
        if self.baseline in ("least", "most"):
            ends = x.amin if self.baseline == "least" else x.amax
            return ends(spatial_dims(x), keepdim=True).expand_as(x)
        if self.baseline == "blur":
            return _blurred(x)
        if isinstance(self.baseline, Baseline):
            return self.baseline(x, x.new_zeros(1, 1, *x.shape[2:]))
        return torch.full_like(x, float(self.baseline))

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The baseline of each input ``(N, C, H, W)``, outside of a plan."""
        zero = inputs.new_zeros(len(inputs))
        return self.perturbed(Evidence(inputs, zero, None, "", Grids(tuple(inputs.shape[2:]))))


def path_baseline(method: str, value: Any) -> Any:
    """A baseline as a path takes it: one of `BASELINES` stays a name, other names are those of `explain.baselines`.

    Raises:
        MethodError: there is no baseline of that name.
    """
    if not isinstance(value, str) or value in BASELINES:
        return value
    try:
        return get_baseline(value)
    except BaselineError as error:
        raise MethodError(
            f"baseline of {method} must be a number, a tensor (C, H, W), one of {', '.join(BASELINES)} or a baseline: "
            f"{error}"
        ) from None


def score_of(baseline: PathBaseline, method: str) -> Scores:
    """The need for the score of the baseline; other methods use that of a blank photo too."""
    is_blank = isinstance(baseline, (int, float)) and baseline == 0
    return Scores(ZeroInput() if is_blank else PathStart(baseline, method))


@dataclass(frozen=True)
class StraightPath(Perturbation):
    """Points on the straight line from a baseline to the photo, as a quadrature needs them."""

    steps: int
    start: PathStart
    rule: Rule

    def __str__(self) -> str:
        return "points on the way from the baseline to the photo"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.steps

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x, start = evidence.inputs, self.start.perturbed(evidence)
        points = torch.from_numpy(quadrature(self.rule, self.steps)[0]).to(x)
        return copies(x, self.steps, lambda image, step: torch.lerp(start[image], x[image], points[step]))


@dataclass(frozen=True)
class Quadrature(Reducer):
    """Adds up what was found along a path, with the weights of a quadrature."""

    steps: int
    rule: Rule

    def begin(self, evidence: Evidence) -> Accumulator:
        weights = torch.from_numpy(quadrature(self.rule, self.steps)[1])

        def weigh(images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return values * over_all(weights.to(values)[numbers % self.steps], values)

        return SumOfRows(len(evidence.inputs), weigh)


@dataclass(frozen=True)
class ScoreAndGradient:
    """The score of each row, and then the gradient's values: ``(N, 1 + C * H * W)``."""

    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        gradient = evidence[InputGradients()]
        return torch.cat([evidence.score.to(gradient)[:, None], gradient.flatten(1)], 1)


class CompleteMethod(Method):
    """A method whose values add up to the score minus that of a baseline, or the mean of several."""

    family = GRADIENTS
    style = "signed"

    @property
    def gradients(self) -> Attributions:
        """The need for the gradients, added up."""
        raise NotImplementedError

    @property
    def baseline_score(self) -> Scores:
        """The need for the scores of the baselines of each image."""
        raise NotImplementedError

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.gradients, self.baseline_score})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        gradients: torch.Tensor = evidence[self.gradients]
        return gradients

    def expected_sum(self, evidence: Evidence) -> torch.Tensor:
        difference: torch.Tensor = evidence.score - evidence[self.baseline_score].reshape(
            len(evidence.inputs), -1
        ).mean(1)
        return difference


@register
@dataclass(frozen=True)
class IntegratedGradients(CompleteMethod):
    r"""Add up gradients along the straight line from a baseline to the photo, and multiply with their difference.

    :math:`(x - b) \odot \int_0^1 \nabla y\bigl(b + t(x - b)\bigr)\,dt`; the values add up to :math:`y(x) - y(b)`, and
    by how much the quadrature misses that is the attribution's ``delta``.

    Args:
        steps: the number of points.
        baseline: a value for every input, ``mean`` (each image's mean colour), ``blur`` (the image, blurred),
            ``least`` or ``most`` (the least or largest value of each of its channels), or a tensor ``(C, H, W)``; 0
            is what preprocessing makes of the training data's mean colour.
        rule: ``gausslegendre``, ``left``, ``right``, ``midpoint`` or ``trapezoid``.
        multiply_by_inputs: multiply the mean gradient along the path with :math:`x - b`, as published; False gives the
            mean gradient itself, in units of the score per unit of the input.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> a = explain.attribute(model, torch.rand(2, 3, 2, 2), IntegratedGradients(steps=64), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 0.01).all())
    (torch.Size([2, 3, 2, 2]), True)
    """

    steps: int = 50
    baseline: float | str | torch.Tensor | Baseline = 0.0
    rule: Rule = "gausslegendre"
    multiply_by_inputs: bool = True

    __repr__ = in_short

    name = "integratedgradients"
    about = "gradients integrated from a baseline to the photo"
    source = cited("sundararajan2017integratedgradients")
    minimums: ClassVar[Mapping[str, float]] = {"steps": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self.name, "steps", self.steps, 2 if self.rule == "trapezoid" else 1, whole=True)
        object.__setattr__(self, "baseline", path_baseline(self.name, self.baseline))

    @property
    def gradients(self) -> Attributions:
        """The gradients along the path, added up."""
        path = StraightPath(self.steps, PathStart(self.baseline), self.rule)
        return Attributions(path, Saliency(absolute=False), Quadrature(self.steps, self.rule))

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        total: torch.Tensor = evidence[self.gradients]
        return self._way(evidence) * total if self.multiply_by_inputs else total

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor | None:
        """By how much the values miss the difference of the scores at the photo and at the baseline."""
        contributions = values if self.multiply_by_inputs else self._way(evidence) * values
        return super().delta(evidence, contributions)

    @property
    def baseline_score(self) -> Scores:
        return score_of(self.baseline, self.name)

    def _way(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs - PathStart(self.baseline).perturbed(evidence)


def _blurred(x: torch.Tensor) -> torch.Tensor:
    """Blur with a Gaussian whose standard deviation is a tenth of the shorter side."""
    sigma = min(x.shape[-2:]) / 10
    reach = min(int(3 * sigma), min(x.shape[-2:]) - 1)
    offsets = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (kernel / kernel.sum())[None, None]
    flat = x.flatten(0, -3)[:, None]
    flat = F.conv2d(F.pad(flat, (reach, reach, 0, 0), mode="reflect"), kernel[:, :, None])
    flat = F.conv2d(F.pad(flat, (0, 0, reach, reach), mode="reflect"), kernel[..., None])
    return flat.reshape(x.shape)
