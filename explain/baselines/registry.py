"""Baselines by name."""

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


def register(baseline: F) -> F:
    """Make a baseline known by its name, with the options that it has.

    Raises:
        BaselineError: the name is taken by another baseline.
    """
    if _known.setdefault(baseline.name, baseline) != baseline:
        raise BaselineError(f"baseline {baseline.name!r} is already registered; choose another name")
    return baseline


def list_baselines(pattern: str = "*") -> list[str]:
    """Return the names of the baselines that match a glob pattern, in alphabetical order.

    >>> list_baselines()
    ['black', 'blur', 'defocus', 'mean', 'neighbours', 'noise', 'zero']
    """
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_baseline(baseline: BaselineLike, preprocess: Preprocess | None = None) -> Baseline:
    """Return the baseline for a name; a baseline is returned as it is.

    Args:
        baseline: a name from `list_baselines`, also with options, or a baseline.
        preprocess: what makes a photo the model's input, for the baseline "black", which must know it.

    Raises:
        BaselineError: the name is unknown, or the object is no baseline.

    >>> get_baseline("blur"), get_baseline("blur(sigma=3)")
    (Blur(kernel=11, sigma=5.0), Blur(kernel=11, sigma=3.0))
    """
    if isinstance(baseline, str):
        read = _read(baseline)
        name = read.name
        if name == "photo":
            raise BaselineError("baseline 'photo' must be given as an object; use explain.baselines.OtherPhoto(tensor)")
        if name not in _known:
            raise BaselineError(f"baseline {shown(baseline)} is unknown; {did_you_mean(name, list_baselines())}")
        baseline = _made(_known[name], read)
    if isinstance(baseline, type):
        raise BaselineError(
            f"baseline must be a name or an object, got the class {baseline.__name__}; use {baseline.__name__}()"
        )
    if not isinstance(baseline, Baseline):
        raise BaselineError(
            f"baseline must be a name or a baseline, got {shown(baseline)}; see explain.baselines.list_baselines()"
        )
    return Black.of(preprocess) if preprocess is not None and baseline == Black() else baseline


def _read(text: str) -> MethodSpec:
    if "(" not in text:
        return MethodSpec(text.strip().lower())
    try:
        return read_written(text)
    except SpecError as error:
        raise BaselineError(f"baseline {error}; write it like blur(sigma=3)") from None


def _made(baseline: Baseline, read: MethodSpec) -> Baseline:
    """The baseline with the options that were written."""
    if not read.values and not read.options:
        return baseline
    known = [field.name for field in fields(baseline) if field.init]  # type: ignore[arg-type]
    wrong = [repr(name) for name in read.options if name not in known]
    if read.values or wrong:
        got = shown(read.values[0]) if read.values else wrong[0]
        has = f"its options by name ({', '.join(known)})" if known else "no options"
        raise BaselineError(f"baseline {read.name} must be given {has}, got {got}; leave it out")
    made: Baseline = replace(baseline, **read.options)  # type: ignore[type-var]
    return made
