"""Gradients at random places between the photo and baselines, multiplied with the difference of the two.

`ExpectedGradients` is the method of the paper; `GradientSHAP` is the same with noise on the photo, as the package shap
has it. Without noise, both draw the same points, and are run once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError
from explain._utils.random_numbers import normal, uniform
from explain.baselines.base import Baseline
from explain.engine import Accumulator, Attributions, Evidence, Need, Perturbation, PerturbedRows, Reducer
from explain.engine.perturbations import Scores, SumOfRows, copies
from explain.methods.base import GRADIENTS, Method
from explain.methods.bibliography import cited
from explain.methods.gradients import Saliency
from explain.methods.path import CompleteMethod, PathBaseline, PathStart, path_baseline, score_of
from explain.methods.registry import register


@dataclass(frozen=True)
class RandomPoints(Perturbation):
    """Random points between the photo, with noise, and baselines drawn at random."""

    samples: int
    baseline: PathBaseline
    sigma: float
    seed: int
    method: str = field(default="gradientshap", compare=False)
    """What errors call the method."""

    def __str__(self) -> str:
        return "random points between the photo and baselines"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.samples

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        return copies(x, self.samples, lambda image, sample: torch.lerp(*self.drawn(x[image], sample)))

    def drawn(self, x: torch.Tensor, sample: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The baseline, the photo with noise, and how far from one to the other, of one sample of one photo.

        Each photo has the same draws, whichever stand beside it.
        """
        g = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + sample)
        which, share = uniform((2,), g).tolist()
        end = x + self.sigma * (x.max() - x.min()) * normal(x.shape, g).to(x)
        if not isinstance(self.baseline, torch.Tensor):
            return PathStart(self.baseline, self.method).of(x[None])[0], end, share
        known = several(self.baseline, x, self.method, alone=self.method == "gradientshap")
        return known[min(int(which * len(known)), len(known) - 1)], end, share


def several(baselines: torch.Tensor, x: torch.Tensor, method: str, *, alone: bool = False) -> torch.Tensor:
    """Baselines ``(B, C, H, W)`` for a photo ``(C, H, W)``; one ``alone`` may come without its first dimension.

    Raises:
        MethodError: they are of another shape.
    """
    known = baselines.detach().to(x)
    known = known[None] if alone and known.ndim == x.ndim else known
    if known.shape[1:] != x.shape or not len(known):
        raise MethodError(
            f"baseline of {method} must have the shape (B, {', '.join(map(str, x.shape))}), got "
            f"{tuple(baselines.shape)}; give it inputs that the model would take"
        )
    return known


@dataclass(frozen=True)
class Baselines(Perturbation):
    """All baselines, for each photo."""

    full_precision = True

    baselines: torch.Tensor
    method: str = field(compare=False)

    def __str__(self) -> str:
        return "the baselines"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return len(self.baselines)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        known = several(self.baselines, x[0], self.method)
        return copies(x, len(known), lambda image, number: known[number])


def scores_of(baseline: PathBaseline, method: str) -> Scores:
    """The need for the scores of all baselines."""
    return Scores(Baselines(baseline, method)) if isinstance(baseline, torch.Tensor) else score_of(baseline, method)


@dataclass(frozen=True)
class Differences(Reducer):
    """Averages gradients times the difference that each was drawn from."""

    of: RandomPoints

    def begin(self, evidence: Evidence) -> Accumulator:
        def weigh(images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            differences = []
            for image, number in zip(images.tolist(), numbers.tolist(), strict=True):
                start, end, _ = self.of.drawn(evidence.inputs[image], number % self.of.samples)
                differences.append(end - start)
            return values * torch.stack(differences) / self.of.samples

        return SumOfRows(len(evidence.inputs), weigh)


@register
@dataclass(frozen=True)
class GradientSHAP(Method):
    r"""Average :math:`(x - b) \odot \nabla y\bigl(b + t(x - b)\bigr)` over random baselines b and places t in [0, 1].

    With one baseline and no noise it is integrated gradients with random points, and its values add up to
    :math:`y(x) - y(b)` as the samples grow; with several, to the mean of that. Without noise it is `ExpectedGradients`,
    which says by how much they miss it.

    Args:
        samples: the number of points.
        baseline: a tensor ``(B, C, H, W)`` of photos to draw from, such as some of the training data; or a single
            baseline as for `IntegratedGradients`.
        sigma: standard deviation of noise on the photo, as a share of its range.
        seed: of baselines, places and noise; each photo has the same draws, whichever stand beside it.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Erion et al., "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors and Expected
    Gradients", Nature Machine Intelligence 2021; the noise, and the name, as in Lundberg and Lee's package shap.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> x = torch.rand(1, 3, 2, 2)
    >>> a = explain.attribute(model, x, GradientSHAP(samples=4), target=0)
    >>> torch.allclose(a.values.sum(), model(x)[:, 0] - model(0 * x)[:, 0], atol=1e-5)
    True
    """

    samples: int = 20
    baseline: float | str | torch.Tensor | Baseline = 0.0
    sigma: float = 0.0
    seed: int = 0

    name = "gradientshap"
    about = "gradients at random points between the photo and baselines"
    source = cited("erion2021expectedgradients")
    family = GRADIENTS
    style = "signed"
    minimums: ClassVar[Mapping[str, float]] = {"samples": 1, "sigma": 0, "seed": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "baseline", path_baseline(self.name, self.baseline))

    @property
    def gradients(self) -> Attributions:
        points = RandomPoints(self.samples, self.baseline, self.sigma, self.seed)
        return Attributions(points, Saliency(absolute=False), Differences(points))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.gradients})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        gradients: torch.Tensor = evidence[self.gradients]
        return gradients


@register
@dataclass(frozen=True)
class ExpectedGradients(CompleteMethod):
    r"""Average :math:`(x - b) \odot \nabla y\bigl(b + t(x - b)\bigr)` over random baselines b and places t in [0, 1].

    The baselines are photos, such as some of the training data; their mean takes the place of a single one that would
    have to be chosen. The values add up to the score minus the mean score of the baselines as the samples grow, and by
    how much they miss that is ``delta``. `GradientSHAP` is this with noise on the photo.

    Args:
        samples: the number of points.
        baseline: a tensor ``(B, C, H, W)`` to draw from; or a single baseline as for `IntegratedGradients`, which makes
            it that at random places.
        seed: of baselines and places; each photo has the same draws, whichever stand beside it.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive speaks for the target, negative against it.

    Erion et al., "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors and Expected
    Gradients", Nature Machine Intelligence 2021.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> photos = torch.rand(5, 3, 2, 2)
    >>> a = explain.attribute(model, photos[:1], ExpectedGradients(baseline=photos), target=0)
    >>> a.values.shape, a.delta.shape
    (torch.Size([1, 3, 2, 2]), torch.Size([1]))
    """

    samples: int = 20
    baseline: float | str | torch.Tensor | Baseline = 0.0
    seed: int = 0

    name = "expectedgradients"
    about = "gradients between the photo and other photos, on average"
    source = cited("erion2021expectedgradients")
    minimums: ClassVar[Mapping[str, float]] = {"samples": 1, "seed": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "baseline", path_baseline(self.name, self.baseline))

    @property
    def gradients(self) -> Attributions:
        points = RandomPoints(self.samples, self.baseline, 0.0, self.seed, self.name)
        return Attributions(points, Saliency(absolute=False), Differences(points))

    @property
    def baseline_score(self) -> Scores:
        return scores_of(self.baseline, self.name)
