"""The defaults of methods and metrics, and what their options accept: a change breaks users' code.

``defaults.txt`` has a line for each; new ones are added with a release. Where a line changes, the
changelog says so.
"""

from pathlib import Path

from explain import list_methods, list_metrics
from explain.methods.base import get_method
from explain.metrics.base import get_metric

LISTED = Path(__file__).with_name("defaults.txt").read_text().splitlines()


def line_of(name: str, plugin: object) -> str:
    ranges = [getattr(plugin, kind, None) or {} for kind in ("minimums", "maximums", "below")]
    return f"{name}: {plugin!r}; at least {ranges[0]}, at most {ranges[1]}, below {ranges[2]}"


def test_defaults_and_ranges_are_those_that_users_have() -> None:
    of_methods = {line_of(name, get_method(name)) for name in list_methods()}
    of_metrics = {line_of(name, get_metric(name)) for name in list_metrics()}
    assert LISTED
    assert set(LISTED) <= of_methods | of_metrics
