"""A matplotlib figure of pictures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(pictures: Sequence[Image.Image], titles: Sequence[str], heading: str = "", columns: int = 3) -> Figure:
    """Return a figure with a title over each picture; it belongs to no window, so that nothing has to be closed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    aspect = pictures[0].height / pictures[0].width
    drawn = Figure(figsize=(3.4 * columns, (3.4 * aspect + 0.35) * rows + 0.5), layout="constrained", dpi=120)
    FigureCanvasAgg(drawn)
    axes = np.atleast_1d(np.asarray(drawn.subplots(rows, columns))).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, picture, title in zip(axes, pictures, titles, strict=False):
        axis.imshow(np.asarray(picture), interpolation="none")
        axis.set_title(title, fontsize=10, parse_math=False)
    if heading:
        drawn.suptitle(heading, fontsize=12, fontweight="bold", parse_math=False)
    return drawn
