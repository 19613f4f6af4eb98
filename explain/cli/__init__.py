"""`explain image.jpg`: arguments in, printed lines and an exit code out.

    arguments   the options, and the parsers that are made of them
    output      lines or one JSON document, errors, notes; exit codes; `Command`
    progress    a bar with the time that is left
    inputs      photos and models by the names that were typed
    each        the same work for each of several photos; photos whose results exist
    options     options without effect, budgets, baselines, rules of methods, metrics
    explaining  `explain PHOTO`
    running     `explain run`, `explain export`, `explain insight`, `explain film`
    serving     `explain serve`
    listing     `explain methods`, `metrics`, `models`, `layers`, `inspect`, `concepts`
    commands    which of them was typed

To add a command, write a module with a `Command`, and enter it in `commands`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Sequence

from explain._utils.errors import ExplainError, raised, typed
from explain.cli.arguments import JSON, UsageError
from explain.cli.commands import chosen
from explain.cli.output import DONE, FAILED, INTERRUPTED, USAGE, Output, OutputClosedError, tell

__all__ = ["main"]


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
    answer = Output(as_json=JSON.flags[0] in words[:end])
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
        return command.run(options, answer)
    except OutputClosedError:
        raise
    except UsageError as error:
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
