"""`explain image.jpg`: arguments in, printed lines and an exit code out.

    commands    the commands and their options, as ``commands.toml`` describes them, and their parsers
    output      lines or one JSON document, errors, notes; exit codes; a bar with the time that is left
    arguments   photos and models by the names that were typed, the same work for each of several photos; what options
                mean together: methods, metrics, baselines, budgets; options without effect
    explaining  `explain PHOTO`, `explain layers`, `inspect`, `concepts`, `trace`
    running     `explain run`, `export`, `insight`, `repair`, `film`, `serve`
    listed      `explain methods`, `metrics`, `models`, `version`, without torch; `explain completion`

To add a command, describe it in ``commands.toml``, and write its function. The module of a command is loaded when it
runs, so that those that need no torch do not wait for it.
"""

import argparse
import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence

from explain._utils.errors import ArgumentError, ExplainError, raised, typed
from explain._utils.spelling import close_to
from explain.cli.commands import COMMANDS, EXPLAIN, Command, UsageError, configured, read
from explain.cli.output import DONE, FAILED, INTERRUPTED, USAGE, Output, OutputClosedError, tell

__all__ = ["main"]


def chosen(words: Sequence[str], answer: Output) -> tuple[Command, argparse.Namespace]:
    """Return the command that was typed, and its options.

    The first word may name a command; all else is about photos. A photo with the name of a command is written with its
    folder, as "./run".

    Raises:
        UsageError: an option is unknown, lacks a value, or would have no effect.
    """
    command, word = EXPLAIN, words[0] if words else ""
    if word == "--version":
        command, words = COMMANDS["version"], words[1:]
    elif word in COMMANDS:
        command, words = COMMANDS[word], words[1:]
    elif re.fullmatch(r"[A-Za-z]+", word) and not os.path.lexists(word):
        close = close_to(word, COMMANDS, 1)
        if close:
            raise UsageError(f"{word!r} is neither a file nor a command; did you mean 'explain {close[0]}'?")
    answer.key = command.key
    for flag in (each.split("=")[0] for each in words[: words.index("--") if "--" in words else None]):
        if flag in EXPLAIN.flags and flag not in command.flags:
            raise UsageError(f"{flag} would have no effect with {command.prog}; leave it out")
    names = "\n".join(f"  explain {each.name:<10} {each.about}" for each in COMMANDS.values())
    listed = f"commands, each with --help of its own:\n{names}\n\n" if command is EXPLAIN else ""
    file, defaults = configured(command)
    found = read(command, words, defaults, f"{listed}example: {command.example}")
    answer.quiet, answer.verbose = (getattr(found, name, False) for name in ("quiet", "verbose"))
    if defaults:
        answer.note(f"options from {file}: {', '.join(defaults)}")
    if command.needs_images and not getattr(found, "images", True):
        raise UsageError(f"name at least one image; {command.prog} --help shows the options")
    return command, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code.

    0 if all is done; 1 if a photo could not be explained or a file not written; 2 if what was asked for cannot be done
    whatever the photo, as with an option, method, model, layer or label that does not exist; 130 if interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a label that the terminal cannot show is no reason to stop
    if not logging.getLogger("PIL").handlers:
        logging.getLogger("PIL").addHandler(logging.NullHandler())  # its log goes to standard error otherwise
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    answer = Output(as_json="--json" in words[:end])
    try:
        with typed(), answer.alone():
            code = _answered(words, answer)
            answer.end()
            return code
    except OutputClosedError as error:
        if not isinstance(error.__cause__, BrokenPipeError):
            tell(f"explain: output cannot be printed: {error}")
        return FAILED
    except KeyboardInterrupt:  # before there was an answer, or while it was printed
        return INTERRUPTED


def _answered(words: Sequence[str], answer: Output) -> int:
    """Do what was typed; whatever goes wrong is part of the answer."""
    try:
        helped = io.StringIO()
        try:
            with contextlib.redirect_stdout(helped):
                command, options = chosen(words, answer)
        except SystemExit:  # argparse has printed its help, and would leave
            answer.key = "help"
            answer.add(helped.getvalue())
            answer.say(*helped.getvalue().rstrip().split("\n"))
            return DONE
        return command.run(options, answer) or DONE
    except OutputClosedError:
        raise
    except (UsageError, ArgumentError) as error:
        answer.complain(str(error))
        return USAGE
    except ExplainError as error:
        return answer.complain(str(error))
    except MemoryError:
        return answer.complain("memory must hold the model and the photo, but it ran out; close other programs")
    except KeyboardInterrupt:
        answer.complain("interrupted")
        return INTERRUPTED
    except BaseException as error:  # a fault of our own: what is done is said, and the fault is shown
        answer.errors.append(raised(error))
        answer.end()
        raise
