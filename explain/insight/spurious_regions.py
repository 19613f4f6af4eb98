"""The pattern of a finding: the region that photos of the finding have in common, which other
photos can be given."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from explain._utils.errors import LayerError, RunError
from explain._utils.random_numbers import permutation, seeded
from explain.insight.channels import Channel, feature_maps, placement_of
from explain.insight.class_statistics import FILLED, ClassStatistics
from explain.insight.clusters import Cluster
from explain.insight.directions import Direction
from explain.insight.maps import chosen_from, object_of
from explain.insight.reattribution import (
    BATCH,
    RunPhotos,
    class_of,
    class_tensor,
    one_for_each_photo,
)
from explain.layers.placement import draw
from explain.store.reading import Row, StoredRun

CORE = 0.4
"""The share of its peak from which on the excess of a mean map counts as the pattern."""
STRONGEST = 32  # photos that count as bearing a direction: those in which it is strongest
LEAST = 2  # photos of each of the parts to fit, to choose and to prove
FIT = 0.5
CHOOSE = 0.25
"""The shares of the photos from which the pattern is learnt, and the repair is chosen; the result
is measured on the rest."""
Finding = Cluster | ClassStatistics | Channel | Direction


@dataclass(frozen=True, eq=False)
class PhotosWithRegions:
    """Photos as inputs ``(N, C, H, W)``, their classes ``(N,)``, and the region of a pattern in
    each ``(N, 1, H, W)``."""

    rows: Sequence[Row]
    x: torch.Tensor
    classes: torch.Tensor
    regions: torch.Tensor

    def __len__(self) -> int:
        """The number of photos."""
        return len(self.rows)

    def __getitem__(self, which: torch.Tensor | slice) -> "PhotosWithRegions":
        """Return the photos with these numbers, a tensor of indices or a slice."""
        numbers = torch.arange(len(self))[which].tolist()
        return chosen_from(self, numbers, "rows x classes regions")


ReadSome = Callable[[list[Row]], PhotosWithRegions]
"""Reads photos of these rows as inputs; of more than the caller's ``most``, a random choice."""


class ExchangedRegions(NamedTuple):
    """Photos of other classes, whose ``regions`` ``(N, 1, H, W)`` have the pixels of a photo of the
    finding in ``pasted`` ``(N, C, H, W)``, and of another such photo in ``control``."""

    pasted: torch.Tensor
    control: torch.Tensor
    regions: torch.Tensor
    # ``(N,)``, the numbers of the photos of the finding
    donors: torch.Tensor


@dataclass(frozen=True, eq=False)
class PatternPhotos:
    """Photos with the pattern of a finding, other photos of its class, and photos of other classes.
    The pattern is pasted into these, or taken off, by exchanging the pixels of a region."""

    target: int | None
    of_finding: PhotosWithRegions
    of_class: PhotosWithRegions
    other_classes: PhotosWithRegions
    # whether the region is that of the photo that it is pasted into (such as all but its object)
    region_of_other: bool = False
    direction: tuple[str, torch.Tensor] | None = None
    """The layer and the vector ``(C,)`` of the pattern, where the finding has one."""

    def __len__(self) -> int:
        """The number of photos of other classes."""
        return len(self.other_classes)

    def parts(self, seed: int) -> "Iterator[PatternPhotos]":
        """Split the photos at random, by the seed, into three parts without a photo in common: to
        fit a repair (`FIT`), to choose it (`CHOOSE`), and to measure the result (the rest).
        """
        generator = seeded(seed)
        parts: list[dict[str, Any]] = [{}, {}, {}]
        for name in ("of_finding", "of_class", "other_classes"):
            photos = getattr(self, name)
            order = torch.randperm(len(photos), generator=generator)
            ends = [round(share * len(photos)) for share in (FIT, FIT + CHOOSE)]
            for part, numbers in zip(parts, order.tensor_split(ends), strict=True):
                part[name] = photos[numbers]
        for part in parts:
            yield replace(self, **part)

    def exchanged(self, seed: int = 0) -> ExchangedRegions:
        """Paste the region of a random photo of the finding into each photo of other classes, and,
        as a control, the same region of another of these. The seed fixes the draws."""
        generator = seeded(seed)
        count = len(self.other_classes)
        donors = torch.randint(len(self.of_finding), (count,), generator=generator)
        shifts = torch.randint(1, count, (count,), generator=generator)  # never 0: the photo itself
        control_donors = (torch.arange(count) + shifts) % count
        regions = (
            self.other_classes.regions if self.region_of_other else self.of_finding.regions[donors]
        )
        pasted = torch.where(regions, self.of_finding.x[donors], self.other_classes.x)
        control = torch.where(regions, self.other_classes.x[control_donors], self.other_classes.x)
        return ExchangedRegions(pasted, control, regions, donors)

    def without(self, seed: int = 0) -> torch.Tensor:
        """The inputs ``(N, C, H, W)`` of the photos of the finding without its pattern: its region
        has the pixels of random photos of other classes."""
        donors = torch.randint(len(self), (len(self.of_finding),), generator=seeded(seed))
        return torch.where(self.of_finding.regions, self.other_classes.x[donors], self.of_finding.x)


def pattern_of(
    finding: Finding, photos: RunPhotos, *, layer: str | None = None, most: int = 400, seed: int = 0
) -> PatternPhotos:
    """Return the photos with the pattern of a finding, its region in them, and at most ``most``
    photos without the pattern."""
    rows = list(one_for_each_photo(photos.run))

    def read_some(rows: list[Row]) -> PhotosWithRegions:
        """Read photos of these rows as inputs: ``most`` of them at random, if there are more."""
        order = permutation(len(rows), seed)[:most]
        return _read_photos(photos, [rows[i] for i in order.tolist()])

    # of a channel or a vector, the region is where it is strongest
    if isinstance(finding, (Channel, Direction)):
        return _of_vector(finding, photos, layer, rows, read_some)
    target = _class_called(finding.target, photos.run)
    # of a cluster, where its maps exceed the others' of the class
    if isinstance(finding, Cluster):
        return _of_excess(finding.excess, set(finding.members), target, rows, read_some)
    # of a class, all but its objects, of which one that fills its photo leaves nothing; without
    # boxes, where its maps exceed those of other classes
    boxed = [row for row in rows if 0 < object_of(row).float().mean() <= FILLED]
    if not boxed:
        members = set(finding.members)
        return _of_excess(finding.beyond_others, members, target, rows, read_some)
    with_class = [row for row in boxed if class_of(row) == target]
    of_finding = _around_object(_read_photos(photos, with_class))
    other_classes = _around_object(read_some([row for row in boxed if class_of(row) != target]))
    return _check_enough(
        PatternPhotos(
            target,
            of_finding=of_finding,
            of_class=of_finding[:0],  # none: all photos of the class bear this pattern
            other_classes=other_classes,
            region_of_other=True,
        )
    )


def _of_excess(
    excess: torch.Tensor,
    members: Collection[str],
    target: int | None,
    rows: list[Row],
    read_some: ReadSome,
) -> PatternPhotos:
    """The photos of a finding whose region is the same for all: where ``excess`` ``(16, 16)`` is at
    least `CORE` of its peak. ``members`` bear it, other photos of ``target`` do not.
    """
    region = (excess >= CORE * excess.max())[None, None].float()
    of_finding = read_some([row for row in rows if row.name in members])
    mask = F.interpolate(region, of_finding.x.shape[2:]) > 0
    of_finding = _with_regions(of_finding, mask)
    rest = [row for row in rows if row.name not in members]

    def covered(rows: list[Row]) -> PhotosWithRegions:
        """Photos of these rows with the region of the pattern; none where there are no rows."""
        photos = read_some(rows)
        return _with_regions(photos, mask) if len(photos) else of_finding[:0]

    of_class = covered([row for row in rest if class_of(row) == target])
    other_classes = covered([row for row in rest if class_of(row) != target])
    return _check_enough(
        PatternPhotos(target, of_finding=of_finding, of_class=of_class, other_classes=other_classes)
    )


def _around_object(photos: PhotosWithRegions) -> PhotosWithRegions:
    """Return photos with all pixels outside their boxes as the region: for a class that looks away
    from its object."""
    return _with_regions(photos, torch.stack([~object_of(row) for row in photos.rows])[:, None])


def _of_vector(
    finding: Channel | Direction,
    photos: RunPhotos,
    layer: str | None,
    rows: list[Row],
    read_some: ReadSome,
) -> PatternPhotos:
    """The `STRONGEST` photos in which a channel or concept vector is strongest, with the region
    where it reaches half of its peak. All other photos count as those of other classes."""
    layer = finding.layer if isinstance(finding, Direction) else layer
    if layer is None:
        raise LayerError(
            "layer must name the layer of the channel, got None; give that of its report"
        )
    candidates = read_some(rows)
    model = photos.explainer.model
    maps = torch.cat(
        [feature_maps(model, x, layer).float().cpu() for x in torch.split(candidates.x, BATCH)]
    )
    if isinstance(finding, Channel):
        target = None
        vector = F.one_hot(torch.tensor(finding.number), maps.shape[1])
    else:
        target = _class_called(finding.target, photos.run)
        vector = finding.vector
    projections = torch.einsum("nchw,c->nhw", maps, vector.to(maps))
    order = projections.flatten(1).amax(1).argsort(descending=True)
    count = min(STRONGEST, len(order) // 4)  # three in four are left to get the pattern
    placement = placement_of(model, candidates.x, layer)
    enlarged = draw(projections[:, None], tuple(candidates.x.shape[2:]), placement)
    candidates = _with_regions(candidates, enlarged >= enlarged.amax((2, 3), keepdim=True) / 2)
    return _check_enough(
        PatternPhotos(
            target,
            of_finding=candidates[order[:count]],
            of_class=candidates[order[:0]],
            other_classes=candidates[order[count:]],
            direction=(layer, vector.double()),
        )
    )


def _class_called(target: str, run: StoredRun) -> int | None:
    """The model's class number of a target of a run, by its name; None where it has none."""
    return next((row.target_class for row in run.rows() if row.target == target), None)


def _read_photos(photos: RunPhotos, rows: Sequence[Row]) -> PhotosWithRegions:
    """Read photos of a run as inputs of one size, without regions (all False); those that cannot be
    read are left out."""
    batches = list(photos.batches(rows))
    if len({batch.x.shape[1:] for batch in batches}) > 1:
        raise RunError(
            "photos must have inputs of one size to exchange parts, got several; use one "
            "preprocessing"
        )
    readable = [row for batch in batches for row in batch.rows]
    x = torch.cat([batch.x.cpu() for batch in batches]) if batches else torch.zeros(0, 3, 1, 1)
    regions = torch.zeros_like(x[:, :1], dtype=torch.bool)
    return PhotosWithRegions(readable, x, class_tensor(map(class_of, readable)), regions)


def _with_regions(photos: PhotosWithRegions, regions: torch.Tensor) -> PhotosWithRegions:
    """Return photos with other regions: ``(N, 1, H, W)``, or ``(1, 1, H, W)`` for all."""
    return replace(photos, regions=regions.expand_as(photos.regions))


def _check_enough(pattern: PatternPhotos) -> PatternPhotos:
    """Return the photos, or refuse a finding with too few photos that bear the pattern, or that
    do not: each of three parts needs `LEAST`, of which the smaller ones are quarters."""
    for name, photos in (
        ("of the finding", pattern.of_finding),
        ("without it", pattern.other_classes),
    ):
        if len(photos) < 4 * LEAST:
            raise RunError(
                f"run must have {4 * LEAST} photos {name} that can be read, got {len(photos)}; "
                "explain more"
            )
    return pattern
