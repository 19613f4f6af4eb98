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
INTERRUPTED = 130


class OutputClosedError(OutputError):
    """Standard output takes no more."""


class Output:
    """What a command says on standard output, and what went wrong.

    As lines, they are printed as they come. As JSON, ``items`` are kept for one document that ends
    the answer, under the name ``key``, with the ``errors``.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.key = "results"
        self.quiet = False
        self.verbose = False
        self.items: list[Any] = []
        self.errors: list[str] = []
        self._stream: TextIO | None = sys.stdout
        self._noted: set[str] = set()

    def say(self, line: object) -> None:
        """Print a line that cannot steer the terminal, unless a document is printed instead."""
        self.say_all([line])

    def say_all(self, lines: Iterable[object]) -> None:
        """Print lines, as `say` does."""
        if not (self.as_json or self.quiet):
            self._print(lines)

    def add(self, item: Any, lines: Iterable[object] = ()) -> None:
        """Enter something in the document, or say the lines that tell the same."""
        self.items.append(item)
        self.say_all(lines)

    def complain(self, message: str) -> int:
        """Say in one line on standard error what went wrong, and enter it in the document."""
        self.errors.append(message)
        tell(f"explain: {' '.join(message.split())}")
        return FAILED

    def note(self, message: str, *, once: bool = False) -> None:
        """Say something on standard error that is no error."""
        if not self.quiet and not (once and message in self._noted):
            self._noted.add(message)
            tell(f"note: {message}")

    def end(self) -> None:
        """Print the document, if there is to be one; what cannot be printed shows here, and not
        later."""
        if self.as_json:
            from explain.data.files import json_text

            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            document = {self.key: self.items, "errors": self.errors}
            self._print(json_text(document, encoding).split("\n"))
        self.flush()

    def flush(self) -> None:
        """Let what was said be seen at once."""
        with _as_closed_output():
            if self._stream is not None:
                self._stream.flush()

    def _print(self, lines: Iterable[object]) -> None:
        with _as_closed_output():
            if self._stream is not None:  # as it is where standard output was closed
                self._stream.writelines(f"{printable(line)}\n" for line in lines)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep standard output for what is said here; what anything else prints there goes to
        standard error."""
        with _standard_output() as self._stream:
            try:
                yield
            except OutputClosedError:
                # Whoever read our output has gone, or it cannot be written; the interpreter is not
                # to complain at exit. it may be something else than a file
                with suppress(io.UnsupportedOperation, AttributeError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # type: ignore[union-attr]
                raise


@contextmanager
def _as_closed_output() -> Iterator[None]:
    """Raise `OutputClosedError` for whatever error a stream raises."""
    try:
        yield
    except OSError as error:
        raise OutputClosedError(error.strerror) from error


@contextmanager
def _standard_output() -> Iterator[TextIO | None]:
    """Yield standard output, or None where it is closed, and send there nothing else until the
    block ends."""
    ours = sys.stdout
    with ExitStack() as stack:
        stack.enter_context(
            redirect_stdout(
                sys.stderr or stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            )
        )
        if ours is None or _descriptor(ours) != 1 or _descriptor(sys.stderr) != 2:
            yield ours
            return
        ours.flush()
        kept = os.dup(1)  # programs and libraries in C print to the number, and know no names
        stack.callback(os.close, kept)
        stack.callback(os.dup2, kept, 1)
        os.dup2(2, 1)
        output = open(  # noqa: SIM115
            kept,
            "w",
            encoding=ours.encoding,
            errors="backslashreplace",
            closefd=False,
            buffering=1 if getattr(ours, "line_buffering", False) else -1,
        )
        stack.callback(output.close)
        yield output


def _descriptor(stream: Any) -> int | None:
    """The file descriptor of a stream, or None where it has none."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def in_brackets(counts: Mapping[str, int]) -> str:
    """The counts that are not zero, as the end of a line.

    >>> in_brackets({"failed": 2, "skipped": 0}), in_brackets({"failed": 0})
    (' (2 failed)', '')
    """
    parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f" ({parts})" if parts else ""


def wrote(files: Iterable[object]) -> list[str]:
    """The lines that name the files that were written."""
    return [f"wrote {file}" for file in files]


def tell(line: str) -> None:
    """Print a line on standard error that cannot steer the terminal."""
    if sys.stderr is not None:  # it is None where standard error was closed
        print(printable(line), file=sys.stderr)


@contextmanager
def notes(answer: Output, photo: str = "") -> Iterator[None]:
    """Print the package's own warnings as notes, and keep those of libraries to themselves."""
    from explain.data.scans import split_slice

    heard: list[str] = []
    file, _ = split_slice(photo)  # of a volume, whose slices have much in common
    try:
        with quiet(), collect_warnings(heard):
            yield
    finally:
        for said in heard:
            answer.note(said if file in said else f"{photo}: {said}", once=True)


MOMENT = 1.0  # seconds after which the passes of one photo are shown
SURE = 3.0  # seconds after which the time left is shown


MINUTE = 60.0  # seconds between two lines where there is no terminal


class RunProgress(StatusLine):
    """The progress of a run over a data set: photos that were ``done``, and that were ``there``
    before.

    Without a terminal, as in a job of the night, it is a line a minute, however long a batch takes,
    and one at the end.
    """

    done = 0
    there = 0

    def __init__(self) -> None:
        super().__init__()
        self._line = "no photo done yet"
        self._has_ended = threading.Event()
        self._has_told = False
        self._teller = threading.Thread(target=self._tell, daemon=True)
        if sys.stderr is not None and not sys.stderr.isatty():
            self._teller.start()

    def close(self) -> None:
        """End with the run."""
        self.wipe()
        self._has_ended.set()
        if self._teller.is_alive():
            self._teller.join()
        if self._has_told:
            tell(self._line)

    def __call__(self, state: Any) -> None:
        self.done = state.done
        self.there = state.there
        stored = state.there + state.done
        ended = stored + state.failed
        parts = [
            f"{ended}/{state.total} photos" if state.total else f"{ended} photos",
            f"{state.rate:.3g} a second",
        ]
        if state.left is not None and state.seconds >= SURE:
            parts.append(f"about {duration(state.left)} left")
        if state.failed:
            parts.append(f"{state.failed} failed")
        self.draw(ended / state.total if state.total else None, ", ".join(parts))
        left = "" if state.total is None else f", {max(0, state.total - ended)} left"
        rest = f", about {duration(state.left)} to go" if state.left else ""
        self._line = (
            f"{stored} photos done{left}, {state.failed} failed, {state.rate:.3g} a second{rest}"
        )

    def _tell(self) -> None:
        """Print the line once a minute until the run has ended; runs in a thread of its own."""
        while not self._has_ended.wait(MINUTE):
            if not self.hidden:
                tell(self._line)
                self._has_told = True


class ProgressBar(StatusLine):
    """The progress of photos one after the other, and of many passes for each.

    Args:
        total: how many photos there are.
        clock: gives the time in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.total = total
        self.done = 0
        self.name = ""
        self._begun = clock()
        self._photo_begun = self._begun

    def begin(self, name: str) -> None:
        """Begin with a photo."""
        self.name = name
        self._photo_begun = self.clock()
        self._drawn = float("-inf")
        if self.total > 1:
            self._draw(0.0, "")

    def runs(self, done: int, total: int) -> None:
        """Show how many of the passes for this photo are done, once these take more than a
        moment."""
        if self.clock() - self._photo_begun >= MOMENT and done < total:
            self._draw(done / total, f" {done}/{total} runs")

    def close(self) -> None:
        """End with a photo."""
        self.done += 1
        self.wipe()

    def _draw(self, part: float, passes: str) -> None:
        """Draw the bar, where this share of the passes for the current photo is done."""
        share = (self.done + part) / self.total
        elapsed = self.clock() - self._begun
        photos = f"{self.done}/{self.total} " if self.total > 1 else ""
        left = (
            f", about {duration(elapsed / share - elapsed)} left"
            if share > 0 and elapsed >= SURE
            else ""
        )
        self.draw(share, f"{photos}{printable(self.name)[:30]}{passes}{left}")
