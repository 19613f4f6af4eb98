"""Methods that run the model very often are asked with fewer samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import isqrt
from typing import Any

from explain.errors import MethodError
from explain.methods import Method
from explain.methods.base import options
from explain.result import Attribution

COSTLY = 60
"""Passes from which on a method is asked again with fewer samples."""

FEW = 32
"""Samples that it is then asked with, at first."""

COUNTS = ("runs", "samples", "steps")


def lighter(method: Method, most: int) -> Iterator[Method]:
    """The method with fewer samples: first ``most`` of them, then twice as many, for those that take no fewer.

    A method that it wraps gets its share of them. Nothing where there is no such option, or no smaller number.

    >>> from explain.methods import IntegratedGradients, RISE
    >>> next(lighter(RISE(), 32)).runs, [each.steps for each in lighter(IntegratedGradients(steps=50), 32)]
    (32, [32])
    """
    inner = options(method).get("method")
    wrapped = inner if isinstance(inner, Method) and _size(inner) > 1 else None
    while most < _size(method):
        own = most if wrapped is None else isqrt(most)
        fewer: dict[str, Any] = {name: min(value, own) for name, value in _counts(method).items()}
        if wrapped is not None:
            fewer["method"] = next(lighter(wrapped, most // own), wrapped)
        with suppress(MethodError):  # it takes no fewer than some number
            yield replace(method, **fewer)  # type: ignore[type-var]
        most *= 2


def _counts(method: Method) -> dict[str, int]:
    return {name: value for name in COUNTS if isinstance(value := options(method).get(name), int)}


def _size(method: Method) -> int:
    """How many samples it takes, those of a method that it wraps for each of its own."""
    inner = options(method).get("method")
    return max(_counts(method).values(), default=1) * (_size(inner) if isinstance(inner, Method) else 1)


def asked_lightly(
    method: Method, most: int, ask: Callable[[Method], Attribution]
) -> tuple[Method, Attribution, str] | None:
    """Ask a method with fewer samples; return it, its map, and what it was asked with."""
    for fewer in lighter(method, most):
        try:
            found = ask(fewer)
        except MethodError:
            continue
        return fewer, found, ", ".join(_told(fewer))
    return None


def _told(method: Method) -> list[str]:
    inner = options(method).get("method")
    mine = [f"{name}={value}" for name, value in _counts(method).items()]
    return mine + (_told(inner) if isinstance(inner, Method) else [])
