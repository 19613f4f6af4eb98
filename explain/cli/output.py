"""What a command prints: lines as they come, or one JSON document at the end; and `Command` as a value."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from explain._utils.errors import ExplainWarning, OutputError, printable
from explain.cli.arguments import Option

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class OutputClosedError(OutputError):
    """Standard output takes no more."""


class Output:
    """What a command says on standard output, and what went wrong.

    As lines, they are printed as they come. As JSON, ``items`` are kept for one document that ends the answer, under
    the name ``key``, with the ``errors``.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json, self.key = as_json, "results"
        self.items: list[Any] = []
        self.errors: list[str] = []
        self._stream: TextIO | None = sys.stdout
        self._noted: set[str] = set()

    def say(self, *lines: object) -> None:
        """Print lines that cannot steer the terminal, unless a document is printed instead."""
        if not self.as_json:
            self._print(*lines)

    def add(self, item: Any) -> None:
        """Enter something in the document."""
        self.items.append(item)

    def complain(self, message: str) -> int:
        """Say in one line on standard error what went wrong, and enter it in the document."""
        self.errors.append(message)
        tell(f"explain: {' '.join(message.split())}")
        return FAILED

    def note(self, message: str, *, once: bool = False) -> None:
        """Say something on standard error that is no error."""
        if not once or message not in self._noted:
            self._noted.add(message)
            tell(f"note: {message}")

    def end(self) -> None:
        """Print the document, if there is to be one; what cannot be printed shows here, and not later."""
        if self.as_json:
            from explain.data.files import json_text

            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._print(*json_text({self.key: self.items, "errors": self.errors}, encoding).split("\n"))
        self.flush()

    def flush(self) -> None:
        """Let what was said be seen at once."""
        with _heard():
            if self._stream is not None:
                self._stream.flush()

    def _print(self, *lines: object) -> None:
        with _heard():
            for line in lines:
                if self._stream is not None:  # as it is where standard output was closed
                    print(printable(line), file=self._stream)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep standard output for what is said here; what anything else prints there goes to standard error."""
        with _set_apart() as self._stream:
            try:
                yield
            except OutputClosedError:
                # Whoever read our output has gone, or it cannot be written; the interpreter is not to complain at exit.
                with suppress(io.UnsupportedOperation, AttributeError):  # it may be something else than a file
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # type: ignore[union-attr]
                raise


@contextmanager
def _heard() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputClosedError(error.strerror) from error


@contextmanager
def _set_apart() -> Iterator[TextIO | None]:
    """Yield standard output, or None where it is closed, and send there nothing else until the block ends."""
    ours = sys.stdout
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr or stack.enter_context(_nowhere())))
        if ours is None or _number(ours) != 1 or _number(sys.stderr) != 2:
            yield ours
            return
        ours.flush()
        kept = os.dup(1)  # programs and libraries in C print to the number, and know no names
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 1)
        os.dup2(2, 1)
        mine = open(  # noqa: SIM115
            kept, "w", encoding=ours.encoding, errors="backslashreplace", closefd=False,
            buffering=1 if getattr(ours, "line_buffering", False) else -1,
        )  # fmt: skip
        stack.callback(mine.close)
        yield mine


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _number(stream: Any) -> int | None:
    """The file descriptor of a stream, or None where it has none."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def tell(line: str) -> None:
    """Print a line on standard error that cannot steer the terminal."""
    if sys.stderr is not None:  # it is None where standard error was closed
        print(printable(line), file=sys.stderr)


@contextmanager
def notes(answer: Output, about: str = "") -> Iterator[None]:
    """Print the package's own warnings as notes, and keep those of libraries to themselves."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ExplainWarning)
        try:
            yield
        finally:
            for warning in caught:
                said = str(warning.message)
                answer.note(f"{about}: {said}" if about and about not in said else said, once=True)


Run = Callable[[argparse.Namespace, Output], int]
"""Does what was asked for, says it, and returns the exit code."""


@dataclass(frozen=True)
class Command:
    """A command: its name, what it does in a few words, its options, and the function that does it.

    ``key`` is what the list of results is called in a JSON document. ``flag`` is the option of plain ``explain`` that
    means the same; what it takes goes to the option ``value``. ``needs_images`` says that a command that takes photos
    is of no use without. A command is one module with one such value, and one line in `explain.cli.commands`.
    """

    name: str
    about: str
    options: tuple[Option, ...]
    run: Run
    key: str = "results"
    flag: Option | None = None
    value: str = ""
    example: str = ""
    needs_images: bool = True
