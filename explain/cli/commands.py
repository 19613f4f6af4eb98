"""The commands and their options, as ``commands.toml`` describes them, and the parsers that are made of them."""

import argparse
import gc
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from explain._utils.errors import ExplainError
from explain._utils.spelling import close_to, did_you_mean
from explain.cli.output import Output


class UsageError(ExplainError):
    """The command line cannot be meant as it was typed."""


@contextmanager
def as_usage(*kinds: type[ExplainError]) -> Iterator[None]:
    """Errors of these kinds are about what was typed."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def _reader(requirement: str, read: Callable[[str], Any], accepted: Callable[[Any], bool], *words: str) -> Any:
    """A reader of values for argparse, which takes some words as they are."""

    def value(text: str) -> Any:
        if text in words:
            return text
        with suppress(ValueError):
            if accepted(read(text)):
                return read(text)
        raise argparse.ArgumentTypeError(f"must be {requirement}, got {text!r}{_nearest(text, words)}")

    return value


def _numbers(text: str) -> Any:
    values = [float(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def _nearest(text: str, known: Iterable[str]) -> str:
    close = close_to(text, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


ACTIONS = {"flag": "store_true", "many": "append"}
READERS = {
    "positive": _reader("a number above 0", float, lambda value: 0 < value < float("inf")),
    "opacity": _reader("a number from 0 to 1", float, lambda value: 0 <= value <= 1),
    "count": _reader("a whole number from 1", int, lambda value: value >= 1),
    "from zero": _reader("a whole number from 0", int, lambda value: value >= 0),
    "crop": _reader("center, whole, or a share above 0 and up to 1", float, lambda share: 0 < share <= 1,
                    "center", "whole"),
    "channels": _reader("a number, or one for each channel as in 0.5,0.4,0.3", _numbers,
                        lambda values: isinstance(values, float) or len(values) == 3),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Option:
    """An option, or a positional argument where its flag has no dashes.

    ``words`` may be typed after it, or are the name of a list of `explain.cli.listed`; ``how`` has the other arguments
    of argparse's ``add_argument``.
    """

    name: str
    flags: tuple[str, ...]
    default: Any
    words: Sequence[str] | str
    how: Mapping[str, Any]


def _option(
    name: str, help: str, *, positional: bool = False, short: str | None = None, kind: str = "", type: str = "",
    default: Any = None, otherwise: str = "", words: Sequence[str] | str = (), **how: Any,
) -> Option:  # fmt: skip
    """Make an option of its entry in ``commands.toml``."""
    long = name if positional else f"--{name.replace('_', '-')}"
    usual = otherwise or default
    how["help"] = help + "; repeatable" * (kind == "many") + (f" (default: {usual})" if usual else "")
    if kind:
        how["action"] = ACTIONS[kind]
    if type:
        how["type"] = READERS[type]
    flags = (long,) if short is None else (long, short)
    return Option(name, flags, False if kind == "flag" else default, words or how.get("choices", ()), how)


@dataclass(frozen=True)
class Command:
    """A command: its name, what it does in a few words, its options, and the function that does it.

    ``key`` is what the list of results is called in a JSON document. ``needs_images`` says that a command that takes
    photos is of no use without.
    """

    name: str
    about: str
    options: tuple[Option, ...]
    function: str
    example: str
    key: str = "results"
    needs_images: bool = True

    @property
    def prog(self) -> str:
        """What is typed for it."""
        return "explain" if self.name == "explain" else f"explain {self.name}"

    @property
    def flags(self) -> dict[str, Option]:
        """Its options by what is typed for each, without positional arguments."""
        return {flag: option for option in self.options for flag in option.flags if flag.startswith("-")}

    def run(self, options: argparse.Namespace, answer: Output) -> int | None:
        """Do it, and return an exit code; None is 0. Its module is loaded here, since most of them take a while."""
        name, _, function = self.function.partition(".")
        collects = gc.isenabled() and "torch" not in sys.modules
        try:
            if collects:  # the objects of torch all stay: a search for garbage among them takes a sixth of the time
                gc.disable()
            module = import_module(f"explain.cli.{name}")
        finally:
            if collects:
                gc.freeze()  # nor are they searched later
                gc.enable()
        found: int | None = getattr(module, function)(options, answer)
        return found


def _read_commands() -> Iterator[Command]:
    """Yield the commands of ``commands.toml``."""
    table = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))
    for name, about in table["commands"].items():
        known = table["options"] | about.pop("own", {})
        names = [each for entry in about.pop("options") for each in table["groups"].get(entry, [entry])]
        entries = {each: dict(known[each]) for each in names}
        for each in entries.values():
            each |= {**table["options"].get(each.pop("like", ""), {}), **each}
        options = tuple(_option(each, **entry) for each, entry in entries.items())
        yield Command(name, options=options, function=about.pop("run"), **about)


EXPLAIN, *_OTHERS = _read_commands()
COMMANDS = {command.name: command for command in _OTHERS}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with a hint."""

    def error(self, message: str) -> NoReturn:
        named = message.startswith("argument ")
        line = message.removeprefix("argument ").replace(": ", " ", 1) if named else message
        raise UsageError(line if "did you mean" in line else f"{line}; {self.prog} --help shows the options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """List the choices, and suggest the closest."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = _nearest(str(value), known)
            raise argparse.ArgumentError(action, f"must be one of {', '.join(known)}, got {value!r}{hint}")


def parser(command: Command, epilog: str = "") -> argparse.ArgumentParser:
    """Make a parser; options that were not typed are not in its result."""
    made = _Parser(
        command.prog, description=command.about, epilog=epilog, argument_default=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for option in command.options:
        made.add_argument(*option.flags, **option.how)
    return made


def read(command: Command, words: Sequence[str], defaults: Mapping[str, Any], epilog: str) -> argparse.Namespace:
    """Return the values of all options, with defaults for those that were not typed; ``given`` names the others.

    ``defaults`` replace the options' own; ``epilog`` ends the help.

    Raises:
        UsageError: an option is unknown, or has a value that it does not take.
    """
    end = words.index("--") if "--" in words else len(words)  # what follows are names, whatever they begin with
    found, unknown = parser(command, epilog).parse_known_intermixed_args(words[:end])
    if unknown:
        raise UsageError(_unknown(command, unknown[0].split("=")[0]))
    if words[end + 1 :]:
        names = next((option.name for option in command.options if option.how.get("nargs") == "*"), None)
        if names is None:
            raise UsageError(_unknown(command, words[end + 1]))
        setattr(found, names, [*getattr(found, names, ()), *words[end + 1 :]])
    given = frozenset(vars(found))
    for option in command.options:
        if option.name not in given:
            setattr(found, option.name, defaults.get(option.name, option.default))
    found.given = given
    return found


CONFIGS = {"explain.toml": (), "pyproject.toml": ("tool", "explain")}
"""Files of the current folder that may hold options, and the table that has them."""


def configured(command: Command) -> tuple[str, dict[str, Any]]:
    """Read the options that one repeats from ``explain.toml``, or ``[tool.explain]`` in ``pyproject.toml``.

    Keys are long names of options; those of a table named like a command are for this command only. Options of other
    commands do not count here.

    Returns:
        The name of the file, empty without one, and the values by option.

    Raises:
        UsageError: the file cannot be read, or no command has such an option.
    """
    for file, path in CONFIGS.items():
        if not Path(file).is_file():
            continue
        try:
            table = tomllib.loads(Path(file).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} must hold TOML, but {error}; mend it") from None
        for key in path:
            table = table.get(key, {})
        chosen = {key: value for key, value in table.items() if not isinstance(value, dict)}
        chosen |= table.get(command.name, {})
        if not chosen:
            continue
        known = [flag[2:] for each in (command, EXPLAIN, *COMMANDS.values()) for flag in each.flags if flag[:2] == "--"]
        for key in chosen:
            if key not in known:
                raise UsageError(f"{file}: option {key!r} is unknown; {did_you_mean(key, known)}")
        mine = {key: command.flags[f"--{key}"] for key in chosen if f"--{key}" in command.flags}
        words = [word for key, option in mine.items() for word in _typed(option, chosen[key])]
        own = replace(command, options=tuple(dict.fromkeys(command.flags.values())))
        try:
            return file, vars(parser(own).parse_args(words))
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from None
    return "", {}


def _typed(option: Option, value: Any) -> list[str]:
    """An option of a file as it would be typed; of a list, the first where this command takes only one."""
    name = option.flags[0]
    if isinstance(value, bool):
        return [name] * value
    if isinstance(value, list) and not all(isinstance(each, str) for each in value):
        value = ",".join(map(str, value))  # numbers of channels
    values = value if isinstance(value, list) else [value]
    return [f"{name}={each}" for each in (values if "action" in option.how else values[:1])]


def _unknown(command: Command, name: str) -> str:
    known = [flag for flag in command.flags if flag.startswith("--")]
    guess = did_you_mean(name, known) if name.startswith("--") else ""
    hint = guess if guess.startswith("did you mean") else f"{command.prog} --help shows the options"
    return f"{'option' if name.startswith('-') else 'argument'} {name!r} is unknown; {hint}"
