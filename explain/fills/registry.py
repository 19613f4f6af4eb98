"""Fills by name."""

from __future__ import annotations

import fnmatch
from typing import TypeAlias, TypeVar

from explain.errors import FillError, did_you_mean, shown
from explain.fills.base import Fill
from explain.fills.look import Preprocess
from explain.fills.replacing import Black

FillLike: TypeAlias = "str | Fill"
F = TypeVar("F", bound=Fill)

_known: dict[str, Fill] = {}


def register(fill: F) -> F:
    """Make a fill known by its name, with the options that it has.

    Raises:
        FillError: the name is taken by another fill.
    """
    if _known.setdefault(fill.name, fill) != fill:
        raise FillError(f"fill {fill.name!r} is already registered; choose another name")
    return fill


def list_fills(pattern: str = "*") -> list[str]:
    """Return the names of the fills that match a glob pattern, in alphabetical order.

    >>> list_fills()
    ['black', 'blur', 'mean', 'neighbours', 'noise', 'zero']
    """
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_fill(fill: FillLike, preprocess: Preprocess | None = None) -> Fill:
    """Return the fill for a name; a fill is returned as it is.

    Args:
        fill: a name from `list_fills`, or a fill.
        preprocess: what makes a photo the model's input, for the fill "black", which must know it.

    Raises:
        FillError: the name is unknown, or the object is no fill.

    >>> get_fill("blur")
    Blur(kernel=11, sigma=5.0)
    """
    if isinstance(fill, str):
        name = fill.strip().lower()
        if name == "photo":
            raise FillError("fill 'photo' must be given as an object; use explain.fills.Photo(tensor)")
        if name not in _known:
            raise FillError(f"fill {shown(fill)} is unknown; {did_you_mean(name, list_fills())}")
        fill = _known[name]
    if isinstance(fill, type):
        raise FillError(f"fill must be a name or an object, got the class {fill.__name__}; use {fill.__name__}()")
    if not isinstance(fill, Fill):
        raise FillError(f"fill must be a name or a fill, got {shown(fill)}; see explain.fills.list_fills()")
    return Black.of(preprocess) if preprocess is not None and fill == Black() else fill
