"""What there is: `explain methods`, `metrics`, `models`, `version`, and `explain completion` for the shell.

Methods and metrics come from a file, since torch takes seconds; ``python -m explain.cli.listed`` writes it.
"""

import argparse
import fnmatch
import json
import sys
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

from explain._utils.spelling import did_you_mean
from explain._utils.version import __version__
from explain.cli.commands import COMMANDS, EXPLAIN, UsageError
from explain.cli.output import Output

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


_BASH = """_explain() {
  COMPREPLY=($(explain completion words -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _explain explain"""
SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": "complete -c explain -a '(explain completion words -- (commandline -opc)[2..] (commandline -ct))'",
}


def complete(options: argparse.Namespace, answer: Output) -> None:
    """Print the script of a shell, or what may take the place of the last of some words."""
    if options.shell in SCRIPTS:
        answer.say(*SCRIPTS[options.shell].splitlines())
        return
    *before, last = options.words or [""]
    command = COMMANDS.get(before[0] if before else "", EXPLAIN)
    option = command.flags.get(before[-1]) if before else None
    if option is not None and option.how.get("action") != "store_true":
        words = option.words
        found = [item["name"] for item in items(words)] if isinstance(words, str) else words  # none: the shell's files
    else:
        found = [*([] if before else COMMANDS), *(command.flags if last.startswith("-") else ())]
    answer.say(*(word for word in found if word.startswith(last)))
