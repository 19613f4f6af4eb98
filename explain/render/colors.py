"""Colour maps by name; those of the default styles are in ``colormaps.json``, since matplotlib is slow to load."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from explain._utils.errors import ExplainError, option, shown
from explain._utils.spelling import did_you_mean

HEAT = "plasma"  # perceptually uniform, readable with colour-vision deficiencies, and nowhere grey
INTENSITY = "inferno"  # likewise, from black
SIGNED = "RdBu_r"  # blue against, white nothing, red for


def colorize(values: np.ndarray[Any, Any], name: str = HEAT) -> np.ndarray[Any, Any]:
    """Return ``values`` ``(H, W)`` in [0, 1] as colours ``(H, W, 3)`` uint8, by any colour map of matplotlib.

    Raises:
        ExplainError: no colour map has that name.

    >>> colorize(np.array([[0.0, 1.0]]), "gray").tolist()
    [[[0, 0, 0], [255, 255, 255]]]
    """
    table = lookup_table(name)
    colors: np.ndarray[Any, Any] = table[np.clip(values * 256, 0, 255).astype(np.uint8)]
    return colors


def lookup_table(name: str) -> np.ndarray[Any, Any]:
    """Return the 256 colours of a colour map, ``(256, 3)`` uint8."""
    if not isinstance(name, str):
        raise ExplainError(
            f"{option('colormap')} must be the name of a colour map, got {shown(name)}; 'plasma' is usual"
        )
    if name in default_colormaps():
        return np.frombuffer(bytes.fromhex(default_colormaps()[name]), np.uint8).reshape(256, 3)
    from matplotlib import colormaps

    if name not in colormaps:
        raise ExplainError(f"colormap {name!r} is unknown; {did_you_mean(name, list(colormaps))}")
    table: np.ndarray[Any, Any] = colormaps[name](np.arange(256) / 255, bytes=True)[:, :3]
    return table


@cache
def default_colormaps() -> dict[str, str]:
    """Return the colours of each default colour map as hexadecimal digits; examples/color_tables.py makes the file."""
    text = (resources.files("explain.render") / "colormaps.json").read_text("utf-8")
    found: dict[str, str] = json.loads(text)
    return found
