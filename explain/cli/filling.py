"""`--fill`: what takes the place of covered pixels, in all methods and metrics that cover some."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from explain.arguments import UsageError
from explain.errors import FillError

if TYPE_CHECKING:
    from explain.fills import Fill

T = TypeVar("T")
_OWN = re.compile(r"\bfill\s*=")


def checked_fill(options: argparse.Namespace, covering: Sequence[object] | None) -> Fill | None:
    """Return the fill that was named, if one was; ``covering`` has the methods and metrics, or None for a group.

    Raises:
        UsageError: there is none of that name, a method has its own already, or nothing is covered.
    """
    if options.fill is None:
        return None
    from explain.fills import get_fill

    try:
        fill = get_fill(options.fill)
    except FillError as error:
        raise UsageError(str(error)) from None
    own = [name for name in options.method or () if _OWN.search(name)]
    if own:
        raise UsageError(f"--fill {options.fill} and {own[0]!r} both say what covers pixels; leave one out")
    if covering is not None and not any(map(covers, covering)):
        names = ", ".join(str(getattr(each, "name", each)) for each in covering)
        raise UsageError(f"--fill would have no effect: no pixels are covered for {names}; leave it out")
    return fill


def covers(each: object) -> bool:
    """Whether a method, or the method within it, or a metric covers pixels."""
    return hasattr(each, "fill") or (hasattr(each, "method") and covers(each.method))


def with_fill(each: T, fill: Fill | None) -> T:
    """The same method or metric with another fill, if it covers pixels."""
    if fill is None or not covers(each):
        return each
    thing: Any = each
    changed = {"fill": fill} if hasattr(thing, "fill") else {"method": with_fill(thing.method, fill)}
    found: T = replace(thing, **changed)
    return found
