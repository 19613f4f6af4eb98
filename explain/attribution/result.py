"""`Attribution`: what a method says about a batch of images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import adaptive_avg_pool2d

from explain._utils.errors import ArgumentError, ImageError, LayerError, shown
from explain._utils.html import lines_html, picture_html
from explain.data.boxes import Array, Box, connected_parts
from explain.hooks.interventions import Intervention
from explain.layers.placement import (
    Placement,
    PlacementMode,
    draw,
    shared_out,
    transferred,
)
from explain.methods.base import (
    Fusion,
    Method,
    Outcome,
    Style,
    get_method,
    over_all,
    relative_error,
    title_of,
)
from explain.methods.evidence import EvidenceSets
from explain.relevance.gradient_rules import Coverage
from explain.render.sheets import Group, Layout, Tile, contact_sheet
from explain.render.styles import get_style
from explain.targets.tokenizer import words_of

ENLARGED = 180  # pixels along the longer side of a map in a picture
SHOWN = 8  # maps in a picture of a batch


class Channels(NamedTuple):
    """The channels of a layer, the most relevant first: what each counts for, and its number, both
    ``(N, C)``."""

    values: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Outcome):
    """What a method says about a batch of N images; in a notebook it shows its maps.

    ``values`` is the raw attribution, detached unless ``create_graph`` keeps its graph: ``(N, h,
    w)`` at the layer's resolution for CAM methods, ``(N, C, H, W)`` for pixel methods. ``heatmap``
    is its display form. ``score`` ``(N,)`` is what was explained and ``target`` the class of each
    image, or the name of a callable. ``layer`` is the layer's name, a tuple of names where several
    were fused (``maps`` then has each one's values), or None. ``logits`` ``(N, K)`` are the model's
    class scores, if it gave any. ``delta`` ``(N,)`` is by how much the values miss what they should
    add up to, for methods that promise a sum; ``fuse`` is how several layers' maps became one.
    ``input`` names the argument that was explained, where the model takes several; where several
    were explained together, this is the first, and ``parts`` has the attribution of each by its
    name. ``coverage`` says which operations a rule acted on, for methods that have one, and what
    was taken out of relevance on its way. ``channels`` ranks the channels of the layer, for methods
    that know what each one counts for.

    Of methods that estimate, ``error`` has the error of each value, in the same shape: a standard
    error, made larger where runs are few, so that the value ± 1.96 errors can be read as a 95 %
    interval. It is None, or NaN for an image beside others, as long as the runs are too few.
    ``samples`` is how many altered photos each image was run with (the most of any), ``planned``
    ``(N,)`` how many there would be without an early end, ``finished`` ``(N,)`` whether these are
    all that were wanted, or fewer because the error was small enough or the time was over (true) or
    because of an interrupt (false); ``stopped`` says so in words; ``r2`` ``(N,)`` how much of the
    variance of the scores a surrogate explains. ``neutral`` ``(N,)`` is the value of a place that
    makes no difference, where it is not zero (of RISE, the mean score over the masks): pictures
    show the difference from it.

    ``interactions`` ``(N, M, M)`` is what pairs of regions do together by `FaithSHAP`, with what
    each does alone on the diagonal, and ``centres`` ``(N, M, 2)`` where they lie, as parts of the
    sides; an image with fewer regions has zeros.

    ``certified`` ``(N, H, W)`` is what a `Certified` map says of each pixel: 1 in the top share, -1
    not in it, 0 where it abstains; it holds for every change of the input whose L2 norm is below
    ``radius`` ``(N,)``.

    ``sets`` are the smallest sets of regions that `Sufficient` or `Necessary` found: ``sets[0]``
    those of the first image, each with its mask, its size, what the model says of it, and what is
    proved. ``words`` are those of a text that was explained together with the image, with their
    values; ``tokens`` are its tokens, in the part of it.

    ``placement`` says where the cells of a layer's map look, and so are drawn; None where they are
    spread evenly over the input.

    ``interventions`` are those that the model was explained under, with the values that they took
    from inputs.

    Of a video ``(N, C, T, H, W)``, all of these have a dimension for frames before height and
    width. Where its frames come first, ``(N, T, C, H, W)``, values for each channel have that shape
    too, and ``frames_first`` is true. Of a signal ``(N, C, L)`` there is a length in the place of
    height and width.
    """

    method: str
    values: torch.Tensor
    target: torch.Tensor | str
    score: torch.Tensor
    layer: str | tuple[str, ...] | None
    size: tuple[int, ...]
    style: Style = "heat"
    options: Mapping[str, Any] = field(default_factory=dict)
    maps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    fuse: Fusion | None = None
    input: str | None = None
    coverage: Coverage | None = None
    channels: Channels | None = None
    parts: "Mapping[str, Attribution]" = field(default_factory=dict)
    interventions: tuple[Intervention, ...] = ()
    sets: EvidenceSets | None = field(default=None, kw_only=True)
    tokens: tuple[str, ...] = ()
    frames_first: bool = field(default=False, kw_only=True)
    placement: Placement | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: int | slice) -> "Attribution":
        """Return the attribution of one image, or of a slice of images, as a batch. Tensors are
        copies, since runs and pickles keep such parts."""
        chosen = range(len(self))[which]
        images = [chosen] if isinstance(chosen, int) else list(chosen)
        return self.converted(lambda tensor: tensor[images])  # a copy, since it is chosen by a list

    def converted(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> "Attribution":
        """A copy with ``convert`` applied to each tensor that has the images first, also those
        of parts and channels.

        Used to choose images, move tensors to the CPU and change their type. Options are left as
        they are.
        """

        def convert_any(value: Any) -> Any:
            """Convert a field's value: tensors, and whatever holds tensors with a value for each
            image; else the value itself."""
            if isinstance(value, torch.Tensor):
                return convert(value)
            if isinstance(value, (Attribution, Placement)):
                return value.converted(convert)
            if isinstance(value, Channels):
                return Channels(convert(value.values), convert(value.indices))
            if isinstance(value, EvidenceSets):
                return replace(value, **convert_any(vars(value)))
            if isinstance(value, Coverage):
                return replace(value, taken=convert_any(value.taken))
            if isinstance(value, Mapping):
                return {name: convert_any(item) for name, item in value.items()}
            return value

        names = [part.name for part in fields(self) if part.name != "options"]
        return replace(self, **{name: convert_any(getattr(self, name)) for name in names})

    def applied(self, methods: Sequence[Method] = ()) -> Method:
        """The method object that made this map, with its options: one of ``methods``, or a
        registered one by name.

        >>> one = torch.ones(1, 1, 1)
        >>> Attribution(
        ...     "hirescam", one, "score", one[0, 0], None, (1, 1), options={"relu": True}
        ... ).applied()
        HiResCAM(relu=True)
        """
        by_name = {method.name: method for method in methods}
        method = by_name.get(self.method) or get_method(self.method)
        names = {option.name for option in fields(method) if option.init}
        return replace(
            method, **{name: value for name, value in self.options.items() if name in names}
        )

    def of_signals(self) -> "Attribution":
        """The attribution of images of one row as one of signals: without the dimension of rows."""

        def of_signal(values: torch.Tensor) -> torch.Tensor:
            """Maps ``(N, 1, l)`` as ``(N, l)``."""
            if values.shape[-2] != 1:
                raise LayerError(
                    f"layer {self.layer!r} must give a map along the signal, got one of "
                    f"{values.shape[-2]} x {values.shape[-1]}; choose one with outputs (N, C, L)"
                )
            return values.squeeze(-2)

        return replace(
            self,
            values=of_signal(self.values),
            error=None if self.error is None else of_signal(self.error),
            maps={name: of_signal(values) for name, values in self.maps.items()},
            size=self.size[1:],
        )

    @property
    def samples(self) -> int | None:
        """The largest number of altered photos that an image was run with; None for methods that do
        not count."""
        return None if self.spent is None else int(self.spent.max())

    @property
    def stopped(self) -> str:
        """The words that say that an interrupt or the time ended the runs early; empty if all that
        were wanted ran."""
        if self.spent is None or self.planned is None:
            return ""
        if not bool((self.spent < self.planned).any()):
            return ""
        tolerance = self.options.get("tolerance")
        errors = self.relative_error
        is_enough = (
            tolerance is not None and errors is not None and bool((errors <= tolerance).all())
        )
        # with a small enough error, no more runs were wanted, and the time did not end them
        is_timed = self.options.get("max_seconds") is not None and not is_enough
        if not is_timed and (self.finished is None or bool(self.finished.all())):
            return ""
        return f"stopped early after {int(self.spent.max()):,} of {int(self.planned.max()):,}"

    @property
    def placed(self) -> PlacementMode:
        """Whether the cells of a layer's map are drawn where they look, or spread evenly."""
        return "even" if self.layer is not None and self.placement is None else "cells"

    @property
    def relative_error(self) -> torch.Tensor | None:
        """The largest error of each map over its largest magnitude, ``(N,)``: what the option
        ``tolerance`` is compared with."""
        return None if self.error is None else relative_error(self.values, self.error)

    @property
    def words(self) -> list[list[tuple[str, float]]]:
        """The words of the texts that were explained with each image, each with the sum of its
        tokens' values.

        A list for each image, in the order of the texts. Tokens are joined to words by their
        tokenizer's marks.
        """
        words: list[list[tuple[str, float]]] = [[] for _ in range(len(self))]
        for part in (self, *self.parts.values()):
            if part.tokens:
                token_values = part.values.flatten(2).sum(2).tolist()
                for positions in words_of(part.tokens):
                    word = "".join(
                        part.tokens[position].removesuffix("</w>").removeprefix("##")
                        for position in positions
                    )
                    for row, values in zip(words, token_values, strict=True):
                        row.append(
                            (word.strip("▁Ġ"), sum(values[position] for position in positions))
                        )
        return words

    @property
    def shares(self) -> dict[str, torch.Tensor]:
        """The share ``(N,)`` that each explained input has of all magnitudes, by its name; they add
        up to one.

        A part's magnitudes are those of its tokens, or of the 8 x 8 fields of an image
        (Parcalabescu and Frank, "MM-SHAP", ACL 2023).
        """
        sizes = {}
        for name, part in (self.parts or {self.input or "x": self}).items():
            is_image = len(part.size) > 1  # else tokens ``(N, L, D)``
            summed_values = part.values.float().sum(part.channel_dim if is_image else 2)
            if is_image:
                pixels_of_field = part.size[-2] * part.size[-1] / 64
                summed_values = adaptive_avg_pool2d(summed_values, 8) * pixels_of_field
            sizes[name] = summed_values.abs().flatten(1).sum(1)
        total = torch.stack([*sizes.values()]).sum(0)
        return {name: size / torch.where(total > 0, total, 1) for name, size in sizes.items()}

    @cached_property
    def heatmap(self) -> torch.Tensor:
        """The maps as shown: ``(N, H, W)`` float32 in [0, 1] at input resolution, magnitude divided
        by its maximum, never shifted.

        Signed maps of a layer show their positive part. Maps of the input show the largest
        magnitude over the channels, or, where the values are contributions (``style="signed"``),
        the magnitude of their sum: `signed` has the sign.
        """
        return by_maximum(self.on_input())

    def mask(self, threshold: float = 0.5) -> torch.Tensor:
        """Where each heatmap has at least this share of its maximum: ``(N, H, W)``, true or false.
        A map that is zero everywhere has no such place.

        Raises:
            ArgumentError: the share is not above 0 and up to 1.
        """
        is_number = isinstance(threshold, Real) and not isinstance(threshold, bool)
        if not is_number or not 0 < threshold <= 1:
            raise ArgumentError(
                f"threshold must be a share of the maximum above 0 and up to 1, got "
                f"{shown(threshold)}; leave it out for 0.5"
            )
        return self.heatmap.detach() >= threshold

    def boxes(self, threshold: float = 0.5) -> list[list[tuple[int, ...]]]:
        """The boxes of the connected parts of each `mask`: for each image a list of x0 y0 x1 y1 in
        pixels of the input, with exclusive ends, the part with most of the heat first.

        Raises:
            ArgumentError: the share is not above 0 and up to 1.
            ImageError: the maps are those of videos or volumes.

        >>> values = torch.tensor([[[0.0, 1.0, 0.2], [0.0, 0.9, 0.0]]])
        >>> Attribution("gradcam", values, "score", values[:, 0, 0], None, (2, 3)).boxes()
        [[(1, 0, 2, 2)]]
        """
        return [[box for box, _ in parts] for parts in self.connected_parts(threshold)]

    def connected_parts(self, threshold: float = 0.5) -> list[list[tuple[tuple[int, ...], Array]]]:
        """The box and the mask ``(H, W)`` of each of `boxes`, in its order."""
        masks = self.mask(threshold).cpu().numpy()
        if masks.ndim != 3:
            raise ImageError(
                f"boxes must be those of images, got maps {tuple(masks.shape)}; take mask() of "
                "videos and volumes"
            )
        heat = self.heatmap.detach().cpu().numpy()
        parts = []
        for mask, heatmap in zip(masks, heat, strict=True):
            numbers, boxes = connected_parts(mask)
            sums = np.bincount(numbers.ravel(), heatmap.ravel())[1:]  # 0 is outside all parts
            order = np.argsort(-sums, kind="stable")
            parts.append([(tuple(boxes[part].tolist()), numbers == part + 1) for part in order])
        return parts

    @cached_property
    def signed(self) -> torch.Tensor:
        """The maps with their signs: ``(N, H, W)`` float32 in [-1, 1] at input resolution, divided
        by the largest magnitude.

        Values of pixels are summed over channels. They are counted from `neutral` on, where a place
        that makes no difference has another value than zero.
        """
        return by_maximum(self.on_input(with_sign=True))

    def on_input(self, *, with_sign: bool = False) -> torch.Tensor:
        """The `heatmap`, or `signed`, in the units of the values: ``(N, H, W)`` float32."""
        self._must_have_places()
        if not self._in_pixels:
            cells = self.contributions if with_sign else self.cells
            return self._drawn(cells.float())
        if not with_sign and self.style != "signed":
            return self.values.float().abs().amax(self.channel_dim)
        summed = self.contributions.float().sum(self.channel_dim)
        return summed if with_sign else summed.abs()

    def _drawn(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps ``(N, h, w)``, or ``(N, l)`` of signals, at the resolution of the input."""
        if len(self.size) == 1:
            return draw(maps[:, None, None], (1, *self.size), self.placement)[:, 0, 0]
        return draw(maps[:, None], self.size, self.placement)[:, 0]

    @property
    def contributions(self) -> torch.Tensor:
        """The values as differences from `neutral`, in their own shape: what places do for the
        score, and against it.
        """
        if self.neutral is None:
            return self.values
        return self.values - over_all(self.neutral, self.values).to(self.values)

    @property
    def certified(self) -> torch.Tensor | None:
        """The answers of a `Certified` map, ``(N, H, W)`` int8: 1 in the top share, -1 not in it, 0
        abstains; None for others."""
        return None if self.radius is None else self.values.to(torch.int8)

    @property
    def cells(self) -> torch.Tensor:
        """What the heatmap shows of a map ``(N, h, w)``, at the map's own resolution and in its
        units.

        Positive parts, or magnitudes for signed maps of the input. In the same cells as the values,
        for outlines that round them.
        """
        of_input = self.layer is None and self.style == "signed"
        return self.contributions.abs() if of_input else self.contributions.clamp(min=0)

    def __repr__(self) -> str:
        """One line: the method, the number of images, the shape of the values, the layer and the
        target.
        """
        images = f"{len(self)} image{'s' * (len(self) != 1)}"
        layer = "" if self.layer is None else f", layer {self.layer!r}"
        target = self.target
        if not isinstance(target, str):
            first_classes = ", ".join(str(index) for index in target.tolist()[:6])
            target = f"{first_classes}, ..." if len(target) > 6 else first_classes
        text = (
            f"Attribution({self.method!r}, {images}, values {tuple(self.values.shape)}{layer}, "
            f"target {target}"
        )
        if self.interventions:
            text += f", under {'; '.join(map(str, self.interventions))}"
        return f"{text})"

    def layout(self) -> Layout:
        """Return the maps of the first few images, or frames, as the tiles of a sheet, with the
        title and their scores.

        What a notebook shows.
        """
        in_own_style = self.style in ("signed", "color") and len(self.size) == 2
        style = get_style(self.style if in_own_style else "intensity")
        # `signed`, `values` or `heatmap`; each frame of a video is a map
        maps = getattr(self, style.reads).detach().float().flatten(0, len(self.size) - 2)
        times = max(1, round(ENLARGED / max(maps.shape[-2:])))
        blank = Image.new("RGB", (maps.shape[-1] * times, maps.shape[-2] * times), "white")
        box = Box.whole(blank.size)
        frames = len(maps) // len(self)
        names = [
            f"{name}, {number} of {frames}" if frames > 1 else name
            for name in self._names()
            for number in range(1, frames + 1)
        ]
        legend = style.legend(blank)
        tiles = []
        for values, name in zip(maps[:SHOWN], names, strict=False):
            tiles.append(Tile(style.draw(blank, values.cpu().numpy(), box), name, legend=legend))
        title = title_of(self.method)
        if self.layer is not None:
            layers = [self.layer] if isinstance(self.layer, str) else self.layer
            title += f", layer {', '.join(layers)}"
        detail = f"values {tuple(self.values.shape)}"
        if len(tiles) < len(names):
            detail += f", the first {len(tiles)} of {len(names)} maps"
        return Layout(title, detail, (Group("", tuple(tiles)),))

    def _names(self) -> list[str]:
        """The caption of each image's map: its target and its score."""
        if isinstance(self.target, str):
            targets = [self.target] * len(self)
        else:
            targets = [f"class {index}" for index in self.target.tolist()]
        scores = self.score.tolist()
        return [f"{name}, score {score:.3g}" for name, score in zip(targets, scores, strict=True)]

    def _repr_html_(self) -> str:
        """The maps as a picture for notebooks; one line of text if the input is no image."""
        if len(self.size) < 2 or not len(self):
            return lines_html([repr(self)])
        return picture_html(
            contact_sheet(self.layout(), 180),
            f"{self.method}: maps for {'; '.join(self._names()[:SHOWN])}",
        )

    def _must_have_places(self) -> None:
        """Refuse a heatmap of an input that is no image, such as a text."""
        if not self.size:
            shape = tuple(self.values.shape)
            raise ImageError(
                f"input {self.input} must be an image for a heatmap, got shape {shape}; use values"
            )

    @property
    def channel_dim(self) -> int:
        """The dimension of the channels, in values that have one for each channel."""
        return 2 if self.frames_first else 1

    @property
    def _in_pixels(self) -> bool:
        """Whether the values have a dimension of channels, ``(N, C, H, W)``, as those of pixel
        methods do."""
        return self.values.ndim == len(self.size) + 2


def by_maximum(maps: torch.Tensor) -> torch.Tensor:
    """Divide each map of a batch by its largest magnitude; an all-zero map stays zero. The form in
    which all maps are shown and fused: magnitudes are kept in proportion, never shifted.
    """
    peak = maps.abs().flatten(1).amax(1)
    return maps / over_all(torch.where(peak > 0, peak, 1), maps)


def fused(
    maps: Sequence[torch.Tensor],
    how: Fusion = "mean",
    placements: Sequence[Placement | None] = (),
) -> torch.Tensor:
    """Fuse maps ``(N, h, w)`` of layers at the finest resolution, each divided by its largest
    magnitude but for "sum". "stages" is the product of the sums within each resolution."""
    placements = placements or [None] * len(maps)
    if how == "stages":
        by_size: dict[torch.Size, list[int]] = {}
        for number, layer_map in enumerate(maps):
            by_size.setdefault(layer_map.shape, []).append(number)
        maps = [
            fused(
                [maps[i] for i in numbers], how="sum", placements=[placements[i] for i in numbers]
            )
            for numbers in by_size.values()
        ]
        # maps of one resolution were brought to the cells of their first
        placements = [placements[numbers[0]] for numbers in by_size.values()]
    finest = finest_of(maps)
    size = tuple(maps[finest].shape[1:])

    # where the cells of each map look, and of the finest, which has ``size`` of them
    pairs = [(placement, placements[finest], size) for placement in placements]
    if how == "sum":  # a coarse cell is shared out among the fine ones
        total = maps[0].new_zeros((len(maps[0]), *size))
        for values, pair in zip(maps, pairs, strict=True):
            total = total + shared_out(values[:, None], *pair)[:, 0]
        return total
    at_finest = [
        transferred(by_maximum(values)[:, None], *pair)[:, 0]
        for values, pair in zip(maps, pairs, strict=True)
    ]
    stacked = torch.stack(at_finest)
    if how == "mean":
        return stacked.mean(0)
    if how == "max":
        return stacked.amax(0)
    return stacked.clamp(min=0).prod(0)  # a product of two negative values is no evidence


def finest_of(maps: Sequence[torch.Tensor]) -> int:
    """The number of the map ``(N, h, w)`` with the most cells, the first of these."""
    return max(range(len(maps)), key=lambda number: maps[number][0].numel())


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU that shares memory with no other tensor, for pickles, which
    would hold all of it."""
    return tensor.detach().cpu().clone()


def set_figures(attribution: Attribution, image: int) -> dict[str, float | None]:
    """The share of the photo, and the scores alone and without, of an image's first set of regions,
    by names of columns; empty for maps that are no sets of regions.
    """
    if attribution.sets is None:
        return {}
    sets = attribution.sets[image]
    return {
        f"set_{name}": getattr(sets[0], name) if sets else None
        for name in ("size", "alone", "without")
    }
