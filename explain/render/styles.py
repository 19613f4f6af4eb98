"""Styles: how a map is drawn on a photo, as plain values.

Four of them draw a heatmap in [0, 1] of any method:

    Heat        colour over the photo in grey: the colours come from the map alone
    Contour     lines around the places that hold 50, 75 and 90 % of the evidence
    Mask        those places cut out, on pale paper
    Spotlight   the photo in colour where the map is high, dark and grey elsewhere

Three are the own styles of methods that give a value for each pixel: Intensity, Signed and Color.
RegionSets draws sets of regions, CertifiedPlaces the answers of certified maps. To add one, write a
subclass of `Style` and enter it in `STYLES`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle, pairwise
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image, ImageChops, ImageDraw

from explain._utils.errors import ExplainError, ImageError, did_you_mean, option_name, shown
from explain._utils.options import CheckedFields
from explain._utils.resources import packaged_text
from explain.data.boxes import Box
from explain.render.captions import COLORS, INK, PAPER, RGB, Legend

HEAT = "plasma"  # perceptually uniform, readable with colour-vision deficiencies, and nowhere grey
INTENSITY = "inferno"  # likewise, from black
SIGNED = "RdBu_r"  # blue against, white nothing, red for
PRINT = "print"  # dark blue against, grey nothing, light yellow for: apart in grey print as well
PRINT_ONE_SIDED = "print-one-sided"  # what `PRINT` is for magnitudes: from dark to light


def lookup_table(name: str) -> np.ndarray[Any, Any]:
    """Return the 256 colours of a colour map of this package or of matplotlib, ``(256, 3)``
    uint8."""
    if name in default_colormaps():
        return np.frombuffer(bytes.fromhex(default_colormaps()[name]), np.uint8).reshape(256, 3)
    from matplotlib import colormaps

    if name not in colormaps:
        raise ExplainError(f"colormap {name!r} is unknown; {did_you_mean(name, list(colormaps))}")
    return colormaps[name](np.arange(256) / 255, bytes=True)[:, :3]


def one_sided(name: str) -> np.ndarray[Any, Any]:
    """Return the 256 colours of a colour map for values from 0 to 1, ``(256, 3)`` uint8."""
    return lookup_table(PRINT_ONE_SIDED if name == PRINT else name)


@cache
def default_colormaps() -> dict[str, str]:
    """Return the colours of each default colour map as hexadecimal digits; examples/color_tables.py
    makes the file."""
    return json.loads(packaged_text("explain.render", "colormaps.json"))


Array = np.ndarray[Any, Any]


def resampled_on_photo(
    values: Array, size: tuple[int, int], region: Box, outside: int = 0
) -> Array:
    """A map in [0, 1] on the pixels of a photo of ``size`` (width, height), as uint8 ``(height,
    width)``: it covers ``region``, and ``outside`` fills the rest.
    """
    placed = np.full(size[::-1], outside, np.uint8)
    resampled, where = _resampled(values, size, region)
    # in place: on a large photo, copies would take gigabytes
    np.rint(np.multiply(resampled, 255, out=resampled), out=resampled)
    placed[where] = np.clip(resampled, 0, 255, out=resampled)
    return placed


def mask_above(values: Array, threshold: float, size: tuple[int, int], region: Box) -> Array:
    """Return where on a photo of ``size`` (width, height) a map is at least ``threshold``: bool
    ``(height, width)``, False outside ``region``, the part of the photo that the map covers."""
    placed = np.zeros(size[::-1], bool)
    resampled, where = _resampled(values, size, region)
    placed[where] = resampled >= threshold
    return placed


def cells_on_photo(mask: Array, size: tuple[int, int], region: Box) -> Array:
    """A mask ``(h, w)`` on the pixels of a photo of ``size`` (width, height), bool ``(height,
    width)``: by the cell under the centre of each; False outside ``region``, which it covers."""
    centres = (np.arange(size[0]) + 0.5, np.arange(size[1]) + 0.5)
    columns, rows = region.to_input(centres, mask.shape)
    # a rim of False, to which all is clipped that lies outside: indices are one larger
    padded = np.pad(mask > 0, 1)
    across = np.floor(columns + 1).clip(0, mask.shape[1] + 1).astype(int)
    down = np.floor(rows + 1).clip(0, mask.shape[0] + 1).astype(int)
    on_photo: Array = padded[down[:, None], across]
    return on_photo


def part_on_photo(values: Array, size: tuple[int, int], region: Box) -> Array:
    """The cells of a map over ``region`` (in pixels) that lie on a photo of ``size`` (width,
    height): evidence in padding must not count in `thresholds`.
    """
    height, width = values.shape
    on_map = Box(*region.to_input((0, 0, *size), values.shape))
    left, top, right, bottom = edges(on_map, (width, height))
    return values[top:bottom, left:right]


def edges(region: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a region in whole pixels (the last two exclusive), cut at a
    photo's ``size`` (width, height); at least one pixel wide and high.
    """
    left = min(max(0, round(region.left)), size[0] - 1)
    top = min(max(0, round(region.top)), size[1] - 1)
    right = max(left + 1, min(size[0], round(region.right)))
    bottom = max(top + 1, min(size[1], round(region.bottom)))
    return left, top, right, bottom


def _resampled(
    values: Array, size: tuple[int, int], region: Box
) -> tuple[Array, tuple[slice, slice]]:
    """A map ``(h, w)`` scaled to ``region`` in pixels: the float32 values on a photo of ``size``
    (width, height), and its rows and columns. `MemoryError` if OpenCV gets no memory.
    """
    import cv2

    left = round(region.left)
    top = round(region.top)
    width = max(1, round(region.right) - left)
    height = max(1, round(region.bottom) - top)
    interpolation = cv2.INTER_LINEAR if width >= values.shape[1] else cv2.INTER_AREA
    try:
        covered: Array = cv2.resize(
            values.astype(np.float32), (width, height), interpolation=interpolation
        )
    except cv2.error as error:
        if error.code != cv2.Error.StsNoMem:
            raise
        raise MemoryError(error.err) from None
    # the region may reach beyond the photo
    on_photo_part = covered[max(0, -top) : size[1] - top, max(0, -left) : size[0] - left]
    y = max(0, top)
    x = max(0, left)
    rows, columns = on_photo_part.shape
    return on_photo_part, (slice(y, y + rows), slice(x, x + columns))


PALE = (203, 205, 210)
HATCH = (128, 131, 138)
CONTRAST = 0.35  # how much of the photo's contrast is left where it is pale


def mark_unseen(picture: Image.Image, photo: Image.Image, seen: Sequence[Box]) -> Image.Image:
    """The ``picture`` with what the model did not see pale and hatched, and a line around what it
    has ``seen``; itself where the model saw everything."""
    parts = [edges(part, photo.size) for part in seen]
    seen_mask = Image.new("L", photo.size, 0)
    draw = ImageDraw.Draw(seen_mask)
    for left, top, right, bottom in parts:
        draw.rectangle((left, top, right - 1, bottom - 1), fill=255)
    if seen_mask.getextrema() == (255, 255):
        return picture
    # by the smallest part, which a thick line would fill
    extent = min(min(right - left, bottom - top) for left, top, right, bottom in parts)
    line = max(1, round(min(extent, max(photo.size) / 4) / 125))
    ground = Image.blend(Image.new("RGB", photo.size, PALE), grey(photo), CONTRAST)
    ground.paste(HATCH, mask=_stripes(photo.size))
    marked = Image.composite(picture, ground, seen_mask)
    marked.paste((255, 255, 255), mask=_rim(seen_mask, line))
    return marked


def _stripes(size: tuple[int, int]) -> Image.Image:
    """A mask of ``size`` (width, height) with diagonal lines, about forty along the longer side.
    Lines are 120 of 255, so that the ground shows through.
    """
    period = max(6, round(max(size) / 40))
    # distance from the middle of a line, in pixels along a row
    distance = np.abs(np.arange(sum(size) - 1) % period - period / 2)
    row = (120 * np.clip(period / 10 + 0.5 - distance, 0, 1)).astype(np.uint8)
    # each row is the one above it, moved by one pixel
    return Image.fromarray(np.ascontiguousarray(sliding_window_view(row, size[0])))


def _rim(seen_mask: Image.Image, line: int) -> Image.Image:
    """A mask of the border between seen and unseen: the outermost ``line`` pixels of ``seen_mask``
    (255 where the model saw the photo, else 0), without the photo's own edge.
    """
    import cv2

    seen: Array = np.asarray(seen_mask)
    core = cv2.erode(seen, np.ones((2 * line + 1, 2 * line + 1), np.uint8), borderValue=255)
    return Image.fromarray(np.ascontiguousarray(seen - core))


def as_floats(name: str, values: Any, remedy: str) -> Array:
    """The argument ``name``, a tensor or an array, as an array of float32."""
    tensor = values.detach().float().cpu() if hasattr(values, "detach") else values
    try:
        return np.asarray(tensor, dtype=np.float32)
    except (TypeError, ValueError):
        got = type(values).__name__
        raise ImageError(f"{name} must be a tensor or an array, got {got}; {remedy}") from None


FINE = 100  # cells along the longer side of a map, from which on its areas look round
AREAS = 0.03  # of the longer side: how far maps of single pixels are summed for their areas
ROUNDED = 0.45  # of a cell: how far an enlarged map is smoothed


def thresholds(values: Array, shares: Sequence[float]) -> list[float]:
    """For each share, the largest threshold whose values add up to it, of values that are not
    negative; infinite for a map of zeros, so that no area is drawn."""
    falling = np.sort(values, axis=None)[::-1].astype(np.float64)
    sums = np.cumsum(falling)
    total = sums[-1]
    if not total > 0:
        return [np.inf] * len(shares)
    # a little less, since a sum that rounding makes too small must not take in one value more
    reached = np.searchsorted(sums, np.asarray(shares) * total * (1 - 1e-12))
    return [float(falling[place]) for place in np.minimum(reached, len(falling) - 1)]


def fine(values: Array) -> Array:
    """Return a coarse map enlarged to at least `FINE` cells along its longer side and smoothed, so
    that the outlines of its areas are round; a map as fine already is left as it is."""
    import cv2

    if max(values.shape) >= FINE:
        return values
    large = _enlarged(values, FINE)
    times = len(large) // len(values)
    return cv2.GaussianBlur(large, (0, 0), ROUNDED * times, borderType=cv2.BORDER_REPLICATE)


def _enlarged(values: Array, cells: int) -> Array:
    """Return a map ``(h, w)`` enlarged by a whole number, by linear interpolation, so that its
    longer side has at least ``cells`` cells."""
    import cv2

    times = -(-cells // max(values.shape))
    return cv2.resize(values.astype(np.float32), None, fx=times, fy=times)


def smoothed(values: Array, spread: float) -> Array:
    """A map ``(H, W)`` under a Gaussian of ``spread`` (a share of the longer side; nothing below a
    third of a cell)."""
    import cv2

    width = spread * max(values.shape)
    single: Array = values.astype(np.float32)
    if width <= 0.3:
        return single
    return cv2.GaussianBlur(single, (0, 0), width, borderType=cv2.BORDER_REFLECT)


Reading: TypeAlias = Literal["heatmap", "signed", "values", "sets", "answers"]
"""What a style draws: ``(H, W)`` in [0, 1], ``(H, W)`` in [-1, 1], ``(C, H, W)``, masks of R sets
``(R, H, W)``, or answers ``(H, W)`` of -1, 0 and 1."""

SHARES = (0.5, 0.75, 0.9)
STEPS = 65  # colours in the legend of a ramp; that of zero is in the middle


def grey(photo: Image.Image) -> Image.Image:
    """Return a photo in shades of grey, as an RGB picture of the same size."""
    return photo.convert("L").convert("RGB")


FAINT_COLOR = 8  # of 255: a difference of channels that the compression of a grey photo leaves


def has_colors(photo: Image.Image) -> bool:
    """Whether an RGB photo has colours: a scan or a photo in grey has none."""
    red, green, blue = photo.split()
    apart = ImageChops.lighter(
        ImageChops.difference(red, green), ImageChops.difference(green, blue)
    )
    return apart.getextrema()[1] > FAINT_COLOR  # type: ignore[operator]


VALUES = np.arange(256) / 255
"""The values in [0, 1] that a map has where it is placed on a photo."""


def curve(levels: Array) -> Array:
    """Return levels in [0, 1], one for each of the 256 `VALUES`, as a lookup table of uint8, which
    is indexed by a map of uint8."""
    return (255 * levels).round().astype(np.uint8)


def rising(levels: Array, start: float = 0.1) -> Array:
    """Return the opacity of levels in [0, 1]: none up to ``start``, so that weak values leave the
    photo as it is; then it rises quickly and levels off."""
    above = np.clip((levels - start) / (1 - start), 0, 1)
    return 1 - (1 - above) ** 3


@dataclass(frozen=True)
class Ground:
    """How the photo below a map is drawn: in grey, and blended with one level, so that colours
    above it are about as light over black as over white."""

    grey: int
    """The level, 0 to 255."""
    visible: float
    """The share of the photo's contrast that is left."""

    @classmethod
    def of_zero(cls, color: Array, visible: float = 0.35) -> "Ground":
        """Return the ground for a colour map whose colour for zero is ``color``, ``(3,)`` uint8: as
        light as that colour, so that a value of zero changes nothing."""
        return cls(round(float(color.mean())), visible)

    def below(self, photo: Image.Image) -> Image.Image:
        """Return an RGB photo as it is drawn below the colours of a map: grey and faded."""
        levels = [round(self.grey + (level - self.grey) * self.visible) for level in range(256)]
        return grey(photo).point(levels * 3)


LIFTED = Ground(185, 0.5)
"""Below colours that become lighter: between dark grey and light grey."""


class Style(CheckedFields):
    """How a map is drawn on a photo: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    reads: ClassVar[Reading] = "heatmap"
    spread: float = 0.0
    """Maps of single pixels are summed over a Gaussian as wide as this share of the longer side
    before they are drawn; 0 draws each pixel as it is."""
    ends: ClassVar[tuple[str, str]] = ("0", "max")
    shows: ClassVar[str] = "evidence"
    error: ClassVar[type[ExplainError]] = ExplainError
    minimums: ClassVar[Mapping[str, float]] = dict.fromkeys(
        ("alpha", "contrast", "dark", "share", "spread"), 0
    )
    maximums: ClassVar[Mapping[str, float]] = {
        **dict.fromkeys(("alpha", "contrast", "share"), 1),
        "dark": 0.99,
        "spread": 0.5,
    }

    def __post_init__(self) -> None:
        """Check the options of a style when it is made: their types and limits (by
        `CheckedFields`), that the colour map exists, and that the shares of evidence rise."""
        super().__post_init__()
        if "colormap" in vars(self):
            lookup_table(vars(self)["colormap"])
        shares = vars(self).get("shares", (1.0,))  # right, where a style has none
        if not shares or not all(a < b for a, b in pairwise((0, *shares))) or shares[-1] > 1:
            raise ExplainError(
                f"shares of {self.name} must rise within 0 to 1, got {shown(shares)}; use (0.5, "
                "0.9)"
            )

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo with a map drawn on it; ``photo`` itself is not changed.

        ``values`` are as the style's `reads` says; ``region`` is the part of the photo that they
        cover, in its pixels.
        """
        raise NotImplementedError

    def over(self, photo: Image.Image) -> "Style":
        """Return the style as it is drawn over this photo."""
        return self

    def legend(self, photo: Image.Image) -> Legend | None:
        """Return the colours that the style gives on a photo as bright as this one, and what they
        mean; None for a style whose colours need no words.

        The colours are drawn by `draw` on the photo's mean colour: so they are those that are seen
        in the picture, where the photo shines through.
        """
        ramp = np.linspace(-1 if self.reads == "signed" else 0, 1, STEPS)[None]
        flat = Image.new("RGB", (STEPS, 1), _mean(photo))
        picture = self.draw(flat, ramp, Box(0, 0, STEPS, 1))
        return Legend(_rgb(np.asarray(picture)[0]), self.ends, self.shows)


StyleLike: TypeAlias = str | Style


@dataclass(frozen=True)
class Colored(Style):
    """A style that gives each value a colour and an opacity over the photo in grey; the only one
    from which pictures, legends, pages and the app take colours of values."""

    colormap: str = HEAT
    contrast: float | None = field(default=None, kw_only=True)
    """The share of the photo's own contrast that is left below the colours; by default half or
    less, and all of it where the photo has no colours, as a scan."""
    share: float | None = field(default=None, kw_only=True, repr=False)
    """The largest value of a map is drawn as this share of the scale, 1 by default: below if the
    map is compared with a larger one, or is mostly noise."""

    power: ClassVar[float] = 1.0
    """The level of a value is its magnitude to this power, with its sign."""
    clipped: ClassVar[bool] = False  # at the 99.5th percentile, so that the rest shows

    def table(self) -> Array:
        """Return the colours of 256 levels, ``(256, 3)`` uint8."""
        return one_sided(self.colormap)

    @property
    def ground(self) -> Ground:
        """How the photo below the colours is drawn: for `PRINT`, faded to the colour of zero."""
        usual = Ground.of_zero(self.table()[0], 0.25) if self.colormap == PRINT else LIFTED
        return usual if self.contrast is None else replace(usual, visible=self.contrast)

    def over(self, photo: Image.Image) -> "Colored":
        # in grey print, light parts of a scan would be taken for heat
        if self.contrast is not None or self.colormap == PRINT or has_colors(photo):
            return self
        return replace(self, contrast=1.0)

    def prepared(self, values: Array) -> Array:
        """Return the values of a map as their colours are chosen, in the same units."""
        return values

    def largest(self, values: Array) -> float:
        """Return the magnitude of a map that gets the last colour; 0 for a map of zeros."""
        magnitudes = np.abs(self.prepared(values))
        peak = float(magnitudes.max())
        if not peak:  # zeros, of which `_bright` would say 1
            return 0.0
        return _bright(magnitudes) if self.clipped else peak

    def levels(self, values: Array) -> Array:
        """Return the place of each value of a map on the colour scale, in [0, 1]; for signed values
        zero is at 0.5."""
        prepared = self.prepared(values)
        share = 1.0 if self.share is None else self.share
        scaled = share * (_stretched(prepared) if self.clipped else prepared)
        levels: Array = np.sign(scaled) * np.abs(scaled) ** self.power
        return levels / 2 + 0.5 if self.reads == "signed" else levels

    def opacity(self) -> Array:
        """Return the opacity over the photo of each of 256 levels on the colour scale, in [0, 1]:
        weak values leave the photo as it is."""
        return rising(VALUES)

    def rgba(self) -> Array:
        """Return red, green, blue and opacity of 256 levels, ``(256, 4)`` uint8."""
        return np.column_stack([self.table(), curve(self.opacity())])

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo with a map as colours over it: each value gets a colour and an
        opacity from the 256 levels of `rgba`. Outside ``region``, the part of the photo that the
        map covers, the value is zero."""
        zero_level = 128 if self.reads == "signed" else 0
        placed = resampled_on_photo(self.levels(values), photo.size, region, outside=zero_level)
        table = self.rgba()
        colors = Image.fromarray(table[:, :3][placed])
        opacity = Image.fromarray(table[:, 3][placed])
        return Image.composite(colors, self.ground.below(photo), opacity)


@dataclass(frozen=True)
class Heat(Colored):
    """Colour over the photo in grey: the more evidence, the brighter the colour and the less of the
    photo.

    Since the photo is grey, no colour of its own can be taken for heat, and the legend's colours
    are those seen.
    """

    colormap: str = HEAT
    alpha: float = 0.75
    spread: float = AREAS

    name: ClassVar[str] = "heat"

    def opacity(self) -> Array:
        """Return the opacity of heat over the photo for each of 256 levels, at most ``alpha``."""
        return self.alpha * super().opacity()


@dataclass(frozen=True)
class Contour(Style):
    """Lines around the smallest places that hold these shares of the evidence, the brightest around
    the first."""

    shares: tuple[float, ...] = SHARES
    colormap: str = HEAT
    spread: float = AREAS

    name: ClassVar[str] = "contour"

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo with a line around each of the smallest areas that hold these shares
        of the evidence in a map ``(H, W)``."""
        areas = _areas(values, self.shares, photo.size, region)
        lines = [Outline(area, color) for area, color in zip(areas, self._colors, strict=True)]
        return _outlined(photo, lines)

    def legend(self, photo: Image.Image) -> Legend:
        """Return the colour of each contour line with the share of the evidence inside; the lines
        are opaque, so that the photo does not matter."""
        return Legend(self._colors, percents(self.shares), "evidence inside", ramp=False)

    def signed(self) -> "SignedContour":
        """Return the contour style for signed maps (contributions for and against a target).

        It takes over the options that differ from their defaults: its own defaults are others.
        """
        options = vars(self).items()
        chosen = {name: value for name, value in options if value != getattr(type(self), name)}
        return SignedContour(**chosen)

    @property
    def _colors(self) -> tuple[RGB, ...]:
        """The colour of the line of each share of the evidence, the brightest for the first."""
        places = _spread_over(0.97, 0.45, len(self.shares))
        return _rgb(one_sided(self.colormap)[(255 * places).astype(int)])


@dataclass(frozen=True)
class SignedContour(Contour):
    """Lines around the areas that support the target in one colour and, dashed, around those that
    oppose it in another; both together hold each share of the sum of all magnitudes."""

    shares: tuple[float, ...] = SHARES[:1]
    """One: signs change so often from pixel to pixel that more lines are confusing."""
    colormap: str = SIGNED
    spread: float = 0.05

    reads: ClassVar[Reading] = "signed"

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo with lines around the areas of a signed map ``(H, W)``, by turns for
        the target and, dashed, against it: the order of `_areas` and of `_colors`."""
        lines = []
        areas = _areas(values, self.shares, photo.size, region, sides=(1, -1))
        for number, (area, color) in enumerate(zip(areas, self._colors, strict=True)):
            rim = INK if np.mean(color) > 128 else PAPER  # dark around light lines
            lines.append(Outline(area, color, rim, dashed=number % 2 == 1))
        return _outlined(photo, lines)

    def legend(self, photo: Image.Image) -> Legend:
        """Return the colours of the lines against and for the target; of several shares, those of
        the first, which are the strongest."""
        against_and_for = (self._colors[1], self._colors[0])
        description = f"lines hold {', '.join(percents(self.shares))}"
        return Legend(against_and_for, ("against, dashed", "for"), description, ramp=False)

    @property
    def _colors(self) -> tuple[RGB, ...]:
        """The colours of the lines, two for each share of the magnitudes: for and then against the
        target. The lines of the first share are the strongest in colour."""
        places = _spread_over(0.4, 0.25, len(self.shares))
        ends = 0.5 + places[:, None] * (1, -1)
        return _rgb(lookup_table(self.colormap)[(255 * ends).astype(int).ravel()])


@dataclass(frozen=True)
class Mask(Style):
    """The photo where the evidence lies, in steps that hold these shares of it, and nothing of the
    rest."""

    shares: tuple[float, ...] = SHARES
    spread: float = AREAS

    name: ClassVar[str] = "mask"
    cover: ClassVar[RGB] = (228, 230, 235)

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo that is covered where the evidence of a map ``(H, W)`` does not lie.

        The areas of larger shares contain those of smaller ones. So the largest is filled first,
        and each smaller one then overwrites its part with a higher visibility.
        """
        opacity = np.zeros(photo.size[::-1], np.uint8)
        areas = _areas(values, self.shares, photo.size, region)
        for visible, within in zip(self._visible[::-1], areas[::-1], strict=True):
            opacity[within] = round(255 * visible)
        cover = Image.new("RGB", photo.size, self.cover)
        return Image.composite(photo, cover, Image.fromarray(opacity))

    def legend(self, photo: Image.Image) -> Legend:
        """Return the tone of the photo's mean colour in the area of each share of the evidence,
        under as much cover as there."""
        cover = np.array(self.cover)
        tones = cover + (np.array(_mean(photo)) - cover) * np.array(self._visible)[:, None]
        return Legend(_rgb(np.round(tones)), percents(self.shares), "evidence shown", ramp=False)

    @property
    def _visible(self) -> list[float]:
        """How much of the photo is visible in the area of each share, 0 to 1: falling, and 1 in the
        innermost."""
        return [1 - i / (len(self.shares) + 0.5) for i in range(len(self.shares))]


@dataclass(frozen=True)
class Spotlight(Style):
    """The photo lit by the map: in colour where it is high, dark and grey where it is zero."""

    dark: float = 0.15
    spread: float = AREAS

    name: ClassVar[str] = "spotlight"

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo in its colours where a map ``(H, W)`` in [0, 1] is high, and dark and
        grey where it is zero, and outside ``region``, which the map covers."""
        darkened = [round(self.dark * level) for level in range(256)]
        unlit = grey(photo).point(darkened * 3)
        light = curve(1 - (1 - VALUES) ** 2)
        placed = resampled_on_photo(values, photo.size, region)
        return Image.composite(photo, unlit, Image.fromarray(light[placed]))


@dataclass(frozen=True)
class Intensity(Colored):
    """Magnitudes as brightness, without the photo."""

    colormap: str = INTENSITY

    name: ClassVar[str] = "intensity"
    shows: ClassVar[str] = "magnitude"
    clipped: ClassVar[bool] = True

    def opacity(self) -> Array:
        """Return the opacity of 256 levels: 1 for all, so that nothing of the photo is seen."""
        return np.ones_like(VALUES)


@dataclass(frozen=True)
class Signed(Colored):
    """Values in [-1, 1] over the photo faded to the colour of zero: one colour for what supports
    the target, one for what opposes it."""

    colormap: str = SIGNED
    spread: float = 0.012
    """Values are summed with their signs over a Gaussian of this share of the longer side. Few
    pixels hold most of the sum of such a map, and would not be seen in a small picture."""

    name: ClassVar[str] = "signed"
    reads: ClassVar[Reading] = "signed"
    ends: ClassVar[tuple[str, str]] = ("against", "for")
    shows: ClassVar[str] = "contribution"
    power: ClassVar[float] = 0.5
    """Colours and opacity follow the square root, for the same reason."""
    clipped: ClassVar[bool] = True

    def table(self) -> Array:
        """Return the colours of 256 levels for signed values, ``(256, 3)`` uint8: level 128 is
        zero."""
        return lookup_table(self.colormap)

    @property
    def ground(self) -> Ground:
        """How the photo below the colours is drawn: faded to the colour of zero, level 128."""
        usual = Ground.of_zero(self.table()[128])
        return usual if self.contrast is None else replace(usual, visible=self.contrast)

    def prepared(self, values: Array) -> Array:
        """Return a signed map summed over its neighbourhoods. A coarse map is enlarged before, so
        that the result may have more cells."""
        if max(values.shape) < FINE:  # so that the curve bends between the cells as well
            values = _enlarged(values, 4 * FINE)
        return smoothed(values, self.spread)

    def opacity(self) -> Array:
        """Return the opacity of 256 levels of signed values: none around the middle, which is
        zero, and rising towards both ends."""
        return rising(np.abs(2 * VALUES - 1), 0.17)


@dataclass(frozen=True)
class Color(Style):
    """Values ``(C, H, W)`` as a colour picture in which grey is zero."""

    name: ClassVar[str] = "color"
    reads: ClassVar[Reading] = "values"

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return a map ``(C, H, W)`` as a picture of the photo's size: three channels as red, green
        and blue, else the grey of their mean. Zero, and all outside ``region``, is middle grey."""
        if values.shape[0] != 3:
            values = np.broadcast_to(values.mean(0, keepdims=True), (3, *values.shape[1:]))
        scaled = _stretched(values) / 2 + 0.5
        channels = [
            resampled_on_photo(channel, photo.size, region, outside=128) for channel in scaled
        ]
        return Image.fromarray(np.stack(channels, -1))

    def legend(self, photo: Image.Image) -> Legend:
        """Return the greys that stand for negative values, zero and positive values."""
        greys = ((0, 0, 0), (128, 128, 128), (255, 255, 255))
        return Legend(greys, ("−", "0", "+"), "each colour channel")


@dataclass(frozen=True)
class RegionSets(Style):
    """The photo where sets of regions lie, each with a line around it in its own colour, and the
    rest pale. With ``without``, the first set is covered instead, and all else is as it was.
    """

    without: bool = False

    name: ClassVar[str] = "evidence"
    reads: ClassVar[Reading] = "sets"
    pale: ClassVar[float] = 0.82

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo that is pale outside sets of regions, masks ``(R, H, W)`` (empty ones
        are left out), with a line around each; or, ``without``, with the first set covered."""
        masks = values[values.any((1, 2))]
        sets = [cells_on_photo(mask, photo.size, region) for mask in masks]
        cover = Image.new("RGB", photo.size, Mask.cover)
        if self.without and not sets:
            return photo.copy()
        if self.without:
            return Image.composite(cover, photo, Image.fromarray(sets[0]))
        in_any_set = np.any(sets, axis=0) if sets else np.zeros(photo.size[::-1], bool)
        rest = Image.blend(photo, cover, self.pale)
        picture = Image.composite(photo, rest, Image.fromarray(in_any_set))
        lines = [Outline(area, color) for area, color in zip(sets, cycle(COLORS), strict=False)]
        return _outlined(picture, lines)

    def legend(self, photo: Image.Image) -> None:
        return None


@dataclass(frozen=True)
class CertifiedPlaces(Style):
    """Three colours over the photo in grey: places that are certainly not among the largest, those
    that abstain, and those that certainly are."""

    alpha: float = 0.6

    name: ClassVar[str] = "certified"
    reads: ClassVar[Reading] = "answers"
    colors: ClassVar[dict[int, RGB]] = {-1: (38, 90, 160), 0: (200, 202, 207), 1: (236, 122, 24)}

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Return an RGB photo in grey with a colour for each answer ``(H, W)`` of -1, 0 and 1."""
        ground = LIFTED.below(photo)
        picture = ground.copy()
        for answer, color in self.colors.items():
            tinted = Image.blend(ground, Image.new("RGB", photo.size, color), self.alpha)
            area = cells_on_photo(values == answer, photo.size, region)
            picture.paste(tinted, mask=Image.fromarray(area))
        return picture

    def legend(self, photo: Image.Image) -> Legend:
        """Return the colours of the three answers on the photo's mean colour."""
        flat = Image.new("RGB", (3, 1), _mean(photo))
        picture = self.draw(flat, np.array([[-1, 0, 1]]), Box(0, 0, 3, 1))
        return Legend(_rgb(np.asarray(picture)[0]), ("out", "open", "in"), "top share", ramp=False)


STYLES: dict[str, type[Any]] = {
    style.name: style
    for style in (
        Heat,
        Contour,
        Mask,
        Spotlight,
        Intensity,
        Signed,
        Color,
        RegionSets,
        CertifiedPlaces,
    )
}
CHOICES = ("heat", "contour", "mask", "spotlight")
"""The styles that every method's heatmap can be drawn in."""


def get_style(
    style: StyleLike,
    *,
    colormap: str | None = None,
    alpha: float | None = None,
    strict: bool = True,
) -> Style:
    """A style by name, or itself, with colour map and opacity ``alpha`` if given; without
    ``strict``, those that the style does not have are left out, else refused."""
    if isinstance(style, str):
        if style not in STYLES:
            raise ExplainError(f"style {shown(style)} is unknown; {did_you_mean(style, STYLES)}")
        style = STYLES[style]()
    if not isinstance(style, Style):
        raise ExplainError(
            f"style must be a name or a style, got {shown(style)}; use one of {', '.join(CHOICES)}"
        )
    options = {}
    for name, value in {"colormap": colormap, "alpha": alpha}.items():
        if value is None:
            continue
        if hasattr(style, name):
            options[name] = value
        elif strict:
            having = ", ".join(choice for choice in CHOICES if hasattr(STYLES[choice], name))
            raise ExplainError(
                f"{option_name(name)} is for the style {having}, got {style.name!r}; take that "
                "style, or leave it out"
            )
    return replace(style, **options) if options else style  # type: ignore[type-var]


def _areas(
    values: Array,
    shares: Sequence[float],
    size: tuple[int, int],
    region: Box,
    sides: Sequence[int] = (1,),
) -> list[Array]:
    """The smallest areas, bool ``(height, width)``, that hold these shares of a map's magnitudes:
    by share, then by sign in ``sides`` (1, -1). What lies beside the photo does not count.
    """
    values = fine(values)
    share_thresholds = thresholds(np.abs(part_on_photo(values, size, region)), shares)
    return [
        mask_above(side * values, threshold, size, region)
        for threshold in share_thresholds
        for side in sides
    ]


def _spread_over(first: float, last: float, count: int) -> Array:
    """Return ``count`` numbers at equal distances from ``first`` to ``last``; a single one is
    ``first``."""
    return np.linspace(first, last, max(2, count))[:count]


class Outline(NamedTuple):
    """A line around an area of a photo, bool ``(height, width)``, drawn on a wider line, the rim,
    which sets it off from the photo."""

    area: Array
    color: RGB
    rim: RGB = INK
    dashed: bool = False


def _outlined(photo: Image.Image, outlines: Sequence[Outline]) -> Image.Image:
    """Return a copy of a photo with lines around areas of it: the first outline is on top, and all
    lines lie above all rims."""
    import cv2

    outlined = np.array(photo)
    side = max(photo.size)
    line_width = max(1, round(side / 220))
    rim_width = line_width + 2 * max(1, line_width // 2)
    draw = partial(cv2.polylines, isClosed=False, lineType=cv2.LINE_AA, shift=4)
    points_of: list[list[Array]] = []
    for outline in outlines:
        within = outline.area.astype(np.uint8)
        borders, _ = cv2.findContours(within, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        lines = [_rounded(border, 2 * line_width + 1) for border in borders]
        lines = [np.concatenate([points, points[:1]]) for points in lines]
        if outline.dashed:
            lines = [dash for points in lines for dash in _dashes(points, 5 * line_width)]
        # OpenCV takes whole numbers: sixteenths of a pixel, which shift=4 says
        points_of.append([np.rint(16 * points).astype(np.int32) for points in lines])
        draw(outlined, points_of[-1], color=outline.rim, thickness=rim_width)
    for outline, lines in zip(reversed(outlines), reversed(points_of), strict=True):
        draw(outlined, lines, color=outline.color, thickness=line_width)
    return Image.fromarray(outlined)


def _dashes(points: Array, length: float) -> list[Array]:
    """Cut a line through points ``(N, 2)`` into pieces of ``length`` pixels, and return every
    second piece, from the first on."""
    across, down = np.diff(points, axis=0).T
    steps = np.hypot(across, down)
    distances = np.concatenate([[0], np.cumsum(steps)])  # of each point from the first
    piece_numbers = (distances // length).astype(int)
    pieces = np.split(points, np.flatnonzero(np.diff(piece_numbers)) + 1)
    return pieces[::2]


def _rounded(outline: Array, count: int) -> Array:
    """A closed line ``(N, 1, 2)`` of OpenCV smoothed to ``(N, 2)``: each point the mean of
    ``count`` (odd) points around it; a line too short for that as it is.
    """
    points = outline[:, 0].astype(np.float64)
    if len(points) <= 2 * count:
        return points
    around = np.concatenate([points[-(count // 2) :], points, points[: count // 2]])
    return sliding_window_view(around, count, axis=0).mean(-1)


def _mean(photo: Image.Image) -> RGB:
    """Return the mean colour of a photo, by which a legend shows how the photo shines through."""
    return _rgb(np.asarray(photo.resize((1, 1), Image.Resampling.BOX))[0])[0]


def _rgb(colors: Array) -> tuple[RGB, ...]:
    """Return colours ``(N, 3)`` as tuples of plain whole numbers, as `Legend` and Pillow take
    them."""
    return tuple(map(tuple, colors.astype(int).tolist()))


def percents(shares: Sequence[float]) -> tuple[str, ...]:
    """Return shares as people read them: "50 %"."""
    return tuple(f"{share:.0%}".replace("%", " %") for share in shares)


def _bright(magnitudes: Array) -> float:
    """Return the 99.5th percentile of magnitudes; of few that are not zero, the largest, and 1 of
    none."""
    return float(np.quantile(magnitudes, 0.995)) or float(magnitudes.max()) or 1.0


def _stretched(values: Array) -> Array:
    """Scale values to [-1, 1], so that the 99.5th percentile of the magnitudes becomes 1."""
    return np.clip(values / _bright(np.abs(values)), -1, 1)
