"""Faithfulness by curves: how the score changes while pixels are removed, or shown, in the order of the map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import torch

from explain._utils.errors import MetricError, shown
from explain.baselines import Baseline, Blur, Mean, Neighbours, Zero
from explain.metrics.base import Better, MetricInput, MetricResult, Reading, check, undefined
from explain.metrics.maps import Sign
from explain.metrics.perturbed_inputs import RankedRemoval, ScoreRequest, SoftMasked, covered_by_rank
from explain.metrics.rankings import area, steps_of

FAITHFUL = "mean probability"


@dataclass(frozen=True)
class Deletion:
    r"""The area under the probability's curve while the pixels are covered, the map's largest first.

    :math:`\mathrm{AUC} = \sum_{k=1}^{n} (s_k - s_{k-1}) \frac{p_{k-1} + p_k}{2}`, where :math:`p_k` is what is read
    with the share :math:`s_k` of the pixels covered: :math:`k/n`, to the nearest pixel. Less is better.

    Args:
        steps: n; RISE covers a row's number of pixels at a time, which are 224 steps at 224 pixels.
        baseline: what covers them; RISE's are zeros behind the normalisation.
        reading: "probability" of the class (default) or the target's own "score".
        sign: how values become places, see `explain.metrics.maps.Sign`.
        seed: of the order of equal values. A map that says the same everywhere gets that of a random order.

    Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC 2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> table = explain.evaluate(model, torch.rand(1, 3, 2, 2), "saliency", Deletion(steps=4))
    >>> table["saliency"]["deletion"].shape, table.curve("saliency", "deletion")[1].shape
    (torch.Size([1]), torch.Size([1, 5]))
    """

    steps: int = 64
    baseline: Baseline = field(default_factory=Zero)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    name: ClassVar[str] = "deletion"
    about: ClassVar[str] = "area under the probability while the map's pixels are covered, largest first"
    paper: ClassVar[str] = "Petsiuk et al., BMVC 2018"
    units: ClassVar[str] = FAITHFUL
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self, steps=1)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        ranks, counts = _ranks_and_steps(case, self)
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, [0] * len(counts), counts), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        return _area_of(case, self, scores[0])


@dataclass(frozen=True)
class Insertion:
    """The area under the probability's curve while the pixels are shown, the map's largest first, on a covered photo.

    The formula is that of `Deletion`; more is better.

    Args:
        baseline: RISE begins with a blur of 11 × 11 pixels and σ 5 (see `explain.baselines.Blur`).
        steps, reading, sign, seed: as for `Deletion`.

    Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC 2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    >>> explain.evaluate(model, torch.rand(1, 3, 2, 2), "saliency", Insertion(steps=4))["saliency"]["insertion"].shape
    torch.Size([1])
    """

    steps: int = 64
    baseline: Baseline = field(default_factory=Blur)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    name: ClassVar[str] = "insertion"
    about: ClassVar[str] = "area under the probability while the map's pixels are shown, largest first"
    paper: ClassVar[str] = "Petsiuk et al., BMVC 2018"
    units: ClassVar[str] = FAITHFUL
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self, steps=1)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        ranks, counts = _ranks_and_steps(case, self)
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, counts, [counts[-1]] * len(counts)), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        return _area_of(case, self, scores[0])


@dataclass(frozen=True)
class PixelFlipping:
    """The area under the curve while pixels are covered: the most relevant first (MoRF), or the least (LeRF).

    The formula is that of `Deletion`. For MoRF, less is better; for LeRF, more.

    Args:
        order: "morf" or "lerf".
        baseline: the photo's mean colour by default.
        steps, reading, sign, seed: as for `Deletion`.

    Bach et al., "On Pixel-Wise Explanations", PLOS ONE 2015; Samek et al., TNNLS 2017.

    >>> PixelFlipping("lerf").name, PixelFlipping("lerf").better
    ('lerf', 'more')
    """

    order: Literal["morf", "lerf"] = "morf"
    steps: int = 64
    baseline: Baseline = field(default_factory=Mean)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    paper: ClassVar[str] = "Bach et al., PLOS ONE 2015"
    units: ClassVar[str] = FAITHFUL

    def __post_init__(self) -> None:
        check(self, steps=1)

    @property
    def name(self) -> str:
        return self.order

    @property
    def about(self) -> str:
        return f"area under the probability while pixels are flipped, the {_WHICH[self.order]} relevant first"

    @property
    def better(self) -> Better:
        return "less" if self.order == "morf" else "more"

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        ranks, counts = _ranks_and_steps(case, self)
        return [ScoreRequest(_flipped(ranks, counts, self.order, self.baseline), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        return _area_of(case, self, scores[0])


@dataclass(frozen=True)
class ROAD:
    r"""Remove and debias: what the least relevant pixels take away less than the most relevant ones.

    :math:`\frac{1}{|Q|}\sum_{q \in Q} \frac{p^{\mathrm{LeRF}}_q - p^{\mathrm{MoRF}}_q}{2}`, where the share q of the
    pixels is interpolated from those around it, so that the mask's shape is not recognised. In the paper, the figure of
    a data set is the accuracy: ``parts`` has for each image and share whether the class still was the best,
    "morf hits" and "lerf hits" ``(N, |Q|)``, and the probabilities "morf" and "lerf".

    Args:
        percentiles: Q, in per cent, each above 0 and below 100.
        baseline: `explain.baselines.Neighbours` as published.
        reading, sign, seed: as for `Deletion`.

    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods", ICML 2022.

    >>> ROAD(percentiles=(10, 50)).percentiles
    (10, 50)
    """

    percentiles: tuple[float, ...] = (10, 20, 30, 40, 50, 60, 70, 80, 90)
    baseline: Baseline = field(default_factory=Neighbours)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    name: ClassVar[str] = "road"
    about: ClassVar[str] = "half of LeRF less MoRF, with pixels interpolated from those around"
    paper: ClassVar[str] = "Rong et al., ICML 2022"
    units: ClassVar[str] = FAITHFUL
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self)
        check_shares(self.name, "percentiles", self.percentiles)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        ranks = case.ranks(self.sign, self.seed)
        counts = share_counts(case, self.percentiles)
        rows = [_flipped(ranks, counts, order, self.baseline) for order in ("morf", "lerf")]
        margins = [] if case.probability is None else [ScoreRequest(each, "margin") for each in rows]
        return [*(ScoreRequest(each, self.reading) for each in rows), *margins]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        curve = (scores[1] - scores[0]) / 2
        parts = {"morf": scores[0], "lerf": scores[1]}
        if len(scores) > 2:
            parts |= {"morf hits": scores[2] > 0, "lerf hits": scores[3] > 0}
        return MetricResult(curve.mean(1), curve, torch.tensor(self.percentiles) / 100, parts)


@dataclass(frozen=True)
class _Bins:
    """What sufficiency and comprehensiveness share: shares of the pixels."""

    percentiles: tuple[float, ...] = (1, 5, 10, 20, 50)
    baseline: Baseline = field(default_factory=Zero)
    reading: Reading = "probability"
    sign: Sign = "own"
    seed: int = 0

    paper: ClassVar[str] = "DeYoung et al., ACL 2020"
    units: ClassVar[str] = FAITHFUL

    def __post_init__(self) -> None:
        check(self)
        check_shares(type(self).__name__.lower(), "percentiles", self.percentiles)

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        curve = case.original(self.reading)[:, None] - scores[0]
        return MetricResult(curve.mean(1), curve, torch.tensor(self.percentiles) / 100)


@dataclass(frozen=True)
class Comprehensiveness(_Bins):
    r"""What the score loses without the most relevant pixels, on average over several shares of them.

    :math:`\frac{1}{|Q|}\sum_q \bigl(p(x) - p(x \setminus \mathrm{top}_q)\bigr)`. More is better.

    Args:
        percentiles: Q, in per cent; those of the paper.
        baseline, reading, sign, seed: as for `Deletion`.

    DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020.

    >>> Comprehensiveness().better
    'more'
    """

    name: ClassVar[str] = "comprehensiveness"
    about: ClassVar[str] = "what the probability loses without the most relevant pixels"
    better: ClassVar[Better] = "more"

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        counts = share_counts(case, self.percentiles)
        ranks = case.ranks(self.sign, self.seed)
        return [ScoreRequest(covered_by_rank(ranks, self.baseline, [0] * len(counts), counts), self.reading)]


@dataclass(frozen=True)
class Sufficiency(_Bins):
    r"""What the score loses when nothing but the most relevant pixels is left, on average over several shares.

    :math:`\frac{1}{|Q|}\sum_q \bigl(p(x) - p(\mathrm{top}_q)\bigr)`. Less is better.

    Args:
        percentiles: Q, in per cent; those of the paper.
        baseline, reading, sign, seed: as for `Deletion`.

    DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020.

    >>> Sufficiency().better
    'less'
    """

    name: ClassVar[str] = "sufficiency"
    about: ClassVar[str] = "what the probability loses when only the most relevant pixels are left"
    better: ClassVar[Better] = "less"

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        counts = share_counts(case, self.percentiles)
        ranks = case.ranks(self.sign, self.seed)
        return [
            ScoreRequest(covered_by_rank(ranks, self.baseline, counts, [ranks[0].numel()] * len(counts)), self.reading)
        ]


def check_shares(metric: str, option: str, shares: Sequence[float]) -> None:
    """Refuse shares that are not between 0 and 100 per cent, or none."""
    if not shares or not all(0 < share < 100 for share in shares):
        raise MetricError(f"{option} of {metric} must be per cent above 0 and below 100, got {shown(shares)}; use 50")


def share_counts(case: MetricInput, percentiles: Sequence[float]) -> list[int]:
    """How many pixels shares in per cent are: at least one, and never all."""
    pixels = case.size[0] * case.size[1]
    return [min(max(1, round(pixels * share / 100)), max(1, pixels - 1)) for share in percentiles]


def by_original(
    metric: str, case: MetricInput, reading: Reading, value: torch.Tensor, original: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Put NaN where a figure is a share of an original score that is next to nothing beside those seen, or negative."""
    nothing, why = original < least(reading, original, seen), f"the original score is below {SMALL:g}"
    return undefined(
        metric, case.maps.name, value, nothing, why + ("" if reading == "probability" else " of those seen")
    )


def least(reading: Reading, *scores: torch.Tensor) -> torch.Tensor | float:
    """The smallest number ``(N,)`` that figures are divided by: scores have no unit of their own, probabilities do."""
    if reading == "probability":
        return SMALL
    return SMALL * torch.cat([each.reshape(len(each), -1).abs() for each in scores], 1).amax(1)


SMALL = 1e-6
"""Figures by the original score are not defined where its share of the largest one is smaller than this."""

_WHICH = {"morf": "most", "lerf": "least"}


_Ordered: TypeAlias = "Deletion | Insertion | PixelFlipping"


def _ranks_and_steps(case: MetricInput, metric: _Ordered) -> tuple[torch.Tensor, list[int]]:
    return case.ranks(metric.sign, metric.seed), steps_of(case.size[0] * case.size[1], metric.steps)


def _flipped(
    ranks: torch.Tensor, counts: Sequence[int], order: Literal["morf", "lerf"] | str, baseline: Baseline
) -> RankedRemoval:
    """Cover so many pixels, the most or the least relevant ones."""
    if order == "morf":
        return covered_by_rank(ranks, baseline, [0] * len(counts), counts)
    last = ranks[0].numel()
    return covered_by_rank(ranks, baseline, [last - count for count in counts], [last] * len(counts))


def _area_of(case: MetricInput, metric: _Ordered, curve: torch.Tensor) -> MetricResult:
    counts = _ranks_and_steps(case, metric)[1]
    return MetricResult(area(curve, counts), curve, torch.tensor(counts) / counts[-1])


@dataclass(frozen=True)
class AverageDrop:
    r"""What share of the probability is lost when the photo is seen through its heatmap.

    :math:`\max(0, y - o) / y`, where o is what is read of the photo behind its heatmap, which is divided by its largest
    value. Less is better. Not defined where y is next to nothing. A map without a positive value covers everything.

    Args:
        baseline: what is seen where the heatmap is 0; the paper multiplies the photo by the map.
        reading: "probability" of the class (default) or the target's own "score".

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> AverageDrop().better
    'less'
    """

    baseline: Baseline = field(default_factory=Zero)
    reading: Reading = "probability"

    name: ClassVar[str] = "averagedrop"
    about: ClassVar[str] = "share of the probability that is lost when the photo is seen through its heatmap"
    paper: ClassVar[str] = "Chattopadhay et al., WACV 2018"
    units: ClassVar[str] = "share of the probability"
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(SoftMasked(case.maps.heatmap, self.baseline), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        original, seen = case.original(self.reading), scores[0][:, 0]
        drop = (original - seen).clamp(min=0) / torch.where(original == 0, 1, original)
        return MetricResult(by_original(self.name, case, self.reading, drop, original, seen), parts={"seen": seen})


@dataclass(frozen=True)
class IncreaseInConfidence:
    """Whether the probability rises when the photo is seen through its heatmap: 1 or 0. More is better.

    A map without a positive value covers everything.

    Args:
        baseline, reading: as for `AverageDrop`.

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> IncreaseInConfidence().better
    'more'
    """

    baseline: Baseline = field(default_factory=Zero)
    reading: Reading = "probability"

    name: ClassVar[str] = "increase"
    about: ClassVar[str] = "whether the probability rises when the photo is seen through its heatmap"
    paper: ClassVar[str] = "Chattopadhay et al., WACV 2018"
    units: ClassVar[str] = "0 or 1"
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self)

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(SoftMasked(case.maps.heatmap, self.baseline), self.reading)]

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        original, seen = case.original(self.reading), scores[0][:, 0]
        return MetricResult((seen > original).to(seen), parts={"seen": seen})
