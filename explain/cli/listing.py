"""Lists: `explain methods`, `metrics`, `models`, `version`."""

import argparse
import fnmatch
from typing import Any

from explain._utils.spelling import did_you_mean
from explain._utils.version import __version__
from explain.cli.commands import UsageError
from explain.cli.listed import items
from explain.cli.output import Output


def list_methods(options: argparse.Namespace, answer: Output) -> None:
    """List the methods by family; of those that are named, the options too."""
    found = _matching(items("methods"), options, "method")
    width = max(map(len, [*(item["name"] for item in found), "augmented(METHOD)"]))
    family = ""
    for item in found:
        answer.add(item)
    for item in sorted(found, key=lambda item: items("families").index(item["family"])):
        suffix = f"; for {item['only_for']}" if item["only_for"] else ""
        answer.say(
            *([item["family"]] if item["family"] != family else []),
            f"  {item['name']:<{width}}  {item['about']} ({item['paper']}){suffix}",
            *(f"  {'':<{width}}  {line}" for line in _lines_of(item["options"], options)),
        )
        family = item["family"]
    if options.pattern is None:
        answer.say("any of them", f"  {'smooth(METHOD)':<{width}}  on average over noisy copies of the photo",
                   f"  {'augmented(METHOD)':<{width}}  over flips and scales of the photo")  # fmt: skip


def list_metrics(options: argparse.Namespace, answer: Output) -> None:
    """List the metrics; of those that are named, the options too."""
    for item in _matching(items("metrics"), options, "metric"):
        arrow = {"more": "↑", "less": "↓"}[item["better"]]
        answer.add(item)
        answer.say(f"{item['name']:<24} {arrow} {item['about']} ({item['paper']})")
        answer.say(*(f"{'':<24} {line}" for line in _lines_of(item["options"], options)))


def list_models(options: argparse.Namespace, answer: Output) -> None:
    """List the models that have a name."""
    from explain.models import list_models

    for item in _matching([{"name": name} for name in list_models()], options, "model"):
        answer.add(item["name"])
        answer.say(item["name"])


def _matching(found: list[dict[str, Any]], options: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Those whose names fit the pattern; all of them without one."""
    if options.pattern is None:
        return found
    names = [item["name"] for item in found]
    fitting = fnmatch.filter(names, options.pattern.lower())
    if not fitting:
        raise UsageError(f"{kind} {options.pattern!r} is unknown; {did_you_mean(options.pattern, names)}")
    return [item for item in found if item["name"] in fitting]


def _lines_of(values: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The options of a method or metric that was named."""
    told = ", ".join(f"{name}={value}" for name, value in values.items())
    return [f"options: {told}"] if told and options.pattern is not None else []


def tell_version(options: argparse.Namespace, answer: Output) -> None:
    """Print the version."""
    answer.add(__version__)
    answer.say(f"explain {__version__}")
