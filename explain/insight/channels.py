"""What a channel sees: the patches that excite it most, and what it does for a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import LayerError, RunError, shown
from explain._utils.random_numbers import normal
from explain.data.images import Box
from explain.data.inputs import as_inputs
from explain.engine import Activations, LayerGradients
from explain.engine.execution import gather
from explain.engine.plan import plan_of
from explain.engine.settings import RuntimeSettings
from explain.hooks import FeatureExtractor
from explain.hooks.layer_names import Where
from explain.insight.class_statistics import named, plain, short
from explain.insight.reattribution import RunPhotos, class_in, class_of, one_for_each_photo
from explain.layers import default_layer
from explain.layers.calls import find_layers
from explain.render.sheets import Group, Layout, Tile, sheet
from explain.runs.reading import Row
from explain.targets import ClassTarget, Target, TopClass

DRAWS = 8  # inputs by which a receptive field is found


def one_layer(model: nn.Module, x: torch.Tensor, layer: Where | None) -> str:
    """The name of a layer; None finds the last feature map.

    Raises:
        LayerError: there is no such layer, or these are several.
    """
    inputs = as_inputs(x)
    names = [default_layer(model, inputs)] if layer is None else find_layers(model, inputs, layer)
    if len(names) != 1:
        raise LayerError(f"layer must name one layer, got {len(names)}; choose one of {', '.join(names)}")
    return names[0]


def feature_maps(model: nn.Module, x: torch.Tensor, layer: str) -> torch.Tensor:
    """The feature maps ``(N, C, h, w)`` of a layer."""
    (found,) = gather(model, as_inputs(x), plan_of([Activations()], [layer]), [TopClass()], RuntimeSettings(None))
    return found(layer).activations


def with_gradients(model: nn.Module, x: torch.Tensor, layer: str, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """The feature maps of a layer, and the gradients of a score in them; both ``(N, C, h, w)``."""
    needs = [Activations(), LayerGradients()]
    (found,) = gather(model, as_inputs(x), plan_of(needs, [layer]), [target], RuntimeSettings(None))
    evidence = found(layer)
    return evidence.activations, evidence.gradients


def receptive_field(model: nn.Module, x: torch.Tensor, layer: str, seed: int = 0) -> tuple[int, int, int, int]:
    """The part of an input that the middle of a layer's feature maps can see: left, top, right, bottom; ends exclusive.

    It is found by the gradients of that place in some inputs of noise, so that it holds for any network. Layers that
    are not ``(N, C, h, w)``, such as those of transformers, are taken to see all of the input.

    Args:
        model: the network.
        x: an input ``(1, C, H, W)``, whose size and range count.
        layer: a layer.
        seed: of the noise.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3, padding=1))
    >>> receptive_field(model, torch.rand(1, 1, 32, 32), "2")
    (13, 13, 21, 21)
    """
    height, width = x.shape[-2:]
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = normal((DRAWS, *x.shape[1:]), generator).to(x)
    drawn = (x[:1].mean() + x[:1].std() * noise).requires_grad_()
    with torch.enable_grad():
        features = FeatureExtractor(model, layer, graph=True)(drawn)[layer]
        if not isinstance(features, torch.Tensor) or features.ndim != 4:
            return 0, 0, width, height
        middle = features[:, :, features.shape[2] // 2, features.shape[3] // 2]
        signs = normal(middle.shape, generator).to(middle)  # so that channels do not cancel
        (gradient,) = torch.autograd.grad((middle * signs).sum(), drawn)
    seen = gradient.abs().amax((0, 1)) > 0
    if not seen.any():
        return 0, 0, width, height
    rows, columns = seen.any(1).nonzero().flatten().tolist(), seen.any(0).nonzero().flatten().tolist()
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1


@dataclass(frozen=True, eq=False)
class Patch:
    """A place that excites a channel: its activation, and the part of the photo that this place sees, in its pixels."""

    row: Row
    value: float
    box: Box

    def picture(self, photos: RunPhotos) -> Image.Image:
        """That part of the photo."""
        photo = photos.picture(self.row)
        edges = (self.box.left, self.box.top, self.box.right, self.box.bottom)
        return photo.crop(tuple(round(edge) for edge in edges))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Channel:
    """A channel of a layer: what it does for the class, and the patches that excite it most, the strongest first.

    ``weight`` is the mean over photos of activation times gradient, summed over places: what the score of the class
    gets from the channel, to first order.
    """

    number: int
    weight: float
    patches: tuple[Patch, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        patches = [{"name": each.row.name, "value": plain(each.value), "box": list(vars(each.box).values())}
                   for each in self.patches]  # fmt: skip
        return {"channel": self.number, "weight": plain(self.weight), "patches": patches}


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

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer, "target": self.target, "field": list(self.field), "photos": self.photos,
            "channels": [each.to_dict() for each in self.channels],
        }  # fmt: skip

    def picture(self, photos: RunPhotos, most: int = 6, tile: int = 120) -> Image.Image:
        """The patches of the first channels, a row for each."""
        groups = []
        for channel in self.channels[:most]:
            tiles = tuple(Tile(each.picture(photos), f"{each.value:.3g}") for each in channel.patches)
            groups.append(Group(f"channel {channel.number}, weight {channel.weight:.3g}", tiles))
        title = f"What channels of {self.layer} see, by weight for {self.target}"
        return sheet(Layout(title, f"each place sees {self.field[0]} × {self.field[1]} pixels", tuple(groups)), tile)


class _Best:
    """The largest values of each channel, at most one for a photo, as photos come."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values = torch.empty(0)
        self.rows: list[Row] = []
        self.at = torch.empty(0, dtype=torch.long)  # row and place in one number
        self.size = (1, 1)

    def enter(self, rows: Sequence[Row], maps: torch.Tensor) -> None:
        """Take the feature maps ``(N, C, h, w)`` of some photos."""
        self.size = (int(maps.shape[2]), int(maps.shape[3]))
        values, places = maps.float().cpu().flatten(2).max(2)
        first = len(self.rows)
        numbers = torch.arange(first, first + len(rows))[:, None].expand_as(places)
        code = numbers * (self.size[0] * self.size[1]) + places
        self.rows += rows
        if first:
            values, code = torch.cat([self.values, values]), torch.cat([self.at, code])
        best = values.topk(min(self.count, len(values)), dim=0)
        self.values, self.at = best.values, code.gather(0, best.indices)

    def of(self, channel: int) -> list[tuple[Row, float, int, int]]:
        """The row, the value and the place of each, the largest first."""
        found = []
        for value, code in zip(self.values[:, channel].tolist(), self.at[:, channel].tolist(), strict=True):
            number, place = divmod(code, self.size[0] * self.size[1])
            found.append((self.rows[number], value, place // self.size[1], place % self.size[1]))
        return found


def channels(
    photos: RunPhotos, target: int | str | None = None, *, layer: Where | None = None, count: int = 12, patches: int = 6
) -> ChannelReport:
    """Say what the channels of a layer see that do most for a class.

    Args:
        photos: the photos of a run, and the model.
        target: a class, as a number or label; weights are means over its photos (those with this label, or else this
            prediction). None takes all photos, and the best class of each.
        layer: one layer; None finds the last feature map.
        count: how many channels.
        patches: how many patches of each, from different photos.

    Raises:
        RunError: there are no photos, or none of the class.
        TargetError: there is no such label.
        LayerError: there is no such layer.
    """
    for option, value in (("count", count), ("patches", patches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RunError(f"{option} must be a whole number from 1, got {shown(value)}; 6 is usual")
    number, label = (None, "their best class") if target is None else class_in(photos.explainer, target)
    best, weights, of_class = _Best(patches), torch.zeros(()), 0
    model, size, name, seen = photos.explainer.model, (0, 0), "", (0, 0, 0, 0)
    wanted: Target = TopClass() if number is None else ClassTarget(number)
    for batch in photos.batches(one_for_each_photo(photos.run)):
        if not name:
            name, size = one_layer(model, batch.x[:1], layer), (int(batch.x.shape[-2]), int(batch.x.shape[-1]))
            seen = receptive_field(model, batch.x[:1], name)
        if tuple(batch.x.shape[-2:]) != size:
            raise RunError(f"photos must have inputs of one size for their channels to be compared, got {size} and "
                           f"{tuple(batch.x.shape[-2:])}; use a preprocessing that makes them the same")  # fmt: skip
        best.enter(batch.rows, feature_maps(model, batch.x, name))
        own = [i for i, row in enumerate(batch.rows) if number is None or number == class_of(row)]
        if own:
            maps, gradients = with_gradients(model, batch.x[own], name, wanted)
            weights = weights + (maps * gradients).flatten(2).sum((0, 2)).double().cpu()
            of_class += len(own)
    if not of_class:
        raise RunError(f"target must be a class of which the run has photos, got {target}; choose another")
    weights = weights / of_class
    order = weights.argsort(descending=True)[:count].tolist()
    found = tuple(
        Channel(channel, float(weights[channel]), tuple(
            Patch(row, value, _part(row, y, x, best.size, seen)) for row, value, y, x in best.of(channel)
        ))
        for channel in order
    )  # fmt: skip
    return ChannelReport(name, label, (seen[2] - seen[0], seen[3] - seen[1]), len(best.rows), found)


def _part(row: Row, y: int, x: int, size: tuple[int, int], seen: tuple[int, int, int, int]) -> Box:
    """What the place (y, x) of the feature maps sees of a photo, in pixels of the photo."""
    height, width = row.input_size
    down, across = (y - size[0] // 2) * height / size[0], (x - size[1] // 2) * width / size[1]
    left, right = (min(max(edge + across, 0.0), float(width)) for edge in (seen[0], seen[2]))
    top, bottom = (min(max(edge + down, 0.0), float(height)) for edge in (seen[1], seen[3]))
    box = row.box
    return Box(
        box.left + left * box.width / width, box.top + top * box.height / height,
        box.left + right * box.width / width, box.top + bottom * box.height / height,
    )  # fmt: skip


def table_rows(found: ChannelReport, most: int = 10) -> list[list[str]]:
    """The rows of a table for people: the heading first."""
    rows = [
        [
            str(each.number), f"{each.weight:+.3g}", f"{each.patches[0].value:.3g}", _most_frequent(each),
            ", ".join(short(patch.row.name) for patch in each.patches[:2]),
        ]
        for each in found.channels[:most]
    ]  # fmt: skip
    return [["channel", "weight", "strongest", "in photos of", "as in"], *rows]


def _most_frequent(channel: Channel) -> str:
    """The classes of the photos that excite a channel most, the most frequent first."""
    counts = Counter(named(patch.row) for patch in channel.patches)
    return ", ".join(name for name, _ in counts.most_common(2))
