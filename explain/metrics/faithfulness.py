"""Faithfulness: curves of the score while pixels, squares or superpixels are covered; average
drop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

import numpy as np
import torch

from explain.baselines import Blur, Mean, Neighbours, Noise, Zero
from explain.baselines.base import Baseline
from explain.engine.perturbations import ScoreKind
from explain.methods.base import over_all, ratio
from explain.methods.masking import Score
from explain.methods.regions import in_a_row
from explain.metrics import base
from explain.metrics.base import MetricInput, MetricResult, ScoreMetric, ScoreRequest, register
from explain.metrics.maps import Sign, area_under_curve, grid_regions, region_ranks, steps_of

PROBABILITY = "mean probability"

SMALL = 1e-6
"""Figures by the original score are not defined where its share of the largest one is smaller than
this."""


Covers = Literal["largest", "smallest", "rest"]
"""Which values are covered: the largest ones, the smallest ones, or all but the largest."""


class _RankedCurve(ScoreMetric):
    """The area under the curve of the scores while pixels are covered in the order of the map."""

    steps: int
    baseline: Baseline
    score: Score
    sign: Sign
    seed: int

    units = PROBABILITY
    covers: ClassVar[Covers] = "largest"

    def ranks(self, data: MetricInput) -> torch.Tensor:
        """The rank of each pixel ``(N, H, W)`` in the order of covering, 0 for the most relevant
        one; subclasses rank squares instead.
        """
        return data.ranks(self.sign, self.seed)

    def total(self, data: MetricInput) -> int:
        """How many ranks there are: pixels, or squares in subclasses."""
        return data.pixels

    def counts(self, data: MetricInput) -> list[int]:
        """How many ranks are covered at each step of the curve, from 0 to all."""
        return steps_of(self.total(data), self.steps)

    def images_of_steps(self, data: MetricInput, covers: Covers, score: ScoreKind) -> ScoreRequest:
        """The request for the scores ``(N, steps)`` of the images of all steps: covered are the
        first ranks, the last, or all but the first, by as many as `counts` has.
        """
        counts = torch.tensor(self.counts(data))
        total = torch.full_like(counts, self.total(data))
        first = {"largest": torch.zeros_like(counts), "smallest": total - counts, "rest": counts}
        end = counts if covers == "largest" else total
        return base.cover_ranks(self.ranks(data), first[covers], end, self.baseline, score)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [self.images_of_steps(data, self.covers, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The area ``(N,)`` under the curve of the scores ``(N, steps)`` over the share that is
        covered; the curve is kept in the result.
        """
        counts = self.counts(data)
        value = area_under_curve(scores[0], counts)
        return MetricResult(value, scores[0], torch.tensor(counts) / counts[-1])


@dataclass(frozen=True)
class _StepCurve(_RankedCurve):
    """A curve of the score while pixels are covered in equal steps."""

    steps: int = 64
    baseline: Baseline = Zero()
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    minimums: ClassVar = {"steps": 1}


@register
class Deletion(_StepCurve):
    r"""Area under the probability while the map's pixels are covered, largest first.

    :math:`\mathrm{AUC} = \sum_{k=1}^{n} (s_k - s_{k-1}) \frac{p_{k-1} + p_k}{2}`, where :math:`p_k`
    is the probability with the share :math:`s_k` of the pixels covered: :math:`k/n`, to the nearest
    pixel. Less is better.

    Args:
        steps: n; RISE covers a row's number of pixels at a time, which are 224 steps at 224 pixels.
        baseline: what covers them; RISE's are zeros after the normalisation.
        score: "probability" of the class (default) or the target's own "logit".
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.
        seed: of the order of equal values. A constant map gets a random order.

    Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC
    2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> table = explain.evaluate(model, torch.rand(1, 3, 2, 2), "saliency", Deletion(steps=4))
    >>> table.curve("saliency", "deletion")[0]
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """

    better: ClassVar[base.Better] = "less"


@register
class Insertion(_StepCurve):
    """Area under the probability while the map's pixels are shown, largest first.

    They are shown on a covered photo.

    The formula is that of `Deletion`; more is better.

    Args:
        baseline: RISE begins with a blur of 11 × 11 pixels and σ 5 (see `explain.baselines.Blur`).
        steps, score, sign, seed: as for `Deletion`.

    Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC
    2018.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    >>> explain.evaluate(model, torch.rand(1, 3, 2, 2), "saliency", Insertion(steps=4))["saliency"][
    ...     "insertion"
    ... ].shape
    torch.Size([1])
    """

    baseline: Baseline = Blur()

    covers = "rest"


@register(order="lerf")
@register
class PixelFlipping(_RankedCurve):
    """The area under the curve while pixels are covered: the most relevant first (MoRF), or the
    least (LeRF).

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
    baseline: Baseline = Mean()
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    minimums: ClassVar = {"steps": 1}

    def described(self) -> Mapping[str, str]:
        """The name, summary and direction of pixel flipping for its ``order``: "morf" or "lerf"."""
        morf = self.order == "morf"
        which = "most" if morf else "least"
        return {
            "name": self.order,
            "summary": f"area under the probability while pixels are flipped, the {which} relevant "
            "first",
            "better": "less" if morf else "more",
            "covers": "largest" if morf else "smallest",
        }


@dataclass(frozen=True)
class _ShareCurve(_RankedCurve):
    """A curve of the score while some shares of the pixels are covered."""

    percentiles: tuple[float, ...] = (1, 5, 10, 20, 50)
    baseline: Baseline = Zero()
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    below = {"percentiles": 100}

    def counts(self, data: MetricInput) -> list[int]:
        return share_counts(data, self.percentiles)


@register
class ROAD(_ShareCurve):
    r"""Half of LeRF minus MoRF, with pixels interpolated from their neighbours.

    Remove and debias: the score without the least relevant pixels, less that without the most
    relevant ones.

    :math:`\frac{1}{|Q|}\sum_{q \in Q} \frac{p^{\mathrm{LeRF}}_q - p^{\mathrm{MoRF}}_q}{2}`, where
    the share q of the pixels is interpolated from those around it, so that the mask's shape is not
    recognised. In the paper, the figure of a data set is the accuracy: ``parts`` has for each image
    and share whether the class still was the best, "morf hits" and "lerf hits" ``(N, |Q|)``, and
    the probabilities "morf" and "lerf".

    Args:
        percentiles: Q, in per cent, each above 0 and below 100.
        baseline: `explain.baselines.Neighbours` as published.
        score, sign, seed: as for `Deletion`.

    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods", ICML
    2022.

    >>> ROAD(percentiles=(10, 50)).percentiles
    (10, 50)
    """

    percentiles: tuple[float, ...] = (10, 20, 30, 40, 50, 60, 70, 80, 90)
    baseline: Baseline = Neighbours()

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """The requests of `ROAD`, two or four, in the order that `__call__` takes: the score for
        MoRF and for LeRF, and, where the target is a class, its margin for both."""
        kinds: list[ScoreKind] = [self.score]
        if data.probability is not None:
            kinds.append("margin")
        orders: list[Covers] = ["largest", "smallest"]
        return [self.images_of_steps(data, covers, kind) for kind in kinds for covers in orders]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `ROAD`: half of LeRF minus MoRF, on average over the shares ``(N,)``; with
        margins, also whether the class still was the best."""
        morf, lerf, *margins = scores
        curve = (lerf - morf) / 2
        parts = {"morf": morf, "lerf": lerf}
        if margins:
            morf_margin, lerf_margin = margins
            parts |= {"morf hits": morf_margin > 0, "lerf hits": lerf_margin > 0}
        return MetricResult(
            curve.mean(1), curve, at=torch.tensor(self.percentiles) / 100, parts=parts
        )


@register
class Comprehensiveness(_ShareCurve):
    r"""Drop of the probability without the most relevant pixels.

    It is the mean over several shares of the pixels.

    :math:`\frac{1}{|Q|}\sum_q \bigl(p(x) - p(x \setminus \mathrm{top}_q)\bigr)`. More is better.

    Args:
        percentiles: Q, in per cent; those of the paper.
        baseline, score, sign, seed: as for `Deletion`.

    DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020.

    >>> Comprehensiveness().better
    'more'
    """

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The mean over the shares of what the score loses, ``(N,)``, and the loss at each share as
        the curve; `Sufficiency` is the same with other pixels covered."""
        curve = data.original(self.score)[:, None] - scores[0]
        return MetricResult(curve.mean(1), curve, torch.tensor(self.percentiles) / 100)


@register
class Sufficiency(Comprehensiveness):
    r"""Drop of the probability with the most relevant pixels only.

    It is the mean over several shares of the pixels.

    :math:`\frac{1}{|Q|}\sum_q \bigl(p(x) - p(\mathrm{top}_q)\bigr)`. Less is better.

    Args:
        percentiles: Q, in per cent; those of the paper.
        baseline, score, sign, seed: as for `Deletion`.

    DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020.

    >>> Sufficiency().better
    'less'
    """

    better: ClassVar[base.Better] = "less"
    covers = "rest"


@register
class AverageDrop(ScoreMetric):
    r"""Share of the probability that is lost when the photo is masked by its heatmap.

    :math:`\max(0, y - o) / y`, where o is the probability of the photo masked by its heatmap, which
    is divided by its largest value. Less is better. Not defined where y is next to nothing. A map
    without a positive value covers everything.

    Args:
        baseline: what replaces the photo where the heatmap is 0; the paper multiplies the photo by
            the map.
        score: "probability" of the class (default) or the target's own "logit".

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> AverageDrop().better
    'less'
    """

    baseline: Baseline = Zero()
    score: Score = "probability"

    units = "share of the probability"
    better: ClassVar[base.Better] = "less"

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [base.cover_softly(data.maps.heatmap, self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `AverageDrop`: the share of the probability that is lost behind the
        heatmap, ``(N,)`` from 0; NaN where the original is next to nothing."""
        original = data.original(self.score)
        seen = scores[0][:, 0]
        drop = ratio((original - seen).clamp(min=0), original)
        return MetricResult(by_original(self, data, drop, seen), parts={"seen": seen})


@register
class IncreaseInConfidence(AverageDrop):
    """Whether the probability rises when the photo is masked by its heatmap.

    It is 1 or 0. More is better.

    A map without a positive value covers everything.

    Args:
        baseline, score: as for `AverageDrop`.

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> IncreaseInConfidence().better
    'more'
    """

    name = "increase"
    units = "0 or 1"
    better = "more"

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        seen = scores[0][:, 0]
        return MetricResult((seen > data.original(self.score)).to(seen), parts={"seen": seen})


def share_counts(data: MetricInput, percentiles: Sequence[float]) -> list[int]:
    """How many pixels of an image each share, in per cent, is: at least one, and never all."""
    return [
        min(max(1, round(data.pixels * share / 100)), max(1, data.pixels - 1))
        for share in percentiles
    ]


def by_original(
    metric: "AverageDrop | IROF", data: MetricInput, value: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """``value`` ``(N,)``, a share of the original score, with NaN and a warning where that score is
    negative, or tiny beside ``seen`` ``(N,)`` or ``(N, K)`` of perturbed images.
    """
    original = data.original(metric.score)
    why = f"the original score is below {SMALL:g}"
    if metric.score == "logit":
        why += " of those seen"
    return data.undefined(metric, value, original < least(metric.score, original, seen), why)


def least(kind: Score, *scores: torch.Tensor) -> torch.Tensor | float:
    """The smallest score to divide a figure by: a fixed number for probabilities; for logits, which
    have no unit, ``(N,)``, relative to the largest of ``scores`` ``(N, ...)``.
    """
    if kind == "probability":
        return SMALL
    sizes = [values.reshape(len(values), -1).abs() for values in scores]
    return SMALL * torch.cat(sizes, 1).amax(1)


@dataclass(frozen=True)
class _GridCurve(_RankedCurve):
    """The area under the curve of the scores while squares are covered in the order of the map's
    sums."""

    side: int = 8
    steps: int = 64
    baseline: Baseline = Zero()
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    minimums: ClassVar = {"side": 1, "steps": 1}

    def ranks(self, data: MetricInput) -> torch.Tensor:
        """The rank of each pixel's square ``(N, H, W)``, by the sum of the map in the square."""
        squares = grid_regions(data.size, self.side, data.images)
        return region_ranks(data.maps.per_pixel(self.sign), squares, self.seed)

    def total(self, data: MetricInput) -> int:
        return math.prod(math.ceil(length / self.side) for length in data.size)


@register
class RegionPerturbation(_GridCurve):
    r"""Mean drop of the probability while squares are covered, largest first (AOPC).

    :math:`\mathrm{AOPC} = \frac{1}{L+1}\sum_{k=0}^{L} \bigl(f(x^{(0)}) - f(x^{(k)})\bigr)`, the
    square with the largest sum of the map first. More is better.

    Args:
        side: of the squares in pixels; the paper's are 9 × 9 at 224 pixels.
        steps: L, or as many as there are squares.
        baseline: noise as in the paper, which is here normal with the photo's own mean and
            deviation.
        score, sign, seed: as for `explain.metrics.Deletion`.

    Samek et al., "Evaluating the Visualization of What a Deep Neural Network Has Learned", TNNLS
    2017.

    >>> RegionPerturbation(side=4).steps
    100
    """

    side: int = 9
    steps: int = 100
    baseline: Baseline = Noise()

    def counts(self, data: MetricInput) -> list[int]:
        return list(range(min(self.steps, self.total(data)) + 1))

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `RegionPerturbation`: the mean drop of the score ``(N,)`` over the steps of
        covering squares (AOPC)."""
        curve = scores[0][:, :1] - scores[0]
        at = torch.tensor(self.counts(data)) / self.total(data)
        return MetricResult(curve.mean(1), scores[0], at)


@register
class Selectivity(_GridCurve):
    """Area under the probability while squares are covered, largest first.

    The formula is that of `explain.metrics.Deletion`, over the share of the squares. Less is
    better.

    Args:
        side: of the squares in pixels.
        steps: in how many steps all of them are covered, or as many as there are squares.
        baseline, score, sign, seed: as for `explain.metrics.Deletion`.

    Montavon et al., "Methods for interpreting and understanding deep neural networks", DSP 2018.

    >>> Selectivity(side=4).better
    'less'
    """

    better: ClassVar[base.Better] = "less"


@register
class IROF(ScoreMetric):
    r"""Area over the curve of the probability while superpixels are covered.

    Iterative removal of features.

    :math:`1 - \mathrm{AUC}\bigl(p_k / p_0\bigr)`, where the first k superpixels by the mean of the
    map in each are covered. More is better. Not defined where :math:`p_0` is next to nothing.

    Args:
        segments: about how many superpixels there are, see
            `explain.metrics.faithfulness.superpixels`.
        baseline: the photo's mean colour, as in the paper.
        score, sign, seed: as for `explain.metrics.Deletion`.

    Rieger and Hansen, "IROF: a low resource evaluation metric for explanation methods", 2020
    (arXiv:2003.08747).

    >>> IROF().better
    'more'
    """

    segments: int = 100
    baseline: Baseline = Mean()
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    units = "mean share of the probability"
    minimums: ClassVar = {"segments": 2}

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """The photos in which the first k superpixels by the map's mean are covered."""
        regions = superpixels(data.images, self.segments)
        ranks = region_ranks(data.maps.per_pixel(self.sign), regions, self.seed, mean=True)
        superpixel_count = regions.flatten(1).amax(1) + 1
        # Images have different numbers of superpixels; the curves of those with fewer stay at their
        # end.
        counts = torch.arange(int(superpixel_count.max()) + 1, device=regions.device).expand(
            len(regions), -1
        )
        ends = torch.minimum(counts, superpixel_count[:, None])
        return [base.cover_ranks(ranks, torch.zeros_like(ends), ends, self.baseline, self.score)]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `IROF`: one less the area under the curve of the share of the probability
        that is left ``(N,)``; photos with fewer superpixels have shorter curves."""
        first = scores[0][:, :1]
        curve = scores[0] / torch.where(first == 0, 1, first)
        last_numbers = superpixels(data.images, self.segments).flatten(1).amax(1)
        # from none covered to all, whose number is that of the last superpixel and one
        step_counts = (last_numbers + 2).tolist()
        areas = [
            area_under_curve(row[None, :steps], range(steps))
            for row, steps in zip(curve, step_counts, strict=True)
        ]
        return MetricResult(by_original(self, data, 1 - torch.cat(areas), scores[0]), curve)


def superpixels(
    images: torch.Tensor, count: int, compactness: float = 1.0, rounds: int = 5
) -> torch.Tensor:
    """Return about ``count`` pieces of like colour ``(N, H, W)``, from 0 without gaps, maybe
    unconnected: ``rounds`` of k-means in colour and position (SLIC; Achanta et al., TPAMI 2012)."""
    return torch.stack([_of_image(image.float(), count, compactness, rounds) for image in images])


def _of_image(photo: torch.Tensor, count: int, compactness: float, rounds: int) -> torch.Tensor:
    """The superpixels of one image ``(C, H, W)`` as numbers ``(H, W)``, from 0 without gaps:
    k-means in which each pixel chooses among the nine pieces around it (27 in a volume).
    """
    size = tuple(photo.shape[1:])
    side = max(1.0, (math.prod(size) / count) ** (1 / len(size)))
    places = np.indices(size)
    pieces_along = [max(1, round(length / side)) for length in size]
    # the shape in which one number for each side broadcasts over the pixels
    over_places = (-1, *[1] * len(size))
    own_piece = places * np.reshape(pieces_along, over_places) // np.reshape(size, over_places)
    pieces_around = []  # the pieces that each pixel may belong to
    for steps in product((-1, 0, 1), repeat=len(size)):
        around = own_piece + np.reshape(steps, over_places)
        # clip: beyond the border stands the last piece once more
        pieces_around.append(np.ravel_multi_index(tuple(around), pieces_along, mode="clip"))
    piece_choices = torch.from_numpy(np.stack(pieces_around)).to(photo.device).flatten(1)
    centred = photo - over_all(photo.flatten(1).mean(1), photo)
    colours = centred / centred.pow(2).mean().sqrt().clamp(min=torch.finfo(photo.dtype).tiny)
    # in sides of a piece, so that a contrast of one deviation is as far as 1 / compactness pieces
    positions = torch.from_numpy(places).to(photo) * (compactness / side)
    features = torch.cat([colours, positions]).flatten(1)  # (F, H * W)
    labels = piece_choices[len(piece_choices) // 2]  # without a step
    for _ in range(rounds):
        sizes = torch.bincount(labels, minlength=math.prod(pieces_along))
        sums = features.new_zeros(len(features), len(sizes)).index_add_(1, labels, features)
        # the centre of a piece without pixels is out of reach
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), 1e6)
        distances = torch.stack(
            [(features - centres[:, piece]).pow(2).sum(0) for piece in piece_choices]
        )
        labels = piece_choices.gather(0, distances.argmin(0, keepdim=True))[0]
    return in_a_row(labels).reshape(size)


@register
class Monotonicity(_StepCurve):
    """Whether the probability never falls while pixels are shown, the least relevant first.

    1 where it never falls, else 0; ``parts`` has the "share" of the steps in which it does not.
    More is better.

    Args:
        steps: in how many steps all pixels are shown.
        baseline, score, sign, seed: as for `explain.metrics.Deletion`.

    Arya et al., "One Explanation Does Not Fit All", 2019 (arXiv:1909.03012).

    >>> Monotonicity(steps=8).better
    'more'
    """

    units = "0 or 1"

    def counts(self, data: MetricInput) -> list[int]:
        """How many pixels are covered at each step: all at first, none at the end."""
        return super().counts(data)[::-1]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `Monotonicity`: whether the score never falls while pixels are shown: 1 or
        0 ``(N,)``, and the share of steps in which it does not."""
        not_falling = (scores[0].diff(dim=1) >= 0).to(scores[0])
        shares = 1 - torch.tensor(self.counts(data)) / data.pixels
        parts = {"share": not_falling.mean(1)}
        return MetricResult(not_falling.amin(1), curve=scores[0], at=shares, parts=parts)
