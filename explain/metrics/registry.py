"""Metrics by name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar, overload

from explain._utils.errors import MetricError, keywords, shown
from explain._utils.spelling import did_you_mean
from explain.metrics.base import Metric

MetricLike: TypeAlias = "str | Metric"
M = TypeVar("M", bound=Metric)

_known: dict[str, Metric] = {}


@overload
def register(metric: type[M], /) -> type[M]: ...
@overload
def register(**options: Any) -> Callable[[type[M]], type[M]]: ...
def register(metric: type[Metric] | None = None, /, **options: Any) -> Any:
    """Make a metric known by its name: ``@register`` with its default options, ``@register(order="lerf")`` with others.

    Raises:
        MetricError: the name is taken by another metric, or cannot be one.
    """
    if metric is None:
        return lambda metric: _add(metric, metric(**options))
    return _add(metric, metric())


def _add(kind: type[M], metric: M) -> type[M]:
    name = metric.name
    if not re.fullmatch(r"[a-z0-9+._-]+", name):
        raise MetricError(f"a metric's name must be of lower-case letters, digits and + . _ -, got {name!r}; change it")
    if _known.setdefault(name, metric) != metric:
        raise MetricError(
            f"metric {name!r} is already registered by {type(_known[name]).__qualname__}; choose another name"
        )
    return kind


@keywords()
def list_metrics(pattern: str = "*") -> list[str]:
    """Return the names of the metrics that match a glob pattern, in alphabetical order.

    >>> list_metrics("delet*")
    ['deletion']
    """
    if not isinstance(pattern, str):
        raise MetricError(f"pattern must be a text such as 'delet*', got {shown(pattern)}")
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_metric(metric: MetricLike) -> Metric:
    """Return the metric for a name; a metric is returned as it is.

    Raises:
        MetricError: the name is unknown, or the object is no metric.

    >>> get_metric("insertion").better
    'more'
    """
    if isinstance(metric, str):
        name = metric.strip().lower()
        if name not in _known:
            raise MetricError(f"metric {shown(metric)} is unknown; {did_you_mean(name, list_metrics())}")
        return _known[name]
    if isinstance(metric, type):
        raise MetricError(
            f"metric must be a name or an object, got the class {metric.__name__}; use {metric.__name__}()"
        )
    if not isinstance(metric, Metric):
        raise MetricError(f"metric must be a name or a metric, got {shown(metric)}; see explain.list_metrics()")
    return metric


def by_name(metrics: MetricLike | Iterable[MetricLike]) -> dict[str, Metric]:
    """Return the metrics by their names, in order.

    Raises:
        MetricError: none is given, or two different ones go by one name.
    """
    given = [metrics] if isinstance(metrics, str) or not isinstance(metrics, Iterable) else metrics
    chosen: dict[str, Metric] = {}
    for each in given:
        metric = get_metric(each)
        if chosen.setdefault(metric.name, metric) != metric:
            raise MetricError(
                f"metrics must have different names, got two of {metric.name!r}; ask for them in two calls"
            )
    if not chosen:
        raise MetricError("metrics must name at least one metric, got none; see explain.list_metrics()")
    return chosen
