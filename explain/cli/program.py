"""The command line as a function: from words to an exit code, with all commands."""

import atexit
import gc
import io
import logging
import os
import sys
from collections.abc import Sequence

import click

from explain._utils.errors import ArgumentError, ExplainError, raised, typed
from explain.cli import lists, photos, runs, server, views  # noqa: F401  # which add their commands to the group
from explain.cli.commands import UsageError, commands
from explain.cli.interrupts import after_imports, code_of
from explain.cli.output import DONE, FAILED, USAGE, Output, OutputClosedError, tell


def exit_code(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code, as `explain.cli.main` does."""
    # set before torch is loaded: its idle threads would take processor time by spinning
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "torch" not in sys.modules:
        # the garbage collector would take a sixth of the time with the many objects of torch
        gc.set_threshold(100_000)
        # and as long again at the end of the process, which frees all memory anyway
        atexit.register(gc.freeze)
    if lists.COMPLETION in os.environ:
        return lists.complete(os.environ[lists.COMPLETION])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a label that the terminal cannot show is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    if not logging.getLogger("PIL").handlers:
        # otherwise Pillow's log goes to standard error
        logging.getLogger("PIL").addHandler(logging.NullHandler())
    words = list(sys.argv[1:] if arguments is None else arguments)
    # words behind "--" are photos, whatever they look like
    end = words.index("--") if "--" in words else len(words)
    answer = Output(as_json="--json" in words[:end])
    try:
        # interrupts wait for imports, messages name options as typed, and nothing else prints
        with after_imports(), typed(), answer.alone():
            code = _answered(words, answer)
            answer.end()
            return code
    except OutputClosedError as error:
        # a reader that has seen enough, such as head, is no mistake to tell of
        if not isinstance(error.__cause__, BrokenPipeError):
            tell(f"explain: output cannot be printed: {error}")
        return FAILED


def _answered(words: list[str], answer: Output) -> int:
    """Run the typed command and return its exit code; errors are printed and put into the JSON
    document. Only a fault of this package and a closed output are raised.
    """
    try:
        with commands.make_context("", words, obj=answer) as context:
            return commands.invoke(context) or DONE
    except click.exceptions.Exit:  # the help was asked for
        return DONE
    except OutputClosedError:
        raise
    except (UsageError, ArgumentError) as error:
        answer.complain(str(error))
        return USAGE
    except ExplainError as error:
        return answer.complain(str(error))
    except MemoryError:
        return answer.complain(
            "memory must hold the model and the photo, but it ran out; close other programs"
        )
    except KeyboardInterrupt as interrupt:
        answer.complain("interrupted")
        return code_of(interrupt)
    # a fault of this package: results so far are printed, and the traceback is shown
    except BaseException as error:
        answer.errors.append(raised(error))
        answer.end()
        raise
