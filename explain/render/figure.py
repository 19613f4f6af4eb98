"""Contact sheets as matplotlib figures, and figures that show themselves in a notebook."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from explain._utils.errors import printable
from explain._utils.html import picture_html
from explain.render.captions import Legend
from explain.render.sheets import Group, Layout, Tile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 1600


def figure(layout: Layout, alternative: str = "") -> Figure:
    """Return a figure of a contact sheet: an axis for each tile, and one for each legend.

    It belongs to no window, so that nothing has to be closed.
    """
    rows, columns = layout.rows(), layout.columns
    shapes = [tile.picture.height / tile.picture.width for tile in layout.tiles]
    wide, high = layout.stretch
    tall = min(max(max(shapes, default=1) * wide, 0.2), max(2.0, high))
    extra = 0.5 if layout.legends else 0
    drawn = empty((3.4 * wide * columns, min((3.4 * tall + 0.75) * len(rows) + 0.7 + extra, 19.0)), alternative)
    grid = drawn.add_gridspec(len(rows) + bool(layout.legends), columns, height_ratios=_heights(len(rows), layout))
    for r, row in enumerate(rows):
        places = [(group, i, tile) for group in row for i, tile in enumerate(group.tiles)]
        titles = [_title(tile) for _, _, tile in places]
        lines = 2 + max(title.count("\n") for title in titles)
        for c, (group, i, tile) in enumerate(places):
            axis = drawn.add_subplot(grid[r, c])
            small = tile.picture.copy()
            small.thumbnail((LARGEST, LARGEST))  # more than a figure can show, and little enough to hold
            axis.imshow(np.asarray(small), interpolation="none")
            axis.set_axis_off()
            axis.set_title(titles[c], fontsize=10, parse_math=False)
            if i == 0 and group.heading:
                _head(axis, group, lines)
    for i, legend in enumerate(layout.legends[:columns]):
        _draw_legend(drawn.add_subplot(grid[len(rows), i]), legend)
    if layout.title:
        drawn.suptitle(_lines(layout.title, layout.detail), fontsize=12, fontweight="bold", parse_math=False)
    return drawn


def empty(size: tuple[float, float], alternative: str) -> Figure:
    """Return a figure without axes that shows itself in a notebook, with a text for those who cannot see it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)  # inches
    made: Figure = _figure_class()(figsize=size, layout=spaced, dpi=120)
    made.alternative = alternative  # type: ignore[attr-defined]
    FigureCanvasAgg(made)
    return made


@cache
def _figure_class() -> Any:
    """The class of such figures; matplotlib is loaded when the first is made."""
    from matplotlib.figure import Figure

    return type("ShownFigure", (Figure,), {"_repr_png_": as_png, "_repr_html_": _as_html, "__module__": __name__})


def as_png(drawn: Figure) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png")
    return buffer.getvalue()


def _as_html(drawn: Any) -> str:
    return picture_html(as_png(drawn), drawn.alternative)


def _title(tile: Tile) -> str:
    return _lines(tile.name, tile.detail, tile.remark, "  ".join(mark.text for mark in tile.marks))


def _head(axis: Axes, group: Group, lines: int) -> None:
    """Write a group's heading over its first tile, above the lines of the tiles' own words."""
    words = printable(group.heading) + "\n" * lines
    axis.text(
        0, 1, words, transform=axis.transAxes, fontsize=9, fontweight="bold", va="bottom",
        color="0.45" if group.goes_on else "black", parse_math=False,
    )  # fmt: skip


def _heights(rows: int, layout: Layout) -> list[float]:
    return [1.0] * rows + ([0.05] if layout.legends else [])


def _draw_legend(axis: Axes, legend: Legend) -> None:
    from matplotlib.colors import ListedColormap

    colors = np.asarray(legend.colors, np.float64) / 255
    ends = np.linspace(0, len(colors), len(legend.labels)) if legend.ramp else np.arange(len(legend.labels)) + 0.5
    axis.imshow(
        np.arange(len(colors))[None], cmap=ListedColormap(colors), aspect="auto", interpolation="none",
        extent=(0, len(colors), 0, 1),
    )  # fmt: skip
    axis.set_yticks([])
    axis.set_xticks(ends, legend.labels, fontsize=8)
    if legend.ramp:  # labels that stick out would push the columns apart
        labels = axis.get_xticklabels()
        labels[0].set_horizontalalignment("left")
        labels[-1].set_horizontalalignment("right")
    axis.set_xlabel(legend.about, fontsize=8, labelpad=1)


def _lines(*texts: str) -> str:
    """Join the lines of a title, without empty ones and characters that cannot be drawn."""
    return "\n".join(printable(line) for text in texts if text for line in text.split("\n"))
