"""Randomisation: does the map depend on the model's weights, and on the class?"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Literal

import torch

from explain._utils.errors import MetricError, warn
from explain._utils.random_numbers import permutation
from explain.attribution.diagnostics import image_names
from explain.baselines.replacements import to_unit
from explain.methods import Smooth
from explain.methods.base import ratio
from explain.metrics.base import CONSTANT, MetricInput, MetricResult, register
from explain.metrics.maps import Sign, Similarity, similarity
from explain.metrics.randomised import layer_groups
from explain.metrics.variants import (
    ModelContext,
    RandomWeights,
    ReattributionMetric,
    Variant,
    VariantResult,
)

Order = Literal["top", "bottom", "independent"]


@dataclass(frozen=True)
class _MapSimilarity(ReattributionMetric):
    """A metric of how similar the map is to those of variants, and which of these are zero
    everywhere."""

    similarity: Similarity = "spearman"
    sign: Sign = "own"
    seed: int = 0

    units = "similarity"
    better = "less"

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        own_map = data.maps.per_pixel(self.sign)
        alike = similarity(self.similarity, own_map, variant.maps.per_pixel(self.sign))
        return torch.stack([alike, variant.maps.zero.double()], 1)

    def result(self, data: MetricInput, curve: torch.Tensor, zeros: torch.Tensor) -> MetricResult:
        """The mean over V variants of the similarities ``curve`` ``(N, V)``; NaN for constant maps.
        Warns of variants whose map is zero everywhere (``zeros`` ``(N, V)``).
        """
        warn_of_zeros(self.name, data, (zeros > 0).any(1))
        curve = curve.to(data.maps.values.dtype)
        value = data.undefined(self, curve.mean(1), data.maps.constant, CONSTANT)
        return MetricResult(value, curve, torch.arange(1, curve.shape[1] + 1) / curve.shape[1])


def warn_of_zeros(metric: str, data: MetricInput, zeros: torch.Tensor) -> None:
    """Warn of maps that became zero everywhere in a variant, truth values ``zeros`` ``(N,)``, since
    that counts as a change; constant maps are left out."""
    images = image_names(zeros & ~data.maps.constant)
    if images:
        warn(
            f"{data.maps.name} is zero everywhere in a variant of {metric} for image {images}: "
            "that counts as a map that has changed"
        )


@register(share=0.5, steps=1, copies=2)
@register(samples=8)
@register(order="independent")
@register(order="bottom")
@register
class MPRT(_MapSimilarity):
    """How similar the map stays while the model's layers are reinitialised: the parameter
    randomisation test.

    The layers with weights are taken in about ``steps`` groups, in the order in which a forward
    pass uses them: cascading from the "top" (the output) or the "bottom" (the input), or each group
    alone ("independent"). A layer is initialised as its class does it, normalisations with their
    statistics, on a copy, whose maps are drawn where the model's own cells look. The figure is the
    mean similarity over these models, ``curve`` has each one's, and ``parts`` the "last": that to
    the model without any trained weight, if the layers cascade. Less is better. A map that becomes
    zero everywhere counts as changed, 0, with a warning. Not defined for a constant map.

    Args:
        similarity: "spearman", "pearson", "ssim" or "hog", see `explain.metrics.maps`.
        sign: how values become one number for each pixel; the papers compare "absolute" ones as
            well.
        seed: of the initialisation, and of the noise.
        order: see above.
        steps: how many models; None takes every layer for itself.
        samples: noisy copies over which each map is averaged (the smooth variant); 0 takes the map
            as it is.
        sigma: the noise's deviation, relative to the photo's range.
        share: of the layers, counted from where the order begins: with 0.5 and one step, the upper
            half is reinitialised at once ("mprt-upper"). The last layers are all that a prediction
            needs to be lost, and the first filters stay: maps of edges do not change.
        copies: how many initialisations, with seeds of their own.

    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018; smooth: Hedström et al., "A
    Fresh Look at Sanity Checks for Saliency Maps", 2024 (arXiv:2405.02383).

    >>> MPRT().name, MPRT(order="bottom").name, MPRT(samples=8).name
    ('mprt', 'mprt-bottom', 'smprt')
    """

    order: Order = "top"
    steps: int | None = 6
    samples: int = 0
    sigma: float = 0.1
    share: float = 1.0
    copies: int = 1

    minimums: ClassVar = {"steps": 1, "samples": 0, "sigma": 0, "share": 1e-6, "copies": 1}
    maximums: ClassVar = {"share": 1}

    def described(self) -> Mapping[str, str]:
        """The name, summary and paper for the order, smoothing and share of the layers: "mprt",
        "mprt-bottom", "mprt-upper", "smprt" and so on."""
        orders = {
            "top": "from the output on",
            "bottom": "from the input on",
            "independent": "one group at a time",
        }
        smooth = " averaged over noise" if self.samples else ""
        summary = f"similarity of the map{smooth} while layers are randomised, {orders[self.order]}"
        name = "smprt" if self.samples else "mprt"
        if self.order != "top":
            name += f"-{self.order}"
        if self.share < 1:
            name += "-upper" if self.order == "top" else "-part"
        paper = "Hedström et al., 2024" if self.samples else self.paper
        return {"name": name, "summary": summary, "paper": paper}

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        """Yield a variant for each model: layers reinitialised one group more each time, or one
        group alone. With ``samples``, all are smoothed, and the first is the model itself,
        smoothed.
        """
        wrap = None
        if self.samples:
            wrap = Smooth(samples=self.samples, sigma=self.sigma, seed=self.seed)
            yield Variant(wrap=wrap)
        # from the input to the output; the last ones are at the top
        names = layers_of(self.name, context)
        count = math.ceil(self.share * len(names))
        names = names[-count:] if self.order == "top" else names[:count]
        groups = layer_groups(names, self.steps)
        groups = groups[::-1] if self.order == "top" else groups
        for copy in range(self.copies):
            # other seeds have other copies
            seed = self.seed * self.copies + copy
            # accumulate: the first group, then the first two together, and so on
            for layers in groups if self.order == "independent" else accumulate(groups):
                yield Variant(model=RandomWeights(frozenset(layers), seed), wrap=wrap)

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        """What `MPRT` keeps of one model: the similarity and whether the map is zero ``(N, 2)``;
        smoothed, the map itself and whether it is zero ``(N, H * W + 1)``, since it is compared
        with the smoothed map of the model."""
        if not self.samples:
            return super().compare(data, variant)
        zero = variant.maps.zero[:, None].double()
        return torch.cat([variant.maps.per_pixel(self.sign).flatten(1).double(), zero], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """The figure of `MPRT`: the mean similarity ``(N,)`` over the models, with the curve;
        ``numbers`` ``(N, V, k)`` are those of `compare`."""
        # as `compare` has it: the similarity first, and at the end whether the map is zero
        curve = numbers[..., 0]
        zeros = numbers[..., -1]
        if self.samples:  # of each variant the whole map, and of the first one the model's own
            model_maps, *randomised = (
                numbers[..., :-1].reshape((*numbers.shape[:2], *data.size)).unbind(1)
            )
            alike = [similarity(self.similarity, model_maps, maps) for maps in randomised]
            curve = torch.stack(alike, 1)
            zeros = zeros[:, 1:]
        result = self.result(data, curve, zeros)
        parts = {"last": curve[:, -1].to(result.value)} if self.order != "independent" else {}
        return replace(result, parts={**parts, "zeros": zeros})


@register
class EfficientMPRT(ReattributionMetric):
    r"""Relative rise of the map's entropy when the whole model is randomised.

    :math:`(H_\mathrm{random} - H) / H`, H being the entropy of the map's values in a histogram of
    100 bins between its smallest and its largest. More is better. It needs one other model only.
    Not defined for a constant map, whose entropy is 0.

    Args:
        bins: of the histogram.
        sign: how values become one number for each pixel.
        seed: of the initialisation.

    Hedström et al., "A Fresh Look at Sanity Checks for Saliency Maps", 2024 (arXiv:2405.02383).

    >>> EfficientMPRT().bins
    100
    """

    bins: int = 100
    sign: Sign = "own"
    seed: int = 0

    name = "emprt"
    units = "relative entropy"
    minimums: ClassVar = {"bins": 2}

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        layers = layers_of(self.name, context)
        yield Variant(model=RandomWeights(frozenset(layers), self.seed))

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        return entropy(variant.maps.per_pixel(self.sign), self.bins)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """The figure of `EfficientMPRT`: the relative rise of the map's entropy ``(N,)`` from the
        trained to the random model; NaN for a constant map."""
        randomised = numbers[:, 0]
        # an entropy of 0 is that of a constant map, of which the usual one is zero everywhere
        warn_of_zeros(self.name, data, randomised == 0)
        original = entropy(data.maps.per_pixel(self.sign), self.bins)
        rise = ratio(randomised - original, original)
        value = data.undefined(self, rise, original == 0, CONSTANT).to(data.maps.values.dtype)
        return MetricResult(value, parts={"before": original, "after": randomised})


@register
class RandomLogit(_MapSimilarity):
    """Similarity of the map to those of random other classes.

    Less is better.

    Not defined for a constant map.

    Args:
        similarity, sign: as for `MPRT`.
        seed: of the draw of classes, which for every image are as many steps from its own class.
        samples: how many other classes; the figure is the mean, and ``curve`` has each one's.

    Sixt et al., "When Explanations Lie", ICML 2020.

    >>> RandomLogit(samples=2).better
    'less'
    """

    samples: int = 3

    minimums: ClassVar = {"samples": 1}

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        """Yield a variant for each of ``samples`` other classes, the same number of classes away
        from each photo's own."""
        if context.ranking is None or context.ranking[0].shape[1] < 2:
            raise MetricError(
                "target must be one of several classes for randomlogit, got no other class; use "
                "mprt"
            )
        scores, classes = context.ranking
        count = scores.shape[1]
        # never 0 or count steps, which would lead to the class itself
        for offset in (permutation(count - 1, self.seed)[: self.samples] + 1).tolist():
            yield Variant(classes=tuple(((classes + offset) % count).tolist()))

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        return self.result(data, numbers[..., 0], numbers[..., 1])


def layers_of(metric: str, context: ModelContext) -> list[str]:
    """The names of the layers that can be randomised, in forward order; refused, for the metric
    called ``metric``, if the model has none."""
    if not context.randomised.layers:
        raise MetricError(
            f"model must have weights for {metric} to randomise, got none; use another metric"
        )
    return context.randomised.layers


def entropy(maps: torch.Tensor, bins: int) -> torch.Tensor:
    """Return the entropy ``(N,)`` in nats of the values of each map ``(N, H, W)``, in a histogram
    of ``bins`` between its smallest and its largest value."""
    flat = maps.flatten(1).double()
    bin_of = (to_unit(flat) * bins).long().clamp(max=bins - 1)
    counts = torch.zeros(len(flat), bins, dtype=torch.float64, device=flat.device)
    shares = counts.scatter_add_(1, bin_of, torch.ones_like(flat)) / flat.shape[1]
    return torch.special.entr(shares).sum(1)  # type: ignore[no-any-return]
