"""Gradients added up along a path from a baseline to the image: a straight line (IG), a blur that
becomes sharp, or random points."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch

from explain._utils.errors import BaselineError, MethodError, short_repr
from explain._utils.random_numbers import normal, seeded, uniform
from explain.baselines.base import Baseline
from explain.baselines.replacements import blurred, get_baseline
from explain.engine import (
    Accumulator,
    Attributions,
    Evidence,
    Need,
    Perturbation,
    PerturbedRows,
    Reducer,
)
from explain.engine.needs import InputGradients
from explain.engine.perturbations import (
    Build,
    OneForEach,
    Scores,
    SumOfSamples,
    one_by_one,
    samples_of,
)
from explain.layers.layouts import Grids
from explain.methods.base import GRADIENTS, Method, register, spatial_dims
from explain.methods.gradients import Saliency

PathBaseline: TypeAlias = float | str | tuple[float, ...] | torch.Tensor | Baseline
Rule = Literal["gausslegendre", "left", "right", "midpoint", "trapezoid"]


@cache
def quadrature(rule: Rule, steps: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return points in [0, 1] and weights, which add up to one, of a quadrature ``rule``: two
    arrays ``(steps,)``."""
    if rule == "gausslegendre":
        points, weights = np.polynomial.legendre.leggauss(steps)
        return (points + 1) / 2, weights / 2  # these are for [-1, 1]
    if rule == "trapezoid":
        weights = np.full(steps, 1 / (steps - 1))
        weights[[0, -1]] /= 2  # both ends belong to one interval only
        return np.linspace(0, 1, steps), weights
    first_point = {"left": 0.0, "midpoint": 0.5, "right": 1.0}[rule]
    return (np.arange(steps) + first_point) / steps, np.full(steps, 1 / steps)


BASELINES = ("mean", "blur", "least", "most")
"""Baselines by name: the image's mean colour, the image blurred, and the least and largest value of
each channel."""


@lru_cache(maxsize=32)
def _on_device(rule: Rule, steps: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The points and weights ``(2, steps)`` of a quadrature, kept, since each copy to a device
    waits for it."""
    with torch.inference_mode(False):  # they may be used in a graph later
        return torch.from_numpy(np.stack(quadrature(rule, steps))).to(device, dtype)


@dataclass(frozen=True)
class PathStart(OneForEach):
    """The baseline of each image: a number for all values or for each channel, one of `BASELINES`,
    or a tensor."""

    baseline: PathBaseline = 0.0

    is_reference = True
    words = "the baseline"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """The baseline of each image ``(N, C, H, W)``, where paths begin, in whatever form the
        option has: a tensor, numbers, a `Baseline`, or a name such as "blur".
        """
        x = evidence.inputs
        baseline = self.baseline
        if isinstance(baseline, torch.Tensor):
            baselines = several(baseline, x[0])
            if len(baselines) not in (1, evidence.images):
                raise MethodError(
                    f"baseline must be one, or one for each image, got {len(baselines)}; give one"
                )
            return evidence.of_images(baselines)
        if isinstance(baseline, tuple):
            if len(baseline) not in (1, x.shape[1]):
                raise MethodError(
                    f"baseline must have {x.shape[1]} values, got {len(baseline)}; give one a "
                    "channel"
                )
            return torch.tensor(baseline).to(x).reshape(1, -1, *[1] * (x.ndim - 2)).expand_as(x)
        if isinstance(baseline, (int, float)):
            return torch.full_like(x, float(baseline))
        if x.ndim < 4:  # an input beside the image that is no picture
            raise MethodError(
                f"baseline must be a number for an input with {x.ndim} sides, got {baseline!r}; "
                "give 0"
            )
        if isinstance(baseline, Baseline):
            keep_nothing = x.new_zeros(1, 1, *x.shape[2:])
            return baseline(x, keep_nothing)
        if baseline == "blur":
            return _blurred(x)
        statistic: Any = {"mean": x.mean, "least": x.amin, "most": x.amax}[baseline]
        return statistic(spatial_dims(x), keepdim=True).expand_as(x)  # type: ignore[no-any-return]

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """The baseline of each input ``(N, C, H, W)``, for callers without evidence: DeepLIFT's
        reference, and random paths."""
        zero = inputs.new_zeros(len(inputs))
        grids = Grids(tuple(inputs.shape[2:]))
        # nothing but the inputs is looked at
        return self.perturbed(Evidence(inputs, zero, classes=None, target="", grids=grids))


class Path(Perturbation):
    """Points between a baseline and the image, and the weight of the gradient at each."""

    steps: int

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.steps

    def points(self, evidence: Evidence) -> Build:
        """How to make the points ``(b, C, H, W)`` at which gradients are taken, from the numbers of
        their images and their numbers on the path, ``(b,)`` each."""
        raise NotImplementedError

    def weights(self, evidence: Evidence) -> Build:
        """How to make the weights of the gradients, which broadcast over ``(b, C, H, W)``, for the
        same images and numbers as `points`."""
        raise NotImplementedError

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """One input for each point of the path of each image, in the order of the path."""
        x = evidence.inputs
        return samples_of([self.steps] * len(x), x.device, self.points(evidence))

    @property
    def gradients(self) -> Attributions:
        """The need for the weighted sum of the gradients."""
        return Attributions(self, Saliency(absolute=False), WeightedSum(self))


@dataclass(frozen=True)
class WeightedSum(Reducer):
    """Adds up what was found along a path, with the weights of the path."""

    path: Path

    def begin(self, evidence: Evidence) -> Accumulator:
        weights = self.path.weights(evidence)
        return SumOfSamples(
            len(evidence.inputs),
            lambda images, numbers, values: values * weights(images, numbers).to(values),
        )


@dataclass(frozen=True)
class StraightPath(Path):
    """Points on the straight line from a baseline to the image, with the weights of a
    quadrature."""

    steps: int
    start: PathStart
    rule: Rule

    words = "points on the path from the baseline to the photo"

    def points(self, evidence: Evidence) -> Build:
        """For integrated gradients, how to make the points: the baseline and the image mixed by the
        places of the quadrature."""
        x = evidence.inputs
        start = self.start.perturbed(evidence)
        points, _ = self._points_and_weights(x)
        return lambda images, numbers: torch.lerp(start[images], x[images], points[numbers])

    def weights(self, evidence: Evidence) -> Build:
        _, weights = self._points_and_weights(evidence.inputs)
        return lambda images, numbers: weights[numbers]

    def _points_and_weights(self, x: torch.Tensor) -> torch.Tensor:
        """For integrated gradients, the points and the weights of the quadrature ``(2, steps, 1,
        ..., 1)``, which broadcast over copies of ``x`` and have its type.
        """
        numbers = _on_device(self.rule, self.steps, x.dtype, x.device)
        return numbers.reshape(2, -1, *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class ScoreAndGradient:
    """The score of each perturbed input, and then the gradient's values: ``(N, 1 + C * H * W)``."""

    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The score of each perturbed input in column 0, then its gradient flattened: ``(b, 1 + C *
        H * W)``. Searches and `ByDirection` take it apart in this order.
        """
        gradient = evidence[InputGradients()]
        return torch.cat([evidence.score.to(gradient)[:, None], gradient.flatten(1)], 1)


class CompleteMethod(Method):
    """A method whose values add up to the score minus that of a baseline, or the mean of several.
    It may have an option ``baseline``, which is brought into the form that paths take.
    """

    family = GRADIENTS
    style = "signed"
    baseline: Any

    def __post_init__(self) -> None:
        """Check the options, and turn the name of one of `explain.baselines` into the baseline; the
        names in `BASELINES` stay texts for `PathStart`.
        """
        super().__post_init__()
        baseline = getattr(self, "baseline", None)
        # the name of one of `explain.baselines`
        if isinstance(baseline, str) and baseline not in BASELINES:
            try:
                object.__setattr__(self, "baseline", get_baseline(baseline))
            except BaselineError as error:
                raise MethodError(
                    f"baseline of {self.name} must be a number, a tensor or a name: {error}"
                ) from None

    @property
    def start(self) -> PathStart:
        """The baseline of each image."""
        return PathStart(self.baseline)

    @property
    def along(self) -> Path:
        """The path along which gradients are taken."""
        raise NotImplementedError

    @property
    def baseline_score(self) -> Scores:
        """The need for the scores of the baselines of each image."""
        return Scores(self.start)

    @cached_property
    def gradient_sum(self) -> Attributions:
        """The need for the weighted sum of the gradients."""
        return self.along.gradients

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.gradient_sum, self.baseline_score})

    @property
    def delta_needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.baseline_score})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[self.gradient_sum]  # type: ignore[no-any-return]

    def expected_sum(self, evidence: Evidence) -> torch.Tensor:
        """The score less that of the baseline, or less the mean over several: ``(N,)``."""
        scores: torch.Tensor = evidence[self.baseline_score].reshape(len(evidence.inputs), -1)
        return evidence.score - scores.mean(1)


@register
class IntegratedGradients(CompleteMethod):
    r"""Gradients integrated from a baseline to the photo.

    Add up gradients along the straight line from a baseline to the photo, and multiply with their
    difference.

    :math:`(x - b) \odot \int_0^1 \nabla y\bigl(b + t(x - b)\bigr)\,dt`; the values add up to
    :math:`y(x) - y(b)`, and by how much the quadrature misses that is the attribution's ``delta``;
    a warning says so where it is more than half.

    Args:
        steps: the number of points.
        baseline: a value for every input, ``mean`` (each image's mean colour), ``blur`` (the image,
            blurred), ``least`` or ``most`` (the least or largest value of each of its channels), or
            a tensor ``(C, H, W)``; 0 is what preprocessing makes of the training data's mean
            colour.
        rule: ``gausslegendre``, ``left``, ``right``, ``midpoint`` or ``trapezoid``.
        multiply_by_inputs: multiply the mean gradient along the path with :math:`x - b`, as
            published; False gives the mean gradient itself, in units of the score per unit of the
            input.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... )
    >>> a = explain.attribute(
    ...     model, torch.rand(2, 3, 2, 2), IntegratedGradients(steps=64), target=0
    ... )
    >>> a.values.shape, bool((a.delta.abs() < 0.01).all())
    (torch.Size([2, 3, 2, 2]), True)
    """

    steps: int = 50
    baseline: float | str | torch.Tensor | Baseline = 0.0
    rule: Rule = "gausslegendre"
    multiply_by_inputs: bool = True

    __repr__ = short_repr

    minimums = {"steps": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule == "trapezoid" and self.steps < 2:
            raise MethodError(
                f"steps of {self.name} must be at least 2 for the trapezoid rule, got {self.steps}"
            )

    @property
    def along(self) -> Path:
        return StraightPath(self.steps, self.start, self.rule)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The values of `IntegratedGradients`: the gradients added up along the path ``(N, C, H,
        W)``, times the difference from the baseline if ``multiply_by_inputs``."""
        total = super().__call__(evidence)
        return self._from_start(evidence) * total if self.multiply_by_inputs else total

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor | None:
        """The convergence delta of `IntegratedGradients`: by how much the values ``(N, C, H, W)``
        miss the score of the photo less that of the baseline, ``(N,)``; values without the factor
        of the inputs are multiplied first."""
        return super().delta(
            evidence, values if self.multiply_by_inputs else self._from_start(evidence) * values
        )

    def _from_start(self, evidence: Evidence) -> torch.Tensor:
        """The difference between the images and the baseline."""
        return evidence.inputs - self.start.perturbed(evidence)


def _blurred(x: torch.Tensor) -> torch.Tensor:
    """Blur images ``(N, C, H, W)`` with a Gaussian whose standard deviation is a tenth of the
    shorter side: the baseline "blur"."""
    from torchvision.transforms.functional import gaussian_blur

    sigma = min(x.shape[-2:]) / 10
    # the image is reflected at its edges, which only goes as far as it reaches
    radius = min(int(3 * sigma), min(x.shape[-2:]) - 1)
    planes = x.flatten(0, -3)[:, None]
    # along one side after the other: the same as a square kernel, and much faster
    for kernel in ([2 * radius + 1, 1], [1, 2 * radius + 1]):
        planes = gaussian_blur(planes, kernel, [sigma, sigma])
    return planes.reshape(x.shape)


@dataclass(frozen=True)
class BlurPath(Path):
    """The image, less and less blurred. ``sigma``, the first blur as a share of the shorter side,
    falls in equal ``steps``. Points are at the steps' beginnings, or with ``middle`` halfway."""

    steps: int
    sigma: float
    middle: bool

    words = "the photo, less and less blurred"

    def points(self, evidence: Evidence) -> Build:
        """For blur integrated gradients, how to make the points: each image blurred as at step
        ``step``, one by one, as each step has its own kernel."""
        x = evidence.inputs
        if x.ndim < 4:
            raise MethodError(
                f"input must be a picture (N, C, H, W), got {tuple(x.shape)}; take "
                "integratedgradients"
            )
        return one_by_one(lambda image, step: self.at(x[image], step + self.middle / 2))

    def weights(self, evidence: Evidence) -> Build:
        """For blur integrated gradients, how to make the weights: what the image changes by in each
        step, as it becomes sharper."""
        x = evidence.inputs
        return one_by_one(lambda image, step: self.at(x[image], step + 1) - self.at(x[image], step))

    def at(self, x: torch.Tensor, step: float) -> torch.Tensor:
        """The image ``(C, H, W)`` after so many steps; after all of them, it is sharp."""
        return blurred(x, self.sigma * min(x.shape[-2:]) * (1 - step / self.steps))


@register
class BlurIntegratedGradients(CompleteMethod):
    r"""Gradients integrated while a blurred photo becomes sharp.

    Add up gradients while a blurred photo becomes sharp, each times what has changed.

    :math:`\sum_i \nabla y(L_{\sigma_i}) \odot (L_{\sigma_{i+1/2}} - L_{\sigma_{i-1/2}})`, where
    :math:`L_\sigma` is the photo behind a Gaussian blur whose standard deviation falls to zero in
    equal steps. No colour has to be chosen as a baseline. The values add up to :math:`y(x) -
    y(L_{\sigma_0})`, and by how much the steps miss that is ``delta``.

    Args:
        steps: how many; the authors take 100.
        sigma: the first standard deviation, as a share of the photo's shorter side; the authors
            take 50 pixels.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Xu, Venugopalan and Sundararajan, "Attribution in Scale and Space", CVPR 2020. The authors
    multiply the gradient at the beginning of each step with a derivative of the blur; here it is
    taken at the middle, and multiplied with the difference of two blurs, so that a linear model's
    values add up exactly.

    >>> import explain
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(48, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... )
    >>> a = explain.attribute(model, torch.rand(2, 3, 4, 4), BlurIntegratedGradients(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 0.01).all())
    (torch.Size([2, 3, 4, 4]), True)
    """

    steps: int = 50
    sigma: float = 0.2

    minimums = {"steps": 1, "sigma": 0}

    @property
    def along(self) -> BlurPath:
        return BlurPath(self.steps, self.sigma, middle=True)

    @property
    def baseline_score(self) -> Scores:
        return Scores(BlurPath(1, self.sigma, middle=False))  # where the path begins


@dataclass(frozen=True)
class RandomPoints(Path):
    """Random points between the image, which gets noise, and baselines drawn at random; a
    gradient's weight is the difference of these."""

    steps: int
    baseline: PathBaseline
    sigma: float
    seed: int

    words = "random points between the photo and baselines"

    def points(self, evidence: Evidence) -> Build:
        """How to make the random points of GradientSHAP: a baseline and the noisy image, mixed by a
        random share."""
        draw = self.drawing(evidence.inputs)

        def point(image: int, sample: int) -> torch.Tensor:
            """The point ``(C, H, W)`` of one sample of an image."""
            start, end, share = draw(image, sample)
            return torch.lerp(start, end, share)

        return one_by_one(point)

    def weights(self, evidence: Evidence) -> Build:
        """How to make the weights: the noisy image less the baseline that the same point was drawn
        with, over the number of points."""
        draw = self.drawing(evidence.inputs)

        def weight(image: int, sample: int) -> torch.Tensor:
            """The weight ``(C, H, W)`` of one sample; the seed draws what it drew for the point."""
            start, end, _ = draw(image, sample)
            return (end - start) / self.steps

        return one_by_one(weight)

    def drawing(
        self, x: torch.Tensor
    ) -> Callable[[int, int], tuple[torch.Tensor, torch.Tensor, float]]:
        """The function from the numbers of an image and a sample to a baseline, the noisy image
        ``(C, H, W)`` each, and the share of the path; draws depend on the seed and sample alone.
        """
        has_several = isinstance(self.baseline, torch.Tensor)
        starts = (
            several(self.baseline, x[0])
            if isinstance(self.baseline, torch.Tensor)
            else PathStart(self.baseline).of(x)
        )

        def draw(image: int, sample: int) -> tuple[torch.Tensor, torch.Tensor, float]:
            """The baseline, the image with noise, and the share of the path between them, for
            sample number ``sample`` of an image."""
            generator = seeded(self.seed, sample)
            choice, share = uniform((2,), generator).tolist()
            photo = x[image]
            spread = self.sigma * (photo.max() - photo.min())
            end = photo + spread * normal(photo.shape, generator).to(photo)
            # at most the last one, however the product is rounded
            chosen = min(int(choice * len(starts)), len(starts) - 1)
            return starts[chosen if has_several else image], end, share

        return draw


def several(baselines: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Check a tensor of baselines, and bring it into the shape ``(B, C, H, W)`` for images such as
    ``x`` ``(C, H, W)``; a single baseline may come without its first dimension.
    """
    shaped = baselines.detach().to(x)
    shaped = shaped[None] if shaped.ndim == x.ndim else shaped
    if shaped.shape[1:] != x.shape or not len(shaped):
        shape = ", ".join(map(str, x.shape))
        got = tuple(baselines.shape)
        raise MethodError(
            f"baseline must be a tensor (B, {shape}) of one or several, got shape {got}; reshape it"
        )
    return shaped


@dataclass(frozen=True)
class Baselines(Perturbation):
    """All baselines ``(B, C, H, W)``, run for each image."""

    baselines: torch.Tensor

    words = "the baselines"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return len(self.baselines)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """An input for each of the B baselines, the same for each image: their scores, whose mean
        the method compares with.
        """
        x = evidence.inputs
        starts = several(self.baselines, x[0])
        return samples_of([len(starts)] * len(x), x.device, lambda images, numbers: starts[numbers])


class SeveralBaselines(CompleteMethod):
    """A method that compares with a baseline, or with each of several ``(B, C, H, W)``."""

    @property
    def baseline_score(self) -> Scores:
        return (
            Scores(Baselines(self.baseline))
            if isinstance(self.baseline, torch.Tensor)
            else super().baseline_score
        )


class RandomPathMethod(SeveralBaselines):
    """A method that averages gradients at random points between the image and baselines."""

    samples: int
    seed: int
    sigma: float = 0.0
    minimums = {"samples": 1, "seed": 0}

    @property
    def along(self) -> Path:
        return RandomPoints(self.samples, self.baseline, self.sigma, self.seed)


@register
class GradientSHAP(RandomPathMethod):
    r"""Gradients at random points between the photo and baselines.

    Average :math:`(x - b) \odot \nabla y\bigl(b + t(x - b)\bigr)` over random baselines b and
    places t in [0, 1].

    With one baseline and no noise it is integrated gradients with random points, and its values add
    up to
    :math:`y(x) - y(b)` as the samples grow; with several, to the mean of that. Without noise it is
    `ExpectedGradients`, which says by how much they miss it.

    Args:
        samples: the number of points.
        baseline: a tensor ``(B, C, H, W)`` of photos to draw from, such as some of the training
            data; or a single baseline as for `IntegratedGradients`.
        sigma: standard deviation of noise on the photo, as a share of its range.
        seed: of baselines, places and noise; each photo has the same draws, whichever stand beside
            it.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Erion et al., "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors
    and Expected Gradients", Nature Machine Intelligence 2021; the noise, and the name, as in
    Lundberg and Lee's package shap.

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

    minimums = {"samples": 1, "sigma": 0, "seed": 0}

    @cached_property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.along.gradients})

    def expected_sum(self, evidence: Evidence) -> None:  # type: ignore[override]
        """None: the noise on the photo leaves no sum that the values should have."""


@register
class ExpectedGradients(RandomPathMethod):
    r"""Gradients between the photo and other photos, on average.

    Average :math:`(x - b) \odot \nabla y\bigl(b + t(x - b)\bigr)` over random baselines b and
    places t in [0, 1].

    The baselines are photos, such as some of the training data; their mean takes the place of a
    single one that would have to be chosen. The values add up to the score minus the mean score of
    the baselines as the samples grow, and by how much they miss that is ``delta``. `GradientSHAP`
    is this with noise on the photo.

    Args:
        samples: the number of points.
        baseline: a tensor ``(B, C, H, W)`` to draw from; or a single baseline as for
            `IntegratedGradients`, which makes it that at random places.
        seed: of baselines and places; each photo has the same draws, whichever stand beside it.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Erion et al., "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors
    and Expected Gradients", Nature Machine Intelligence 2021.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... )
    >>> photos = torch.rand(5, 3, 2, 2)
    >>> a = explain.attribute(model, photos[:1], ExpectedGradients(baseline=photos), target=0)
    >>> a.values.shape, a.delta.shape
    (torch.Size([1, 3, 2, 2]), torch.Size([1]))
    """

    samples: int = 20
    baseline: float | str | torch.Tensor | Baseline = 0.0
    seed: int = 0
