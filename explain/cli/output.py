"""What a command prints: lines as they come, or one JSON document at the end."""

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from explain._utils.errors import OutputError, collect_warnings, printable, quiet
from explain._utils.progress import StatusLine, duration

DONE = 0
FAILED = 1
USAGE = 2


class OutputClosedError(OutputError):
    """Standard output takes no more lines: it is closed, or its reader has gone."""


class Output:
    """What a command prints on standard output, and its errors and notes on standard error. With
    --json, ``items`` and ``errors`` become one document under ``key`` at the end."""

    def __init__(self, *, as_json: bool = False) -> None:
        """Prepare what a command prints; ``as_json`` says whether --json is given."""
        self.as_json = as_json
        self.key = "results"
        self.quiet = False
        self.verbose = False
        self.items: list[Any] = []
        self.errors: list[str] = []
        self._stream: TextIO | None = sys.stdout
        self._noted: set[str] = set()

    def say(self, line: object) -> None:
        """Print a line on standard output, unless --json or --quiet is given. Control characters
        are made visible: labels and file names must not steer the terminal."""
        self.say_all([line])

    def say_all(self, lines: Iterable[object]) -> None:
        """Print lines on standard output, unless --json or --quiet is given."""
        if not (self.as_json or self.quiet):
            self._print(lines)

    def add(self, item: Any, lines: Iterable[object] = ()) -> None:
        """Add an item to the JSON document, and print the lines that say the same to people."""
        self.items.append(item)
        self.say_all(lines)

    def complain(self, message: str) -> int:
        """Print an error as one line on standard error, also with --quiet, and add it to the
        errors of the JSON document; return the exit code of a failure."""
        self.errors.append(message)
        tell(f"explain: {' '.join(message.split())}")
        return FAILED

    def note(self, message: str, *, once: bool = False) -> None:
        """Print a note on standard error, unless --quiet is given; with ``once``, only the first
        time that a command has this note."""
        if not self.quiet and not (once and message in self._noted):
            self._noted.add(message)
            tell(f"note: {message}")

    def end(self) -> None:
        """Print the JSON document, if --json is given, and flush standard output."""
        if self.as_json:
            from explain.data.files import json_text

            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            document = {self.key: self.items, "errors": self.errors}
            self._print(json_text(document, encoding).split("\n"))
        self.flush()

    def flush(self) -> None:
        """Flush standard output, so that lines are seen before a command that goes on running."""
        with _as_closed_output():
            if self._stream is not None:
                self._stream.flush()

    def _print(self, lines: Iterable[object]) -> None:
        """Write lines to standard output, with control characters made visible.
        Raises `OutputClosedError` if it takes no more.
        """
        with _as_closed_output():
            if self._stream is not None:  # None where the process began without standard output
                self._stream.writelines(f"{printable(line)}\n" for line in lines)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Reserve standard output for this command's lines within the block; what else prints there
        goes to standard error, so that a JSON document stays valid.
        """
        with _standard_output() as self._stream:
            try:
                yield
            except OutputClosedError:
                # The reader has gone, or the output cannot be written. The rest goes to the null
                # device, so that the interpreter does not complain when it flushes at exit. In
                # tests and notebooks, the stream may be no file
                with suppress(io.UnsupportedOperation, AttributeError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # type: ignore[union-attr]
                raise


@contextmanager
def _as_closed_output() -> Iterator[None]:
    """Turn an error of the operating system within the block, from writing to standard output, into
    an `OutputClosedError`."""
    try:
        yield
    except OSError as error:
        raise OutputClosedError(error.strerror) from error


@contextmanager
def _standard_output() -> Iterator[TextIO | None]:
    """Yield a stream to standard output (None if it is closed); what others print within the block
    goes to standard error, through the descriptor too, as libraries in C do.
    """
    original = sys.stdout
    with ExitStack() as stack:
        # what Python prints; standard error is None where it was closed
        stack.enter_context(
            redirect_stdout(
                sys.stderr or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            )
        )
        # where streams are not those of the process, as in tests and notebooks, libraries in C
        # print past them anyway
        if original is None or _descriptor(original) != 1 or _descriptor(sys.stderr) != 2:
            yield original
            return
        # what libraries in C print: descriptor 1 becomes another name of standard error, and our
        # own lines go to a copy of what it was
        original.flush()
        saved_descriptor = os.dup(1)
        # callbacks run in reverse: the descriptor is put back before its copy is closed
        stack.callback(os.close, saved_descriptor)
        stack.callback(os.dup2, saved_descriptor, 1)
        os.dup2(2, 1)
        output = open(  # noqa: SIM115
            saved_descriptor,
            "w",
            encoding=original.encoding,
            errors="backslashreplace",
            closefd=False,
            buffering=1 if getattr(original, "line_buffering", False) else -1,
        )
        stack.callback(output.close)
        yield output


def _descriptor(stream: Any) -> int | None:
    """Return the file descriptor of a stream, or None where it has none (as in a notebook)."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def in_brackets(counts: Mapping[str, int]) -> str:
    """Return the counts that are not zero in brackets, such as " (2 failed)", to end a printed
    line."""
    parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f" ({parts})" if parts else ""


def wrote(files: Iterable[object]) -> list[str]:
    """Return a line "wrote FILE" for each file that a command has written."""
    return [f"wrote {file}" for file in files]


def tell(line: str) -> None:
    """Print a line on standard error, with control characters made visible so that they do not
    steer the terminal."""
    if sys.stderr is not None:  # it is None where standard error was closed
        print(printable(line), file=sys.stderr)


@contextmanager
def notes(answer: Output, photo: str = "") -> Iterator[None]:
    """Print this package's warnings within the block as notes, once each, and silence those of
    libraries. A note that does not name the file ``photo`` begins with it.
    """
    from explain.data.scans import split_slice

    messages: list[str] = []
    file, _ = split_slice(photo)  # the slices of one volume get the same notes
    try:
        with quiet(), collect_warnings(messages):
            yield
    finally:
        for message in messages:
            answer.note(message if file in message else f"{photo}: {message}", once=True)


MOMENT = 1.0  # seconds after which the passes of one photo are shown
SURE = 3.0  # seconds after which the time left is shown


MINUTE = 60.0  # seconds between two lines where there is no terminal


class RunProgress(StatusLine):
    """The progress line of `explain run` on standard error; without a terminal, a thread prints a
    line a minute. ``there`` counts photos that the run's file had before."""

    done = 0
    there = 0

    def __init__(self) -> None:
        """Begin the progress of a run; without a terminal, start the thread that prints it."""
        super().__init__()
        self._line = "no photo done yet"
        self._has_ended = threading.Event()
        self._has_told = False
        self._teller = threading.Thread(target=self._tell, daemon=True)
        if sys.stderr is not None and not sys.stderr.isatty():
            self._teller.start()

    def close(self) -> None:
        """Remove the progress line when the run has ended, and stop the thread that prints it; if
        that has printed any line, print the last one."""
        self.wipe()
        self._has_ended.set()
        if self._teller.is_alive():
            self._teller.join()
        if self._has_told:
            tell(self._line)

    def __call__(self, state: Any) -> None:
        """Show the progress of a run: the numbers of photos, and the seconds that have passed and
        are ``left``.
        """
        self.done = state.done
        self.there = state.there
        stored = state.there + state.done
        ended = stored + state.failed
        more = "" if state.total is None else f", {max(0, state.total - ended)} left"
        time_left = f", about {duration(state.left)} to go" if state.left else ""
        self._line = (
            f"{stored} photos done{more}, {state.failed} failed, {state.rate:.3g} a "
            f"second{time_left}"
        )
        self.draw(ended / state.total if state.total else None, self._line)

    def _tell(self) -> None:
        """Print the progress line once a minute until the run has ended; the body of the thread."""
        while not self._has_ended.wait(MINUTE):
            if not self.hidden:
                tell(self._line)
                self._has_told = True


class ProgressBar(StatusLine):
    """The progress of ``total`` photos one after the other, and of many passes for each; ``clock``
    gives the time in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the progress of ``total`` photos; nothing is drawn before `begin`."""
        super().__init__(clock)
        self.total = total
        self.done = 0
        self.name = ""
        self._begun = clock()
        self._photo_begun = self._begun

    def begin(self, name: str) -> None:
        """Show that work on a photo begins; ``name`` stands beside the bar. Of a single photo,
        nothing is shown until its passes take longer (`runs`)."""
        self.name = name
        self._photo_begun = self.clock()
        self._drawn = float("-inf")  # so that `draw` does not wait: the name has changed
        if self.total > 1:
            self._draw(0.0, "")

    def runs(self, done: int, total: int) -> None:
        """Show how many passes of the model are done for the current photo, out of ``total``, once
        the photo takes longer than `MOMENT`; methods call this as their ``progress``."""
        if self.clock() - self._photo_begun >= MOMENT and done < total:
            self._draw(done / total, f" {done}/{total} runs")

    def close(self) -> None:
        """Count the current photo as done, and remove the bar, so that lines can be printed."""
        self.done += 1
        self.wipe()

    def _draw(self, part: float, passes: str) -> None:
        """Draw the progress bar. ``part`` is the share of the current photo that is done, 0 to 1;
        ``passes`` is the text about its passes, or empty."""
        share = (self.done + part) / self.total
        elapsed = self.clock() - self._begun
        photos = f"{self.done}/{self.total} " if self.total > 1 else ""
        left = (
            f", about {duration(elapsed / share - elapsed)} left"
            if share > 0 and elapsed >= SURE
            else ""
        )
        self.draw(share, f"{photos}{printable(self.name)[:30]}{passes}{left}")
