"""Methods made of another: averaged over noise, over flips and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from explain.engine import Activations, Evidence, LayerGradients, Need, Reruns
from explain.methods.backprop import Saliency
from explain.methods.base import Method, Style, at_least, over_all, spatial_dims, uses_layer
from explain.methods.cam import BOTH, ratio, weighted
from explain.methods.checks import check_options

Statistic = Literal["mean", "square", "variance"]
_PREFIX = {"mean": "smooth", "square": "smoothsquare", "variance": "var"}
_PUBLISHED = {"mean": "smoothgrad", "square": "smoothgrad2", "variance": "vargrad"}
_PAPERS = {"mean": "Smilkov et al., 2017", "square": "Hooker et al., NeurIPS 2019", "variance": "Adebayo et al., 2018"}


def noise(seed: int, index: int, like: torch.Tensor) -> torch.Tensor:
    """The ``index``-th standard normal sample in the shape of ``like``, the same on every device and in every batch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
    return torch.randn(like.shape, generator=generator).to(like)


def noisy(evidence: Evidence, samples: int, sigma: float, seed: int) -> tuple[torch.Tensor, Noisy]:
    """The owners of ``samples`` noisy copies of each image, and what makes them; sigma is relative to each range."""
    x = evidence.inputs
    count = len(x)
    least, most = x.flatten(1).aminmax(dim=1)
    spread = sigma * over_all(most - least, x)
    return torch.arange(count, device=x.device).repeat(samples), Noisy(x, spread, seed)


@dataclass(frozen=True)
class Noisy:
    """Makes noisy copies of images by row number: all images with the first noise, then all with the second."""

    images: torch.Tensor
    spread: torch.Tensor
    seed: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        image, sample = rows % len(self.images), rows // len(self.images)
        drawn = {index: noise(self.seed, index, self.images[0]) for index in set(sample.tolist())}
        return self.images[image] + self.spread[image] * torch.stack([drawn[index] for index in sample.tolist()])


@dataclass(frozen=True)
class Smooth:
    r"""What a method says on average over noisy copies of the photo, or how much it varies.

    With the default method this is SmoothGrad, SmoothGrad-Squared and VarGrad: the mean, the mean square and the
    variance of :math:`M(x + \varepsilon_i)`, :math:`\varepsilon_i \sim \mathcal N(0, \sigma^2)`. Every copy is asked
    for the class of the unaltered photo.

    Args:
        method: any method; its name goes into this one's: ``smooth(gradcam)``.
        samples: how many copies.
        sigma: the standard deviation relative to the range of the image's values.
        statistic: ``mean``, ``square`` or ``variance``.
        seed: of the noise; every image gets the same.

    Returns:
        What ``method`` returns, in its units or in their square.

    Smilkov et al., "SmoothGrad: removing noise by adding noise", 2017 (arXiv:1706.03825); Hooker et al., "A Benchmark
    for Interpretability Methods in Deep Neural Networks", NeurIPS 2019; Adebayo et al., "Sanity Checks for Saliency
    Maps", NeurIPS 2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    >>> a = explain.attribute(model, torch.rand(1, 3, 1, 1), Smooth(samples=4), target=0)
    >>> a.method, torch.allclose(a.values[0, :, 0, 0], model[1].weight[0])
    ('smoothgrad', True)
    """

    method: Method = field(default_factory=lambda: Saliency(absolute=False))
    samples: int = 25
    sigma: float = 0.15
    statistic: Statistic = "mean"
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self, samples=1, sigma=0)

    @property
    def name(self) -> str:
        if self.method == Saliency(absolute=False):
            return _PUBLISHED[self.statistic]
        return f"{_PREFIX[self.statistic]}({self.method.name})"

    @property
    def about(self) -> str:
        inner = "the gradient" if self.method == Saliency(absolute=False) else self.method.name
        of = {"mean": "mean", "square": "mean square", "variance": "variance"}[self.statistic]
        return f"{of} of {inner} over noisy copies"

    @property
    def paper(self) -> str:
        return _PAPERS[self.statistic]

    @property
    def style(self) -> Style:
        unsigned: Style = "heat" if self.method.style == "heat" else "intensity"
        return self.method.style if self.statistic == "mean" else unsigned

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Reruns(of_layer=uses_layer(self.method))})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        owners, make = noisy(evidence, self.samples, self.sigma, self.seed)
        moments = Moments()
        for rows, values in evidence.variants.attributions(self.method, owners, make):
            for image, value in zip(owners[rows].tolist(), values, strict=True):
                moments.add(image, value**2 if self.statistic == "square" else value)
        return moments.variance() if self.statistic == "variance" else moments.mean()


class Moments:
    """Mean and variance of tensors for each of several images, one at a time (Welford, 1962)."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def add(self, image: int, value: torch.Tensor) -> None:
        count, mean, squares = self._of.get(image, (0, torch.zeros_like(value), torch.zeros_like(value)))
        off = value - mean
        mean = mean + off / (count + 1)
        self._of[image] = count + 1, mean, squares + off * (value - mean)

    def mean(self) -> torch.Tensor:
        return torch.stack([self._of[image][1] for image in sorted(self._of)])

    def variance(self) -> torch.Tensor:
        return torch.stack([squares / count for _, (count, _, squares) in sorted(self._of.items())])


@dataclass(frozen=True)
class _LayerGradient:
    """The plain gradient in the feature maps, for methods that average it."""

    needs: ClassVar[frozenset[Need]] = BOTH

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[LayerGradients()]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SmoothGradCAMPlusPlus:
    r"""Grad-CAM++ with each derivative averaged over noisy copies of the photo; the feature maps are the clean ones.

    With :math:`D_p` the mean over the copies of the p-th power of the gradient,
    :math:`\alpha = D_2 / (2 D_2 + \sum_{ab} A_{ab} D_3)` and :math:`w_k = \sum_{ij} \alpha\,\mathrm{ReLU}(D_1)`. The
    paper prints :math:`D_1` above the fraction bar; :math:`D_2` is what makes it Grad-CAM++ where there is no noise.

    Args:
        samples: how many copies.
        sigma: the standard deviation of the noise relative to the range of the image's values.
        seed: of the noise; every image gets the same.

    Returns:
        ``(N, h, w)`` at the layer's resolution, its positive part.

    Omeiza et al., "Smooth Grad-CAM++", 2019 (arXiv:1908.01224).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> a = explain.attribute(model, torch.rand(1, 3, 8, 8), SmoothGradCAMPlusPlus(samples=2), target=1, layer="0")
    >>> a.values.shape
    torch.Size([1, 6, 6])
    """

    samples: int = 25
    sigma: float = 0.15
    seed: int = 0

    name: ClassVar[str] = "smoothgradcam++"
    about: ClassVar[str] = "Grad-CAM++ with derivatives averaged over noisy copies"
    paper: ClassVar[str] = "Omeiza et al., 2019"
    style: ClassVar[Style] = "heat"
    needs: ClassVar[frozenset[Need]] = frozenset({Activations(), Reruns(of_layer=True)})

    def __post_init__(self) -> None:
        check_options(self, samples=1, sigma=0)

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        owners, make = noisy(evidence, self.samples, self.sigma, self.seed)
        sums = [torch.zeros_like(evidence.activations) for _ in range(3)]
        for rows, g in evidence.variants.attributions(_LayerGradient(), owners, make):
            for power, total in enumerate(sums, start=1):
                total.index_add_(0, owners[rows], g**power)
        first, second, third = (total / self.samples for total in sums)
        a = evidence.activations
        alpha = ratio(second, 2 * second + a.sum(spatial_dims(a), keepdim=True) * third)
        return weighted((alpha * first.clamp(min=0)).sum(spatial_dims(a)), evidence, relu=True)


@dataclass(frozen=True)
class Augmented:
    """What a method says on average over the photo as it is, flipped, and shown larger and smaller, each mapped back.

    The photo keeps its size: it is enlarged and cut off, or made smaller with its border mirrored, so any network takes
    it. A place that a variant does not show takes no part in its average.

    Args:
        method: any method; its name goes into this one's: ``augmented(gradcam)``.
        flip: also mirrored left to right.
        scales: how large the photo is shown.

    Returns:
        What ``method`` returns.

    Shanmugam et al., "Better Aggregation in Test-Time Augmentation", ICCV 2021; for maps: Gildenblat, 2021.

    >>> import explain, torch
    >>> from explain.methods import GradCAM
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> a = explain.attribute(model, torch.rand(1, 3, 8, 8), Augmented(GradCAM()), target=1, layer="0")
    >>> a.method, a.values.shape
    ('augmented(gradcam)', torch.Size([1, 6, 6]))
    """

    method: Method
    flip: bool = True
    scales: tuple[float, ...] = (1.0, 0.9, 1.1)

    paper: ClassVar[str] = "Gildenblat, 2021"

    def __post_init__(self) -> None:
        check_options(self, scales=0.1)
        at_least("augmented", "number of scales", len(self.scales), 1)

    @property
    def name(self) -> str:
        return f"augmented({self.method.name})"

    @property
    def about(self) -> str:
        return f"{self.method.name} over flips and scales, mapped back"

    @property
    def style(self) -> Style:
        return self.method.style

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Reruns(of_layer=uses_layer(self.method))})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        x = evidence.inputs
        kinds = [(scale, flip) for scale in self.scales for flip in ((False, True) if self.flip else (False,))]
        owners = torch.arange(len(x), device=x.device).repeat(len(kinds))

        def make(rows: torch.Tensor) -> torch.Tensor:
            shown = zip((rows % len(x)).tolist(), (rows // len(x)).tolist(), strict=True)
            return torch.cat([_shown(x[i : i + 1], *kinds[kind], padding="reflection") for i, kind in shown])

        total, weight = torch.zeros(0), torch.zeros(0)
        for rows, values in evidence.variants.attributions(self.method, owners, make):
            if not len(total):
                total, weight = values.new_zeros(len(x), *values.shape[1:]), values.new_zeros(len(x), *values.shape[1:])
            for row, value in zip(rows.tolist(), values, strict=True):
                scale, flip = kinds[row // len(x)]
                back = value[None] if value.ndim == x.ndim - 1 else value[None, None]
                total[row % len(x)] += _shown(back, 1 / scale, flip, padding="zeros")[0].reshape(value.shape)
                weight[row % len(x)] += _shown(torch.ones_like(back), 1 / scale, flip, padding="zeros")[0].reshape(
                    value.shape
                )
        return total / weight.clamp(min=torch.finfo(weight.dtype).tiny)


def _shown(x: torch.Tensor, scale: float, flip: bool, *, padding: str) -> torch.Tensor:
    """Show ``x`` ``(1, C, H, W)`` enlarged about its centre by ``scale`` at the same size, mirrored if ``flip``.

    Of a video, every frame is shown so.
    """
    if scale != 1:
        axes = [1 / scale, 1 / scale, *[1.0] * (x.ndim - 4)]  # width, height, time
        theta = F.pad(torch.tensor(axes, dtype=torch.float64).diag(), (0, 1))[None]
        grid = F.affine_grid(theta.to(x), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)
    return x.flip(-1) if flip else x
