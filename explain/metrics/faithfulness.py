"""Faithfulness by curves: how the score changes while pixels are removed, or shown, in the order of the map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from explain.baselines import Blur, Mean, Neighbours, Zero
from explain.baselines.base import Baseline
from explain.metrics.base import Better, Metric, MetricInput, MetricResult, Score, ScoreKind, register
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import ScoreMetric, ScoreRequest, cover_ranks, cover_softly
from explain.metrics.rankings import area, steps_of

PROBABILITY = "mean probability"

SMALL = 1e-6
"""Figures by the original score are not defined where its share of the largest one is smaller than this."""


class _RankedCurve(ScoreMetric):
    """The area under the curve of the scores while pixels are covered in the order of the map."""

    steps: int
    baseline: Baseline
    score: Score
    sign: Sign
    seed: int

    units = PROBABILITY
    minimums: ClassVar = {"steps": 1}

    def interval(self, counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
        """The ranks from which and to which pixels are covered at each step."""
        return largest(counts, pixels)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        start, end = self.interval(steps_of(data.pixels, self.steps), data.pixels)
        return [cover_ranks(data.ranks(self.sign, self.seed), start, end, self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        counts = steps_of(data.pixels, self.steps)
        return MetricResult(area(scores[0], counts), scores[0], torch.tensor(counts) / counts[-1])


@register
@dataclass(frozen=True)
class Deletion(_RankedCurve):
    r"""The area under the probability's curve while the pixels are covered, the map's largest first.

    :math:`\mathrm{AUC} = \sum_{k=1}^{n} (s_k - s_{k-1}) \frac{p_{k-1} + p_k}{2}`, where :math:`p_k` is the probability
    with the share :math:`s_k` of the pixels covered: :math:`k/n`, to the nearest pixel. Less is better.

    Args:
        steps: n; RISE covers a row's number of pixels at a time, which are 224 steps at 224 pixels.
        baseline: what covers them; RISE's are zeros after the normalisation.
        score: "probability" of the class (default) or the target's own "logit".
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.
        seed: of the order of equal values. A constant map gets a random order.

    Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC 2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> table = explain.evaluate(model, torch.rand(1, 3, 2, 2), "saliency", Deletion(steps=4))
    >>> table.curve("saliency", "deletion")[0]
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """

    steps: int = 64
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    name = "deletion"
    about = "area under the probability while the map's pixels are covered, largest first"
    paper = "Petsiuk et al., BMVC 2018"
    better: ClassVar[Better] = "less"


@register
@dataclass(frozen=True)
class Insertion(Deletion):
    """The area under the probability's curve while the pixels are shown, the map's largest first, on a covered photo.

    The formula is that of `Deletion`; more is better.

    Args:
        baseline: RISE begins with a blur of 11 × 11 pixels and σ 5 (see `explain.baselines.Blur`).
        steps, score, sign, seed: as for `Deletion`.

    Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC 2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    >>> explain.evaluate(model, torch.rand(1, 3, 2, 2), "saliency", Insertion(steps=4))["saliency"]["insertion"].shape
    torch.Size([1])
    """

    baseline: Baseline = field(default_factory=Blur)

    name = "insertion"
    about = "area under the probability while the map's pixels are shown, largest first"
    better = "more"

    def interval(self, counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
        return all_but_largest(counts, pixels)


@register(order="lerf")
@register
@dataclass(frozen=True)
class PixelFlipping(_RankedCurve):
    """The area under the curve while pixels are covered: the most relevant first (MoRF), or the least (LeRF).

    The formula is that of `Deletion`. For MoRF, less is better; for LeRF, more.

    Args:
        order: "morf" or "lerf".
        baseline: the photo's mean colour by default.
        steps, score, sign, seed: as for `Deletion`.

    Bach et al., "On Pixel-Wise Explanations", PLOS ONE 2015; Samek et al., TNNLS 2017.

    >>> PixelFlipping("lerf").name, PixelFlipping("lerf").better
    ('lerf', 'more')
    """

    order: Literal["morf", "lerf"] = "morf"
    steps: int = 64
    baseline: Baseline = field(default_factory=Mean)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    paper = "Bach et al., PLOS ONE 2015"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.order

    @property
    def about(self) -> str:  # type: ignore[override]
        which = "most" if self.order == "morf" else "least"
        return f"area under the probability while pixels are flipped, the {which} relevant first"

    @property
    def better(self) -> Better:  # type: ignore[override]
        return "less" if self.order == "morf" else "more"

    def interval(self, counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
        return largest(counts, pixels) if self.order == "morf" else smallest(counts, pixels)


@register
@dataclass(frozen=True)
class ROAD(ScoreMetric):
    r"""Remove and debias: the score without the least relevant pixels, less that without the most relevant ones.

    :math:`\frac{1}{|Q|}\sum_{q \in Q} \frac{p^{\mathrm{LeRF}}_q - p^{\mathrm{MoRF}}_q}{2}`, where the share q of the
    pixels is interpolated from those around it, so that the mask's shape is not recognised. In the paper, the figure of
    a data set is the accuracy: ``parts`` has for each image and share whether the class still was the best,
    "morf hits" and "lerf hits" ``(N, |Q|)``, and the probabilities "morf" and "lerf".

    Args:
        percentiles: Q, in per cent, each above 0 and below 100.
        baseline: `explain.baselines.Neighbours` as published.
        score, sign, seed: as for `Deletion`.

    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods", ICML 2022.

    >>> ROAD(percentiles=(10, 50)).percentiles
    (10, 50)
    """

    percentiles: tuple[float, ...] = (10, 20, 30, 40, 50, 60, 70, 80, 90)
    baseline: Baseline = field(default_factory=Neighbours)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    name = "road"
    about = "half of LeRF minus MoRF, with pixels interpolated from their neighbours"
    paper = "Rong et al., ICML 2022"
    units = PROBABILITY
    percentages = ("percentiles",)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        ranks, counts = data.ranks(self.sign, self.seed), share_counts(data, self.percentiles)
        intervals = [largest(counts, data.pixels), smallest(counts, data.pixels)]
        kinds: list[ScoreKind] = [self.score] if data.probability is None else [self.score, "margin"]
        return [cover_ranks(ranks, *each, self.baseline, kind) for kind in kinds for each in intervals]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        curve = (scores[1] - scores[0]) / 2
        parts = {"morf": scores[0], "lerf": scores[1]}
        if len(scores) > 2:
            parts |= {"morf hits": scores[2] > 0, "lerf hits": scores[3] > 0}
        return MetricResult(curve.mean(1), curve, torch.tensor(self.percentiles) / 100, parts)


@register
@dataclass(frozen=True)
class Comprehensiveness(ScoreMetric):
    r"""The loss of score without the most relevant pixels, on average over several shares of them.

    :math:`\frac{1}{|Q|}\sum_q \bigl(p(x) - p(x \setminus \mathrm{top}_q)\bigr)`. More is better.

    Args:
        percentiles: Q, in per cent; those of the paper.
        baseline, score, sign, seed: as for `Deletion`.

    DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020.

    >>> Comprehensiveness().better
    'more'
    """

    percentiles: tuple[float, ...] = (1, 5, 10, 20, 50)
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    name = "comprehensiveness"
    about = "drop of the probability without the most relevant pixels"
    paper = "DeYoung et al., ACL 2020"
    units = PROBABILITY
    percentages = ("percentiles",)

    def interval(self, counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
        """The ranks from which and to which pixels are covered for each share."""
        return largest(counts, pixels)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        start, end = self.interval(share_counts(data, self.percentiles), data.pixels)
        return [cover_ranks(data.ranks(self.sign, self.seed), start, end, self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        curve = data.original(self.score)[:, None] - scores[0]
        return MetricResult(curve.mean(1), curve, torch.tensor(self.percentiles) / 100)


@register
@dataclass(frozen=True)
class Sufficiency(Comprehensiveness):
    r"""The loss of score when only the most relevant pixels are left, on average over several shares.

    :math:`\frac{1}{|Q|}\sum_q \bigl(p(x) - p(\mathrm{top}_q)\bigr)`. Less is better.

    Args:
        percentiles: Q, in per cent; those of the paper.
        baseline, score, sign, seed: as for `Deletion`.

    DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020.

    >>> Sufficiency().better
    'less'
    """

    name = "sufficiency"
    about = "drop of the probability with the most relevant pixels only"
    better = "less"

    def interval(self, counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
        return all_but_largest(counts, pixels)


@register
@dataclass(frozen=True)
class AverageDrop(ScoreMetric):
    r"""The share of the probability that is lost when the photo is multiplied by its heatmap.

    :math:`\max(0, y - o) / y`, where o is the probability of the photo masked by its heatmap, which is divided by its
    largest value. Less is better. Not defined where y is next to nothing. A map without a positive value covers
    everything.

    Args:
        baseline: what replaces the photo where the heatmap is 0; the paper multiplies the photo by the map.
        score: "probability" of the class (default) or the target's own "logit".

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> AverageDrop().better
    'less'
    """

    baseline: Baseline = field(default_factory=Zero)
    score: Score = "probability"

    name = "averagedrop"
    about = "share of the probability that is lost when the photo is masked by its heatmap"
    paper = "Chattopadhay et al., WACV 2018"
    units = "share of the probability"
    better: ClassVar[Better] = "less"

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [cover_softly(data.maps.heatmap, self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        original, seen = data.original(self.score), scores[0][:, 0]
        drop = (original - seen).clamp(min=0) / torch.where(original == 0, 1, original)
        return MetricResult(by_original(self, self.score, data, drop, original, seen), parts={"seen": seen})


@register
@dataclass(frozen=True)
class IncreaseInConfidence(AverageDrop):
    """Whether the probability rises when the photo is multiplied by its heatmap: 1 or 0. More is better.

    A map without a positive value covers everything.

    Args:
        baseline, score: as for `AverageDrop`.

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> IncreaseInConfidence().better
    'more'
    """

    name = "increase"
    about = "whether the probability rises when the photo is masked by its heatmap"
    units = "0 or 1"
    better = "more"

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        seen = scores[0][:, 0]
        return MetricResult((seen > data.original(self.score)).to(seen), parts={"seen": seen})


def largest(counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
    """The first and last rank of the so many largest values of a map."""
    return [0] * len(counts), counts


def smallest(counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
    """The first and last rank of the so many smallest values of a map."""
    return [pixels - count for count in counts], [pixels] * len(counts)


def all_but_largest(counts: list[int], pixels: int) -> tuple[list[int], list[int]]:
    """The first and last rank of all but the so many largest values of a map."""
    return counts, [pixels] * len(counts)


def share_counts(data: MetricInput, percentiles: Sequence[float]) -> list[int]:
    """How many pixels shares in per cent are: at least one, and never all."""
    return [min(max(1, round(data.pixels * share / 100)), max(1, data.pixels - 1)) for share in percentiles]


def by_original(
    metric: Metric, kind: Score, data: MetricInput, value: torch.Tensor, original: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Put NaN where a figure is a share of an original score that is negative or tiny compared with those seen."""
    why = f"the original score is below {SMALL:g}" + ("" if kind == "probability" else " of those seen")
    return data.undefined(metric, value, original < least(kind, original, seen), why)


def least(kind: Score, *scores: torch.Tensor) -> torch.Tensor | float:
    """The smallest number ``(N,)`` that figures are divided by: scores have no unit of their own, probabilities do."""
    if kind == "probability":
        return SMALL
    return SMALL * torch.cat([each.reshape(len(each), -1).abs() for each in scores], 1).amax(1)
