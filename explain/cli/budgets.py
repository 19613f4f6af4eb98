"""`--runs`, `--until` and `--seconds`: how much work methods that estimate may do."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from explain.arguments import BUDGET

if TYPE_CHECKING:
    from explain.methods import Method


def given_budget(options: argparse.Namespace) -> dict[str, float]:
    """The budgets that were typed, by the names of the methods' options."""
    return {option.name: getattr(options, option.name) for option in BUDGET if option.name in options.given}


def within_budget(methods: Iterable[str | Method], options: argparse.Namespace) -> list[Method]:
    """The methods with the budgets that were typed, as far as each has such an option.

    Raises:
        MethodError: one cannot do with so little.
    """
    from explain.methods import get_method
    from explain.methods import options as options_of

    found = []
    for method in map(get_method, methods):
        mine = {name: value for name, value in given_budget(options).items() if name in options_of(method)}
        found.append(replace(method, **mine) if mine else method)  # type: ignore[type-var]
    return found
