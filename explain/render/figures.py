"""Figures of matplotlib: pictures as images, everything else as text, in the size that a paper
needs."""

import io
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from explain._utils.errors import ExplainError, ImageError, shown
from explain._utils.html import picture_html
from explain.render.captions import FAINT
from explain.render.sheets import ABREAST, SMALL, Layout, Page, Tile
from explain.render.styles import HEAT, SIGNED, Array, as_floats, lookup_table, one_sided

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120  # dots per inch of figures for a screen
PRINTED = 300  # dots per inch of the images of a figure for print
CM = 1 / 2.54  # inches
USUAL = 4.5  # cm of a picture, unless a width is asked for
LEAST = 1.9  # cm of a picture in a table, which has its texts once
ROOMY = 2.6  # cm of any other, below which there are fewer in a row
WIDEST = 32.0  # cm, unless asked for
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
    page.fill(layout, heading=heading)
    return page.figure(alternative)


class _Page(Page):
    """A contact sheet as a figure; lengths are in inches."""

    def __init__(self, width: float, layout: Layout, letters: bool) -> None:
        """Fit the measures to the font size of figures."""
        from matplotlib import rcParams

        size = float(rcParams["font.size"]) / 72  # points to inches
        super().__init__(width, layout.columns, layout.stretch, size=size, gap=0.4 * size)
        self.top = 0.04  # a little space, where there is no margin
        self.letters = letters

    def text_width(self, text: str, size: float, bold: bool) -> float:
        return _text_width(text, 72 * size, "bold" if bold else "normal")

    def checks(self, tile: Tile, left: float) -> float:
        # in words: not every font has the signs
        words = ", ".join(f"{mark.word} {MARKS[mark.passed]}" for mark in tile.marks)
        return self.write(words, left, self.cell, size=SMALL, color=FAINT)

    def figure(self, alternative: str) -> "Figure":
        """The matplotlib figure with all texts and images; ``alternative`` describes it."""
        # by now, ``top`` is the height of all that is on the page
        shown_figure = empty((self.width, self.top), alternative, PRINTED)
        shown_figure.set_layout_engine("none")  # all places are known
        for left, top, width, height, picture in self.images:
            corner = (left / self.width, 1 - (top + height) / self.top)  # the lower left one
            size = (width / self.width, height / self.top)
            axes = shown_figure.add_axes((*corner, *size))
            axes.imshow(np.asarray(_printed(picture, width)), interpolation="none", aspect="auto")
            axes.set_axis_off()
        for line in self.texts:
            shown_figure.text(
                line.left / self.width,
                1 - line.top / self.top,
                line.text,
                va="top",
                parse_math=False,
                fontsize=72 * line.size,  # inches to points
                color=[channel / 255 for channel in line.color],
                fontweight="bold" if line.bold else "normal",
                ha=line.align,
            )
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
    if not -1 <= low <= high <= 1 + 1e-6:  # rounding may exceed 1 a little
        raise ImageError(
            f"heatmap must have values from -1 to 1, got {low:.3g} to {high:.3g}; pass "
            "attribution.heatmap[0] or attribution.signed[0]"
        )
    # a shorter map is stretched over the signal; none is longer
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
        height = float(np.ptp(line)) or 1.0  # a flat line needs some height too
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


def _printed(picture: Image.Image, width: float) -> Image.Image:
    """Return a picture resized to the pixels that it needs when it is ``width`` inches wide at 300
    dots per inch (`PRINTED`); colours of a legend are stretched by the viewer."""
    if picture.height == 1:
        return picture
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
