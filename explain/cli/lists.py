"""What there is: `explain methods`, `metrics`, `models`, `version`; and `explain completion` for
the shell."""

from dataclasses import fields
from fnmatch import fnmatch
from typing import Any

import click
from click.shell_completion import get_completion_class, shell_complete

from explain._utils.spelling import did_you_mean
from explain._utils.version import __version__
from explain.cli.commands import UsageError, commands, json
from explain.cli.output import Output

COMPLETION = "_EXPLAIN_COMPLETE"
"""The environment variable by which the script of a shell asks for words."""

pattern = click.argument("pattern", required=False)


@commands.command("methods", key="methods", epilog="Example: explain methods '*cam*'")
@pattern
@json
@click.pass_obj
def list_methods(answer: Output, pattern: str | None) -> None:
    """List the methods by family; of a name or pattern, their options too."""
    import explain
    from explain.methods.base import FAMILIES, get_method, innermost_method, options

    methods = list(map(get_method, _matching(explain.list_methods(), pattern, "method")))
    # the last is the longest of the wrappers below
    width = max(len(name) for name in [*(method.name for method in methods), "augmented(METHOD)"])
    for family in FAMILIES:
        # a method that wraps another stands with that one
        members = [method for method in methods if innermost_method(method).family == family]
        if members:
            answer.say(family)
        for method in members:
            values = {name: _plain(value) for name, value in options(method).items()}
            document = {
                "name": method.name,
                "about": method.summary,
                "paper": method.paper,
                "only_for": method.only_for or None,
                "family": family,
                "options": values,
            }
            suffix = f"; for {method.only_for}" if method.only_for else ""
            line = f"  {method.name:<{width}}  {method.summary} ({method.paper}){suffix}"
            # below the summary, which has two blanks on either side of the name before it
            answer.add(document, [line, *_options_lines(pattern, values, indent=width + 4)])
    # lines go by family, the document by name
    answer.items.sort(key=lambda item: str(item["name"]))
    if pattern is None:
        wrappers = [
            "any of them",
            f"  {'smooth(METHOD)':<{width}}  on average over noisy copies of the photo",
            f"  {'augmented(METHOD)':<{width}}  over flips and scales of the photo",
            f"  {'certified(METHOD)':<{width}}  which places no small change can move",
        ]
        answer.say_all(wrappers)


@commands.command("metrics", key="metrics", epilog="Example: explain metrics '*mprt*'")
@pattern
@json
@click.pass_obj
def list_metrics(answer: Output, pattern: str | None) -> None:
    """List the metrics; of a name or pattern, their options too."""
    import explain
    from explain.metrics import get_metric
    from explain.metrics.evaluation import ARROWS

    for metric in map(get_metric, _matching(explain.list_metrics(), pattern, "metric")):
        values = {field.name: str(getattr(metric, field.name)) for field in fields(metric)}
        document = {
            "name": metric.name,
            "about": metric.summary,
            "paper": metric.paper,
            "units": metric.units,
            "better": metric.better,
            "options": values,
        }
        # the name has 24 places and a blank, below which the options are indented
        line = f"{metric.name:<24} {ARROWS[metric.better]} {metric.summary} ({metric.paper})"
        answer.add(document, [line, *_options_lines(pattern, values, indent=25)])


@commands.command("models", key="models", epilog="Example: explain models 'resnet*'")
@pattern
@json
@click.pass_obj
def list_models(answer: Output, pattern: str | None) -> None:
    """List the models that have a name."""
    from explain.models import list_models

    for name in _matching(list_models(), pattern, "model"):
        answer.add(name, [name])


def _matching(names: list[str], pattern: str | None, kind: str) -> list[str]:
    """Return the names that match a pattern such as "*cam*", or all without a pattern; ``kind``
    ("method", "metric", "model") is for the error if none matches."""
    if pattern is None:
        return names
    fitting = [name for name in names if fnmatch(name, pattern.lower())]
    if not fitting:
        raise UsageError(f"{kind} {pattern!r} is unknown; {did_you_mean(pattern, names)}")
    return fitting


def _plain(value: Any) -> Any:
    """Return the value of a method's option as JSON takes it: plain values as they are, objects
    such as a baseline by the name that is typed for them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "name", None) or str(value)


def _options_lines(pattern: str | None, values: dict[str, Any], indent: int) -> list[str]:
    """Return the line with the options (values by name) of a method or metric, indented by so many
    spaces; no line in a list of all, without a pattern, or where there are no options."""
    texts = [f"{name}={value}" for name, value in values.items()]
    return [f"{'':<{indent}}options: {', '.join(texts)}"] if pattern is not None and texts else []


@commands.command("version", key="version", epilog="Example: explain version")
@json
@click.pass_obj
def tell_version(answer: Output) -> None:
    """Print the version."""
    answer.add(__version__, [f"explain {__version__}"])


@commands.command("completion", epilog='Example: eval "$(explain completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_obj
def completion(answer: Output, shell: str) -> None:
    """Print the script that completes words in a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    answer.say_all(kind(commands, {}, "explain", COMPLETION).source().splitlines())


def complete(instruction: str) -> int:
    """Print the words that may follow on the command line, and return the exit code;
    ``instruction`` is what a shell's completion script has put into `COMPLETION`.
    """
    return shell_complete(commands, {}, "explain", COMPLETION, instruction)
