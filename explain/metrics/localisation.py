"""Localisation: does the map lie where the object is, by its boxes or its mask? And how these are
given."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from explain._utils.errors import MetricError, image_name, shown
from explain.attribution.diagnostics import image_names
from explain.baselines.replacements import to_unit
from explain.data.boxes import connected_parts
from explain.layers.layouts import Size
from explain.methods.base import over_all, ratio
from explain.methods.regions import pixels_near
from explain.metrics.base import NOTHING, ZERO, MapMetric, MetricInput, MetricResult, register
from explain.metrics.faithfulness import share_counts
from explain.metrics.maps import Sign, as_tensor, mid_ranks, ranks_of

Boxes: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]

SHARE = "share"


class LocalisationMetric(MapMetric):
    """A metric of the map and of where the object is."""

    needs_object = True

    def region(self, data: MetricInput) -> torch.Tensor:
        """The object's pixels, as truth values ``(N, H, W)`` on the images' device; refused if
        neither boxes nor masks were given."""
        if data.regions is None:
            raise MetricError(
                f"metric {self.name!r} needs to know where the object is; give boxes= or masks="
            )
        return data.regions.to(data.images.device)

    def share_on_object(
        self, data: MetricInput, values: torch.Tensor, why: str = NOTHING
    ) -> torch.Tensor:
        """The share ``(N,)`` of non-negative ``values`` ``(N, H, W)`` that lies on the object; NaN
        with a warning, which says ``why``, where all values are zero."""
        wide = values.double()  # squares and sums of any size fit into it
        total = wide.flatten(1).sum(1)
        on_object = (wide * self.region(data)).flatten(1).sum(1)
        share = ratio(on_object, total).to(data.maps.values)
        return data.undefined(self, share, total == 0, why)


@register
class MaxBoxAccV2(LocalisationMetric):
    r"""Whether boxes around the map's parts match the object's boxes, at three degrees of overlap.

    The map is brought to [0, 1]. For each threshold :math:`\tau`, every connected part of the
    pixels at or above it gets its tightest box, and the best overlap (IoU) with any of the object's
    boxes counts. The published figure is of a **data set**: for each degree :math:`\delta`, the
    share of the photos with an overlap from :math:`\delta` on, at the one threshold that is best
    for all, on average over the degrees. `of_data_set` computes it from the ``parts`` "overlaps"
    ``(N, T)`` of any number of photos. The figure of a single photo is the same with that photo as
    the data set, which is an upper bound: each photo has its own best threshold. More is better.

    A constant map is one part at every threshold: the whole photo.

    Args:
        thresholds: T, from 0 in equal steps to below 1. (The authors' code has 1,000 of them.)
        overlaps: the degrees, in per cent.
        sign: as for `explain.metrics.PointingGame`.

    Choe et al., "Evaluation for Weakly Supervised Object Localization: Protocol, Metrics, and
    Datasets", TPAMI 2022.

    >>> MaxBoxAccV2().of_data_set(
    ...     torch.tensor([[0.2, 0.6], [0.8, 0.4]])
    ... )  # at 30 % both, at 50 % and 70 % one
    0.6666666666666666
    """

    thresholds: int = 100
    overlaps: tuple[float, ...] = (30, 50, 70)
    sign: Sign = "own"

    units = "share of degrees of overlap"
    minimums: ClassVar = {"thresholds": 1}
    below = {"overlaps": 100}

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of each photo as if it were the data set, ``(N,)``; ``parts`` has the best
        overlap at each threshold, ``(N, T)``, which `of_data_set` makes the published figure of."""
        if data.boxes is None:
            raise MetricError(
                "metric 'maxboxaccv2' needs the boxes of the object; give boxes= to evaluate"
            )
        if len(data.size) != 2:
            raise MetricError(
                "metric 'maxboxaccv2' must have maps of photos, got those of volumes or videos; "
                "use iou"
            )
        maps = data.maps.per_pixel(self.sign).double()
        # a constant map is one part at every threshold: the whole photo
        varies = maps.flatten(1).amin(1) < maps.flatten(1).amax(1)
        unit_maps = torch.where(varies[:, None, None], to_unit(maps), 1).cpu().numpy()
        best = [
            self._overlaps(unit_map, boxes.double())
            for unit_map, boxes in zip(unit_maps, data.boxes, strict=True)
        ]
        overlaps = torch.stack(best).to(data.maps.values)
        value = overlaps.new_tensor([self.of_data_set(row[None]) for row in overlaps])
        at = torch.arange(self.thresholds, dtype=torch.float64) / self.thresholds
        return MetricResult(value, curve=overlaps, at=at, parts={"overlaps": overlaps})

    def of_data_set(self, overlaps: torch.Tensor) -> float:
        """The published figure, from the best overlaps ``(N, T)`` of all photos of a data set."""
        shares = [(overlaps >= degree / 100).double().mean(0).amax() for degree in self.overlaps]
        return float(torch.stack(shares).mean())

    def _overlaps(self, unit_map: NDArray[np.float64], boxes: torch.Tensor) -> torch.Tensor:
        """The best IoU at each threshold ``(T,)`` between boxes around the connected parts of one
        ``unit_map`` ``(H, W)`` in [0, 1] and the object's boxes ``(k, 4)``.
        """
        from torchvision.ops import box_iou

        best = []
        for threshold in np.arange(self.thresholds) / self.thresholds:
            _, parts = connected_parts(unit_map >= threshold)
            best.append(box_iou(torch.from_numpy(parts).double(), boxes).max())
        return torch.stack(best)


@register
class PointingGame(LocalisationMetric):
    """Whether the map's largest value lies on the object, or near it.

    It is 1 or 0. More is better.

    Where several pixels share the largest value, their share that hits; so a constant map scores
    as a random point. ``parts`` has that of a "random" point and that of the photo's "centre".

    Args:
        tolerance: how far from the object still counts, as a share of the photo's longer side. The
            paper's 15 pixels are for full-size photos (500 pixels); at 80 pixels they would let a
            random point hit most boxes.
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.

    Zhang et al., "Top-down Neural Attention by Excitation Backprop", IJCV 2018.

    >>> import explain, torch
    >>> maps = torch.zeros(1, 4, 4)
    >>> maps[0, 1, 1] = 1
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    >>> table = explain.evaluate(
    ...     model, torch.rand(1, 3, 4, 4), maps, "pointinggame", boxes=[[0, 0, 2, 2]]
    ... )
    >>> table["map"]["pointinggame"], table.parts("map", "pointinggame")["random"]
    (tensor([1.]), tensor([0.2500]))
    """

    tolerance: float = 0.03
    sign: Sign = "own"

    units = "0 or 1"
    minimums: ClassVar = {"tolerance": 0}
    maximums: ClassVar = {"tolerance": 1}

    def __call__(self, data: MetricInput) -> MetricResult:
        """Whether the largest value is on the object or within the tolerance, ``(N,)``: 1 or 0, or
        the share of equal largest values that are."""
        maps = data.maps.per_pixel(self.sign)
        near = pixels_near(self.region(data), self.tolerance * max(data.size[-2:]))
        is_largest = maps == over_all(maps.flatten(1).amax(1), maps)
        value = (is_largest & near).flatten(1).sum(1) / is_largest.flatten(1).sum(1)
        # one pixel of an odd side, two of an even one
        centre = [slice((length - 1) // 2, length // 2 + 1) for length in data.size]
        # the chance of a random point, and of the centre
        parts = {"random": _share_of(near).to(maps), "centre": _share_of(near[:, *centre]).to(maps)}
        return MetricResult(value.to(maps), parts=parts)


@register
class EnergyPointingGame(LocalisationMetric):
    r"""Share of the map's positive values that lies on the object.

    More is better.

    :math:`\sum_{i \in R} a_i^+ / \sum_i a_i^+`. ``parts`` has the share of a constant map,
    "random". Not defined for a map without a positive value.

    Args:
        sign: as for `PointingGame`.

    Wang et al., "Score-CAM", CVPR Workshops 2020.

    >>> EnergyPointingGame().better
    'more'
    """

    sign: Sign = "own"

    units = SHARE

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `EnergyPointingGame`: the share of the positive values on the object,
        ``(N,)``."""
        value = self.share_on_object(data, data.maps.per_pixel(self.sign).clamp(min=0))
        return MetricResult(value, parts={"random": _share_of(self.region(data)).to(value)})


@register
class RelevanceMass(LocalisationMetric):
    r"""Share of the map's squared values that lies on the object.

    More is better.

    :math:`\sum_{i \in R} r_i / \sum_i r_i` with :math:`r_i = \sum_c a_{ic}^2`; of maps without
    channels, the square of the positive part. Not defined where all of these are zero.

    Arras et al., "CLEVR-XAI: A benchmark dataset for the ground truth evaluation of neural network
    explanations", Information Fusion 2022.

    >>> RelevanceMass().better
    'more'
    """

    units = SHARE

    def __call__(self, data: MetricInput) -> MetricResult:
        why = ZERO if data.maps.of_channels else NOTHING
        return MetricResult(self.share_on_object(data, _pooled(data), why))


@register
class RelevanceRank(LocalisationMetric):
    r"""Share of the top pixels, as many as the object has, that lie on it.

    More is better.

    :math:`|\mathrm{top}_K \cap R| / K`, :math:`K = |R|`, the channels pooled by their squares.
    Equal values are shuffled with a seed, so that a constant map scores about as a random one.

    Args:
        seed: of the order of equal values.

    Arras et al., "CLEVR-XAI", Information Fusion 2022.

    >>> RelevanceRank().seed
    0
    """

    seed: int = 0

    units = SHARE

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `RelevanceRank`: the share ``(N,)`` of the K top pixels on the object,
        where K is the number of the object's pixels."""
        region = self.region(data)
        ranks = ranks_of(_pooled(data), self.seed)
        size = region.flatten(1).sum(1)
        hits = (region & (ranks < over_all(size, ranks))).flatten(1).sum(1)
        return MetricResult((hits / size).to(data.maps.values.dtype))


@register
class AttributionLocalisation(LocalisationMetric):
    r"""Share of the positive values on the object, divided by the object's share of the photo.

    :math:`\mu = R_\mathrm{in}^+ / R_\mathrm{tot}^+`, and weighted
    :math:`\mu_w = \mu \cdot S_\mathrm{tot} / S_\mathrm{in}`: above 1 where the map prefers the
    object. More is better. Not defined for a map without a positive value.

    Args:
        weighted: whether to divide by the object's share.
        sign: as for `PointingGame`.

    Kohlbrenner et al., "Towards Best Practice in Explaining Neural Network Decisions with LRP",
    IJCNN 2020.

    >>> AttributionLocalisation().weighted
    True
    """

    weighted: bool = True
    sign: Sign = "own"

    units = "ratio"

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `AttributionLocalisation`: the share of the positive values on the object
        ``(N,)``, if ``weighted`` over the object's share of the photo."""
        value = self.share_on_object(data, data.maps.per_pixel(self.sign).clamp(min=0))
        figure = value
        if self.weighted:
            figure = value / _share_of(self.region(data)).to(value)
        return MetricResult(figure, parts={"share": value.nan_to_num(0)})


@register
class TopKIntersection(LocalisationMetric):
    """Share of the top pixels that lie on the object.

    More is better.

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

    units = SHARE
    below = {"share": 100}

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `TopKIntersection`: the share ``(N,)`` of the top pixels that lie on the
        object."""
        count = share_counts(data, [self.share])[0]
        hits = ((data.ranks(self.sign, self.seed) < count) & self.region(data)).flatten(1).sum(1)
        return MetricResult((hits / count).to(data.maps.values.dtype))


@register
class AUC(LocalisationMetric):
    """Probability that a pixel of the object has a larger value than one outside it.

    Equal values count a half, so that a constant map has 1/2. More is better. Not defined where
    the object takes the whole photo.

    Args:
        sign: as for `PointingGame`.

    Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 2006.

    >>> AUC().better
    'more'
    """

    sign: Sign = "own"

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `AUC`: the probability ``(N,)`` that a pixel of the object has a larger
        value than one outside it, from ranks (Mann-Whitney)."""
        region = self.region(data).flatten(1)
        maps = data.maps.per_pixel(self.sign).flatten(1)
        ranks = mid_ranks(maps)
        object_size = region.sum(1).double()
        rest_size = region.shape[1] - object_size
        # ranks begin at 0: those of the object among itself, 0 + 1 + ..., are no wins
        wins = (ranks * region).sum(1) - object_size * (object_size - 1) / 2
        value = ratio(wins, object_size * rest_size).to(maps)
        why = "the object takes the whole photo"
        return MetricResult(data.undefined(self, value, rest_size == 0, why))


@register
class IoU(LocalisationMetric):
    """Intersection over union with the object at each photo's best threshold.

    It is an upper bound: nobody knows that threshold beforehand. More is better. A constant map
    has one threshold, and so the object's share of the photo.

    Args:
        sign: as for `PointingGame`.

    Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016 (at a fixed
    threshold, of boxes).

    >>> IoU().better
    'more'
    """

    sign: Sign = "own"

    def __call__(self, data: MetricInput) -> MetricResult:
        """The figure of `IoU`: the largest intersection over union ``(N,)`` over all thresholds of
        the map, and the threshold."""
        region = self.region(data).flatten(1)
        values, order = data.maps.per_pixel(self.sign).flatten(1).sort(1, descending=True)
        hits = region.gather(1, order).cumsum(1)
        taken_count = torch.arange(1, values.shape[1] + 1, device=values.device)
        # with each number of the largest values taken: intersection over union
        overlap = hits.double() / (region.sum(1, keepdim=True) + taken_count - hits)
        is_threshold = torch.ones_like(region)  # a threshold takes all of equal values, or none
        is_threshold[:, :-1] = values[:, :-1] != values[:, 1:]
        best = torch.where(is_threshold, overlap, 0).max(1)
        threshold = values.gather(1, best.indices[:, None])[:, 0]
        return MetricResult(best.values.to(values), parts={"threshold": threshold})


def _share_of(region: torch.Tensor) -> torch.Tensor:
    """The share ``(N,)`` of the pixels that regions ``(N, H, W)`` hold."""
    return region.double().flatten(1).mean(1)


def _pooled(data: MetricInput) -> torch.Tensor:
    """The map's relevance of each pixel ``(N, H, W)``, as CLEVR-XAI pools channels: the sum of
    their squares; of maps without channels, the square of the positive part.
    """
    values = data.maps.values.double()
    if data.maps.of_channels:
        return values.square().sum(1)
    return data.maps.per_pixel().double().clamp(min=0).square()


def boxes_per_image(boxes: Boxes, count: int, size: Size) -> list[torch.Tensor]:
    """Return a caller's boxes, ``(k, 4)`` of each image, in whole pixels x0 y0 x1 y1 (x1 and y1
    exclusive), cut off at the image; empty ones are refused. Of volumes ``(k, 6)``: x0 y0 z0 ..."""
    lengths = size[::-1]
    sides = " x ".join(map(str, lengths))
    edges = "x0 y0 x1 y1" if len(size) == 2 else "x0 y0 z0 x1 y1 z1"
    must = f"boxes must be numbers {edges} within the image of {sides} pixels"
    is_sequence = hasattr(boxes, "__len__") and getattr(boxes, "ndim", 1) > 0
    if not is_sequence or len(boxes) != count:
        raise MetricError(
            f"{must}, some for each of the {count} images, got {shown(boxes)}; see evaluate"
        )
    image_ends = torch.tensor(lengths * 2)
    checked = []
    for image, image_boxes in enumerate(boxes):
        # what is no box stays empty, and is refused below
        corners = torch.empty(0, len(image_ends))
        with suppress(TypeError, ValueError, RuntimeError):
            is_tensor = isinstance(image_boxes, torch.Tensor)
            numbers = image_boxes if is_tensor else np.array(image_boxes, dtype=np.float64)
            corners = torch.as_tensor(numbers).double().reshape(-1, len(image_ends))
        cut = torch.minimum(corners.round().clamp(min=0), image_ends.to(corners))
        if not len(cut) or not (cut[:, : len(size)] < cut[:, len(size) :]).all():
            raise MetricError(
                f"{must}, got {shown(image_boxes)} for image {image_name(image)}; mend them"
            )
        checked.append(cut.long())
    return checked


def as_regions(
    masks: torch.Tensor | np.ndarray[Any, Any] | None,
    boxes: Sequence[torch.Tensor] | None,
    count: int,
    size: Size,
) -> torch.Tensor | None:
    """The object's pixels as truth values ``(N, H, W)``, from the masks that a caller gives, or
    else drawn from the boxes; None where neither is known.
    """
    if masks is None:
        return None if boxes is None else in_boxes(boxes, size)
    values = None
    with suppress(TypeError, ValueError, RuntimeError):  # a list of lists of other lengths
        values = as_tensor(masks if isinstance(masks, torch.Tensor) else np.asarray(masks))
    fits = values is not None and tuple(values.shape) == (count, *size)
    # of other numbers than 0 and 1, it is not known from where on they are the object
    if values is not None and fits and values.is_floating_point():
        fits = torch.equal(values, (values > 0).to(values))
    if values is None or not fits:
        raise MetricError(
            f"masks must be truth values {(count, *size)}, got {shown(masks)}; resize, or give "
            "masks > 0.5"
        )
    regions = values > 0
    empty = ~regions.flatten(1).any(1)
    if empty.any():
        raise MetricError(
            "masks must have a pixel of the object in every image, got none in image "
            f"{image_names(empty)}"
        )
    return regions


def in_boxes(boxes: Sequence[torch.Tensor], size: Size) -> torch.Tensor:
    """Draw boxes, ``(k, 4)`` for each image or ``(k, 6)`` for each volume, as truth values ``(N, H,
    W)``: the pixels in any box of an image."""
    regions = torch.zeros((len(boxes), *size), dtype=torch.bool)
    for image, image_boxes in enumerate(boxes):
        for box in image_boxes.tolist():
            # x comes first in boxes, and last in a map
            starts = box[: len(size)][::-1]
            ends = box[len(size) :][::-1]
            regions[image][tuple(map(slice, starts, ends))] = True
    return regions
