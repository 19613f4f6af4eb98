"""`--metric` and `--check`: how good the maps of a photo are, in a table; and `explain metrics`, which lists them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from explain._utils.errors import ExplainError, naming
from explain.cli.arguments import JSON, PATTERN, UsageError
from explain.cli.output import DONE, Command, Output

if TYPE_CHECKING:
    from PIL import Image

    from explain.checks import Verdict
    from explain.explanation.explanation import Explanation
    from explain.methods import Method
    from explain.metrics import Metric
    from explain.metrics.table import Table


def checked_metrics(options: argparse.Namespace, *, boxes: bool = False) -> list[Metric]:
    """Return the metrics that were named, and refuse what cannot be meant; ``boxes`` may come with the photos."""
    asked = [name for name in ("metric", "check") if getattr(options, name, None)]
    if asked and options.crop == "five":
        raise UsageError(f"--{asked[0]} judges maps of one crop, and --crop five makes one map of five; leave one out")
    if not options.metric:
        return []
    from explain.metrics import get_metric

    try:
        chosen = {metric.name: metric for metric in map(get_metric, options.metric)}
    except ExplainError as error:
        raise UsageError(str(error)) from None
    for name, metric in chosen.items():
        if metric.needs_object and not boxes:
            raise UsageError(
                f"metric {name!r} needs to know where the object is, which cannot be typed; use explain.evaluate(..., "
                "boxes=...) in Python, or another metric"
            )
    return list(chosen.values())


def judged(
    explanation: Explanation,
    photo: Image.Image,
    methods: Sequence[str | Method],
    metrics: Sequence[Metric],
    **options: Any,
) -> list[Table]:
    """Judge the maps of each target; the methods are run again where a metric asks for it."""
    from explain.methods.registry import get_method
    from explain.metrics import ReattributionMetric, evaluate

    explainer = explanation.explainer
    x, tables = explainer.as_input(photo), []
    again = any(isinstance(metric, ReattributionMetric) for metric in metrics)
    objects = {method.name: method for method in map(get_method, methods)}
    for result in explanation.results:
        chosen = next(iter(result.values())).target
        target = chosen if isinstance(chosen, str) else int(chosen[0])
        given: Any = {name: objects[name] if again else each for name, each in result.items()}
        with naming([explanation.source]):
            tables.append(
                evaluate(explainer.model, x, given, metrics, target=target, activation=explainer.activation, **options)
            )
    return tables


def checked(explanation: Explanation, **options: Any) -> list[Verdict]:
    """Check the maps of each target."""
    return [explanation.check(target=index, **options) for index in range(len(explanation.results))]


def lines_of(tables: list[str], targets: list[str]) -> list[str]:
    """Tables and verdicts as they are printed, with what was explained where there are several."""
    lines = []
    for table, target in zip(tables, targets, strict=True):
        lines += [f"  {target}"] if len(tables) > 1 else []
        lines += [f"  {line}" for line in table.splitlines()]
    return lines


def list_metrics(options: argparse.Namespace, answer: Output) -> int:
    """List the metrics; of those that are named, the options too."""
    import fnmatch

    from explain._utils.spelling import did_you_mean
    from explain.metrics import get_metric, list_metrics
    from explain.metrics.table import ARROWS

    pattern = getattr(options, "pattern", None)
    names = list_metrics() if pattern is None else fnmatch.filter(list_metrics(), pattern.lower())
    if not names:
        raise UsageError(f"metric {pattern!r} is unknown; {did_you_mean(str(pattern), list_metrics())}")
    for metric in map(get_metric, names):
        values = {each.name: str(getattr(metric, each.name)) for each in fields(metric)}
        about = {"name": metric.name, "about": metric.about, "paper": metric.paper, "units": metric.units}
        answer.add({**about, "better": metric.better, "options": values})
        answer.say(f"{metric.name:<24} {ARROWS[metric.better]} {metric.about} ({metric.paper})")
        if pattern is not None and values:
            answer.say(f"{'':<24} options: {', '.join(f'{name}={value}' for name, value in values.items())}")
    return DONE


METRICS = Command(
    "metrics", "list the metrics, with their options if one is named", (PATTERN, JSON), list_metrics, "metrics",
    example="explain metrics '*mprt*'",
)  # fmt: skip
