"""Localisation: does the map lie where the object is, by its boxes or its mask?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from explain._utils.errors import MetricError
from explain.metrics.base import ZERO, MapMetric, MetricInput, MetricResult, register
from explain.metrics.faithfulness import share_counts
from explain.metrics.maps import Sign
from explain.metrics.rankings import mid_ranks, ranks_of

NOTHING = "its map has no positive value"
SHARE = "share"


@dataclass(frozen=True)
class LocalisationMetric(MapMetric):
    """A metric of the map and of where the object is."""

    needs_object = True

    def region(self, data: MetricInput) -> torch.Tensor:
        """Where the object is ``(N, H, W)``; refused if it is not known."""
        if data.regions is None:
            raise MetricError(
                f"metric {self.name!r} needs to know where the object is; give boxes= or masks= to evaluate"
            )
        return data.regions.to(data.images.device)


@register
@dataclass(frozen=True)
class MaxBoxAccV2(LocalisationMetric):
    r"""Whether boxes around the parts of the map meet the object's boxes, at three degrees of overlap.

    The map is brought to [0, 1]. For each threshold :math:`\tau`, every connected part of the pixels at or above it
    gets its tightest box, and the best overlap (IoU) with any of the object's boxes counts. The published figure is of
    a **data set**: for each degree :math:`\delta`, the share of the photos with an overlap from :math:`\delta` on, at
    the one threshold that is best for all, on average over the degrees. `of_data_set` computes it from the ``parts``
    "overlaps" ``(N, T)`` of any number of photos. The figure of a single photo is the same with that photo as the data
    set, which is an upper bound: each photo has its own best threshold. More is better.

    A constant map is one part at every threshold: the whole photo.

    Args:
        thresholds: T, from 0 in equal steps to below 1. (The authors' code has 1,000 of them.)
        overlaps: the degrees, in per cent.
        sign: as for `explain.metrics.PointingGame`.

    Choe et al., "Evaluation for Weakly Supervised Object Localization: Protocol, Metrics, and Datasets", TPAMI 2022.

    >>> MaxBoxAccV2().of_data_set(torch.tensor([[0.2, 0.6], [0.8, 0.4]]))  # at 30 % both, at 50 % and 70 % one
    0.6666666666666666
    """

    thresholds: int = 100
    overlaps: tuple[float, ...] = (30, 50, 70)
    sign: Sign = "own"

    name = "maxboxaccv2"
    about = "whether boxes around the map's parts match the object's boxes; see its docstring"
    paper = "Choe et al., TPAMI 2022"
    units = "share of degrees of overlap"
    minimums: ClassVar = {"thresholds": 1}
    percentages = ("overlaps",)

    def __call__(self, data: MetricInput) -> MetricResult:
        if data.boxes is None:
            raise MetricError("metric 'maxboxaccv2' needs the boxes of the object; give boxes= to evaluate")
        maps = data.maps.per_pixel(self.sign).double()
        least, most = (ends.reshape(-1, 1, 1) for ends in maps.flatten(1).aminmax(dim=1))
        levels = torch.where(most > least, (maps - least) / torch.where(most > least, most - least, 1), 1).cpu().numpy()
        found = [self._overlaps(level, boxes.double().numpy()) for level, boxes in zip(levels, data.boxes, strict=True)]
        overlaps = torch.from_numpy(np.stack(found)).to(data.maps.values)
        value = overlaps.new_tensor([self.of_data_set(row[None]) for row in overlaps])
        return MetricResult(value, overlaps, torch.from_numpy(self._at), {"overlaps": overlaps})

    def of_data_set(self, overlaps: torch.Tensor) -> float:
        """The published figure, from the best overlaps ``(N, T)`` of all photos of a data set."""
        shares = [(overlaps >= degree / 100).double().mean(0).amax() for degree in self.overlaps]
        return float(torch.stack(shares).mean())

    @property
    def _at(self) -> NDArray[np.float64]:
        return np.arange(self.thresholds) / self.thresholds

    def _overlaps(self, levels: NDArray[np.float64], boxes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The best overlap at each threshold."""
        import cv2

        found = np.zeros(self.thresholds)
        for i, threshold in enumerate(self._at):
            above = (levels >= threshold).astype(np.uint8)
            parts = cv2.connectedComponentsWithStats(above, connectivity=8)[2][1:].astype(np.float64)
            x0, y0, width, height = parts[:, 0], parts[:, 1], parts[:, 2], parts[:, 3]
            around = np.stack([x0, y0, x0 + width, y0 + height], 1)
            found[i] = overlap(around[:, None], boxes[None]).max()
        return found


def overlap(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """The intersection over union of boxes ``(..., 4)``, ends exclusive."""
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    common = np.prod(sides.clip(min=0), -1)
    areas = [np.prod(each[..., 2:] - each[..., :2], -1) for each in (one, other)]
    found: NDArray[np.float64] = common / (areas[0] + areas[1] - common)
    return found


@register
@dataclass(frozen=True)
class PointingGame(LocalisationMetric):
    """Whether the largest value of the map lies on the object, or near it: 1 or 0. More is better.

    Where several pixels share the largest value, their share that hits; so a constant map scores
    as a random point. ``parts`` has that of a "random" point and that of the photo's "centre".

    Args:
        tolerance: how far from the object still counts, as a share of the photo's longer side. The paper's 15 pixels
            are for full-size photos (500 pixels); at 80 pixels they would let a random point hit most boxes.
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.

    Zhang et al., "Top-down Neural Attention by Excitation Backprop", IJCV 2018.

    >>> import explain, torch
    >>> maps = torch.zeros(1, 4, 4)
    >>> maps[0, 1, 1] = 1
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    >>> table = explain.evaluate(model, torch.rand(1, 3, 4, 4), maps, "pointinggame", boxes=[[0, 0, 2, 2]])
    >>> table["map"]["pointinggame"], table.parts("map", "pointinggame")["random"]
    (tensor([1.]), tensor([0.2500]))
    """

    tolerance: float = 0.03
    sign: Sign = "own"

    name = "pointinggame"
    about = "whether the map's largest value lies on the object, or near it"
    paper = "Zhang et al., IJCV 2018"
    units = "0 or 1"
    minimums: ClassVar = {"tolerance": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance > 1:
            raise MetricError(
                f"tolerance of pointinggame must be a share of the photo's longer side, got {self.tolerance:g}; "
                "15 pixels of 500 are 0.03"
            )

    def __call__(self, data: MetricInput) -> MetricResult:
        maps = data.maps.per_pixel(self.sign)
        near = widened(self.region(data), self.tolerance * max(data.size))
        tops = maps == maps.flatten(1).amax(1).reshape(-1, 1, 1)
        value = (tops & near).flatten(1).sum(1) / tops.flatten(1).sum(1)
        height, width = data.size
        middle = near[:, (height - 1) // 2 : height // 2 + 1, (width - 1) // 2 : width // 2 + 1]
        parts = {"random": near.flatten(1).to(maps).mean(1), "centre": middle.flatten(1).to(maps).mean(1)}
        return MetricResult(value.to(maps), parts=parts)


@register
@dataclass(frozen=True)
class EnergyPointingGame(LocalisationMetric):
    r"""The share of the map's positive values that lies on the object (relevance mass accuracy). More is better.

    :math:`\sum_{i \in R} a_i^+ / \sum_i a_i^+`. ``parts`` has the share of a constant map,
    "random". Not defined for a map without a positive value.

    Args:
        sign: as for `PointingGame`.

    Wang et al., "Score-CAM", CVPR Workshops 2020.

    >>> EnergyPointingGame().better
    'more'
    """

    sign: Sign = "own"

    name = "energypointinggame"
    about = "share of the map's positive values that lies on the object"
    paper = "Wang et al., CVPR Workshops 2020"
    units = SHARE

    def __call__(self, data: MetricInput) -> MetricResult:
        region = self.region(data)
        value, nothing = _inside(data, data.maps.per_pixel(self.sign).clamp(min=0), region)
        value = data.undefined(self, value, nothing, NOTHING)
        return MetricResult(value, parts={"random": region.flatten(1).to(value).mean(1)})


@register
@dataclass(frozen=True)
class RelevanceMass(LocalisationMetric):
    r"""The share of the map's energy that lies on the object, the channels pooled by their squares. More is better.

    :math:`\sum_{i \in R} r_i / \sum_i r_i` with :math:`r_i = \sum_c a_{ic}^2`; of maps without channels, the square
    of the positive part. Not defined where all of these are zero.

    Arras et al., "CLEVR-XAI: A benchmark dataset for the ground truth evaluation of neural network explanations",
    Information Fusion 2022.

    >>> RelevanceMass().better
    'more'
    """

    name = "relevancemass"
    about = "share of the map's squared values that lies on the object"
    paper = "Arras et al., Information Fusion 2022"
    units = SHARE

    def __call__(self, data: MetricInput) -> MetricResult:
        value, nothing = _inside(data, _pooled(data), self.region(data))
        return MetricResult(data.undefined(self, value, nothing, ZERO if data.maps.values.ndim == 4 else NOTHING))


@register
@dataclass(frozen=True)
class RelevanceRank(LocalisationMetric):
    r"""The share of the K pixels with the largest values that lie on the object, which has K pixels. More is better.

    :math:`|\mathrm{top}_K \cap R| / K`, :math:`K = |R|`, the channels pooled by their squares. Equal values are
    shuffled with a seed, so that a constant map scores about as a random one.

    Args:
        seed: of the order of equal values.

    Arras et al., "CLEVR-XAI", Information Fusion 2022.

    >>> RelevanceRank().seed
    0
    """

    seed: int = 0

    name = "relevancerank"
    about = "share of the top pixels, as many as the object has, that lie on it"
    paper = "Arras et al., Information Fusion 2022"
    units = SHARE

    def __call__(self, data: MetricInput) -> MetricResult:
        region, ranks = self.region(data), ranks_of(_pooled(data), self.seed)
        size = region.flatten(1).sum(1)
        hits = (region & (ranks < size.reshape(-1, 1, 1))).flatten(1).sum(1)
        return MetricResult((hits / size).to(data.maps.values.dtype))


@register
@dataclass(frozen=True)
class AttributionLocalisation(LocalisationMetric):
    r"""The share of the positive values that lies on the object, by the share of the photo that the object takes.

    :math:`\mu = R_\mathrm{in}^+ / R_\mathrm{tot}^+`, and weighted
    :math:`\mu_w = \mu \cdot S_\mathrm{tot} / S_\mathrm{in}`: above 1 where the map prefers the object. More is better.
    Not defined for a map without a positive value.

    Args:
        weighted: whether to divide by the object's share.
        sign: as for `PointingGame`.

    Kohlbrenner et al., "Towards Best Practice in Explaining Neural Network Decisions with LRP", IJCNN 2020.

    >>> AttributionLocalisation().weighted
    True
    """

    weighted: bool = True
    sign: Sign = "own"

    name = "attributionlocalisation"
    about = "share of the positive values on the object, divided by the object's share of the photo"
    paper = "Kohlbrenner et al., IJCNN 2020"
    units = "ratio"

    def __call__(self, data: MetricInput) -> MetricResult:
        region = self.region(data)
        value, nothing = _inside(data, data.maps.per_pixel(self.sign).clamp(min=0), region)
        taken = region.flatten(1).to(value).mean(1)
        found = value / taken if self.weighted else value
        return MetricResult(data.undefined(self, found, nothing, NOTHING), parts={"share": value})


@register
@dataclass(frozen=True)
class TopKIntersection(LocalisationMetric):
    """The share of the top pixels that lie on the object. More is better.

    Equal values are shuffled with a seed, so that a constant map scores about as a random one.

    Args:
        share: how many pixels are the top ones, in per cent. (The paper takes 1,000 pixels.)
        sign, seed: as for `explain.metrics.Deletion`.

    Theiner et al., "Interpretable Semantic Photo Geolocation", WACV 2022.

    >>> TopKIntersection().share
    2
    """

    share: float = 2
    sign: Sign = "own"
    seed: int = 0

    name = "topkintersection"
    about = "share of the top pixels that lie on the object"
    paper = "Theiner et al., WACV 2022"
    units = SHARE
    percentages = ("share",)

    def __call__(self, data: MetricInput) -> MetricResult:
        count = share_counts(data, [self.share])[0]
        top = data.ranks(self.sign, self.seed) < count
        hits = (top & self.region(data)).flatten(1).sum(1)
        return MetricResult((hits / count).to(data.maps.values.dtype))


@register
@dataclass(frozen=True)
class AUC(LocalisationMetric):
    """The area under the receiver operating characteristic: the chance that a pixel of the object outranks another.

    Equal values count a half, so that a constant map has 1/2. More is better. Not defined where
    the object takes the whole photo.

    Args:
        sign: as for `PointingGame`.

    Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 2006.

    >>> AUC().better
    'more'
    """

    sign: Sign = "own"

    name = "auc"
    about = "probability that a pixel of the object has a larger value than one outside it"
    paper = "Fawcett, Pattern Recognition Letters 2006"

    def __call__(self, data: MetricInput) -> MetricResult:
        region = self.region(data).flatten(1)
        maps = data.maps.per_pixel(self.sign).flatten(1)
        ranks = mid_ranks(maps)
        inside = region.sum(1).double()
        outside = region.shape[1] - inside
        wins = (ranks * region).sum(1) - inside * (inside - 1) / 2
        value = (wins / torch.where(outside > 0, inside * outside, 1)).to(maps)
        return MetricResult(data.undefined(self, value, outside == 0, "the object takes the whole photo"))


@register
@dataclass(frozen=True)
class IoU(LocalisationMetric):
    """The intersection over union of the object with the pixels above a threshold, at the best threshold of each photo.

    It is an upper bound: nobody knows that threshold beforehand. More is better. A constant map
    has one threshold, and so the object's share of the photo.

    Args:
        sign: as for `PointingGame`.

    Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016 (at a fixed threshold, of boxes).

    >>> IoU().better
    'more'
    """

    sign: Sign = "own"

    name = "iou"
    about = "intersection over union with the object at each photo's best threshold"
    paper = "Zhou et al., CVPR 2016"

    def __call__(self, data: MetricInput) -> MetricResult:
        region = self.region(data).flatten(1)
        values, order = data.maps.per_pixel(self.sign).flatten(1).sort(1, descending=True)
        hits = region.gather(1, order).cumsum(1)
        taken = torch.arange(1, values.shape[1] + 1, device=values.device)
        overlap = hits.double() / (region.sum(1, keepdim=True) + taken - hits)
        ends = torch.ones_like(region)  # a threshold takes all of equal values, or none
        ends[:, :-1] = values[:, :-1] != values[:, 1:]
        best = torch.where(ends, overlap, 0).max(1)
        return MetricResult(best.values.to(values), parts={"threshold": values.gather(1, best.indices[:, None])[:, 0]})


def widened(region: torch.Tensor, by: float) -> torch.Tensor:
    """The pixels ``(N, H, W)`` no farther than ``by`` from a region.

    >>> widened(torch.tensor([[[True, False, False]]]), 1.0)
    tensor([[[ True,  True, False]]])
    """
    reach, found = int(by), region.clone()
    for down in range(-reach, reach + 1):
        across = int((by**2 - down**2) ** 0.5)
        wide = F.max_pool2d(region.float()[:, None], (1, 2 * across + 1), 1, (0, across))[:, 0] > 0
        height = region.shape[1]
        if abs(down) < height:
            target, source = slice(max(0, down), height + min(0, down)), slice(max(0, -down), height - max(0, down))
            found[:, target] |= wide[:, source]
    return found


def _inside(data: MetricInput, values: torch.Tensor, region: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of values from 0 that lies in a region ``(N,)``, and where there are none."""
    wide = values.double()  # squares and sums of any size fit into it
    total = wide.flatten(1).sum(1)
    inside = (wide * region).flatten(1).sum(1)
    return (inside / torch.where(total > 0, total, 1)).to(data.maps.values), total == 0


def _pooled(data: MetricInput) -> torch.Tensor:
    values = data.maps.values.double()
    return values.square().sum(1) if values.ndim == 4 else data.maps.per_pixel().double().clamp(min=0).square()
