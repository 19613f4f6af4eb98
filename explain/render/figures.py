"""Figures of matplotlib: pictures as images, everything else as text, in the size that a paper
needs."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from math import ceil
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from PIL import Image

from explain._utils.errors import ExplainError, ImageError, shown
from explain._utils.html import picture_html
from explain.render.captions import FAINT, INK, RGB, Legend, ramp, wrapped
from explain.render.sheets import ABREAST, REMARK, Layout, Places, Tile, groups_of
from explain.render.styles import HEAT, SIGNED, Array, as_floats, lookup_table, one_sided

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Align: TypeAlias = Literal["left", "center", "right"]
DPI = 120  # dots per inch of figures for a screen
PRINTED = 300  # dots per inch of the images of a figure for print
CM = 1 / 2.54  # inches
USUAL = 4.5  # cm of a picture, unless a width is asked for
LEAST = 1.9  # cm of a picture in a table, which has its texts once
ROOMY = 2.6  # cm of any other, below which there are fewer in a row
WIDEST = 32.0  # cm, unless asked for
LINE = 1.3  # height of a line of text, in font sizes
MARKS = {True: "passed", False: "failed", None: "open"}


def abreast(width_cm: float | None, is_table: bool) -> int:
    """Return how many pictures stand side by side at most in a figure ``width_cm`` wide. In a
    table, they may be narrower: its texts stand once, over the columns."""
    is_number = isinstance(width_cm, (int, float)) and not isinstance(width_cm, bool)
    if width_cm is None:
        return ABREAST
    if not (is_number and 2 <= width_cm <= 100):
        raise ExplainError(
            f"width_cm must be a number from 2 to 100, got {shown(width_cm)}; 8 and 17 are usual"
        )
    if is_table:
        return max(1, int(width_cm / LEAST))
    return max(1, min(ABREAST, int(width_cm / ROOMY)))


def figure_of(
    layout: Layout,
    alternative: str = "",
    *,
    width_cm: float | None = None,
    letters: bool = False,
    heading: bool = True,
) -> "Figure":
    """A contact sheet as a matplotlib figure that no window owns: images at 300 dots per inch or
    more, texts in the fonts of ``rcParams``. ``alternative`` is its description in words."""
    if width_cm is None:
        width_cm = min(WIDEST, USUAL * layout.columns)
    page = _Page(width_cm * CM, layout, letters)
    if heading:
        page.head()
    rows = zip(layout.places(), layout.legends(), layout.names(), strict=True)
    for places, legends, names in rows:
        page.row(places, legends, names)
    return page.figure(alternative)


@dataclass
class _Page:
    """The texts and images of a figure with their positions, in inches from the left and the top.
    They are put on the figure at the end, when its height is known."""

    width: float
    layout: Layout
    letters: bool
    top: float = 0.04
    """How far it is filled: where the next row begins."""
    texts: list[tuple[float, float, str, dict[str, Any]]] = field(default_factory=list)
    images: list[tuple[float, float, float, float, Image.Image]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Set the measures of a figure page: font sizes in points, the gap between pictures and the
        width of a column (``cell``) in inches."""
        from matplotlib import rcParams

        self.size = float(rcParams["font.size"])  # points
        self.small = 0.8 * self.size
        self.gap = 0.4 * self.size / 72
        columns = self.layout.columns
        self.cell = (self.width - (columns - 1) * self.gap) / columns
        self.letter = 0  # how many pictures have one

    def head(self) -> None:
        """Write the layout's title and its detail, a fainter line, at the top of the figure; move
        ``top`` below them."""
        title = self.layout.title
        self.top += self.write(title, 0, self.width, 1.2 * self.size, weight="bold", ha="left")
        detail = self.layout.detail
        self.top += self.write(detail, 0, self.width, self.small, color=FAINT, ha="left")
        self.top += self.gap

    def row(
        self, places: Places, legends: Mapping[int, Legend], names: Mapping[int, Tile] | None
    ) -> None:
        """Put a row of pictures with texts and legends by column on the figure, and move ``top``
        below it. In a table, ``names`` are the tiles named above the row, else None.
        """
        if names:
            self.top += self._texts({c: _named(tile) for c, tile in names.items()}) + self.gap
        self._headings(places)
        if self.letters:
            self._letters(places)
        self.top += self._pictures(places)
        below = {}
        for column, (_, tile) in places.items():
            lines = _named(tile) if names is None else []
            # in words: not every font has the signs
            checks = ", ".join(f"{mark.word} {MARKS[mark.passed]}" for mark in tile.marks)
            below[column] = [*lines, (tile.remark, REMARK, 1.0), (checks, FAINT, 0.8)]
        self.top += self._texts(below)
        self.top += max((self._bar(c, legend) for c, legend in legends.items()), default=0.0)
        self.top += 2 * self.gap

    def _texts(self, columns: Mapping[int, list[tuple[str, RGB, float]]]) -> float:
        """Write each column's texts ``(text, color, size)`` below each other (sizes are multiples
        of the font's); returns the tallest column's height in inches. ``top`` stays.
        """
        tallest = 0.0
        for column, lines in columns.items():
            height = 0.0
            for text, color, size in lines:
                height += self.write(
                    text, self._left(column), self.cell, size * self.size, color=color, top=height
                )
            tallest = max(tallest, height)
        return tallest

    def _headings(self, places: Places) -> None:
        """Write the heading of each group of pictures over its first tile in the row, fainter where
        the group began in a row above; move ``top`` below the headings."""
        tallest = 0.0
        for group, first, count in groups_of(places):
            color = INK if places[first][1] is group.tiles[0] else FAINT
            width = count * (self.cell + self.gap) - self.gap
            left = self._left(first)
            height = self.write(
                group.heading, left, width, self.size, color=color, weight="bold", ha="left"
            )
            tallest = max(tallest, height)
        self.top += tallest

    def _letters(self, places: Places) -> None:
        """Write (a), (b), … above the pictures of a row, counted on through the whole figure; move
        ``top`` below the letters."""
        for column in places:
            name = f"({_letter(self.letter)})"
            self.write(name, self._left(column), self.cell, self.size, weight="bold", ha="left")
            self.letter += 1
        self.top += LINE * self.size / 72

    def _pictures(self, places: Places) -> float:
        """Add a row's pictures, scaled into their columns, with middles at one height; returns the
        tallest's height in inches with a gap. ``top`` stays.
        """
        wide, high = self.layout.stretch
        max_height = self.cell * high / wide
        sizes = {}
        for column, (_, tile) in places.items():
            scale = min(self.cell / tile.picture.width, max_height / tile.picture.height)
            sizes[column] = tile.picture.width * scale, tile.picture.height * scale
        tallest = max(height for _, height in sizes.values())
        for column, (_, tile) in places.items():
            width, height = sizes[column]
            left = self._left(column) + (self.cell - width) / 2
            down = self.top + (tallest - height) / 2
            self.images.append((left, down, width, height, _printed(tile.picture, width)))
        return tallest + self.gap / 2

    def _bar(self, column: int, legend: Legend) -> float:
        """Add a legend to a column: colours as images, labels and meaning as texts (between a
        ramp's two labels if there is room); returns its height in inches. ``top`` stays.
        """
        # narrower than the pictures, so that labels do not touch those of the next column
        bar_width = 0.92 * self.cell
        left = self._left(column) + (self.cell - bar_width) / 2
        thick = 0.5 * self.small / 72
        count = len(legend.labels)
        step = bar_width / max(1, count)
        top = self.gap / 2
        colors_top = self.top + top
        top += thick + self.gap / 2
        write = partial(self.write, size=self.small, color=FAINT, top=top)
        if legend.ramp:
            self.images.append((left, colors_top, bar_width, thick, ramp(legend, 256, 1)))
            inner: list[Align] = ["center"] * (count - 2)
            aligned: list[Align] = ["left", *inner, "right"]
            heights = [
                write(label, left, bar_width, ha=align)
                for label, align in zip(legend.labels, aligned, strict=False)
            ]
        else:
            for number, color in enumerate(legend.colors):
                patch = Image.new("RGB", (1, 1), color)
                place = left + (number + 0.1) * step
                self.images.append((place, colors_top, 0.8 * step, thick, patch))
            heights = [write(label, left + i * step, step) for i, label in enumerate(legend.labels)]
        texts = [*legend.labels, legend.meaning]
        *label_widths, width = [_text_width(text, self.small, "normal") for text in texts]
        # the meaning then stands in the line of the labels, and needs no height of its own
        room = bar_width - 2 * (max(label_widths, default=0.0) + self.gap)
        in_a_line = legend.ramp and count == 2 and width < room
        if not in_a_line:
            top += max(heights, default=0.0)
        return top + write(legend.meaning, left, bar_width, top=top)

    def write(
        self,
        text: str,
        left: float,
        width: float,
        size: float,
        *,
        color: RGB = INK,
        weight: str = "normal",
        ha: Align = "center",
        top: float = 0.0,
    ) -> float:
        """Add a text of ``size`` points in up to three lines of ``width`` inches, ``top`` inches
        below what is filled; returns its height in inches. ``self.top`` stays.
        """
        place = left + {"left": 0.0, "center": width / 2, "right": width}[ha]
        style = {
            "fontsize": size,
            "color": tuple(channel / 255 for channel in color),
            "fontweight": weight,
            "ha": ha,
        }
        lines = wrapped(text, width, partial(_text_width, size=size, weight=weight), 3)
        for number, line in enumerate(lines):
            self.texts.append((place, self.top + top + number * LINE * size / 72, line, style))
        return len(lines) * LINE * size / 72

    def _left(self, column: int) -> float:
        """Return where a column of the figure begins, in inches from the left."""
        return column * (self.cell + self.gap)

    def figure(self, alternative: str) -> "Figure":
        """The matplotlib figure with all texts and images, as high as these need; to be made last,
        since places are shares of the height. ``alternative`` describes it.
        """
        shown_figure = empty((self.width, self.top), alternative, PRINTED)
        shown_figure.set_layout_engine("none")
        for left, top, width, height, picture in self.images:
            edges = (left / self.width, 1 - (top + height) / self.top)
            size = (width / self.width, height / self.top)
            axes = shown_figure.add_axes((*edges, *size))
            axes.imshow(np.asarray(picture), interpolation="none", aspect="auto")
            axes.set_axis_off()
        for left, top, text, style in self.texts:
            place = (left / self.width, 1 - top / self.top)
            shown_figure.text(place[0], place[1], text, va="top", parse_math=False, **style)
        return shown_figure


def plot(signal: Any, heatmap: Any, *, names: Sequence[str] = (), width_cm: float = 17) -> "Figure":
    """Plot a signal as lines, one for each channel, each with its map beneath it in colours.

    For the result of `explain.attribute`: ``plot(x[0], attribution.heatmap[0])``, or with
    ``attribution.signed[0]``, whose two signs have two colours.

    Args:
        signal: ``(C, L)`` or ``(L,)``, a tensor or an array.
        heatmap: ``(L,)`` for all channels, or ``(C, L)``, in [0, 1] or [-1, 1]; ``(l,)`` and ``(C,
            l)`` are stretched over the signal.
        names: those of the channels, to write beside the lines.
        width_cm: the width of the figure.

    Raises:
        ImageError: shapes or values that do not fit, or a number of names other than of channels.

    >>> len(plot(np.sin(np.arange(20)), np.linspace(0, 1, 20)).axes)
    1
    """
    lines = _rows_of("signal", signal)
    maps = _rows_of("heatmap", heatmap)
    count, length = lines.shape
    low = float(maps.min())
    high = float(maps.max())
    if not -1 <= low <= high <= 1 + 1e-6:
        raise ImageError(
            f"heatmap must have values from -1 to 1, got {low:.3g} to {high:.3g}; pass "
            "attribution.heatmap[0] or attribution.signed[0]"
        )
    if len(maps) not in (1, count) or maps.shape[1] > length:
        raise ImageError(
            f"heatmap must be one row, or one for each channel of a signal {lines.shape}, got "
            f"{maps.shape}; pass attribution.heatmap[0]"
        )
    if names and len(names) != count:
        raise ImageError(f"names must be {count}, one for each channel, got {len(names)}")
    table = lookup_table(SIGNED) if low < 0 else one_sided(HEAT)
    levels = (maps + 1) / 2 if low < 0 else maps
    colors = table[(255 * levels.clip(0, 1)).round().astype(int)]
    opacity = np.abs(maps)[..., None] * 255
    beneath = np.concatenate([colors, opacity.round()], -1).astype(np.uint8)
    shown_figure = empty((width_cm * CM, (1.2 + 1.8 * count) * CM), "a signal with its map")
    for number, line in enumerate(lines):
        axes = shown_figure.add_subplot(count, 1, number + 1)
        row = beneath[number if len(maps) > 1 else 0]
        height = float(np.ptp(line)) or 1.0
        ends = (float(line.min()) - height / 20, float(line.max()) + height / 20)
        axes.imshow(row[None], extent=(-0.5, length - 0.5, *ends), aspect="auto")
        axes.plot(line, color="black", linewidth=0.8)
        axes.set_ylim(*ends)
        axes.tick_params(labelsize=7, labelbottom=number == count - 1)
        if names:
            axes.set_ylabel(names[number], fontsize=8)
    return shown_figure


def _rows_of(name: str, values: Any) -> Array:
    """A tensor or an array ``(C, L)`` or ``(L,)`` as finite float32 rows ``(C, L)``; ``name`` is
    that of the argument."""
    rows = np.atleast_2d(as_floats(name, values, "take one of a batch"))
    if rows.ndim != 2 or not rows.size or not np.isfinite(rows).all():
        raise ImageError(
            f"{name} must be finite numbers (C, L) or (L,), got shape {rows.shape}; take one of a "
            "batch"
        )
    return rows


def _named(tile: Tile) -> list[tuple[str, RGB, float]]:
    """Return the texts (text, colour, size) of a tile's name and detail; a size is a multiple of
    the font's."""
    return [(tile.name, INK, 1.0), (tile.detail, FAINT, 0.8)]


def _letter(number: int) -> str:
    """Return the letters of a picture by its number from 0: a to z, then aa, ab, …"""
    first, last = divmod(number, len(ascii_lowercase))
    return (_letter(first - 1) if first else "") + ascii_lowercase[last]


def _printed(picture: Image.Image, width: float) -> Image.Image:
    """Return a picture resized to the pixels that it needs when it is ``width`` inches wide at 300
    dots per inch (`PRINTED`)."""
    scale = width * PRINTED / picture.width
    size = [max(1, ceil(scale * side)) for side in picture.size]
    return picture.resize(size, Image.Resampling.LANCZOS)


def _text_width(text: str, size: float, weight: str) -> float:
    """Return the width in inches of a text of ``size`` points in the font of matplotlib's
    ``rcParams``; ``weight`` is "normal" or "bold"."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    face = FontProperties(size=size, weight=weight)
    width: float = text_to_path.get_text_width_height_descent(text, face, False)[0]
    return width / 72


def empty(size: tuple[float, float], alternative: str, dpi: float = DPI) -> "Figure":
    """A matplotlib figure of ``size`` (width, height) in inches without axes, that a notebook
    displays and no window owns; ``alternative`` describes it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)  # inches
    shown_figure: Figure = _figure_class()(figsize=size, layout=spaced, dpi=dpi)
    shown_figure.alternative = alternative  # type: ignore[attr-defined]
    FigureCanvasAgg(shown_figure)
    return shown_figure


@cache
def _figure_class() -> Any:
    """The class of figures that a notebook displays as HTML with an alternative text; made at the
    first call, since importing must not load matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    def as_html(shown_figure: Any) -> str:
        """Return a figure as HTML: a picture with the alternative text."""
        return picture_html(as_picture(shown_figure), shown_figure.alternative)

    def display_once(shown_figure: Any) -> None:
        # Only IPython calls this. Without it, IPython would store a PNG of every figure as well.
        display: Any = import_module("IPython.display").display
        display({"text/plain": repr(shown_figure), "text/html": as_html(shown_figure)}, raw=True)

    def savefig(shown_figure: Any, *args: Any, **options: Any) -> None:
        """Save a figure as matplotlib does, but with texts kept as texts in PDF and SVG."""
        # texts stay texts: in a PDF with fonts that journals take, in an SVG to be edited
        with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
            Figure.savefig(shown_figure, *args, **options)

    members = {
        "_repr_html_": as_html,
        "_ipython_display_": display_once,
        "savefig": savefig,
        "__module__": __name__,
    }
    return type("ShownFigure", (Figure,), members)


def as_picture(shown_figure: "Figure") -> Image.Image:
    """Return a figure as a picture, with at most `DPI` dots per inch: as fine as a screen needs."""
    return Image.open(io.BytesIO(as_file(shown_figure, "png", min(DPI, shown_figure.dpi))))


def as_file(
    shown_figure: "Figure", ending: str, dpi: float | Literal["figure"] = "figure"
) -> bytes:
    """Return the bytes of a figure's file in the format ``ending`` ("png", "pdf", "svg", ...).
    The same figure gives the same bytes: dates and random ids are left out.
    """
    from matplotlib import rc_context

    date_fields = {"pdf": "CreationDate", "svg": "Date"}
    metadata = {date_fields[ending]: None} if ending in date_fields else None
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "explain"}):
        shown_figure.savefig(buffer, format=ending, dpi=dpi, metadata=metadata)
    return buffer.getvalue()
