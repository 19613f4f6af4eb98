"""Axioms: what a map should fulfil by its definition; and ADCC, which explains the masked photo again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.data.inputs import Inputs, Path
from explain.metrics.base import ZERO, MetricInput, MetricResult, Score, need_probability, register
from explain.metrics.faithfulness import SMALL, least
from explain.metrics.perturbed_inputs import ScoreMetric, ScoreRequest, cover_softly
from explain.metrics.rankings import correlation
from explain.metrics.robustness import relative_change
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult


@register
@dataclass(frozen=True)
class Completeness(ScoreMetric):
    r"""By how much the values miss the difference of the scores that they should add up to.

    :math:`\bigl|\sum_i a_i - (f(x) - f(x'))\bigr|`, x' being the covered photo; ``parts`` has the "relative" one, by
    :math:`|f(x) - f(x')|`. Less is better. Values are added up as they are, of maps at the layer's resolution; it says
    something of contributions only, such as input times gradient. A map of zeros misses all of the difference.

    Args:
        baseline: what covers x'.
        score: the target's own "logit" (default), or "probability".

    Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017.

    >>> Completeness().better
    'less'
    """

    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"

    name = "completeness"
    about = "difference between the sum of the values and the difference of scores that they should add up to"
    paper = "Sundararajan et al., ICML 2017"
    units = "score"
    better = "less"

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [cover_softly(torch.zeros_like(data.images[:, 0]), self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        difference = data.original(self.score) - scores[0][:, 0]
        off = (data.maps.values.flatten(1).sum(1) - difference).abs()
        nothing = difference.abs() <= least(self.score, data.original(self.score), scores[0])
        relative = torch.where(nothing, torch.nan, off / difference.abs())
        return MetricResult(off, parts={"relative": relative, "difference": difference})


class Shifted(nn.Module):
    """A model that takes ``shift`` away from its photo first, so that it says of ``x + shift`` what it said of x.

    ``path`` is where the photo is among the arguments.
    """

    def __init__(self, inner: nn.Module, shift: float, path: Path = (0,)) -> None:
        super().__init__()
        self.inner, self.shift, self.path = inner, shift, path
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs, explained=self.path)
        return inputs.replaced(inputs.x - self.shift).call(self.inner)


OTHER = "leave adcc out, or use its parts: averagedrop(score='logit') and sparseness"


@register
@dataclass(frozen=True)
class InputInvariance(ReattributionMetric):
    r"""By how much the map changes where both the photo and the model are shifted by a constant, which changes nothing.

    :math:`\|\Phi_{f'}(x + c) - \Phi_f(x)\|_2 / \|\Phi_f(x)\|_2` with :math:`f'(x) = f(x - c)`; the paper shifts the
    first layer's bias, which is the same but for padding. Less is better. Not defined for a map of zeros.

    Args:
        shift: c, in the units of the input.

    Kindermans et al., "The (Un)reliability of saliency methods", 2017 (arXiv:1711.00867).

    >>> InputInvariance().better
    'less'
    """

    shift: float = 1.0

    name = "inputinvariance"
    about = "change of the map when photo and model are shifted by the same constant"
    paper = "Kindermans et al., 2017"
    units = "relative change"
    better = "less"

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        make = partial(Shifted, context.model, self.shift, context.inputs.path)
        yield Variant(("shifted", self.shift), lambda: context.images + self.shift, model=make, prefix="inner.")

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        return relative_change(data, found)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        nothing = (data.maps.values == 0).flatten(1).all(1)
        return MetricResult(data.undefined(self, numbers[:, 0], nothing, ZERO))


@register
@dataclass(frozen=True)
class ADCC(ReattributionMetric):
    r"""Average drop, coherency and complexity in one: their harmonic mean.

    :math:`3 \Bigl(\frac{1}{\mathrm{Coh}} + \frac{1}{1 - \mathrm{Com}} + \frac{1}{1 - \mathrm{AD}}\Bigr)^{-1}`, where
    Coh is Pearson's correlation of the heatmap with that of the photo masked by it, brought to [0, 1] as
    :math:`(1 + r) / 2`; Com is the heatmap's mean; AD is the share of the probability that masking takes. ``parts`` has
    all three. More is better. Not defined for a map without a positive value, nor where the probability is next to
    nothing; where one of the three has failed entirely, the mean is 0.

    Args:
        baseline: what replaces the photo where the heatmap is 0; the paper multiplies the photo by the map.

    Poppi et al., "Revisiting The Evaluation of Class Activation Mapping for Explainability", CVPR Workshops 2021.

    >>> ADCC().better
    'more'
    """

    baseline: Baseline = field(default_factory=Zero)

    name = "adcc"
    about = "harmonic mean of coherency, simplicity and the probability kept under the heatmap"
    paper = "Poppi et al., CVPR Workshops 2021"

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        need_probability(data.probability, OTHER)
        keep = data.maps.heatmap[:, None].to(context.images)
        yield Variant(("masked by its map", self.baseline, data.maps.name), lambda: self.baseline(context.images, keep))

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        assert found.logits is not None
        assert data.classes is not None
        probability = data.outputs.of_classes(found.logits, data.classes)
        together = correlation(data.maps.heatmap.flatten(1), found.maps.heatmap.flatten(1))
        return torch.stack([probability.double(), together.nan_to_num(-1)], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        original = need_probability(data.probability, OTHER).double()
        seen, together = numbers[:, 0].unbind(1)
        coherency = (1 + together) / 2
        complexity = data.maps.heatmap.double().flatten(1).mean(1)
        drop = (original - seen).clamp(min=0) / original.clamp(min=SMALL)
        goods = torch.stack([coherency, 1 - complexity, 1 - drop], 1)
        failed = (goods <= 0).any(1)
        value = torch.where(failed, 0, 3 / torch.where(goods > 0, 1 / goods, 1).sum(1))
        value = data.undefined(self, value, original < SMALL, f"the probability is below {SMALL:g}")
        nothing = (data.maps.heatmap == 0).flatten(1).all(1)
        value = data.undefined(self, value, nothing, "its map has no positive value")
        parts = {"coherency": coherency, "complexity": complexity, "averagedrop": drop}
        return MetricResult(value.to(data.maps.values.dtype), parts=parts)
