"""Methods made of another: averaged over noise, over flips and scales."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from explain._utils.random_numbers import normal, seeded
from explain.engine import (
    Accumulator,
    Activations,
    Attributions,
    Evidence,
    Need,
    Perturbation,
    PerturbedRows,
    Reducer,
)
from explain.engine.needs import LayerGradients
from explain.engine.perturbations import AnswerTo, SumOfSamples, samples_of
from explain.methods import cam, gradients
from explain.methods.base import (
    Citation,
    Method,
    Style,
    cited,
    over_all,
    ratio,
    register,
    register_wrapper,
    spatial_dims,
)

Statistic = Literal["mean", "square", "variance"]
_PREFIX = {"mean": "smooth", "square": "smoothsquare", "variance": "var"}
_PUBLISHED = {"mean": "smoothgrad", "square": "smoothgrad2", "variance": "vargrad"}


def noise(seed: int, index: int, like: torch.Tensor) -> torch.Tensor:
    """The ``index``-th standard normal sample in the shape of ``like``, the same on every device
    and in every batch."""
    return normal(like.shape, seeded(seed, index)).to(like)


def noises(seed: int, numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The noise samples with these ``numbers`` ``(b,)``: ``(b, ...)``, each shaped as ``like``. A
    sample depends on the seed and its number alone, whatever the batch.
    """
    samples = {number: noise(seed, number, like) for number in set(numbers.tolist())}
    return torch.stack([samples[number] for number in numbers.tolist()])


def span(values: torch.Tensor) -> torch.Tensor:
    """The range, largest less least value, of each sample of ``values`` ``(N, ...)``:
    ``(N, 1, ...)``, which broadcasts over them. The unit of noise."""
    least, most = values.flatten(1).aminmax(dim=1)
    return over_all(most - least, values)


@dataclass(frozen=True)
class NoisyCopies(Perturbation):
    """Copies of the image with noise; ``sigma`` is its standard deviation relative to the range of
    its values."""

    samples: int
    sigma: float
    seed: int

    draws_anew = True
    words = "noisy copies of the photo"

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """Each image plus ``samples`` Gaussian noises, whose standard deviation is the share
        ``sigma`` of the image's range. All images get the same noise.
        """
        x = evidence.inputs
        spread = self.sigma * span(x)

        def noisy(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return x[images] + spread[images] * noises(self.seed, numbers, x[0])

        return samples_of([self.samples] * len(x), x.device, noisy)


@dataclass(frozen=True)
class Statistics(Reducer):
    """The mean, the mean square or the variance over the altered copies of each image."""

    of: Statistic

    def begin(self, evidence: Evidence) -> Accumulator:
        return Moments(self.of)


class WrapperMethod(Method):
    """A method that combines the maps of another method for altered copies of the image."""

    method: Method

    @property
    def attributions(self) -> Attributions:
        """The need for the combined maps."""
        raise NotImplementedError

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self.attributions})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[self.attributions]  # type: ignore[no-any-return]


@register
class Smooth(WrapperMethod):
    r"""What a method says on average over noisy copies of the photo, or how much it varies.

    With the default method this is SmoothGrad, SmoothGrad-Squared and VarGrad: the mean, the mean
    square and the variance of :math:`M(x + \varepsilon_i)`, :math:`\varepsilon_i \sim \mathcal N(0,
    \sigma^2)`. Every copy is asked for the class of the unaltered photo.

    Args:
        method: any method; its name goes into this one's: ``smooth(gradcam)``.
        samples: how many copies.
        sigma: the standard deviation relative to the range of the image's values.
        statistic: ``mean``, ``square`` or ``variance``.
        seed: of the noise; every image gets the same.

    Returns:
        What ``method`` returns, in its units or in their square.

    Smilkov et al., "SmoothGrad: removing noise by adding noise", 2017 (arXiv:1706.03825); Hooker et
    al., "A Benchmark for Interpretability Methods in Deep Neural Networks", NeurIPS 2019; Adebayo
    et al., "Sanity Checks for Saliency Maps", NeurIPS 2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    >>> a = explain.attribute(model, torch.rand(1, 3, 1, 1), Smooth(samples=4), target=0)
    >>> a.method, torch.allclose(a.values[0, :, 0, 0], model[1].weight[0])
    ('smoothgrad', True)
    """

    method: Method = gradients.Saliency(absolute=False)
    samples: int = 25
    sigma: float = 0.15
    statistic: Statistic = "mean"
    seed: int = 0

    minimums = {"samples": 1, "sigma": 0}

    @property
    def _is_published(self) -> bool:
        """Whether the method is the gradient, as in the papers."""
        return self.method == gradients.Saliency(absolute=False)

    @property
    def name(self) -> str:
        if self._is_published:
            return _PUBLISHED[self.statistic]
        return f"{_PREFIX[self.statistic]}({self.method.name})"

    @property
    def summary(self) -> str:
        """The summary of ``smooth(method)`` in lists of methods: the statistic, and the method that
        is averaged over noisy copies."""
        inner = "the gradient" if self._is_published else self.method.name
        statistic = "mean square" if self.statistic == "square" else self.statistic
        return f"{statistic} of {inner} over noisy copies"

    @property
    def source(self) -> Citation:
        return cited(_PUBLISHED[self.statistic])

    @property
    def style(self) -> Style:
        unsigned: Style = "heat" if self.method.style in ("heat", "evidence") else "intensity"
        return self.method.style if self.statistic == "mean" else unsigned

    @property
    def attributions(self) -> Attributions:
        return Attributions(
            NoisyCopies(self.samples, self.sigma, self.seed),
            self.method,
            Statistics(self.statistic),
        )


register(Smooth(statistic="square"))
register(Smooth(statistic="variance"))
register_wrapper("smooth", Smooth)
register_wrapper("smoothsquare", partial(Smooth, statistic="square"))
register_wrapper("var", partial(Smooth, statistic="variance"))


class Moments(Accumulator):
    """A statistic of the values of each image, which come one by one (Welford, 1962)."""

    def __init__(self, statistic: Statistic) -> None:
        self._statistic = statistic
        # for each image: the number of values, their mean, the sum of squared deviations from it
        self._moments: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Take the maps ``values`` ``(b, ...)`` of some perturbed inputs, and update the count, the
        mean and the squares of their images.
        """
        if self._statistic == "square":
            values = values**2
        for image, value in zip(images.tolist(), values, strict=True):
            zeros = torch.zeros_like(value)
            count, mean, squares = self._moments.get(image, (0, zeros, zeros))
            deviation = value - mean
            mean = mean + deviation / (count + 1)
            self._moments[image] = count + 1, mean, squares + deviation * (value - mean)

    def result(self) -> torch.Tensor:
        """The mean over the perturbed inputs of each image, their mean square, or their variance
        ``(N, ...)``, by ``statistic``; images in order.
        """
        moments = [self._moments[image] for image in sorted(self._moments)]
        if self._statistic == "variance":
            return torch.stack([squares / count for count, _, squares in moments])
        return torch.stack([mean for _, mean, _ in moments])


@dataclass(frozen=True)
class MeanPowers(Reducer):
    """The means of the first three powers of the results for the ``samples`` copies of each
    image."""

    samples: int

    def begin(self, evidence: Evidence) -> Accumulator:
        def powers(
            images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            return torch.stack([values, values**2, values**3], 1) / self.samples

        return SumOfSamples(len(evidence.inputs), powers)


@register
class SmoothGradCAMPlusPlus(cam.ClassActivationMap):
    r"""Grad-CAM++ with derivatives averaged over noisy copies.

    Grad-CAM++ with each derivative averaged over noisy copies of the photo; the feature maps are
    the clean ones.

    With :math:`D_p` the mean over the copies of the p-th power of the gradient,
    :math:`\alpha = D_2 / (2 D_2 + \sum_{ab} A_{ab} D_3)` and :math:`w_k = \sum_{ij}
    \alpha\,\mathrm{ReLU}(D_1)`. The paper prints :math:`D_1` above the fraction bar; :math:`D_2` is
    what makes it Grad-CAM++ where there is no noise.

    Args:
        samples: how many copies.
        sigma: the standard deviation of the noise relative to the range of the image's values.
        seed: of the noise; every image gets the same.

    Returns:
        ``(N, h, w)`` at the layer's resolution, its positive part.

    Omeiza et al., "Smooth Grad-CAM++", 2019 (arXiv:1908.01224).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> a = explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), SmoothGradCAMPlusPlus(samples=2), target=1, layer="0"
    ... )
    >>> a.values.shape
    torch.Size([1, 6, 6])
    """

    samples: int = 25
    sigma: float = 0.15
    seed: int = 0

    name = "smoothgradcam++"
    minimums = {"samples": 1, "sigma": 0}

    @property
    def derivatives(self) -> Attributions:
        """For Smooth Grad-CAM++, the need for the first three powers of the layer's gradient,
        averaged over the noisy copies: ``(N, 3, C, h, w)``."""
        noisy = NoisyCopies(self.samples, self.sigma, self.seed)
        return Attributions(noisy, AnswerTo(LayerGradients()), MeanPowers(self.samples))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Activations(), self.derivatives})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map ``(N, h, w)`` of Smooth Grad-CAM++: Grad-CAM++ with the derivatives averaged over
        noisy copies."""
        first, second, third = evidence[self.derivatives].unbind(1)
        a = evidence.activations
        alpha = ratio(second, 2 * second + a.sum(spatial_dims(a), keepdim=True) * third)
        weights = (alpha * first.clamp(min=0)).sum(spatial_dims(a))
        return cam.weighted_maps(weights, evidence, relu=True)


@dataclass(frozen=True)
class Views(Perturbation):
    """The image shown at several scales, each also mirrored if ``flip``."""

    flip: bool
    scales: tuple[float, ...]

    @property
    def kinds(self) -> list[tuple[float, bool]]:
        flips = (False, True) if self.flip else (False,)
        return [(scale, flip) for scale in self.scales for flip in flips]

    words = "the photo mirrored and at other scales"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return len(self.kinds)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """The image in each view (enlarged, mirrored), one input for each; ``carry`` moves other
        tensors, such as masks of the image, in the same way.
        """
        x = evidence.inputs

        def carry(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            """Show the samples of a tensor ``(b, ...)`` as the views with these numbers ``(b,)``
            show the image.
            """
            kinds = [self.kinds[number] for number in numbers.tolist()]
            return torch.cat(
                [
                    _shown(image[None], scale, flip, padding="reflection")
                    for image, (scale, flip) in zip(tensor, kinds, strict=True)
                ]
            )

        counts = [len(self.kinds)] * len(x)
        samples = samples_of(counts, x.device, lambda images, numbers: carry(x[images], numbers))
        return replace(samples, carry=carry)


@dataclass(frozen=True)
class MappedBack(Reducer):
    """The sum of the maps of all views of each image, and that of ones, ``(N, 2, ...)``, each
    mapped back to where the image is."""

    views: Views

    def begin(self, evidence: Evidence) -> Accumulator:
        """The sums ``(N, 2, ...)`` over the views of each image: of the maps moved back to the
        image's place, and of how much each view covers there.
        """
        image_dims = evidence.inputs.ndim

        def mapped_back(
            images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            pairs = zip(numbers.tolist(), values, strict=True)
            return torch.stack([view_moved_back(number, value) for number, value in pairs])

        def view_moved_back(number: int, value: torch.Tensor) -> torch.Tensor:
            """The map ``value`` of one view, moved back to the image's place, and the weight of the
            view at each place: ``(2, ...)``.
            """
            scale, flip = self.views.kinds[number]
            has_channels = value.ndim == image_dims - 1
            as_image = value[None] if has_channels else value[None, None]
            # both are zero where the view does not show the image
            moved = _shown(as_image, 1 / scale, flip, padding="zeros")
            coverage = _shown(torch.ones_like(as_image), 1 / scale, flip, padding="zeros")
            return torch.cat([moved, coverage]).reshape((2, *value.shape))

        return SumOfSamples(len(evidence.inputs), mapped_back)


@dataclass(frozen=True)
class Augmented(WrapperMethod):
    """What a method says on average over the photo as it is, flipped, and shown larger and smaller,
    each mapped back.

    The photo keeps its size: it is enlarged and cut off, or made smaller with its border mirrored,
    so any network takes it. A place that a variant does not show takes no part in its average.

    Args:
        method: any method; its name goes into this one's: ``augmented(gradcam)``.
        flip: also mirrored left to right.
        scales: how large the photo is shown.

    Returns:
        What ``method`` returns.

    Shanmugam et al., "Better Aggregation in Test-Time Augmentation", ICCV 2021; for maps:
    Gildenblat, 2021.

    >>> import explain, torch
    >>> from explain.methods import GradCAM
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> a = explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), Augmented(GradCAM()), target=1, layer="0"
    ... )
    >>> a.method, a.values.shape
    ('augmented(gradcam)', torch.Size([1, 6, 6]))
    """

    method: Method
    flip: bool = True
    scales: tuple[float, ...] = (1.0, 0.9, 1.1)

    source = cited("gildenblat2021pytorchgradcam")
    minimums = {"scales": 0.1}
    below = {"scales": torch.inf}

    @property
    def name(self) -> str:
        return f"augmented({self.method.name})"

    @property
    def summary(self) -> str:
        return f"{self.method.name} over flips and scales, mapped back"

    @property
    def style(self) -> Style:
        return self.method.style

    @property
    def attributions(self) -> Attributions:
        views = Views(self.flip, self.scales)
        return Attributions(views, self.method, MappedBack(views))

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        total, weight = super().__call__(evidence).unbind(1)
        return total / weight.clamp(min=torch.finfo(weight.dtype).tiny)


register_wrapper("augmented", Augmented)


def _shown(x: torch.Tensor, scale: float, flip: bool, *, padding: str) -> torch.Tensor:
    """An image ``(1, C, H, W)`` enlarged about its centre by ``scale``, then mirrored if ``flip``;
    ``padding`` as in `grid_sample`. So every frame of a video; other inputs as they are.
    """
    if x.ndim < 4:  # an input beside the image that is no picture
        return x
    if scale != 1:
        # each pixel of the result is read off the image, nearer to its centre: 1 / scale
        axes = [1 / scale, 1 / scale, *[1.0] * (x.ndim - 4)]  # width, height, time
        theta = F.pad(torch.tensor(axes, dtype=torch.float64, device="cpu").diag(), (0, 1))[None]
        grid = F.affine_grid(theta.to(x), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)
    return x.flip(-1) if flip else x
