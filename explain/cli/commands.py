"""Which commands there are, and which of them was typed."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

from explain._utils.spelling import close_to
from explain.cli.arguments import IMAGES, UsageError, parser, read
from explain.cli.explaining import EXPLAIN
from explain.cli.listing import CONCEPTS, INSPECT, LAYERS, METHODS, METRICS, MODELS, VERSION
from explain.cli.output import Command, Output
from explain.cli.running import EXPORT, FILM, INSIGHT, RUN
from explain.cli.serving import SERVE

COMMANDS = {
    command.name: command
    for command in (RUN, EXPORT, SERVE, INSIGHT, FILM, METHODS, METRICS, MODELS, LAYERS, INSPECT, CONCEPTS, VERSION)
}


def chosen(words: Sequence[str], answer: Output) -> tuple[Command, argparse.Namespace]:
    """Return the command that was typed, and its options.

    The first word may name a command, unless a file or folder has that name; all else is about photos.

    Raises:
        UsageError: an option is unknown, lacks a value, or would have no effect.
    """
    if words and words[0] in COMMANDS:
        if not os.path.lexists(words[0]):
            return _named(COMMANDS[words[0]], words[1:], answer)
        answer.note(f"{words[0]!r} is taken for the file or folder of that name, not for the command {words[0]}")
    elif words:
        _refuse_misspelt(words[0])
    return _plain(words, answer)


def _refuse_misspelt(word: str) -> None:
    """Refuse a first word that looks like the name of a command, and is none, nor a file or folder."""
    close = close_to(word, COMMANDS, 1) if re.fullmatch(r"[A-Za-z]+", word) and not os.path.lexists(word) else []
    if close:
        raise UsageError(f"{word!r} is neither a file nor a command; did you mean 'explain {close[0]}'?")


def _named(command: Command, words: Sequence[str], answer: Output) -> tuple[Command, argparse.Namespace]:
    answer.key = command.key
    made = parser(f"explain {command.name}", command.about, command.options, _example(command))
    own = {flag for option in command.options for flag in option.flags}
    elsewhere = {flag for option in EXPLAIN.options for flag in option.flags} - own
    for flag in (word.split("=")[0] for word in words):
        if flag in elsewhere:
            raise UsageError(f"{flag} would have no effect with {made.prog}; leave it out")
    found = read(made, command.options, words)
    _check_images(command, found, made.prog)
    return command, found


def _plain(words: Sequence[str], answer: Output) -> tuple[Command, argparse.Namespace]:
    """The command that options of plain ``explain`` stand for."""
    flags = {command.flag.name: (command.flag, command) for command in COMMANDS.values() if command.flag is not None}
    every = {option.name: option for option in (*EXPLAIN.options, *(flag for flag, _ in flags.values()))}
    names = "\n".join(f"  explain {command.name:<10} {command.about}" for command in COMMANDS.values())
    epilog = f"commands, each with --help of its own:\n{names}\n\n{_example(EXPLAIN)}"
    options = tuple(every.values())
    found = read(parser("explain", EXPLAIN.about, options, epilog), options, words)
    asked = [name for name in flags if name in found.given]
    if not asked:
        _check_images(EXPLAIN, found, "explain")
        return EXPLAIN, found
    flag, command = flags[asked[0]]
    answer.key = command.key
    allowed = {flag.name, *(option.name for option in command.options)}
    ignored = sorted(every[name].flags[0] for name in found.given - allowed)
    if ignored:
        raise UsageError(f"{', '.join(ignored)} would have no effect with {flag.flags[0]}; leave out one or the other")
    if command.value:
        setattr(found, command.value, getattr(found, flag.name))
    _check_images(command, found, "explain")
    return command, found


def _check_images(command: Command, found: argparse.Namespace, prog: str) -> None:
    if IMAGES in command.options and command.needs_images and not found.images:
        raise UsageError(f"name at least one image; {prog} --help shows the options")


def _example(command: Command) -> str:
    return f"example: {command.example}" if command.example else ""
