"""Fills by name."""

from __future__ import annotations

import fnmatch
from dataclasses import fields, replace
from typing import TypeAlias, TypeVar

from explain._utils.errors import BaselineError, shown
from explain._utils.specs import MethodSpec, SpecError, read_written
from explain._utils.spelling import did_you_mean
from explain.baselines.base import Baseline, Preprocess
from explain.baselines.replacements import Black

BaselineLike: TypeAlias = "str | Baseline"
F = TypeVar("F", bound=Baseline)

_known: dict[str, Baseline] = {}


def register(fill: F) -> F:
    """Make a fill known by its name, with the options that it has.

    Raises:
        FillError: the name is taken by another fill.
    """
    if _known.setdefault(fill.name, fill) != fill:
        raise BaselineError(f"fill {fill.name!r} is already registered; choose another name")
    return fill


def list_fills(pattern: str = "*") -> list[str]:
    """Return the names of the fills that match a glob pattern, in alphabetical order.

    >>> list_fills()
    ['black', 'blur', 'defocus', 'mean', 'neighbours', 'noise', 'zero']
    """
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_baseline(fill: BaselineLike, preprocess: Preprocess | None = None) -> Baseline:
    """Return the fill for a name; a fill is returned as it is.

    Args:
        fill: a name from `list_fills`, also with options, or a fill.
        preprocess: what makes a photo the model's input, for the fill "black", which must know it.

    Raises:
        FillError: the name is unknown, or the object is no fill.

    >>> get_baseline("blur"), get_baseline("blur(sigma=3)")
    (Blur(kernel=11, sigma=5.0), Blur(kernel=11, sigma=3.0))
    """
    if isinstance(fill, str):
        read = _read(fill)
        name = read.name
        if name == "photo":
            raise BaselineError("fill 'photo' must be given as an object; use explain.baselines.OtherPhoto(tensor)")
        if name not in _known:
            raise BaselineError(f"fill {shown(fill)} is unknown; {did_you_mean(name, list_fills())}")
        fill = _made(_known[name], read)
    if isinstance(fill, type):
        raise BaselineError(f"fill must be a name or an object, got the class {fill.__name__}; use {fill.__name__}()")
    if not isinstance(fill, Baseline):
        raise BaselineError(f"fill must be a name or a fill, got {shown(fill)}; see explain.baselines.list_fills()")
    return Black.of(preprocess) if preprocess is not None and fill == Black() else fill


def _read(text: str) -> MethodSpec:
    if "(" not in text:
        return MethodSpec(text.strip().lower())
    try:
        return read_written(text)
    except SpecError as error:
        raise BaselineError(f"fill {error}; write it like blur(sigma=3)") from None


def _made(fill: Baseline, read: MethodSpec) -> Baseline:
    """The fill with the options that were written."""
    if not read.values and not read.options:
        return fill
    known = [field.name for field in fields(fill) if field.init]  # type: ignore[arg-type]
    wrong = [repr(name) for name in read.options if name not in known]
    if read.values or wrong:
        got = shown(read.values[0]) if read.values else wrong[0]
        has = f"its options by name ({', '.join(known)})" if known else "no options"
        raise BaselineError(f"fill {read.name} must be given {has}, got {got}; leave it out")
    made: Baseline = replace(fill, **read.options)  # type: ignore[type-var]
    return made
