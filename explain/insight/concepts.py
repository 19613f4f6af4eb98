"""Concepts that all photos share: feature maps factorised in mini-batches, for any number of
photos."""

from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import RunError, check_whole_number
from explain.attribution.concepts import factorise, one_layer
from explain.data.inputs import as_inputs
from explain.hooks.layer_names import Where
from explain.insight.channels import feature_maps, placement_of
from explain.insight.maps import (
    Names,
    caption_of_row,
    fields_of,
    heated,
    in_percent,
    json_value,
    most_frequent,
)
from explain.insight.reattribution import Batch, RunPhotos
from explain.layers.placement import Placement, draw
from explain.render.sheets import Group, Layout, Tile, contact_sheet
from explain.store.reading import Row

STRENGTH_UPDATES = 30  # multiplicative updates of the strengths in a batch, for fixed concepts
CONCEPT_UPDATES = 5  # multiplicative updates of the concepts after each batch
KEPT = 0.5  # the weight of the sums of earlier rounds in the next one
TINY = 1e-12
TILE = 140  # pixels of a photo in a picture


@dataclass(frozen=True, eq=False)
class Example:
    """A photo in which a concept is strong: its map ``(H, W)``, 1 at its strongest, and how strong
    it is there."""

    row: Row
    strength: float
    heatmap: torch.Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class SharedConcepts:
    """K concepts of a layer, found in all photos of a run together; ``examples`` are the photos in
    which each is strongest."""

    layer: str
    photos: int
    # ``(K, C)``, of length 1: each one's activation of the channels
    vectors: torch.Tensor = field(repr=False)
    # ``(K,)``: each one's part of what they make up together
    shares: tuple[float, ...]
    # the share of the layer's norm that is left over
    error: float
    examples: tuple[tuple[Example, ...], ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The concepts in plain values of JSON, for ``insight.json``: share and photos of each,
        without the vectors."""
        concepts = []
        for share, examples in zip(self.shares, self.examples, strict=True):
            photos = [
                {"name": example.row.name, "strength": json_value(example.strength)}
                for example in examples
            ]
            concepts.append({"share": json_value(share), "photos": photos})
        return {**fields_of(self, "layer photos error"), "concepts": concepts}

    @property
    def table(self) -> list[list[str]]:
        """The cells of the table of concepts: number, share, what most of its photos show, and two
        of their names; the head is in ``sections.toml``."""
        table: list[list[str]] = []
        for share, examples in zip(self.shares, self.examples, strict=True):
            rows = [example.row for example in examples]
            names = Names(row.name for row in rows)
            shown = most_frequent(rows, most=3)
            # formatted, names are the first two, shortened
            table.append([str(len(table) + 1), in_percent(share), shown, f"{names}"])
        return table

    def picture(self, photos: RunPhotos) -> Image.Image:
        """Draw a contact sheet with a row for each concept: the photos in which it is strongest,
        with its map on them."""
        groups: list[Group] = []
        for share, examples in zip(self.shares, self.examples, strict=True):
            tiles = []
            for example in examples:
                picture = heated(photos.picture(example.row), example.heatmap, example.row.box)
                tiles.append(Tile(picture, caption_of_row(example.row)))
            groups.append(Group(f"concept {len(groups) + 1}: {in_percent(share)}", tuple(tiles)))
        title = f"{len(self.shares)} concepts of {self.layer} in {self.photos} photos"
        return contact_sheet(
            Layout(title, f"{in_percent(self.error)} of the layer left over", tuple(groups)), TILE
        )


def shared_concepts(
    photos: RunPhotos,
    count: int = 8,
    *,
    layer: Where | None = None,
    rounds: int = 3,
    examples: int = 6,
    seed: int = 0,
) -> SharedConcepts:
    """Factorise a layer's feature maps of all photos into a few concepts that are present or
    absent, never negative.

    What `explain.find_concepts` does for a few images at once is done in mini-batches here: the
    places of each batch are fitted to the concepts, and the concepts to what all batches so far say
    together, of which only sums are kept (Mairal et al., JMLR 2010). Each round goes through all
    photos once, and a last one says how strong each concept is in each photo.

    Args:
        photos: the photos of a run, and the model.
        count: how many concepts.
        layer: one layer; None finds the last feature map. Its negative values, if it has any, are
            left out.
        rounds: how often all photos are gone through.
        examples: how many photos stand for each concept.
        seed: of the random start.

    Raises:
        RunError: there are no photos, or the layer is zero everywhere.
        LayerError: there is no such layer.
    """
    check_whole_number("count", count, 1, optional=False)
    model = photos.explainer.model
    name = one_layer(model, as_inputs(photos.first().x), layer)
    # the concepts (K, C); and sums over all places so far, from which they are updated: products of
    # the strengths of concepts (K, K), and of strengths and activations (K, C)
    concepts: torch.Tensor | None = None
    strength_products = torch.zeros(())
    activation_products = torch.zeros(())
    for _ in range(rounds):
        # strengths of earlier rounds were fitted to concepts that have changed since
        strength_products = strength_products * KEPT
        activation_products = activation_products * KEPT
        for batch in photos.batches():
            activations = _at_places(feature_maps(model, batch.x, name))
            if not activations.any():
                continue
            if concepts is None:
                most = min(activations.shape)
                if count > most:
                    raise RunError(
                        f"count must be at most {most} at layer {name}, got {count}; 8 is usual"
                    )
                _, concepts = factorise(activations, count, seed)
                concepts = concepts / concepts.norm(dim=1, keepdim=True).clamp(min=TINY)
            strengths = concept_strengths(activations, concepts)
            strength_products = strength_products + strengths.T @ strengths
            activation_products = activation_products + strengths.T @ activations
            for _ in range(CONCEPT_UPDATES):
                concepts = (
                    concepts * activation_products / (strength_products @ concepts).clamp(min=TINY)
                )
            # scale concepts to length 1, and the sums with them, as strengths scale inversely
            norms = concepts.norm(dim=1).clamp(min=TINY)
            concepts = concepts / norms[:, None]
            strength_products = strength_products * norms[:, None] * norms
            activation_products = activation_products * norms[:, None]
    if concepts is None:
        raise RunError(
            "photos must be active somewhere in the layer for concepts, but none is; choose "
            "another layer"
        )
    return _measured(photos, name, concepts, examples)


def concept_strengths(activations: torch.Tensor, concepts: torch.Tensor) -> torch.Tensor:
    """Return how strong K concepts ``(K, C)`` are at each of P places, with ``activations``
    ``(P, C)``: ``(P, K)``, none negative, by multiplicative updates."""
    cross = activations @ concepts.T
    gram = concepts @ concepts.T
    strengths = cross.clamp(min=TINY)
    for _ in range(STRENGTH_UPDATES):
        strengths = strengths * cross / (strengths @ gram).clamp(min=TINY)
    return strengths


def _measured(photos: RunPhotos, name: str, concepts: torch.Tensor, most: int) -> SharedConcepts:
    """The final concepts ``(K, C)``, the largest share first: how strong each is, in which ``most``
    photos and where, and how much of the layer is left over. Reads all photos again.
    """
    model = photos.explainer.model
    totals = torch.zeros(len(concepts), dtype=torch.double)
    squared_residual = 0.0
    squared_norm = 0.0
    count = 0
    examples: list[list[Example]] = [[] for _ in concepts]
    for batch in photos.batches():
        maps = feature_maps(model, batch.x, name)
        placement = placement_of(model, batch.x, name)
        activations = _at_places(maps)
        strengths = concept_strengths(activations, concepts)
        totals += strengths.sum(0) * concepts.sum(1)  # of all that a concept adds to the maps
        squared_residual += float((activations - strengths @ concepts).square().sum())
        squared_norm += float(activations.square().sum())
        count += len(batch.rows)
        strength_maps = strengths.reshape((len(maps), *maps.shape[2:], len(concepts))).movedim(
            -1, 1
        )
        for number, strongest in enumerate(examples):
            strongest += _strongest(batch, strength_maps[:, number], most, placement)
            strongest.sort(key=lambda example: -example.strength)
            del strongest[most:]
    by_total = totals.argsort(descending=True)
    shares = totals[by_total] / totals.sum().clamp(min=TINY)
    return SharedConcepts(
        layer=name,
        photos=count,
        vectors=concepts[by_total].float(),
        shares=tuple(shares.tolist()),
        error=(squared_residual / max(squared_norm, TINY)) ** 0.5,
        examples=tuple(tuple(examples[number]) for number in by_total.tolist()),
    )


def _strongest(
    batch: Batch, maps: torch.Tensor, most: int, placement: Placement | None
) -> list[Example]:
    """Return the ``most`` photos of a batch in which one concept is strongest, by the sum of its
    map in ``maps`` ``(N, h, w)`` over places, the strongest first; maps are drawn on the input.
    """
    strength = maps.flatten(1).sum(1)
    examples = []
    for i in strength.argsort(descending=True)[:most].tolist():
        of_photo = None if placement is None else placement[i]
        heatmap = draw(maps[i][None, None].float(), tuple(batch.x.shape[-2:]), of_photo)[0, 0]
        heatmap = (heatmap / heatmap.max().clamp(min=TINY)).clamp(0, 1)
        examples.append(Example(batch.rows[i], float(strength[i]), heatmap))
    return examples


def _at_places(maps: torch.Tensor) -> torch.Tensor:
    """The activations at each place of feature maps ``(N, C, h, w)``, negative ones as 0: ``(N * h
    * w, C)``, float64, on the CPU."""
    return maps.clamp(min=0).movedim(1, -1).reshape(-1, maps.shape[1]).double().cpu()
