"""The same work for each of several photos: what fails is told for itself, what fails for all is told once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from explain.cli.answer import DONE, FAILED, USAGE, Answer, notes
from explain.cli.bar import Bar, duration
from explain.cli.sources import Source, stems
from explain.errors import (
    ExplainError,
    FolderError,
    ImageError,
    LabelsError,
    LayerError,
    MethodError,
    OutputError,
    TargetError,
)

ASKED = (LabelsError, LayerError, MethodError, TargetError)
"""Errors about what was asked for, rather than about a photo."""


@dataclass(frozen=True)
class Result:
    """What came of a photo: its part of the document, and lines. ``files`` were written; or all were there before."""

    found: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    skipped: bool = False


Work = Callable[[Source, str, Bar], Result]
"""Of a photo and of what the names of its results begin with; runs are told to the bar."""


@dataclass
class _Run:
    """The state of the work on several photos; ``verb`` says in the last line what has been done."""

    work: Work
    answer: Answer
    bar: Bar
    verb: str
    total: int
    begun: float = field(default_factory=time.monotonic)
    files: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    held: tuple[Source, ExplainError] | None = None  # the first failure, as long as it may be that of all photos
    refused: bool = False  # whether what was asked for cannot be done, whatever the photo

    def take(self, source: Source, stem: str) -> bool:
        """Do the work on a photo; return whether any other photo can be worked on."""
        self.bar.begin(source.name)
        try:
            with notes(self.answer, source.name):
                result = self.work(source, stem, self.bar)
        except (ExplainError, MemoryError) as error:
            self.bar.end()
            self.failed += 1
            return self._goes_on(source, error)
        except BaseException:  # an interrupt too must not find half a bar on the line; it goes on
            self.bar.wipe()
            raise
        self.bar.end()
        self._enter(source, result)
        return True

    def _enter(self, source: Source, result: Result) -> None:
        self.tell_held()
        self.done += not result.skipped
        self.skipped += result.skipped
        self.files += len(result.files)
        self.answer.add(result.found)
        self.answer.say(source.name, *result.lines)

    def _goes_on(self, source: Source, error: ExplainError | MemoryError) -> bool:
        left = self.total - self.done - self.skipped - self.failed
        if isinstance(error, FolderError):
            self.tell_held()
            self.answer.complain(_blamed(source, error) + (f"; stopped, {left} more not looked at" if left else ""))
            return False
        if isinstance(error, ExplainError) and not isinstance(error, (ImageError, OutputError)):
            if self.held is None and not self.done and not self.skipped:
                self.held = source, error
                return True
            if self.held is not None and str(self.held[1]) == str(error):
                rest = f", {left} more not looked at" if left else ""
                self.answer.complain(f"{error} (this holds for every photo: none is done{rest})")
                self.held, self.refused = None, isinstance(error, ASKED)
                return False
        self.tell_held()
        self.answer.complain(_blamed(source, error))
        return True

    def tell_held(self) -> None:
        """Tell what was wrong with the first photo, since it is not so with all of them."""
        if self.held is not None:
            source, error = self.held
            self.held = None
            self.answer.complain(_named(source, str(error)))

    def end(self) -> None:
        """Tell what was wrong with the only photo that could be read; what was asked for is not its fault."""
        if self.held is not None and isinstance(self.held[1], ASKED):
            self.answer.complain(str(self.held[1]))
            self.held, self.refused = None, True
        self.tell_held()

    def sum_up(self, folder: str | None) -> None:
        """Say in one line what has been done."""
        parts = [f"{self.failed} failed"] if self.failed else []
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        left = self.total - self.done - self.skipped - self.failed
        if left:
            parts.append(f"{left} not looked at")
        told = f" ({', '.join(parts)})" if parts else ""
        wrote = f"; {self.files} files written to {folder}" if folder is not None and self.files else ""
        seconds = duration(time.monotonic() - self.begun)
        self.answer.say(f"{self.verb} {self.done} of {self.total} photos in {seconds}{told}{wrote}")


def for_all(
    photos: list[Source],
    missing: list[ExplainError],
    work: Work,
    answer: Answer,
    *,
    verb: str,
    folder: str | None = None,
) -> int:
    """Do the work on each photo and say what came of it, and at the end how it went with all of them.

    What fails for one photo is told, and the others still get done. Where no file can be written, or the first two
    photos fail in the same way on account of the model, the layer or the target, the rest is left. What was asked for
    and cannot be done with this model is a matter of usage, and not of the photo.
    """
    for error in missing:
        answer.complain(str(error))
    total = len(photos) + len(missing)
    run = _Run(work, answer, Bar(len(photos)), verb, total, failed=len(missing))
    try:
        for source, stem in stems(photos):
            if not run.take(source, stem):
                break
    finally:
        run.end()
        if total > 1:
            run.sum_up(folder)
    return USAGE if run.refused else FAILED if answer.errors else DONE


def _blamed(source: Source, error: ExplainError | MemoryError) -> str:
    """Say which photo an error is about, where it does not say so itself."""
    if isinstance(error, MemoryError):
        return f"{source.name}: memory must hold the photo and what is drawn on it, but it ran out; resize the photo"
    return _named(source, str(error))


def _named(source: Source, message: str) -> str:
    return message if repr(str(source)) in message else f"{source.name}: {message}"
