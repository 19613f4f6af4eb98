"""The mark of a finding: the region that photos of the finding have in common, which other photos
can be given."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from explain._utils.errors import LayerError, RunError
from explain._utils.random_numbers import permutation
from explain.insight.channels import Channel, feature_maps
from explain.insight.class_statistics import FILLED, ClassStatistics
from explain.insight.clusters import Cluster
from explain.insight.directions import Direction
from explain.insight.maps import object_of
from explain.insight.reattribution import RunPhotos, class_of, class_tensor, one_for_each_photo
from explain.layers.layouts import enlarge
from explain.store.reading import Row, StoredRun

CORE = 0.4
"""The share of its peak from which on the excess of a mean map counts as the mark."""
CARRIERS = 32  # photos in which a direction is strongest
LEAST = 2  # photos of each part
FIT = 0.5
CHOOSE = 0.25
PROVE = 0.25
"""The shares of the photos from which the mark is learnt, the repair is chosen, and the result is
measured."""
Finding = Cluster | ClassStatistics | Channel | Direction


@dataclass(frozen=True, eq=False)
class PhotosWithRegions:
    """Photos as inputs ``(N, C, H, W)``, their classes ``(N,)``, and the region of a mark in each
    ``(N, 1, H, W)``."""

    rows: Sequence[Row]
    x: torch.Tensor
    classes: torch.Tensor
    regions: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: torch.Tensor | slice) -> "PhotosWithRegions":
        """The photos with these numbers."""
        numbers = torch.arange(len(self))[which].tolist()
        return PhotosWithRegions(
            [self.rows[i] for i in numbers], self.x[which], self.classes[which], self.regions[which]
        )


ReadSome = Callable[[list[Row]], PhotosWithRegions]
"""Reads some photos of these rows, drawn at random."""


class ExchangedRegions(NamedTuple):
    """Hosts in which a region was replaced: ``marked`` ``(N, C, H, W)`` has the pixels of a marked
    photo there, and ``control`` those of another host.

    ``regions`` are ``(N, 1, H, W)``, and ``donors`` ``(N,)`` the numbers of the marked photos.
    """

    marked: torch.Tensor
    control: torch.Tensor
    regions: torch.Tensor
    donors: torch.Tensor


@dataclass(frozen=True, eq=False)
class MarkedPhotos:
    """The photos that bear the mark of a finding; ``of_class``, others of the class; and ``hosts``,
    those of other classes.

    To put the mark on another photo, its region there is replaced by the pixels of a marked photo:
    by ``from_host``, the region is that of the other photo (such as all but its object), else that
    of the marked one. To take it off, the region is replaced by the pixels of a photo without the
    mark.
    """

    target: int | None
    carriers: PhotosWithRegions
    of_class: PhotosWithRegions
    hosts: PhotosWithRegions
    from_host: bool
    direction: tuple[str, torch.Tensor] | None = None
    """The layer and the vector ``(C,)`` of the mark, where the finding has one."""

    def __len__(self) -> int:
        return len(self.hosts)

    def parts(self, seed: int) -> "Iterator[MarkedPhotos]":
        """Three parts without a photo in common: to fit, to choose, and to prove."""
        generator = torch.Generator().manual_seed(seed)
        kinds = {"carriers": self.carriers, "of_class": self.of_class, "hosts": self.hosts}
        orders = {
            name: torch.randperm(len(of_kind), generator=generator)
            for name, of_kind in kinds.items()
        }
        first = 0.0
        for share in (FIT, CHOOSE, PROVE):
            last = first + share
            part: dict[str, Any] = {}
            for name, of_kind in kinds.items():
                start = round(first * len(of_kind))
                end = round(last * len(of_kind))
                part[name] = of_kind[orders[name][start:end]]
            yield replace(self, **part)
            first = last

    def exchanged(self, seed: int = 0) -> ExchangedRegions:
        """Give each host the region of a marked photo, and of another host instead, which are drawn
        at random."""
        generator = torch.Generator().manual_seed(seed)
        donors = torch.randint(len(self.carriers), (len(self),), generator=generator)
        steps = torch.randint(1, len(self), (len(self),), generator=generator)
        controls = (torch.arange(len(self)) + steps) % len(self)
        regions = self.hosts.regions if self.from_host else self.carriers.regions[donors]
        marked = torch.where(regions, self.carriers.x[donors], self.hosts.x)
        control = torch.where(regions, self.hosts.x[controls], self.hosts.x)
        return ExchangedRegions(marked, control, regions, donors)

    def without(self, seed: int = 0) -> torch.Tensor:
        """The marked photos with the pixels of others in place of the mark."""
        hosts = torch.randint(
            len(self), (len(self.carriers),), generator=torch.Generator().manual_seed(seed)
        )
        return torch.where(self.carriers.regions, self.hosts.x[hosts], self.carriers.x)


def marked_photos(
    finding: Finding, photos: RunPhotos, *, layer: str | None = None, most: int = 400, seed: int = 0
) -> MarkedPhotos:
    """Collect the photos of a finding and others.

    Args:
        finding: a cluster, whose region is where its maps exceed the others of the class; a class,
            whose region is all but its objects, or where its maps exceed those of the other classes
            if no boxes are known; a channel or a concept vector, whose regions are where it is
            strongest.
        photos: the photos of the run, and the model.
        layer: of a channel.
        most: photos without the mark.
        seed: of what is drawn at random.

    Raises:
        RunError: there are too few photos with the mark, or without it.
        LayerError: a channel has no layer.
    """
    rows = list(one_for_each_photo(photos.run))

    def read_some(rows: list[Row]) -> PhotosWithRegions:
        order = permutation(len(rows), seed)[:most]
        return _read_photos(photos, [rows[i] for i in order.tolist()])

    if isinstance(finding, (Channel, Direction)):
        return _of_vector(finding, photos, layer, rows, read_some)
    target = _class_called(finding.target, photos.run)
    if isinstance(finding, Cluster):
        return _of_excess(finding.excess, set(finding.members), target, rows, read_some)
    boxed = [row for row in rows if 0 < object_of(row).float().mean() <= FILLED]
    if not boxed:
        members = {row.name for row in rows if row.target == finding.target}
        return _of_excess(finding.beyond_others, members, target, rows, read_some)
    with_class = [row for row in boxed if class_of(row) == target]
    carriers = _around_object(_read_photos(photos, with_class))
    hosts = _around_object(read_some([row for row in boxed if class_of(row) != target]))
    return _check_enough(MarkedPhotos(target, carriers, carriers[:0], hosts, from_host=True))


def _of_excess(
    excess: torch.Tensor,
    members: Collection[str],
    target: int | None,
    rows: list[Row],
    read_some: ReadSome,
) -> MarkedPhotos:
    """The marked photos of a mean map: those with the names ``members`` bear the mark, where the
    mean map exceeds that of others by ``excess`` ``(16, 16)``."""
    region = (excess >= CORE * excess.max())[None, None].float()
    carriers = read_some([row for row in rows if row.name in members])
    covers = F.interpolate(region, carriers.x.shape[2:]) > 0
    carriers = _with_regions(carriers, covers)
    rest = [row for row in rows if row.name not in members]

    def covered(rows: list[Row]) -> PhotosWithRegions:
        photos = read_some(rows)
        return _with_regions(photos, covers) if len(photos) else carriers[:0]

    of_class = covered([row for row in rest if class_of(row) == target])
    hosts = covered([row for row in rest if class_of(row) != target])
    return _check_enough(MarkedPhotos(target, carriers, of_class, hosts, from_host=False))


def _around_object(photos: PhotosWithRegions) -> PhotosWithRegions:
    """The photos, with all but their objects as the region."""
    return _with_regions(photos, torch.stack([~object_of(row) for row in photos.rows])[:, None])


def _of_vector(
    finding: Channel | Direction,
    photos: RunPhotos,
    layer: str | None,
    rows: list[Row],
    read_some: ReadSome,
) -> MarkedPhotos:
    """The marked photos of a vector of a layer's channels: those in which it is strongest bear the
    mark, where it is."""
    layer = finding.layer if isinstance(finding, Direction) else layer
    if layer is None:
        raise LayerError(
            "layer must name the layer of the channel, got None; give that of its report"
        )
    candidates = read_some(rows)
    model = photos.explainer.model
    maps = torch.cat(
        [feature_maps(model, x, layer).float().cpu() for x in torch.split(candidates.x, 32)]
    )
    if isinstance(finding, Channel):
        target = None
        vector = F.one_hot(torch.tensor(finding.number), maps.shape[1])
    else:
        target = _class_called(finding.target, photos.run)
        vector = finding.vector
    along = torch.einsum("nchw,c->nhw", maps, vector.to(maps))
    order = along.flatten(1).amax(1).argsort(descending=True)
    count = min(CARRIERS, len(order) // 4)
    large = enlarge(along[:, None], tuple(candidates.x.shape[2:]))
    candidates = _with_regions(candidates, large >= large.amax((2, 3), keepdim=True) / 2)
    return _check_enough(
        MarkedPhotos(
            target,
            candidates[order[:count]],
            candidates[order[:0]],
            candidates[order[count:]],
            from_host=False,
            direction=(layer, vector.double()),
        )
    )


def _class_called(target: str, run: StoredRun) -> int | None:
    """The class of the model that a target of a run is; None where there is none."""
    return next((row.target_class for row in run.rows() if row.target == target), None)


def _read_photos(photos: RunPhotos, rows: Sequence[Row]) -> PhotosWithRegions:
    """Read photos as inputs of one size."""
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
    """The photos with other regions: ``(N, 1, H, W)``, or one for all."""
    return replace(photos, regions=regions.expand_as(photos.regions))


def _check_enough(marks: MarkedPhotos) -> MarkedPhotos:
    """Refuse a finding with too few photos that bear the mark, or that do not."""
    for name, photos in (("of the finding", marks.carriers), ("without it", marks.hosts)):
        if len(photos) < 4 * LEAST:
            raise RunError(
                f"run must have {4 * LEAST} photos {name} that can be read, got {len(photos)}; "
                "explain more"
            )
    return marks
