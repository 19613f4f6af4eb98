"""Fills by name."""

from __future__ import annotations

import fnmatch
from dataclasses import fields, replace
from typing import TypeAlias, TypeVar

from explain.errors import FillError, did_you_mean, shown
from explain.fills.base import Fill
from explain.fills.look import Preprocess
from explain.fills.replacing import Black
from explain.written import Written, WrittenError, read_written

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
    ['black', 'blur', 'defocus', 'mean', 'neighbours', 'noise', 'zero']
    """
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_fill(fill: FillLike, preprocess: Preprocess | None = None) -> Fill:
    """Return the fill for a name; a fill is returned as it is.

    Args:
        fill: a name from `list_fills`, also with options, or a fill.
        preprocess: what makes a photo the model's input, for the fill "black", which must know it.

    Raises:
        FillError: the name is unknown, or the object is no fill.

    >>> get_fill("blur"), get_fill("blur(sigma=3)")
    (Blur(kernel=11, sigma=5.0), Blur(kernel=11, sigma=3.0))
    """
    if isinstance(fill, str):
        read = _read(fill)
        name = read.name
        if name == "photo":
            raise FillError("fill 'photo' must be given as an object; use explain.fills.Photo(tensor)")
        if name not in _known:
            raise FillError(f"fill {shown(fill)} is unknown; {did_you_mean(name, list_fills())}")
        fill = _made(_known[name], read)
    if isinstance(fill, type):
        raise FillError(f"fill must be a name or an object, got the class {fill.__name__}; use {fill.__name__}()")
    if not isinstance(fill, Fill):
        raise FillError(f"fill must be a name or a fill, got {shown(fill)}; see explain.fills.list_fills()")
    return Black.of(preprocess) if preprocess is not None and fill == Black() else fill


def _read(text: str) -> Written:
    if "(" not in text:
        return Written(text.strip().lower())
    try:
        return read_written(text)
    except WrittenError as error:
        raise FillError(f"fill {error}; write it like blur(sigma=3)") from None


def _made(fill: Fill, read: Written) -> Fill:
    """The fill with the options that were written."""
    if not read.values and not read.options:
        return fill
    known = [field.name for field in fields(fill) if field.init]  # type: ignore[arg-type]
    wrong = [repr(name) for name in read.options if name not in known]
    if read.values or wrong:
        got = shown(read.values[0]) if read.values else wrong[0]
        has = f"its options by name ({', '.join(known)})" if known else "no options"
        raise FillError(f"fill {read.name} must be given {has}, got {got}; leave it out")
    made: Fill = replace(fill, **read.options)  # type: ignore[type-var]
    return made
