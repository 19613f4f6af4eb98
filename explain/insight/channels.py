"""What a channel sees: the patches that excite it most, and what it does for a class."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils.errors import RunError, check_whole_number
from explain._utils.random_numbers import normal, seeded
from explain.attribution.concepts import one_layer
from explain.data.boxes import Box
from explain.data.inputs import as_inputs
from explain.engine import Activations, Evidence, LayerGradients, Need
from explain.engine.execution import gather
from explain.engine.plan import plan_of
from explain.engine.settings import RuntimeSettings
from explain.hooks import FeatureExtractor
from explain.hooks.layer_names import Where
from explain.insight.maps import Names, fields_of, json_value, most_frequent
from explain.insight.reattribution import RunPhotos, class_in, class_of
from explain.layers.default_layer import stage_layers
from explain.layers.grids import NetworkGrids
from explain.layers.placement import Placement
from explain.render.sheets import Group, Layout, Tile, contact_sheet
from explain.store.reading import Row
from explain.targets import ClassTarget, Target, TopClass

DRAWS = 8  # inputs by which a receptive field is found
DRAWN = 6  # channels of a picture
TILE = 120  # pixels of a patch in it


def finer_layer(photos: RunPhotos, least: int) -> str | None:
    """The last layer whose feature maps have at least ``least`` positions along each side; None
    where none has. Runs one photo of the run.
    """
    batch = next(photos.batches(photos.run.rows(), 1), None)
    if batch is None:
        return None
    model = photos.explainer.model
    for layer in reversed(stage_layers(model, batch.x)):
        # a name with @ is one of several calls of a layer
        if "@" not in layer and min(feature_maps(model, batch.x, layer).shape[2:]) >= least:
            return layer
    return None


def at_layer(
    model: nn.Module, x: torch.Tensor, layer: str, target: Target, needs: Sequence[Need[Any]]
) -> Evidence:
    """Return the evidence of a layer for a target that ``needs`` ask for, such as activations and
    gradients ``(N, C, h, w)``."""
    plan = plan_of(needs, [layer])
    (evidence_of,) = gather(model, as_inputs(x), plan, [target], RuntimeSettings())
    return evidence_of(layer)


def feature_maps(model: nn.Module, x: torch.Tensor, layer: str) -> torch.Tensor:
    """Return the feature maps ``(N, C, h, w)`` of a layer."""
    return at_layer(model, x, layer, TopClass(), [Activations()]).activations


def placement_of(model: nn.Module, x: torch.Tensor, layer: str) -> Placement | None:
    """Where the cells of a layer's feature maps look in inputs ``(N, C, H, W)``."""
    return NetworkGrids(model, as_inputs(x)).placement(layer)


def receptive_field(model: nn.Module, x: torch.Tensor, layer: str) -> Box:
    """Return the part of an input like ``x`` ``(1, C, H, W)`` that the middle of a layer's feature
    maps depends on, by gradients in noise; all of it for layers that are not ``(N, C, h, w)``."""
    whole = Box.whole((x.shape[-1], x.shape[-2]))
    generator = seeded(0)
    # several draws in the photo's range: in one alone, rectifiers may hide a part of the field
    noise = (
        x[:1].mean() + x[:1].std() * normal((DRAWS, *x.shape[1:]), generator).to(x)
    ).requires_grad_()
    with torch.enable_grad():
        features = FeatureExtractor(model, layer, graph=True)(noise)[layer]
        if not isinstance(features, torch.Tensor) or features.ndim != 4:
            return whole
        middle = features[:, :, features.shape[2] // 2, features.shape[3] // 2]
        signs = normal(middle.shape, generator).to(middle)  # so that channels do not cancel
        (gradient,) = torch.autograd.grad((middle * signs).sum(), noise)
    places = gradient.abs().amax((0, 1)).nonzero()
    if not len(places):
        return whole
    top, left = places.amin(0).tolist()
    bottom, right = places.amax(0).tolist()
    return Box(left, top, right + 1, bottom + 1)


@dataclass(frozen=True, eq=False)
class ChannelPatch:
    """A place that excites a channel: its activation, and the part of the photo that this place
    sees, in its pixels."""

    row: Row
    value: float
    box: Box

    def to_dict(self) -> dict[str, Any]:
        """The patch in plain values of JSON: the photo's name, the activation, and the box in
        pixels of the photo."""
        return {
            "name": self.row.name,
            "value": json_value(self.value),
            "box": list(astuple(self.box)),
        }

    def picture(self, photos: RunPhotos) -> Image.Image:
        """The part of the photo that the place sees, cut out of it."""
        return photos.picture(self.row).crop(tuple(map(round, astuple(self.box))))


@dataclass(frozen=True, eq=False)
class Channel:
    """A channel of a layer, with the patches that excite it most, the strongest first. ``weight``
    is what the class's score gets from it, to first order."""

    number: int
    # the mean over photos of activation times gradient, summed over positions
    weight: float
    patches: tuple[ChannelPatch, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The channel with its patches in plain values of JSON, for ``insight.json``."""
        return {"channel": self.number, **fields_of(self, "weight patches")}

    @property
    def shows(self) -> str:
        """In a table: the two most frequent captions (labels, predictions or names) of the photos
        of the patches."""
        return most_frequent([patch.row for patch in self.patches], most=2)

    @property
    def photos(self) -> Names:
        """The names of the photos that the patches are cut from."""
        return Names(patch.row.name for patch in self.patches)


@dataclass(frozen=True, eq=False)
class ChannelReport:
    """What the channels of a layer see, the one with the largest weight for the class first.
    ``field`` is the width and height in pixels of the input of what one place can see.
    """

    layer: str
    target: str
    field: tuple[int, int]
    photos: int
    channels: tuple[Channel, ...]

    @property
    def table(self) -> tuple[Channel, ...]:
        """The rows of the table "channels" of an insight, whose templates in ``sections.toml`` read
        their attributes."""
        return self.channels

    def to_dict(self) -> dict[str, Any]:
        """All fields of the report in plain values of JSON, for ``insight.json``."""
        return fields_of(self)

    def picture(self, photos: RunPhotos) -> Image.Image:
        """Draw a contact sheet with the patches of the first `DRAWN` channels, a row for each, cut
        from the photos of the run."""
        groups = []
        for channel in self.channels[:DRAWN]:
            tiles = tuple(
                Tile(patch.picture(photos), f"{patch.value:.3g}") for patch in channel.patches
            )
            groups.append(Group(f"channel {channel.number}, weight {channel.weight:.3g}", tiles))
        title = f"What channels of {self.layer} see, by weight for {self.target}"
        return contact_sheet(
            Layout(
                title, f"each place sees {self.field[0]} × {self.field[1]} pixels", tuple(groups)
            ),
            TILE,
        )


def strongest(peaks: torch.Tensor, maps: torch.Tensor, photo: int, count: int) -> torch.Tensor:
    """Update each channel's ``count`` largest ``peaks`` ``(3, n, C)``, one a photo (value, photo,
    position; largest first), with ``maps`` ``(N, C, h, w)`` of photos from number ``photo`` on.
    """
    values, places = maps.double().cpu().flatten(2).max(2)
    photos = torch.arange(photo, photo + len(maps))[:, None].expand_as(places)
    of_batch = torch.stack([values, photos.double(), places.double()])
    all_peaks = torch.cat([peaks, of_batch], 1) if len(peaks) else of_batch
    best = all_peaks[0].topk(min(count, all_peaks.shape[1]), dim=0).indices
    return all_peaks.gather(1, best.expand(3, -1, -1))


def channels(
    photos: RunPhotos,
    target: int | str | None = None,
    *,
    layer: Where | None = None,
    count: int = 12,
    patches: int = 6,
) -> ChannelReport:
    """List the channels of a layer that do most for a class, with the patches of photos that excite
    each most.

    Args:
        photos: the photos of a run, and the model.
        target: a class, as a number or label; weights are means over its photos (those with this
            label, or else this prediction). None takes all photos, and the best class of each.
        layer: one layer; None finds the last feature map.
        count: how many channels.
        patches: how many patches of each, from different photos.

    Raises:
        RunError: there are no photos, or none of the class.
        TargetError: there is no such label.
        LayerError: there is no such layer.
    """
    check_whole_number("count", count, 1, optional=False)
    check_whole_number("patches", patches, 1, optional=False)
    number, label = (
        (None, "their best class") if target is None else class_in(photos.explainer, target)
    )
    target_score: Target = TopClass() if number is None else ClassTarget(number)
    model = photos.explainer.model
    rows: list[Row] = []
    peaks = torch.zeros(0)  # then (value, photo, position), patches, channels: see `strongest`
    weights = torch.zeros(())
    count_of_class = 0
    first = photos.first().x
    layer_name = one_layer(model, as_inputs(first), layer)
    middle_field = receptive_field(model, first, layer_name)
    input_size = tuple(first.shape[2:])
    map_size: tuple[int, ...] = ()
    for batch in photos.batches():
        batch_size = tuple(batch.x.shape[2:])
        if batch_size != input_size:
            raise RunError(
                f"photos must have inputs of one size, got {input_size} and {batch_size}; "
                "preprocess them alike"
            )
        maps = feature_maps(model, batch.x, layer_name)
        map_size = tuple(maps.shape[2:])
        # patches come from all photos, weights only from those of the class
        peaks = strongest(peaks, maps, photo=len(rows), count=patches)
        rows += batch.rows
        chosen = [
            i for i, row in enumerate(batch.rows) if number is None or number == class_of(row)
        ]
        if chosen:
            needs = [Activations(), LayerGradients()]
            evidence = at_layer(model, batch.x[chosen], layer_name, target_score, needs)
            products = evidence.activations * evidence.gradients
            weights = weights + products.flatten(2).sum((0, 2)).double().cpu()
            count_of_class += len(chosen)
    if not count_of_class:
        raise RunError(
            f"target must be a class of which the run has photos, got {target}; choose another"
        )
    weights = weights / count_of_class
    reports = []
    for channel in weights.argsort(descending=True)[:count].tolist():
        channel_patches = []
        for value, photo, position in peaks[:, :, channel].T.tolist():
            row = rows[int(photo)]
            y_and_x = divmod(int(position), map_size[1])
            box = _part_seen(row, y_and_x, map_size, middle_field)
            channel_patches.append(ChannelPatch(row, value, box))
        weight = float(weights[channel])
        reports.append(Channel(channel, weight=weight, patches=tuple(channel_patches)))
    return ChannelReport(
        layer=layer_name,
        target=label,
        field=(round(middle_field.width), round(middle_field.height)),
        photos=len(rows),
        channels=tuple(reports),
    )


def _part_seen(
    row: Row, position: tuple[int, int], map_size: Sequence[int], middle_field: Box
) -> Box:
    """The part of a photo, in pixels, that a position (y, x) of feature maps ``(h, w)`` depends on:
    the receptive field of their middle, moved there and clipped to the input.
    """
    height, width = row.input_size
    y, x = position
    rows, columns = map_size
    shift_x = (x - columns // 2) * width / columns
    shift_y = (y - rows // 2) * height / rows
    moved = middle_field.moved(shift_x, shift_y)
    clipped = np.clip(astuple(moved), 0, (width, height, width, height)).tolist()
    return Box(*row.box.to_photo(clipped, row.input_size))
