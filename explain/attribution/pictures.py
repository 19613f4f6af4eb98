"""What an explanation looks like: attributions as overlays, captions, and the tiles of a sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from explain import render
from explain._utils.errors import ExplainError
from explain.attribution.result import Attribution
from explain.data.images import Box
from explain.methods.base import FAMILIES
from explain.methods.registry import control, divides_by_score, family
from explain.render import overlays, placement, styles
from explain.render.captions import Legend, Mark
from explain.render.sheets import Group, Tile
from explain.render.styles import Style, StyleLike

AREAS = ("contour", "mask")  # styles with outlines
MANY = 4  # methods, from which on they are grouped by family


@dataclass(frozen=True, eq=False)
class Scene:
    """A photo, where maps lie on it, and the parts of it that the model saw."""

    photo: Image.Image = field(repr=False)
    box: Box
    seen: tuple[Box, ...]

    def overlay(self, attribution: Attribution, style: Style) -> Image.Image:
        """Draw the map of one image."""
        return overlays.drawn(self.photo, map_for(attribution, style), style, self.box, self.seen)

    def legend(self, style: Style) -> Legend | None:
        """What the colours mean on this photo, as far as the model saw it."""
        return style.legend(self.photo.crop(_outline(self.seen, self.photo.size)))

    def enlarged(self, times: int) -> Scene:
        """The same with every pixel of the photo as a square of so many."""
        if times == 1:
            return self
        size = self.photo.width * times, self.photo.height * times
        larger = self.photo.resize(size, Image.Resampling.NEAREST)
        return Scene(larger, _times(self.box, times), tuple(_times(part, times) for part in self.seen))


@dataclass(frozen=True)
class Look:
    """How attributions are shown: in one style, or each in its method's own, with these options where it has them."""

    style: StyleLike | None = None
    colormap: str | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.style is not None:
            self.of("heat")
        else:
            styles.get_style("heat", colormap=self.colormap, alpha=self.alpha)  # a wrong value is refused in any case

    def of(self, own: str) -> Style:
        """The style for a method whose own is ``own``; lines around contributions have the colours of their sign.

        Raises:
            ExplainError: there is no such style, or the one that was asked for has no such option.
        """
        if self.style is not None:
            style = styles.get_style(self.style, colormap=self.colormap, alpha=self.alpha)
            return style.signed() if own == "signed" and isinstance(style, render.Contour) else style
        return styles.with_options(styles.get_style(own), strict=False, colormap=self.colormap, alpha=self.alpha)


def map_for(attribution: Attribution, style: Style) -> np.ndarray[Any, Any]:
    """Return what a style draws of the first image.

    Maps with a value for each pixel are made smooth for the styles that draw places: see `smoothed`.
    Maps of a layer go as they are, cell by cell, to those that draw the outlines of areas, which round them.

    Raises:
        ExplainError: the style draws the channels of the photo, and the map has none.
    """
    in_pixels = attribution.values.ndim == len(attribution.size) + 2
    if style.reads == "values":
        if not in_pixels:
            raise ExplainError(
                f"style {style.name!r} must be given values for each channel of the photo, but {attribution.method} "
                "has one for each place; take 'heat' or 'signed'"
            )
        return array(attribution.values[0])
    with_sign = style.reads == "signed"
    if in_pixels or style.name not in AREAS:
        found = array(attribution.signed[0] if with_sign else attribution.heatmap[0])
        return placement.smoothed(found) if in_pixels and style.name in styles.CHOICES else found
    cells = array(attribution.contributions[0] if with_sign else attribution.cells[0])
    return cells / (np.abs(cells).max() or 1.0)


def tile(scene: Scene, attribution: Attribution, style: Style, marks: tuple[Mark, ...] = ()) -> Tile:
    """One map of a sheet: the overlay with the method's name, the layer, and what it must not be taken for.

    ``marks`` say what it was asked, if it was.
    """
    where = layer_of(attribution)
    words = f"{attribution.method}{f' at {where}' if where else ''}, drawn as {style.name}"
    words += "".join(f", {mark.word} {mark.result}" for mark in marks)
    return Tile(scene.overlay(attribution, style), attribution.method, where, remark(attribution), words, marks)


def groups(
    scene: Scene,
    results: Sequence[Mapping[str, Attribution]],
    titles: Sequence[str],
    look: Look,
    marks: Callable[[str, int], tuple[Mark, ...]] = lambda method, target: (),
) -> Iterator[Group]:
    """The photo, and the maps: by target where there are several, and by family where there are many methods.

    ``marks`` gives those of a method and the position of a target.
    """
    yield Group("", (Tile(scene.photo, "photo", alternative="the photo"),))
    for index, (title, result) in enumerate(zip(titles, results, strict=True)):
        heading = title if len(results) > 1 else ""
        for name, members in _families(result):
            about = " · ".join(part for part in (heading, name) if part)
            yield Group(
                about, tuple(tile(scene, each, look.of(each.style), marks(each.method, index)) for each in members)
            )
            heading = ""


def legends(scene: Scene, results: Sequence[Mapping[str, Attribution]], look: Look) -> tuple[Legend, ...]:
    """What the colours of these maps mean, each style once."""
    styles = dict.fromkeys(look.of(each.style) for result in results for each in result.values())
    return tuple(legend for style in styles if (legend := scene.legend(style)) is not None)


def layer_of(attribution: Attribution) -> str:
    """Where a method looked, with the way in which the maps of several layers became one.

    >>> one = torch.ones(1, 1, 1)
    >>> layer_of(Attribution("layercam", one, "score", one, ("a", "b"), (1, 1), fuse="max"))
    'max of a, b'
    """
    layer = attribution.layer
    if layer is None or isinstance(layer, str):
        return layer or ""
    names = ", ".join(layer) if len(layer) < 3 else f"{len(layer)} layers, {layer[0]} to {layer[-1]}"
    return f"{attribution.fuse or 'mean'} of {names}"


def remark(attribution: Attribution) -> str:
    """What a map must not be taken for: one that is not complete, or says nothing, or is of no real method."""
    if not attribution.values[:1].any():
        return "zero everywhere"
    if float(attribution.score[0]) < 0 and divides_by_score(attribution.method):
        return "negative score: signs reversed"
    does = control(attribution.method)
    return f"null map: {does}" if does else attribution.stopped


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array of float32."""
    found: np.ndarray[Any, Any] = tensor.float().cpu().numpy()
    return found


def percent(probability: float) -> str:
    """Return a probability as people read it: whole per cent, with a digit below ten.

    >>> percent(0.873), percent(0.0997), percent(0.042), percent(0.0001)
    ('87 %', '10 %', '4.2 %', '<0.1 %')
    """
    share = 100 * probability
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %" if share >= 0.1 else "<0.1 %"


def _families(result: Mapping[str, Attribution]) -> list[tuple[str, list[Attribution]]]:
    """Methods by family; few are left together, in the order in which they were asked for."""
    if len(result) < MANY:
        return [("", list(result.values()))]
    found: dict[str, list[Attribution]] = {name: [] for name in FAMILIES}
    for attribution in result.values():
        found[family(attribution.method)].append(attribution)
    return [(name, members) for name, members in found.items() if members]


def _outline(seen: Sequence[Box], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The smallest rectangle of whole pixels on the photo around what the model saw."""
    left, top = (max(0, round(min(edges))) for edges in ([b.left for b in seen], [b.top for b in seen]))
    right = min(size[0], round(max(b.right for b in seen)))
    bottom = min(size[1], round(max(b.bottom for b in seen)))
    left, top = min(left, size[0] - 1), min(top, size[1] - 1)
    return left, top, max(left + 1, right), max(top + 1, bottom)


def _times(box: Box, times: int) -> Box:
    return Box(box.left * times, box.top * times, box.right * times, box.bottom * times)
