"""Complexity: over how much of the photo the map is spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from explain.metrics.base import ZERO, MapMetric, MetricInput, MetricResult, register
from explain.metrics.maps import Sign


@register
@dataclass(frozen=True)
class Sparseness(MapMetric):
    r"""The Gini index of the map's magnitudes: 0 where all are equal, near 1 where one pixel has everything.

    :math:`G = \frac{\sum_k (2k - d - 1)\,|a|_{(k)}}{d \sum_k |a|_{(k)}}`, smallest first. More is sparser, and counts
    as better. Not defined for a map of zeros.

    Args:
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.

    Chalasani et al., "Concise Explanations of Neural Networks using Adversarial Training", ICML 2020.

    >>> import explain, torch
    >>> maps = torch.zeros(1, 2, 2)
    >>> maps[0, 0, 0] = 1
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> explain.evaluate(model, torch.rand(1, 3, 2, 2), maps, "sparseness")["map"]["sparseness"]
    tensor([0.7500])
    """

    sign: Sign = "own"

    name = "sparseness"
    about = "Gini index of the map's magnitudes"
    paper = "Chalasani et al., ICML 2020"

    def __call__(self, data: MetricInput) -> MetricResult:
        sizes = data.maps.per_pixel(self.sign).abs().flatten(1).double().sort(1).values
        count = sizes.shape[1]
        weights = 2 * torch.arange(1, count + 1, device=sizes.device, dtype=sizes.dtype) - count - 1
        total = sizes.sum(1)
        value = ((sizes * weights).sum(1) / (count * torch.where(total > 0, total, 1))).to(data.maps.values)
        return MetricResult(data.undefined(self, value, total == 0, ZERO))


@register
@dataclass(frozen=True)
class Complexity(MapMetric):
    r"""The entropy of the map's magnitudes as shares of their sum, :math:`-\sum_i p_i \ln p_i`, in nats.

    Less is better: the logarithm of the number of pixels is a constant map. Not defined for a map
    of zeros.

    Args:
        sign: as for `Sparseness`.

    Bhatt et al., "Evaluating and Aggregating Feature-based Model Explanations", IJCAI 2020.

    >>> Complexity().units
    'nats'
    """

    sign: Sign = "own"

    name = "complexity"
    about = "entropy of the map's magnitudes as shares of their sum"
    paper = "Bhatt et al., IJCAI 2020"
    units = "nats"
    better = "less"

    def __call__(self, data: MetricInput) -> MetricResult:
        sizes = data.maps.per_pixel(self.sign).abs().flatten(1).double()  # whose sum must not overflow
        total = sizes.sum(1, keepdim=True)
        shares = sizes / torch.where(total > 0, total, 1)
        value = torch.special.entr(shares).sum(1).to(data.maps.values)
        return MetricResult(data.undefined(self, value, total[:, 0] == 0, ZERO))


@register
@dataclass(frozen=True)
class EffectiveComplexity(MapMetric):
    """The share of the pixels whose magnitude is more than a share of the largest one. Less is better.

    (The paper asks for the smallest number of pixels that the score can be told by; its count of values that are not
    nothing, which other packages use as well, is what this is.) Not defined for a map of zeros.

    Args:
        threshold: the share of the largest magnitude.
        sign: as for `Sparseness`.

    Nguyen and Martínez, "On quantitative aspects of model interpretability", 2020 (arXiv:2007.07584).

    >>> EffectiveComplexity().threshold
    0.1
    """

    threshold: float = 0.1
    sign: Sign = "own"

    name = "effectivecomplexity"
    about = "share of the pixels whose magnitude is more than a tenth of the largest"
    paper = "Nguyen and Martínez, 2020"
    units = "share of pixels"
    better = "less"
    minimums: ClassVar = {"threshold": 0}

    def __call__(self, data: MetricInput) -> MetricResult:
        sizes = data.maps.per_pixel(self.sign).abs().flatten(1)
        most = sizes.amax(1, keepdim=True)
        value = (sizes > self.threshold * most).to(sizes).mean(1)
        return MetricResult(data.undefined(self, value, most[:, 0] == 0, ZERO))
