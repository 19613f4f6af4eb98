"""A matplotlib figure of pictures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from explain.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = 1600


def figure(pictures: Sequence[Image.Image], titles: Sequence[str], heading: str = "", columns: int = 3) -> Figure:
    """Return a figure with a title over each picture; it belongs to no window, so that nothing has to be closed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    aspect = min(max(pictures[0].height / pictures[0].width, 0.2), 4)
    drawn = Figure(figsize=(3.4 * columns, (3.4 * aspect + 0.35) * rows + 0.5), layout="constrained", dpi=120)
    FigureCanvasAgg(drawn)
    axes = np.atleast_1d(np.asarray(drawn.subplots(rows, columns))).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, picture, title in zip(axes, pictures, titles, strict=False):
        small = picture.copy()
        small.thumbnail((LARGEST, LARGEST))  # more than a figure can show, and little enough to hold
        axis.imshow(np.asarray(small), interpolation="none")
        axis.set_title(_lines(title), fontsize=10, parse_math=False)
    if heading:
        drawn.suptitle(_lines(heading), fontsize=12, fontweight="bold", parse_math=False)
    return drawn


def _lines(title: str) -> str:
    """What can be drawn of a title, which may have several lines."""
    return "\n".join(map(printable, title.split("\n")))
