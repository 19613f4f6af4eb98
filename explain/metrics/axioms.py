"""Axioms: what a map should fulfil by its definition; and ADCC, which explains the photo behind a map again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from explain.baselines import Baseline, Zero
from explain.data.inputs import Inputs, Path
from explain.metrics.base import Better, MetricInput, MetricResult, Reading, check, need_probability, undefined
from explain.metrics.faithfulness import SMALL, least
from explain.metrics.perturbed_inputs import ScoreRequest, SoftMasked
from explain.metrics.rankings import correlation
from explain.metrics.variants import ModelContext, Variant, VariantResult


@dataclass(frozen=True)
class Completeness:
    r"""By how much the values miss the difference of the scores that they should add up to.

    :math:`\bigl|\sum_i a_i - (f(x) - f(x'))\bigr|`, x' being the covered photo; ``parts`` has the "relative" one, by
    :math:`|f(x) - f(x')|`. Less is better. Values are added up as they are, of maps at the layer's resolution; it says
    something of contributions only, such as input times gradient. A map of zeros misses all of the difference.

    Args:
        baseline: what covers x'.
        reading: the "score" itself (default), or "probability".

    Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017.

    >>> Completeness().better
    'less'
    """

    baseline: Baseline = field(default_factory=Zero)
    reading: Reading = "score"

    name: ClassVar[str] = "completeness"
    about: ClassVar[str] = "by how much the values miss the difference of scores that they should add up to"
    paper: ClassVar[str] = "Sundararajan et al., ICML 2017"
    units: ClassVar[str] = "score"
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(SoftMasked(torch.zeros_like(case.images[:, 0]), self.baseline), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        difference = case.original(self.reading) - scores[0][:, 0]
        off = (case.maps.values.flatten(1).sum(1) - difference).abs()
        nothing = difference.abs() <= least(self.reading, case.original(self.reading), scores[0])
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


OTHER = "leave adcc out, or judge by its parts with averagedrop(reading='score') and sparseness"


@dataclass(frozen=True)
class InputInvariance:
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

    name: ClassVar[str] = "inputinvariance"
    about: ClassVar[str] = "by how much the map changes where photo and model are shifted alike"
    paper: ClassVar[str] = "Kindermans et al., 2017"
    units: ClassVar[str] = "relative change"
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self)

    def settings(self, world: ModelContext, case: MetricInput) -> Iterator[Variant]:
        make = partial(Shifted, world.model, self.shift, world.called_with.path)
        yield Variant(("shifted", self.shift), lambda: world.images + self.shift, model=make, prefix="inner.")

    def compare(self, case: MetricInput, found: VariantResult) -> torch.Tensor:
        length = case.maps.values.flatten(1).norm(dim=1)
        change = (found.maps.values - case.maps.values).flatten(1).norm(dim=1)
        relative: torch.Tensor = change / torch.where(length > 0, length, 1)
        return relative

    def __call__(self, case: MetricInput, numbers: torch.Tensor) -> MetricResult:
        nothing = (case.maps.values == 0).flatten(1).all(1)
        return MetricResult(undefined(self.name, case.maps.name, numbers[:, 0], nothing, "its map is zero everywhere"))


@dataclass(frozen=True)
class ADCC:
    r"""Average drop, coherency and complexity in one: their harmonic mean.

    :math:`3 \Bigl(\frac{1}{\mathrm{Coh}} + \frac{1}{1 - \mathrm{Com}} + \frac{1}{1 - \mathrm{AD}}\Bigr)^{-1}`, where
    Coh is Pearson's correlation of the heatmap with that of the photo seen through it, brought to [0, 1] as
    :math:`(1 + r) / 2`; Com is the heatmap's mean; AD is the share of the probability that is lost behind it. ``parts``
    has all three. More is better. Not defined for a map without a positive value, nor where the probability is next to
    nothing; where one of the three has failed entirely, the mean is 0.

    Args:
        baseline: what is seen where the heatmap is 0; the paper multiplies the photo by the map.

    Poppi et al., "Revisiting The Evaluation of Class Activation Mapping for Explainability", CVPR Workshops 2021.

    >>> ADCC().better
    'more'
    """

    baseline: Baseline = field(default_factory=Zero)

    name: ClassVar[str] = "adcc"
    about: ClassVar[str] = "harmonic mean of coherency, simplicity and what the photo keeps behind its heatmap"
    paper: ClassVar[str] = "Poppi et al., CVPR Workshops 2021"
    units: ClassVar[str] = "0 to 1"
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self)

    def settings(self, world: ModelContext, case: MetricInput) -> Iterator[Variant]:
        need_probability(case.probability, OTHER)
        keep = case.maps.heatmap[:, None].to(world.images)
        yield Variant(("behind its map", self.baseline, case.maps.name), lambda: self.baseline(world.images, keep))

    def compare(self, case: MetricInput, found: VariantResult) -> torch.Tensor:
        assert found.logits is not None
        assert case.classes is not None
        probability = case.outputs.of_classes(found.logits, case.classes)
        together = correlation(case.maps.heatmap.flatten(1), found.maps.heatmap.flatten(1))
        return torch.stack([probability.double(), together.nan_to_num(-1)], 1)

    def __call__(self, case: MetricInput, numbers: torch.Tensor) -> MetricResult:
        original = need_probability(case.probability, OTHER).double()
        seen, together = numbers[:, 0].unbind(1)
        coherency = (1 + together) / 2
        complexity = case.maps.heatmap.double().flatten(1).mean(1)
        drop = (original - seen).clamp(min=0) / original.clamp(min=SMALL)
        goods = torch.stack([coherency, 1 - complexity, 1 - drop], 1)
        failed = (goods <= 0).any(1)
        value = torch.where(failed, 0, 3 / torch.where(goods > 0, 1 / goods, 1).sum(1))
        value = undefined(self.name, case.maps.name, value, original < SMALL, f"the probability is below {SMALL:g}")
        nothing = (case.maps.heatmap == 0).flatten(1).all(1)
        value = undefined(self.name, case.maps.name, value, nothing, "its map has no positive value")
        parts = {"coherency": coherency, "complexity": complexity, "averagedrop": drop}
        return MetricResult(value.to(case.maps.values.dtype), parts=parts)
