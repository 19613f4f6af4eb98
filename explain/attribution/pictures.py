"""What an explanation looks like: attributions as overlays, captions, and the tiles of a sheet."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import Image

from explain import render
from explain._utils.errors import ExplainError
from explain.attribution.result import Attribution
from explain.data.boxes import Box
from explain.methods.base import FAMILIES, innermost_method, method_or_unknown, title_of
from explain.render import overlays, styles
from explain.render.captions import Legend, Mark
from explain.render.overlays import Edges
from explain.render.sheets import ABREAST, Group, Tile, evenly_spread
from explain.render.styles import Style, StyleLike
from explain.targets.labels import class_label
from explain.targets.outputs import percent

OUTLINES = ("contour", "mask")  # styles
LARGEST_SIDE = 2000  # pixels of an overlay, unless asked: at 12 megapixels, each has 15 MB
MANY = 4  # methods, from which on they are grouped by family
Order: TypeAlias = Literal["family", "given"]
"""How methods follow each other in a sheet."""
Part: TypeAlias = Literal["photo", "seen"]
"""What a figure shows of each photo: all of it, or what the model saw."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A photo, where maps lie on it (``box``), and the parts ``seen`` by the model. ``boxes`` are
    of the targets, ``detected`` of all detections."""

    photo: Image.Image = field(repr=False)
    box: Box
    seen: tuple[Box, ...]
    boxes: tuple[Edges | None, ...] = ()
    detected: Mapping[str, Edges] = field(default_factory=dict)
    # boxes are drawn around the parts of a map above this share of its maximum
    above: float | None = None
    # of a volume, side by side in the photo, by name; names are drawn if ``numbered``
    slices: Mapping[str, Edges] = field(default_factory=dict)
    numbered: bool = True
    legends: dict[str, Legend | None] = field(default_factory=dict, init=False, repr=False)
    smaller: "dict[int, Scene]" = field(default_factory=dict, init=False, repr=False)

    def overlay(self, attribution: Attribution, style: Style, target: int = 0) -> Image.Image:
        """Draw the map of a batch's first image over this photo, with the box of detection number
        ``target``. What the model did not see is marked; a map that is mostly noise is faded."""
        if isinstance(style, styles.Colored) and style.share is None:
            style = replace(style, share=certainty(attribution))
        values = map_for(attribution, style, self._slices_in(attribution.size))
        if self.slices and isinstance(style, styles.Signed):
            # summed already, each slice alone, so that none runs into the next
            style = replace(style, spread=0.0)
        picture = overlays.draw_marked(
            self.photo, values, style, self.box, self._seen_by(attribution)
        )
        if self.numbered and self.slices:
            picture = overlays.numbered(picture, self.slices)
        box = self.boxes[target] if target < len(self.boxes) else None
        if box is not None:
            # in the colour of the detection that it is, or else in the next one
            color_number = [*self.detected.values(), box].index(box)
            picture = overlays.outlined(picture, {"": box}, first=color_number)
        if self.above is None:
            return picture
        [parts] = attribution[:1].boxes(self.above)
        for part in parts:
            edges = self.box.to_photo(part, attribution.size)
            # in the colour that follows those of the detections
            picture = overlays.outlined(picture, {"": edges}, first=len(self.detected))
        return picture

    def largest(self, attribution: Attribution, style: styles.Colored) -> float:
        """The value that gets the last colour where a map is drawn on its own scale, in its
        units."""
        values = _on_input(attribution, style, self._slices_in(attribution.size))
        if self.slices and isinstance(style, styles.Signed):
            style = replace(style, spread=0.0)
        return style.largest(values)

    def _slices_in(self, size: Sequence[int]) -> list[tuple[slice, slice]]:
        """The rows and columns of each slice of a volume in a map of this (height, width)."""
        places = []
        for cell in self.slices.values():
            left, top, right, bottom = map(round, self.box.to_input(cell, size))
            places.append((slice(top, bottom), slice(left, right)))
        return places

    def _seen_by(self, attribution: Attribution) -> Sequence[Box]:
        """The parts of the photo that the map's cells look at: of a network that crops its input,
        the crop."""
        placement = attribution.placement
        # of tiles, which are several parts, it is known already
        if placement is None or placement.seen is None or len(self.seen) > 1:
            return self.seen
        rows = placement.seen.any(1).nonzero()[:, 0].tolist()
        columns = placement.seen.any(0).nonzero()[:, 0].tolist()
        corners = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        return (Box(*self.box.to_photo(corners, placement.size)),)

    def legend(self, style: Style) -> Legend | None:
        """The legend of a style on the part of this photo that the model saw; kept, so each is
        drawn once. Styles are told apart by their ``repr``, so all of their options must be in it.
        """
        key = repr(style)
        if key not in self.legends:
            if isinstance(style, styles.Colored):
                style = replace(style, share=None)  # a legend shows the whole scale
            part = self.photo.crop(self._seen_edges)
            self.legends[key] = style.over(self.photo).legend(part)
        return self.legends[key]

    @property
    def _seen_edges(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of all that the model saw of the photo, in whole pixels."""
        around = Box(
            min(box.left for box in self.seen),
            min(box.top for box in self.seen),
            max(box.right for box in self.seen),
            max(box.bottom for box in self.seen),
        )
        return styles.edges(around, self.photo.size)

    def cropped(self) -> "Scene":
        """Return the scene of what the model saw alone."""
        edges = self._seen_edges
        return self._with(self.photo.crop(edges), Box(*edges))

    def enlarged(self, times: int) -> "Scene":
        """Return the scene, a photo with its boxes, with each pixel as a square of ``times`` by
        ``times``, for tiny photos. The scene itself if ``times`` is 1.
        """
        if times == 1:
            return self
        return self._resized(times, Image.Resampling.NEAREST)

    def fitted(self, side: int | None) -> "Scene":
        """Return the scene with a photo of at most ``side`` pixels a side, boxes included; None
        leaves it. Each size is made once and kept.
        """
        longest = max(self.photo.size)
        if side is None or longest <= side:
            return self
        if side not in self.smaller:
            self.smaller[side] = self._resized(side / longest, Image.Resampling.LANCZOS)
        return self.smaller[side]

    def _resized(self, scale: float, resampling: Image.Resampling) -> "Scene":
        """The scene with the photo scaled, and all boxes with it."""
        width, height = (max(1, round(length * scale)) for length in self.photo.size)
        photo = self.photo.resize((width, height), resampling)
        return self._with(photo, Box.whole(self.photo.size))

    def _with(self, photo: Image.Image, part: Box) -> "Scene":
        """The scene with another photo, which shows a part of this one, and all boxes where they
        lie on it. Legends and smaller scenes are not taken over, since they are made for a size.
        """

        def changed(corners: Edges) -> Edges:
            left, top, right, bottom = part.to_input(corners, (photo.height, photo.width))
            return left, top, right, bottom

        def on_photo(box: Box) -> Box:
            return Box(*changed((box.left, box.top, box.right, box.bottom)))

        return Scene(
            photo,
            box=on_photo(self.box),
            seen=tuple(map(on_photo, self.seen)),
            boxes=tuple(None if box is None else changed(box) for box in self.boxes),
            detected={label: changed(box) for label, box in self.detected.items()},
            above=self.above,
            slices={name: changed(cell) for name, cell in self.slices.items()},
        )


@dataclass(frozen=True)
class Look:
    """How attributions are drawn: all in one style, or each in the style of its method; with the
    options that the style has, and boxes around the parts above the share ``boxes`` of the maximum.
    """

    style: StyleLike | None = None
    colormap: str | None = None
    alpha: float | None = None
    boxes: float | None = None

    def __post_init__(self) -> None:
        """Refuse options that the style does not have."""
        # raises for wrong values
        styles.get_style(self.style or "heat", colormap=self.colormap, alpha=self.alpha)

    def refuse_unused(self, method_styles: Sequence[str]) -> None:
        """Refuse a colour map or an opacity if none of the methods' styles has such an option.
        Raises `ExplainError` if one has no effect.
        """
        if self.style is not None:  # checked with its options when it was made
            return
        in_styles = list(map(styles.get_style, method_styles))
        for name in ("colormap", "alpha"):
            option: dict[str, Any] = {name: getattr(self, name)}
            is_used = any(hasattr(style, name) for style in in_styles)
            if option[name] is not None and in_styles and not is_used:
                styles.get_style(in_styles[0], **option)  # raises, as for a chosen style

    def of(self, method_style: str) -> Style:
        """The style in which a map is drawn whose method's own style is ``method_style``.
        Outlines of signed maps have the colours of their sign.
        """
        is_chosen = self.style is not None
        style = styles.get_style(
            method_style if self.style is None else self.style,
            strict=is_chosen,
            colormap=self.colormap,
            alpha=self.alpha,
        )
        if is_chosen and method_style == "signed" and isinstance(style, render.Contour):
            return style.signed()
        return style


def map_for(
    attribution: Attribution, style: Style, slices: Sequence[tuple[slice, slice]] = ()
) -> np.ndarray[Any, Any]:
    """Return the array that a style's ``reads`` wants of a batch's first image: sets, certified
    answers, raw values, signed map or heatmap. ``slices`` are where those of a volume lie. Maps of
    cells that are spread evenly stay cell by cell for styles with outlines."""
    if style.reads == "sets":
        sets = attribution.sets
        return array(attribution.values[:1] > 0 if sets is None else sets.masks[0])
    if style.reads == "answers":
        answers = attribution.certified
        if answers is None:
            raise ExplainError(
                f"style {style.name!r} must be given a certified map, got one of "
                f"{attribution.method}; take certified({attribution.method})"
            )
        return array(answers[0])
    if style.reads == "values":
        if not _in_pixels(attribution):
            raise ExplainError(
                f"style {style.name!r} must be given values for each channel, but "
                f"{attribution.method} has one for each place; take 'heat'"
            )
        return array(attribution.values[0])
    with_sign = style.reads == "signed"
    in_pixels = _in_pixels(attribution)
    placement = attribution.placement
    is_placed = placement is not None and not placement.is_even
    if in_pixels or is_placed or style.name not in OUTLINES:
        values = _on_input(attribution, style, slices)
    else:  # the style rounds the outlines of the cells itself
        values = array(attribution.contributions[0] if with_sign else attribution.cells[0])
    return values / (np.abs(values).max() or 1.0)  # a map of zeros stays


def _on_input(
    attribution: Attribution, style: Style, slices: Sequence[tuple[slice, slice]]
) -> np.ndarray[Any, Any]:
    """The map that a style draws at the input's resolution ``(H, W)``, in the units of the values;
    maps of pixels are summed over their neighbourhoods where the style draws places."""
    with_sign = style.reads == "signed"
    values = array(attribution.on_input(with_sign=with_sign)[0])
    # these styles draw places, and single pixels would not be seen
    is_summed = style.name in styles.CHOICES and _in_pixels(attribution)
    if slices and isinstance(style, styles.Signed):  # which else sums it itself
        is_summed = True
    if not is_summed:
        return values
    if not slices:
        return styles.smoothed(values, style.spread)
    summed = values.copy()
    for place in slices:
        summed[place] = styles.smoothed(values[place], style.spread)
    return summed


NOISE = 2.0  # standard errors, up to which a value may be chance
MOSTLY = 0.5  # of the magnitudes of a map
FAINTEST = 0.25  # of the colours of a map that is nothing but noise


def beyond_noise(attribution: Attribution) -> float | None:
    """The share of a first map's magnitudes, 0 to 1, in values further than two standard errors
    from what makes no difference; None where no errors are known."""
    if attribution.error is None:
        return None
    magnitudes = attribution.contributions[0].float().abs()
    errors = attribution.error[0].float().expand_as(magnitudes)
    total = float(magnitudes.sum())
    if not (total > 0 and bool(errors.isfinite().all())):
        return None
    return float(magnitudes[magnitudes > NOISE * errors].sum()) / total


def certainty(attribution: Attribution) -> float:
    """Return how much of its colours a map is drawn with: 1, or less (from 0) if it is mostly
    noise."""
    share = beyond_noise(attribution)
    return 1.0 if share is None else min(1.0, max(FAINTEST, share / MOSTLY))


FEW_CELLS = 16  # as 4 × 4, of which each is a quarter of the side; 7 × 7, as is usual, are enough
EVEN = 0.1  # of the largest value: the range of a map that is nearly even


def cautions(attribution: Attribution) -> list[str]:
    """Say what to know before a first map is read: it is mostly noise, has few cells, or is nearly
    even; empty where there is nothing to say."""
    values = attribution.contributions[0].float()
    is_empty = not (values.numel() and values.any())
    # with sets, values are no amounts: they say in which set a region is, and its rank there
    if attribution.sets is not None or is_empty:
        return []
    remarks = []
    share = beyond_noise(attribution)
    if share is not None and share < MOSTLY:
        remarks.append(f"mostly noise: {percent(1 - share)} of it is within two standard errors")
    if attribution.layer is not None and values.ndim == 2 and values.numel() <= FEW_CELLS:
        remarks.append(f"only {values.shape[0]} × {values.shape[1]} cells")
    low = float(values.min())
    high = float(values.max())
    relative_range = (high - low) / max(abs(low), abs(high))
    if relative_range <= EVEN:
        remarks.append(f"nearly even: its values differ by at most {round(100 * relative_range)} %")
    return remarks


def _in_pixels(attribution: Attribution) -> bool:
    """Whether an attribution has a value for each pixel and channel, as pixel methods do."""
    return attribution.values.ndim == len(attribution.size) + 2


def drawing_caption(attribution: Attribution, style: Style) -> str:
    """The words of a caption that say how a map was smoothed before it was drawn; empty if it was
    not. Must follow what `map_for` does.
    """
    if not (style.spread and _in_pixels(attribution)):
        return ""
    return f"summed over {100 * style.spread:.2g} % of the side"


def tiles_of(
    scene: Scene,
    attribution: Attribution,
    style: Style,
    marks: tuple[Mark, ...] = (),
    target: int = 0,
) -> Iterator[Tile]:
    """The tiles of one map in a sheet: first the overlay with the method's name, layer and remark;
    of a set of regions, also the photo without that set. ``marks`` are the map's checks.
    """
    name = title_of(attribution.method)
    picture = scene.overlay(attribution, style, target)
    detail = layer_caption(attribution) or drawing_caption(attribution, style)
    yield Tile(
        picture,
        name,
        detail,
        remark=remark(attribution),
        marks=marks,
        legend=legend_of(scene, attribution, style),
    )
    if attribution.interactions is not None and attribution.centres is not None:
        interactions = array(attribution.interactions[0])
        centres = array(attribution.centres[0])
        of_pairs = overlays.network(scene.photo, interactions, centres, scene.box)
        yield Tile(of_pairs, "in pairs")
    if without := without_set(attribution, style):
        yield Tile(scene.overlay(attribution, without, target), "without it")


def legend_of(scene: Scene, attribution: Attribution, style: Style) -> Legend | None:
    """The legend of a map; that of a certified one says which share it is about, and the radius
    within which it holds."""
    legend = scene.legend(style)
    if legend is None or style.reads != "answers" or attribution.radius is None:
        return legend
    share = percent(attribution.options["share"])
    meaning = f"top {share}, certain within radius {float(attribution.radius[0]):.2g}"
    return replace(legend, meaning=meaning)


def without_set(attribution: Attribution, style: Style) -> Style | None:
    """The style that draws the photo without its first set of regions, or the whole photo if it has
    none. None for maps that are no sets of regions.
    """
    if attribution.sets is None or not isinstance(style, styles.RegionSets):
        return None
    return replace(style, without=True)


PROVED = {
    "found": "some of it may not be needed",
    "minimal": "none of it can be left out",
    "smallest": "no smaller set exists",
}
"""What is proved of a set of regions, by `EvidenceSet.proof`."""


def sentence(attribution: Attribution, label: str, categories: Sequence[str] | None = None) -> str:
    """Return a sentence that says what the sets of regions mean, such as "These 10 % of the photo
    are enough for espresso (...)"; empty for other maps."""
    if attribution.sets is None:
        return ""
    sufficient = innermost_method(attribution.method).name == "sufficient"
    becomes = attribution.options.get("becomes")
    of_what = layer_of(attribution) if attribution.options.get("of_layer") else "the photo"
    if becomes is None:
        role = f"{'enough' if sufficient else 'needed'} for {label}"
        verb = "are"
        verb_of_none = "is"
    else:
        role = f"{label} from being {class_label(categories, becomes)}"
        verb = "keep"
        verb_of_none = "keeps"
    sets = attribution.sets[0]
    if not sets:
        return f"No part of {of_what} {verb_of_none} {role}"
    first = sets[0]
    if not first.size:
        empty = "stays when all is absent" if sufficient else "is no answer for the whole photo"
        return f"{label} {empty}"
    has_scores = not math.isnan(first.alone)  # as after an interrupt, which computes none
    details = []
    if has_scores:
        details = [f"score {first.alone:.2f} with these alone, {first.without:.2f} without them"]
    text = (
        f"These {percent(first.size)} of {of_what} {verb} {role} "
        f"({'; '.join([*details, PROVED[first.proof]])})"
    )
    for another in sets[1:]:
        text += f"; so are another {percent(another.size)}"
        if has_scores:
            text += f" ({another.alone:.2f} alone)"
    return text


def groups(
    scene: Scene,
    results: Sequence[Mapping[str, Attribution]],
    titles: Sequence[str],
    look: Look,
    marks: Callable[[str, int], tuple[Mark, ...]] = lambda method, target: (),
    abreast: int = ABREAST,
    order: Order = "family",
) -> tuple[Group, ...]:
    """Return a sheet's groups of tiles: the photo, and a table of targets and methods (turned where
    methods do not fit ``abreast``), or many methods by family, unless in the given order."""

    def tiles(index: int, maps: Iterable[Attribution]) -> tuple[Tile, ...]:
        by_method = (
            tiles_of(
                scene,
                attribution,
                look.of(attribution.style),
                marks(attribution.method, index),
                index,
            )
            for attribution in maps
        )
        return tuple(chain.from_iterable(by_method))

    photo = Tile(overlays.outlined(scene.photo, scene.detected), "photo")
    if scene.slices:
        return _by_slice(scene, photo.picture, results, titles, look, marks)
    target_count = len(results)
    method_count = len(results[0])
    is_table = target_count > 1 and method_count > 1
    if is_table and method_count >= abreast > target_count:  # it fits if methods are rows
        return Group("", (photo,)), *_by_method(results, titles, tiles)
    if is_table:
        rows = [
            Group(title, tiles(number, results[number].values()), own_row=True)
            for number, title in enumerate(titles)
        ]
        return Group("", (photo,)), *rows
    # with one target, its maps by family; with several, those of the only method of each
    by_family = [
        Group(title if target_count > 1 else name, tiles(index, members))
        for index, (title, result) in enumerate(zip(titles, results, strict=True))
        for name, members in _families(result, order)
    ]
    return Group("", (photo,)), *by_family


SHOWN_SLICES = 12


def _by_slice(
    scene: Scene,
    photo: Image.Image,
    results: Sequence[Mapping[str, Attribution]],
    titles: Sequence[str],
    look: Look,
    checks_of: Callable[[str, int], tuple[Mark, ...]],
) -> tuple[Group, ...]:
    """The groups of a table of a volume's slices in columns, at most `SHOWN_SLICES`, evenly spread;
    its rows are the scan and the maps. ``checks_of`` is called with a method and a target's number.
    """
    names = list(scene.slices)
    shown = [names[place] for place in evenly_spread(len(names), SHOWN_SLICES)]
    whole = replace(scene, numbered=False)  # the names stand below the slices

    def row(heading: str, picture: Image.Image, first_tile: Tile) -> Group:
        """A row of the slices of one picture; what is said of all stands below the first."""
        tiles = []
        for number, name in enumerate(shown):
            with_words = first_tile if number == 0 else Tile(picture)
            left, top, right, bottom = map(round, scene.slices[name])
            part = picture.crop((left, top, right, bottom))
            # the name of the method and the detail are in the heading
            tiles.append(replace(with_words, picture=part, name=name, detail=""))
        return Group(heading, tuple(tiles), own_row=True)

    rows = [row("scan", photo, Tile(photo))]
    for target, (title, result) in enumerate(zip(titles, results, strict=True)):
        for attribution in result.values():
            style = look.of(attribution.style)
            checks = checks_of(attribution.method, target)
            for tile in tiles_of(whole, attribution, style, marks=checks, target=target):
                words = [title if len(results) > 1 else "", tile.name, tile.detail]
                rows.append(row(" · ".join(filter(None, words)), tile.picture, tile))
    return tuple(rows)


def _by_method(
    results: Sequence[Mapping[str, Attribution]],
    titles: Sequence[str],
    tiles: Callable[[int, Iterable[Attribution]], tuple[Tile, ...]],
) -> Iterator[Group]:
    """The groups of a table that has methods in rows, each with a tile for each target in a
    column."""
    for method in results[0]:
        row: list[Tile] = []
        heading = ""
        for index, title in enumerate(titles):
            tile, *further = tiles(index, [results[index][method]])
            heading = " · ".join(filter(None, (tile.name, tile.detail)))
            row += [replace(tile, name=title, detail=""), *further]
        yield Group(heading, tuple(row), own_row=True)


def layer_of(attribution: Attribution) -> str:
    """Return the words for the layer of a map; of several layers, with their fusion ("max of a,
    b")."""
    layer = attribution.layer
    if layer is None or isinstance(layer, str):
        return layer or ""
    names = ", ".join(layer)
    if len(layer) > 2:
        names = f"{len(layer)} layers, {layer[0]} to {layer[-1]}"
    return f"{attribution.fuse or 'mean'} of {names}"


def layer_caption(attribution: Attribution) -> str:
    """The words for the layer of a map as captions have them; empty for a map of the photo's
    pixels.
    """
    prefix = "layer " if isinstance(attribution.layer, str) else ""
    return prefix + layer_of(attribution)


def remark(attribution: Attribution) -> str:
    """The warning below a map: the model was altered, the map is empty, unfinished or says little
    (`cautions`), or its method explains nothing. Empty if there is nothing to say.
    """
    remarks = [str(intervention) for intervention in attribution.interventions]
    if not attribution.values[:1].any():
        remarks.append("zero everywhere")
    elif float(attribution.score[0]) < 0 and method_or_unknown(attribution.method).by_score:
        remarks.append("negative score: signs reversed")
    elif does := innermost_method(attribution.method).control:
        remarks.append(f"null map: {does}")
    else:
        remarks.append(attribution.stopped)  # empty if all runs were made
    return "; ".join(filter(None, [*remarks, *cautions(attribution)]))


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as a NumPy array of float32 on the CPU; records have the digest of float32."""
    values: np.ndarray[Any, Any] = tensor.float().cpu().numpy()
    return values


def _families(
    result: Mapping[str, Attribution], order: Order
) -> list[tuple[str, list[Attribution]]]:
    """Return the maps of one target by the family of their method, in the order of `FAMILIES`; few
    maps, or maps in the given order, are one group without a name."""
    if len(result) < MANY or order == "given":
        return [("", list(result.values()))]
    families: dict[str, list[Attribution]] = {name: [] for name in FAMILIES}
    for attribution in result.values():
        family = innermost_method(attribution.method).family
        families.setdefault(family, []).append(attribution)
    return [(name, members) for name, members in families.items() if members]
