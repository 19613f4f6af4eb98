"""Pictures of the gallery: what a block of a script ends with, if it is a picture or shows itself
as one."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from sphinx_gallery.scrapers import figure_rst

_last: dict[str, Any] = {}


def scraped(block: Any, variables: dict[str, Any], configuration: dict[str, Any]) -> str:
    """Save the picture that a block ends with, and return the reStructuredText that shows it."""
    ends_with = variables["example_globals"].get("___")
    if ends_with is None or ends_with is _last.get("value"):  # what an earlier block ended with
        return ""
    _last["value"] = ends_with
    content = _png(ends_with)
    if content is None:
        return ""
    path = Path(next(variables["image_path_iterator"]))
    content.save(path)
    expression = block[1].strip().splitlines()[-1].strip()
    return figure_rst([str(path)], configuration["src_dir"], f"the picture that {expression} gives")


def _png(value: Any) -> Image.Image | None:
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, Figure):
        canvas = FigureCanvasAgg(value)  # a figure that no window shows has none that draws
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba()))
    if hasattr(value, "sheet"):  # larger than in a notebook
        return value.sheet(260)
    drawn = re.search(r'src="data:image/\w+;base64,([^"]+)"', getattr(value, "_repr_html_", str)())
    return None if drawn is None else Image.open(io.BytesIO(base64.b64decode(drawn[1])))
