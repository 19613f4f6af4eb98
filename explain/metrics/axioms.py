"""What a map should be by itself: spread over little of the image, and invariant; and ADCC, which
explains the masked image again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.data.inputs import Inputs, Path
from explain.engine import Evidence
from explain.engine.perturbations import OneForEach
from explain.methods.base import ratio
from explain.metrics.base import (
    NOTHING,
    ZERO,
    MapMetric,
    MetricInput,
    MetricResult,
    covered_by_masks,
    register,
)
from explain.metrics.faithfulness import SMALL
from explain.metrics.maps import Sign, correlation, gini
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult


@register
class Sparseness(MapMetric):
    r"""The Gini index of the map's magnitudes.

    It is 0 where all are equal, and near 1 where one pixel has everything.

    :math:`G = \frac{\sum_k (2k - d - 1)\,|a|_{(k)}}{d \sum_k |a|_{(k)}}`, smallest first. More is
    sparser, and counts as better. Not defined for a map of zeros.

    Args:
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.

    Chalasani et al., "Concise Explanations of Neural Networks using Adversarial Training", ICML
    2020.

    >>> import explain, torch
    >>> maps = torch.zeros(1, 2, 2)
    >>> maps[0, 0, 0] = 1
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> explain.evaluate(model, torch.rand(1, 3, 2, 2), maps, "sparseness")["map"]["sparseness"]
    tensor([0.7500])
    """

    sign: Sign = "own"

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `Sparseness`: the Gini coefficient of the map's magnitudes ``(N,)``; NaN
        for a map of zeros."""
        values = data.maps.per_pixel(self.sign).double()
        value = gini(values).to(data.maps.values)
        return MetricResult(data.undefined(self, value, (values == 0).flatten(1).all(1), ZERO))


@register
class Complexity(MapMetric):
    r"""Entropy of the map's magnitudes as shares of their sum.

    :math:`-\sum_i p_i \ln p_i`, in nats.

    Less is better: the logarithm of the number of pixels is a constant map. Not defined for a map
    of zeros.

    Args:
        sign: as for `Sparseness`.

    Bhatt et al., "Evaluating and Aggregating Feature-based Model Explanations", IJCAI 2020.

    >>> Complexity().units
    'nats'
    """

    sign: Sign = "own"

    units = "nats"
    better = "less"

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `Complexity`: the entropy in nats ``(N,)`` of the map's magnitudes as
        shares of their sum; NaN for a map of zeros."""
        # whose sum must not overflow
        sizes = data.maps.per_pixel(self.sign).abs().flatten(1).double()
        total = sizes.sum(1, keepdim=True)
        value = torch.special.entr(ratio(sizes, total)).sum(1).to(data.maps.values)
        return MetricResult(data.undefined(self, value, total[:, 0] == 0, ZERO))


@register
class EffectiveComplexity(MapMetric):
    """Share of the pixels whose magnitude is more than a tenth of the largest.

    Less is better.

    (The paper defines it as the smallest number of pixels that determine the score; its count of
    values that are not nothing, which other packages use as well, is what this is.) Not defined for
    a map of zeros.

    Args:
        threshold: the share of the largest magnitude.
        sign: as for `Sparseness`.

    Nguyen and Martínez, "On quantitative aspects of model interpretability", 2020
    (arXiv:2007.07584).

    >>> EffectiveComplexity().threshold
    0.1
    """

    threshold: float = 0.1
    sign: Sign = "own"

    units = "share of pixels"
    better = "less"
    minimums: ClassVar = {"threshold": 0}

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `EffectiveComplexity`: the share of pixels ``(N,)`` whose magnitude exceeds
        ``threshold`` of the largest; NaN for a map of zeros."""
        sizes = data.maps.per_pixel(self.sign).abs().flatten(1)
        most = sizes.amax(1, keepdim=True)
        value = (sizes > self.threshold * most).to(sizes).mean(1)
        return MetricResult(data.undefined(self, value, most[:, 0] == 0, ZERO))


class ShiftedModel(nn.Module):
    """A model that takes ``shift`` away from its image first, so that it says of ``x + shift`` what
    it said of x. ``path`` is where the image is among the arguments.
    """

    def __init__(self, inner: nn.Module, shift: float, path: Path = (0,)) -> None:
        """``inner`` gets its image, at ``path`` among its arguments, less ``shift``. In training
        mode if the model is.
        """
        super().__init__()
        self.inner = inner
        self.shift = shift
        self.path = path
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs, explained=self.path)
        return inputs.replaced(inputs.x - self.shift).call(self.inner)


@dataclass(frozen=True)
class Raised(OneForEach):
    """Images to whose values a number is added."""

    shift: float

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs + self.shift


@dataclass(frozen=True)
class Shifting:
    """Makes the model that takes a number away from its image first."""

    shift: float

    prefix: ClassVar[str] = "inner."

    def __call__(self, context: ModelContext) -> nn.Module:
        return ShiftedModel(context.model, self.shift, context.inputs.path)


OTHER = "leave adcc out, or use its parts: averagedrop(score='logit') and sparseness"


@register
class InputInvariance(ReattributionMetric):
    r"""Change of the map when photo and model are shifted by the same constant.

    :math:`\|\Phi_{f'}(x + c) - \Phi_f(x)\|_2 / \|\Phi_f(x)\|_2` with :math:`f'(x) = f(x - c)`; the
    paper shifts the first layer's bias, which is the same but for padding. Less is better. Not
    defined for a map of zeros.

    Args:
        shift: c, in the units of the input.

    Kindermans et al., "The (Un)reliability of saliency methods", 2017 (arXiv:1711.00867).

    >>> InputInvariance().better
    'less'
    """

    shift: float = 1.0

    units = "relative change"
    better = "less"

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        yield Variant(Raised(self.shift), model=Shifting(self.shift))

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        return MetricResult(data.undefined(self, numbers[:, 0], data.maps.zero, ZERO))


@register
class ADCC(ReattributionMetric):
    r"""Harmonic mean of coherency, simplicity and the probability kept under the heatmap.

    :math:`3 \Bigl(\frac{1}{\mathrm{Coh}} + \frac{1}{1 - \mathrm{Com}} + \frac{1}{1 -
    \mathrm{AD}}\Bigr)^{-1}`, where Coh is Pearson's correlation of the heatmap with that of the
    photo masked by it, brought to [0, 1] as
    :math:`(1 + r) / 2`; Com is the heatmap's mean; AD is the share of the probability that masking
    takes. ``parts`` has all three. More is better. Not defined for a map without a positive value,
    nor where the probability is next to nothing; where one of the three has failed entirely, the
    mean is 0.

    Args:
        baseline: what replaces the photo where the heatmap is 0; the paper multiplies the photo by
            the map.

    Poppi et al., "Revisiting The Evaluation of Class Activation Mapping for Explainability", CVPR
    Workshops 2021.

    >>> ADCC().better
    'more'
    """

    baseline: Baseline = Zero()

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        data.need_probability(OTHER)
        yield Variant(covered_by_masks(data.maps.heatmap[:, None], self.baseline))

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        """What `ADCC` keeps of the photo masked by its heatmap ``(N, 2)``: the probability of the
        class, and the correlation of its heatmap with the photo's (-1 where one does not vary)."""
        assert variant.logits is not None
        assert data.classes is not None
        probability = data.outputs.of_classes(variant.logits, data.classes)
        heatmap_correlation = correlation(
            data.maps.heatmap.flatten(1), variant.maps.heatmap.flatten(1)
        )
        return torch.stack([probability.double(), heatmap_correlation.nan_to_num(-1)], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """The harmonic mean ``(N,)`` of coherency, simplicity and kept probability, 0 where one of
        them has failed entirely, from the ``numbers`` ``(N, 1, 2)`` of `compare`."""
        original = data.need_probability(OTHER).double()
        seen, heatmap_correlation = numbers[:, 0].unbind(1)  # of the only variant
        coherency = (1 + heatmap_correlation) / 2
        heatmaps = data.maps.heatmap.flatten(1)
        complexity = heatmaps.double().mean(1)
        # a smaller probability is set to NaN below
        drop = (original - seen).clamp(min=0) / original.clamp(min=SMALL)
        qualities = torch.stack([coherency, 1 - complexity, 1 - drop], 1)
        value = 3 / (1 / qualities.clamp(min=0)).sum(1)  # 0 where one of them is
        value = data.undefined(self, value, original < SMALL, f"the probability is below {SMALL:g}")
        value = data.undefined(self, value, heatmaps.amax(1) == 0, NOTHING)
        parts = {"coherency": coherency, "complexity": complexity, "averagedrop": drop}
        return MetricResult(value.to(data.maps.values.dtype), parts=parts)
