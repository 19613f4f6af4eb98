"""Styles: how a map is drawn on a photo, as plain values.

Four of them draw a heatmap in [0, 1] of any method:

    Heat        colour over the photo in grey: the colours come from the map alone
    Contour     lines around the places that hold 50, 75 and 90 % of the evidence, on the photo in colour
    Mask        those places cut out, on pale paper
    Spotlight   the photo in colour where the map is high, dark and grey elsewhere, without an edge between

Three are the own styles of methods that give a value for each pixel: Intensity, Signed and Color.
To add one, write a class that satisfies `Style` and enter it in `STYLES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from PIL import Image

from explain._utils.errors import ExplainError, option, shown
from explain._utils.spelling import did_you_mean
from explain.data.images import Box
from explain.render.captions import INK, RGB, Legend
from explain.render.colors import HEAT, INTENSITY, SIGNED, lookup_table
from explain.render.placement import Array, area, fine, on_photo, place, thresholds

Reading: TypeAlias = Literal["heatmap", "signed", "values"]
"""What a style draws: ``(H, W)`` in [0, 1], ``(H, W)`` in [-1, 1], or ``(C, H, W)``."""

SHARES = (0.5, 0.75, 0.9)
STEPS = 64  # colours in the legend of a ramp


@runtime_checkable
class Style(Protocol):
    """A way to draw a map on a photo."""

    name: ClassVar[str]
    reads: ClassVar[Reading]

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        """Draw a map on the part of an RGB photo that it covers; the photo is left as it is."""
        ...

    def legend(self, photo: Image.Image) -> Legend | None:
        """The colours that come out on a photo of this brightness; None where there is nothing to be said of them."""
        ...


StyleLike: TypeAlias = "str | Style"


@dataclass(frozen=True)
class Heat:
    """Colour over the photo in grey: the more evidence, the brighter the colour and the less of the photo.

    Since the photo is grey, no colour of its own can be taken for heat, and the legend's colours are those seen.
    """

    colormap: str = HEAT
    alpha: float = 0.65

    name: ClassVar[str] = "heat"
    reads: ClassVar[Reading] = "heatmap"

    def __post_init__(self) -> None:
        _check(self.colormap, self.alpha)

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        placed = place(values, photo.size, region)
        colors = Image.fromarray(lookup_table(self.colormap)[placed])
        # Opacity rises quickly, then levels off: a weak map is seen, and a strong one does not hide the photo.
        rising = 255 * self.alpha * (1 - (1 - np.arange(256) / 255) ** 3)
        return Image.composite(colors, _grey(photo), Image.fromarray(rising.round().astype(np.uint8)[placed]))

    def legend(self, photo: Image.Image) -> Legend:
        return Legend(_blended(self, _tone(photo)), ("0", "max"), "evidence")


@dataclass(frozen=True)
class Contour:
    """Lines around the smallest places that hold these shares of the evidence, the brightest around the first."""

    shares: tuple[float, ...] = SHARES
    colormap: str = HEAT

    name: ClassVar[str] = "contour"
    reads: ClassVar[Reading] = "heatmap"

    def __post_init__(self) -> None:
        _check(self.colormap)
        _check_shares(self.name, self.shares)

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        return _outlined(photo, self._colors, _areas(values, self.shares, photo.size, region))

    def legend(self, photo: Image.Image) -> Legend:
        return Legend(tuple(self._colors), _percents(self.shares), "evidence inside", ramp=False)

    def signed(self) -> SignedContour:
        """The same for contributions."""
        return SignedContour(self.shares, SIGNED if self.colormap == HEAT else self.colormap)

    @property
    def _colors(self) -> list[RGB]:
        places = np.linspace(0.97, 0.45, max(2, len(self.shares)))[: len(self.shares)]
        return [_rgb(color) for color in lookup_table(self.colormap)[(255 * places).astype(int)]]


@dataclass(frozen=True)
class SignedContour:
    """Lines as `Contour` draws them, around what speaks for the target in one colour and around what speaks against it
    in another; together they hold these shares of all that speaks."""

    shares: tuple[float, ...] = SHARES
    colormap: str = SIGNED

    name: ClassVar[str] = "contour"
    reads: ClassVar[Reading] = "signed"

    def __post_init__(self) -> None:
        _check(self.colormap)
        _check_shares(self.name, self.shares)

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        values = fine(values)
        least = thresholds(np.abs(on_photo(values, photo.size, region)), self.shares)
        areas = [area(side * values, each, photo.size, region) for each in least for side in (1, -1)]
        return _outlined(photo, self._colors, areas)

    def legend(self, photo: Image.Image) -> Legend:
        shares = ", ".join(_percents(self.shares))
        return Legend((self._colors[1], self._colors[0]), ("against", "for"), f"lines hold {shares}", ramp=False)

    @property
    def _colors(self) -> list[RGB]:
        """For and against the target, the strongest around the first share."""
        table, places = lookup_table(self.colormap), np.linspace(0.4, 0.25, max(2, len(self.shares)))
        ends = [0.5 + side * place for place in places[: len(self.shares)] for side in (1, -1)]
        return [_rgb(color) for color in table[(255 * np.array(ends)).astype(int)]]


@dataclass(frozen=True)
class Mask:
    """The photo where the evidence lies, in steps that hold these shares of it, and nothing of the rest."""

    shares: tuple[float, ...] = SHARES

    name: ClassVar[str] = "mask"
    reads: ClassVar[Reading] = "heatmap"
    cover: ClassVar[RGB] = (228, 230, 235)

    def __post_init__(self) -> None:
        _check_shares(self.name, self.shares)

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        opacity = np.zeros(photo.size[::-1], np.uint8)
        areas = _areas(values, self.shares, photo.size, region)
        for visible, within in reversed(list(zip(self._visible, areas, strict=True))):
            opacity[within] = round(255 * visible)
        return Image.composite(photo, Image.new("RGB", photo.size, self.cover), Image.fromarray(opacity))

    def legend(self, photo: Image.Image) -> Legend:
        tone = _mean(photo)
        colors = [_mixed(self.cover, tone, visible) for visible in self._visible]
        return Legend(tuple(colors), _percents(self.shares), "evidence shown", ramp=False)

    @property
    def _visible(self) -> list[float]:
        """How much is seen of the photo in each step, from the inside out."""
        return [1 - i / (len(self.shares) + 0.5) for i in range(len(self.shares))]


@dataclass(frozen=True)
class Spotlight:
    """The photo lit by the map: in colour where it is high, dark and grey where it is zero."""

    dark: float = 0.15

    name: ClassVar[str] = "spotlight"
    reads: ClassVar[Reading] = "heatmap"

    def __post_init__(self) -> None:
        if not 0 <= self.dark < 1:
            raise ExplainError(f"dark of spotlight must be a brightness from 0 to below 1, got {shown(self.dark)}")

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        unlit = _grey(photo).point([round(self.dark * v) for v in range(256)] * 3)
        lit = (255 * (1 - (1 - np.arange(256) / 255) ** 2)).round().astype(np.uint8)
        return Image.composite(photo, unlit, Image.fromarray(lit[place(values, photo.size, region)]))

    def legend(self, photo: Image.Image) -> Legend:
        return Legend(_blended(self, _mean(photo)), ("0", "max"), "evidence")


@dataclass(frozen=True)
class Intensity:
    """Magnitudes as brightness; the top half per cent is cut off, so that the rest shows."""

    colormap: str = INTENSITY

    name: ClassVar[str] = "intensity"
    reads: ClassVar[Reading] = "heatmap"

    def __post_init__(self) -> None:
        _check(self.colormap)

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        return Image.fromarray(lookup_table(self.colormap)[place(_stretched(values), photo.size, region)])

    def legend(self, photo: Image.Image) -> Legend:
        table = lookup_table(self.colormap)[np.linspace(0, 255, STEPS).round().astype(int)]
        return Legend(tuple(map(_rgb, table)), ("0", "max"), "magnitude")


@dataclass(frozen=True)
class Signed:
    """Values in [-1, 1] over the photo in pale grey: one colour speaks for the target, one against it."""

    colormap: str = SIGNED

    name: ClassVar[str] = "signed"
    reads: ClassVar[Reading] = "signed"

    def __post_init__(self) -> None:
        _check(self.colormap)

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        return self._painted(photo, np.sign(values) * _stretched(np.abs(values)), region)

    def _painted(self, photo: Image.Image, spread: Array, region: Box) -> Image.Image:
        magnitude = place(np.sqrt(np.abs(spread)), photo.size, region)
        side = place(spread / 2 + 0.5, photo.size, region, outside=128)
        faded = photo.convert("L").point([round(255 - (255 - v) * 0.4) for v in range(256)]).convert("RGB")
        return Image.composite(Image.fromarray(lookup_table(self.colormap)[side]), faded, Image.fromarray(magnitude))

    def legend(self, photo: Image.Image) -> Legend:
        flat = Image.new("RGB", (STEPS + 1, 1), _tone(photo))
        drawn = self._painted(flat, np.linspace(-1, 1, STEPS + 1)[None], Box(0, 0, STEPS + 1, 1))
        return Legend(_row(drawn), ("against", "for"), "contribution")


@dataclass(frozen=True)
class Color:
    """Values ``(C, H, W)`` as a colour picture in which grey is zero."""

    name: ClassVar[str] = "color"
    reads: ClassVar[Reading] = "values"

    def draw(self, photo: Image.Image, values: Array, region: Box) -> Image.Image:
        if values.shape[0] != 3:
            values = np.broadcast_to(values.mean(0, keepdims=True), (3, *values.shape[1:]))
        peak = np.quantile(np.abs(values), 0.995) or np.abs(values).max() or 1.0
        scaled = np.clip(values / (2 * peak) + 0.5, 0, 1)
        return Image.merge("RGB", [Image.fromarray(place(c, photo.size, region, outside=128)) for c in scaled])

    def legend(self, photo: Image.Image) -> Legend:
        return Legend(((0, 0, 0), (128, 128, 128), (255, 255, 255)), ("−", "0", "+"), "each colour channel")


STYLES: dict[str, type[Any]] = {
    style.name: style for style in (Heat, Contour, Mask, Spotlight, Intensity, Signed, Color)
}
CHOICES = ("heat", "contour", "mask", "spotlight")
"""The styles that every method's heatmap can be drawn in."""


def get_style(style: StyleLike, *, colormap: str | None = None, alpha: float | None = None) -> Style:
    """Return the style for a name, or a style as it is, with another colour map or opacity where one is given.

    Raises:
        ExplainError: there is no such style, or it has no colour map or opacity.

    >>> get_style("heat", alpha=0.5), get_style(Mask(shares=(0.5,)))
    (Heat(colormap='plasma', alpha=0.5), Mask(shares=(0.5,)))
    """
    if isinstance(style, str):
        if style not in STYLES:
            raise ExplainError(f"style {shown(style)} is unknown; {did_you_mean(style, STYLES)}")
        style = STYLES[style]()
    if isinstance(style, type) or not isinstance(style, Style):
        raise ExplainError(f"style must be a name or a style, got {shown(style)}; use one of {', '.join(CHOICES)}")
    return with_options(style, strict=True, colormap=colormap, alpha=alpha)


def with_options(style: Style, *, strict: bool, **options: Any) -> Style:
    """Return a style with other options; without ``strict``, those that it does not have are left out.

    Raises:
        ExplainError: an option is not one of the style's, or has a wrong value.
    """
    given = {name: value for name, value in options.items() if value is not None}
    known = {field.name for field in fields(style)}  # type: ignore[arg-type]
    for name in given:
        if strict and name not in known:
            having = [each for each in CHOICES if name in {field.name for field in fields(STYLES[each])}]
            raise ExplainError(
                f"{option(name)} is for the styles {', '.join(having)}, got style {style.name!r}; leave it out"
            )
    taken = {name: value for name, value in given.items() if name in known}
    return replace(style, **taken) if taken else style  # type: ignore[type-var]


def _check(colormap: str, alpha: float = 1.0) -> None:
    """Refuse an unknown colour map and an opacity outside [0, 1]."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ExplainError(f"{option('alpha')} must be an opacity from 0 to 1, got {shown(alpha)}; 0.65 is usual")
    lookup_table(colormap)


def _check_shares(style: str, shares: tuple[float, ...]) -> None:
    rising = all(a < b for a, b in pairwise(shares))
    if not shares or not rising or not all(0 < share <= 1 for share in shares):
        raise ExplainError(
            f"shares of {style} must rise from above 0 to at most 1, got {shown(shares)}; use (0.5, 0.9)"
        )


def _areas(values: Array, shares: Sequence[float], size: tuple[int, int], region: Box) -> list[Array]:
    """Return the smallest places that hold these shares of what lies on the photo."""
    values = fine(values)
    return [area(values, each, size, region) for each in thresholds(on_photo(values, size, region), shares)]


def _outlined(photo: Image.Image, colors: Sequence[RGB], areas: Sequence[Array]) -> Image.Image:
    """Draw lines around areas ``(height, width)``, the first on top."""
    import cv2

    drawn, found = np.array(photo), []
    line = max(1, round(max(photo.size) / 220))
    for within in areas:
        outlines, _ = cv2.findContours(within.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        found.append([_rounded(outline, 2 * line + 1) for outline in outlines])
    for outlines in found:
        _trace(drawn, outlines, INK, line + 2 * max(1, line // 2))
    for color, outlines in reversed(list(zip(colors, found, strict=True))):
        _trace(drawn, outlines, color, line)
    return Image.fromarray(drawn)


def _rounded(outline: Array, count: int) -> Array:
    """Return a closed line of pixels ``(N, 1, 2)`` without its steps: each point is the mean of so many around it."""
    points = outline[:, 0].astype(np.float64)
    if len(points) <= 2 * count:
        return points
    around = np.concatenate([points[-(count // 2) :], points, points[: count // 2]])
    sums = np.cumsum(np.vstack([np.zeros(2), around]), axis=0)
    means: Array = (sums[count:] - sums[:-count]) / count
    return means


def _trace(drawn: Array, outlines: Sequence[Array], color: RGB, line: int) -> None:
    """Draw closed lines of points between pixels."""
    import cv2

    places = [np.rint(16 * outline).astype(np.int32) for outline in outlines]
    cv2.polylines(drawn, places, True, color, line, cv2.LINE_AA, shift=4)


def _blended(style: Heat | Spotlight, tone: RGB) -> tuple[RGB, ...]:
    """Return the colours that a style makes of a flat photo, from no evidence to the most."""
    flat, ramp = Image.new("RGB", (STEPS, 1), tone), np.linspace(0, 1, STEPS)[None]
    return _row(style.draw(flat, ramp, Box(0, 0, STEPS, 1)))


def _row(picture: Image.Image) -> tuple[RGB, ...]:
    return tuple(map(_rgb, np.asarray(picture)[0]))


def _grey(photo: Image.Image) -> Image.Image:
    return photo.convert("L").convert("RGB")


def _mean(photo: Image.Image) -> RGB:
    """The mean colour of a photo."""
    return _rgb(np.asarray(photo.resize((1, 1), Image.Resampling.BOX))[0, 0])


def _tone(photo: Image.Image) -> RGB:
    """The mean grey of a photo."""
    return _mean(_grey(photo.resize((64, 64), Image.Resampling.BOX)))


def _mixed(under: RGB, over: RGB, opacity: float) -> RGB:
    return _rgb([round(a + (b - a) * opacity) for a, b in zip(under, over, strict=True)])


def _rgb(values: Any) -> RGB:
    red, green, blue = (int(value) for value in values)
    return red, green, blue


def _percents(shares: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{share:.0%}".replace("%", " %") for share in shares)


def _stretched(values: Array) -> Array:
    """Scale magnitudes so that their 99.5th percentile becomes 1."""
    peak = float(np.quantile(values, 0.995)) or float(values.max()) or 1.0
    return np.clip(values / peak, 0, 1)
