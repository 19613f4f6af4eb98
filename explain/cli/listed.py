"""The methods and metrics as `explain methods` and `explain metrics` list them: from a file, since torch takes seconds.

``python -m explain.cli.listed`` writes the file.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

LISTED = Path(__file__).with_name("listed.json")


def items(kind: str) -> list[Any]:
    """All "methods", "metrics" or "families" of methods, in plain values; where torch is loaded, as registered."""
    if "explain.methods" in sys.modules:
        return registered()[kind]
    found: dict[str, list[Any]] = json.loads(LISTED.read_text("utf-8"))
    return found[kind]


def registered() -> dict[str, list[Any]]:
    """What is registered."""
    from explain.methods import list_methods
    from explain.methods.base import FAMILIES, get_method, innermost, options
    from explain.metrics import get_metric, list_metrics

    methods = [
        {
            "name": method.name, "about": method.about, "paper": method.paper, "only_for": method.only_for or None,
            "family": innermost(method).family,
            "options": {name: _plain(value) for name, value in options(method).items()},
        }
        for method in map(get_method, list_methods())
    ]  # fmt: skip
    metrics = [
        {
            "name": metric.name, "about": metric.about, "paper": metric.paper, "units": metric.units,
            "better": metric.better,
            "options": {each.name: str(getattr(metric, each.name)) for each in fields(metric)},
        }
        for metric in map(get_metric, list_metrics())
    ]  # fmt: skip
    return {"methods": methods, "metrics": metrics, "families": list(FAMILIES)}


def _plain(value: Any) -> Any:
    """An option's value as it is typed, and as JSON has it."""
    plain = isinstance(value, (bool, int, float, str, NoneType))
    return value if plain else getattr(value, "name", None) or str(value)


if __name__ == "__main__":
    LISTED.write_text(json.dumps(registered(), indent=1, ensure_ascii=False) + "\n", "utf-8")
