"""Concepts that all photos share: a layer's feature maps factorised in mini-batches, for any number of photos."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import RunError, shown
from explain.attribution.concepts import factorise
from explain.hooks.layer_names import Where
from explain.insight.channels import feature_maps, one_layer
from explain.insight.class_statistics import named, percent, plain, short
from explain.insight.reattribution import Batch, RunPhotos, one_for_each_photo
from explain.layers.feature_maps import enlarge
from explain.render.overlays import drawn
from explain.render.sheets import Group, Layout, Tile, sheet
from explain.render.styles import get_style
from explain.runs.reading import Row

INNER = 30  # steps by which the places of a batch follow the concepts
OUTER = 5  # steps by which the concepts follow the batches so far
KEPT = 0.5
"""How much what was found in a round counts in the next: its places were those of concepts that have moved since."""
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Example:
    """A photo in which a concept is strong: its map ``(H, W)``, 1 at its strongest, and how strong it is there."""

    row: Row
    strength: float
    heatmap: torch.Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class SharedConcepts:
    """K concepts of a layer, found in all photos of a run together.

    ``vectors`` ``(K, C)`` are each one's activation of the layer's channels, of length 1; ``shares`` ``(K,)`` how much
    of what they make up is each one's; ``error`` the share of the layer's norm that is left over. ``examples`` has the
    photos in which each is strongest.
    """

    layer: str
    photos: int
    vectors: torch.Tensor = field(repr=False)
    shares: tuple[float, ...]
    error: float
    examples: tuple[tuple[Example, ...], ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        examples = [[{"name": each.row.name, "strength": plain(each.strength)} for each in own]
                    for own in self.examples]  # fmt: skip
        return {
            "layer": self.layer, "photos": self.photos, "error": plain(self.error),
            "concepts": [{"share": plain(share), "photos": own}
                         for share, own in zip(self.shares, examples, strict=True)],
        }  # fmt: skip

    def picture(self, photos: RunPhotos, tile: int = 140) -> Image.Image:
        """Each concept in the photos in which it is strongest."""
        style = get_style("heat")
        groups = []
        for number, (share, own) in enumerate(zip(self.shares, self.examples, strict=True)):
            tiles = tuple(
                Tile(
                    drawn(photos.picture(each.row), each.heatmap.numpy(), style, each.row.box, [each.row.box]),
                    named(each.row),
                )
                for each in own
            )
            groups.append(Group(f"concept {number + 1}: {share:.0%}", tiles))
        title = f"{len(self.shares)} concepts of {self.layer} in {self.photos} photos"
        return sheet(Layout(title, f"{self.error:.0%} of the layer left over", tuple(groups)), tile)


def shared_concepts(
    photos: RunPhotos,
    count: int = 8,
    *,
    layer: Where | None = None,
    rounds: int = 3,
    examples: int = 6,
    seed: int = 0,
) -> SharedConcepts:
    """Factorise a layer's feature maps of all photos into a few concepts that are present or absent, never negative.

    What `explain.find_concepts` does for a few images at once is done in mini-batches here: the places of each batch
    are fitted to the concepts, and the concepts to what all batches so far say together, of which only sums are kept
    (Mairal et al., JMLR 2010). Each round goes through all photos once, and a last one says how strong each concept is
    in each photo.

    Args:
        photos: the photos of a run, and the model.
        count: how many concepts.
        layer: one layer; None finds the last feature map. Its negative values, if it has any, are left out.
        rounds: how often all photos are gone through.
        examples: how many photos stand for each concept.
        seed: of the random start.

    Raises:
        RunError: there are no photos, or the layer is zero everywhere.
        LayerError: there is no such layer.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise RunError(f"count must be a whole number from 1, got {shown(count)}; 8 is usual")
    model, found, name = photos.explainer.model, None, ""
    for _ in range(rounds):
        if found is not None:
            found.fade()
        for batch in photos.batches(one_for_each_photo(photos.run)):
            name = name or one_layer(model, batch.x[:1], layer)
            rows = _rows(feature_maps(model, batch.x, name))
            if not rows.any():
                continue
            if found is None:
                _must_fit(count, rows, name)
                found = _Sums(factorise(rows, count, seed)[1])
            found.follow(rows)
    if found is None:
        raise RunError("photos must be active somewhere in the layer for concepts, but none is; choose another layer")
    return _measured(photos, name, found.what, examples)


class _Sums:
    """Concepts ``(K, C)``, and the sums over all places so far by which they follow them."""

    def __init__(self, what: torch.Tensor) -> None:
        self.what = what / what.norm(dim=1, keepdim=True).clamp(min=TINY)
        self.own = torch.zeros(len(what), len(what), dtype=what.dtype)
        self.cross = torch.zeros_like(what)

    def follow(self, rows: torch.Tensor) -> None:
        """Take the activations ``(P, C)`` of some places."""
        where = places(rows, self.what)
        self.own += where.T @ where
        self.cross += where.T @ rows
        for _ in range(OUTER):
            self.what = self.what * self.cross / (self.own @ self.what).clamp(min=TINY)
        self._as_unit()

    def fade(self) -> None:
        """Let what was found in this round count less in the next."""
        self.own, self.cross = self.own * KEPT, self.cross * KEPT

    def _as_unit(self) -> None:
        """Bring the concepts to length 1, and the sums to the places that belong to these."""
        length = self.what.norm(dim=1).clamp(min=TINY)
        self.what = self.what / length[:, None]
        self.own, self.cross = self.own * length[:, None] * length, self.cross * length[:, None]


def places(rows: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
    """How strong concepts ``(K, C)`` are at each place ``(P, C)``: ``(P, K)``, none negative."""
    cross, own = rows @ what.T, what @ what.T
    where = cross.clamp(min=TINY)
    for _ in range(INNER):
        where = where * cross / (where @ own).clamp(min=TINY)
    return where


def _measured(photos: RunPhotos, name: str, what: torch.Tensor, examples: int) -> SharedConcepts:
    """Go through all photos once more: how strong each concept is, where, and what is left over."""
    model, count = photos.explainer.model, len(what)
    totals, left, whole, seen = torch.zeros(count, dtype=torch.double), 0.0, 0.0, 0
    best: list[list[Example]] = [[] for _ in range(count)]
    for batch in photos.batches(one_for_each_photo(photos.run)):
        maps = feature_maps(model, batch.x, name)
        rows = _rows(maps)
        where = places(rows, what)
        totals += where.sum(0) * what.sum(1)
        left += float((rows - where @ what).square().sum())
        whole += float(rows.square().sum())
        seen += len(batch.rows)
        placed = where.reshape(len(maps), *maps.shape[2:], count).movedim(-1, 1)
        for number, own in enumerate(best):
            own += _strongest(batch, placed[:, number], examples)
            own.sort(key=lambda each: -each.strength)
            del own[examples:]
    order = totals.argsort(descending=True).tolist()
    shares = (totals / totals.sum().clamp(min=TINY)).tolist()
    return SharedConcepts(
        layer=name, photos=seen, vectors=what[order].float(), shares=tuple(shares[k] for k in order),
        error=(left / max(whole, TINY)) ** 0.5, examples=tuple(tuple(best[k]) for k in order),
    )  # fmt: skip


def _strongest(batch: Batch, maps: torch.Tensor, most: int) -> list[Example]:
    """The photos of a batch in which a concept with these maps ``(N, h, w)`` is strongest, by its sum over places."""
    strength = maps.flatten(1).sum(1)
    found = []
    for i in strength.argsort(descending=True)[:most].tolist():
        heatmap = enlarge(maps[i][None, None].float(), tuple(batch.x.shape[-2:]))[0, 0]
        heatmap = (heatmap / heatmap.max().clamp(min=TINY)).clamp(0, 1)
        found.append(Example(batch.rows[i], float(strength[i]), heatmap))
    return found


def _rows(maps: torch.Tensor) -> torch.Tensor:
    """The part of feature maps ``(N, C, h, w)`` that is not negative, a row for each place."""
    return maps.clamp(min=0).movedim(1, -1).reshape(-1, maps.shape[1]).double().cpu()


def _must_fit(count: int, rows: torch.Tensor, layer: str) -> None:
    most = min(rows.shape)
    if count > most:
        raise RunError(f"count must be at most {most} at layer {layer}, got {count}; 8 is usual")


def table_rows(found: SharedConcepts) -> list[list[str]]:
    """The rows of a table for people: the heading first."""
    rows = []
    for number, (share, own) in enumerate(zip(found.shares, found.examples, strict=True), 1):
        labels = Counter(named(each.row) for each in own)
        rows.append([
            str(number), percent(share), ", ".join(name for name, _ in labels.most_common(3)),
            ", ".join(short(each.row.name) for each in own[:2]),
        ])  # fmt: skip
    return [["concept", "share", "in photos of", "as in"], *rows]
