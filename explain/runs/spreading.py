"""A run in pieces that are explained anywhere and in any order: some photos each, into one folder of Parquet files."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import torch

from explain.errors import RunError, raised
from explain.record import versions
from explain.runs.attempts import BEGUN, Attempt, attempt
from explain.runs.explaining import Question
from explain.runs.known import Comparing, Known
from explain.runs.labels import Labels
from explain.runs.manifest import must_agree
from explain.runs.parts import ENDING, MANIFEST, REMARKS, known_in, names_in, write_part
from explain.runs.places import Place
from explain.runs.preparing import Failed, Preparer, in_process
from explain.runs.runner import State
from explain.runs.sources import Entry, Source, Trouble, entries_of, text
from explain.runs.store import Answer

KEPT = 1000  # notes that are kept
SAME = ("explain", "torch")  # packages whose versions have to be the same everywhere


@dataclass(frozen=True)
class Task:
    """All that a machine needs to know to explain photos of a run; it can be sent."""

    source: Source
    question: Question
    labels: Labels
    place: Place
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """What became of a piece: the photos that are in the folder now, those that failed, and warnings.

    ``error`` is what ends the run.
    """

    done: tuple[str, ...] = ()
    failures: tuple[Failed, ...] = ()
    notes: tuple[str, ...] = ()
    error: Exception | None = None


class Explaining:
    """Explains pieces of a run, with a model that is kept.

    Args:
        task: what is to be done.
        device: where to run the model; by default where it is.
    """

    def __init__(self, task: Task, device: str | None = None) -> None:
        self.task = task
        if device is not None:
            task.question.explainer.model.to(device)
        self._metrics = sorted(metric.name for metric in task.question.metrics)

    def __call__(self, entries: list[Entry]) -> Report:
        """Explain photos, write them into the folder, and report; whatever goes wrong is in the report."""
        task = self.task
        try:
            _must_be_same(task.manifest["versions"])
            with attempt(task.place, entries) as tried:
                found = list(self._found(entries, tried))
                failures = tuple(_sendable(each) for each in found if isinstance(each, Failed))
                answers = [each for each in found if not isinstance(each, Failed)]
                write_part(task.place, answers, self._metrics)
        except Exception as error:
            return Report(error=_sent(error))
        notes = dict.fromkeys(note for answer in answers for note in answer.notes)
        return Report(tuple(answer.photo[0] for answer in answers), failures, tuple(notes))

    def _found(self, entries: list[Entry], tried: Attempt) -> Iterator[Answer | Failed]:
        if not tried.alone:
            yield from self._explained(entries)
            return
        for entry in entries:
            if entry.name in tried.ended:
                yield Failed(entry.name, f"image {entry.name!r} ended the process that explained it (out of memory?); "
                             "explain it alone", entry.path, stamp=entry.stamp)  # fmt: skip
            else:
                tried.begin(entry.name)
                yield from self._explained([entry])

    def _explained(self, entries: list[Entry]) -> Iterator[Answer | Failed]:
        ready = in_process(Preparer(self.task.source, self.task.question.explainer.preprocess), iter(entries))
        for batch in self.task.question.each(ready, self.task.labels):
            yield from batch


Through: TypeAlias = Callable[[Task, Iterator[list[Entry]]], Iterable[Report]]
"""What takes pieces through `Explaining`, here or elsewhere; the reports may come in any order."""


@dataclass
class Spread:
    """One go at a run in pieces: what is in the folder is left out, and the rest is explained.

    ``per_file`` is the number of photos of a piece, and of a file.
    """

    task: Task
    through: Through
    per_file: int
    progress: Callable[[State], None] | None = None
    begun: float = field(default_factory=time.monotonic)
    done: int = 0
    there: int = 0

    def go(self) -> None:
        """Explain what is missing.

        Raises:
            RunError: the folder is that of another run, or cannot be written.
            ExplainError: what holds for all photos.
        """
        self.known = self._begin()
        self.failures: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.named: set[str] = set()
        self.open: set[str] = set()
        ended = None
        try:
            for report in self.through(self.task, self._pieces()):
                self._enter(report)
            if self.open:
                raise RunError(f"pieces must all come back, but {len(self.open)} photos did not; start once more")
            self._tell()
            self._must_be_there()
            ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        finally:
            remarks = {"ended": ended, "failures": self.failures, "notes": list(self.notes)}
            self.task.place.write(REMARKS, json.dumps(remarks, ensure_ascii=False, indent=1).encode())

    def _begin(self) -> dict[str, Known]:
        """Check that the folder is that of this run, and return the photos in it."""
        place, manifest = self.task.place, self.task.manifest
        for left in place.files(".json"):  # by a go that was ended in the middle: attempts count from one again
            if left.startswith(BEGUN):
                place.remove(left)
        there, content = place.files(ENDING), place.read(MANIFEST)
        if there and content is None:
            raise RunError(f"output {text(place.name)!r} must be a new folder or that of a run, got one with other "
                           "Parquet files; choose another")  # fmt: skip
        if there and content is not None:
            must_agree(json.loads(content), manifest, place.name)
            return known_in(place)
        place.write(MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1).encode())
        return {}

    def _pieces(self) -> Iterator[list[Entry]]:
        entries = self._entries()
        while piece := list(islice(entries, self.per_file)):
            self.open.update(entry.name for entry in piece)
            yield piece

    def _entries(self) -> Iterator[Entry]:
        """What is still to be explained; photos that the folder has are compared with those of the source."""
        task = self.task
        comparing = Comparing(task.source, task.labels, self.known)
        preparer = Preparer(task.source, task.question.explainer.preprocess)
        for entry in entries_of(task.source):
            if isinstance(entry, Trouble):
                self.failures[entry.name] = entry.reason
                continue
            self.named.add(entry.name)
            if entry.name not in self.known:
                yield entry
                continue
            self.there += 1
            if comparing.has_file(entry):
                continue
            found = preparer(entry)
            if isinstance(found, Failed):
                self.failures[entry.name] = found.reason
            elif not comparing.has(found):
                raise RunError(f"photo {entry.name!r} must be as it was when it was explained, but it, its label or "
                               "its boxes have changed; give another folder")  # fmt: skip

    def _enter(self, report: Report) -> None:
        if report.error is not None:
            raise report.error
        general = [each.general for each in report.failures if each.general is not None]
        if general and not (self.known or self.done or report.done):
            raise general[0]
        self.done += len(report.done)
        self.open.difference_update(report.done, (each.name for each in report.failures))
        self.failures |= {each.name: each.reason for each in report.failures}
        for note in report.notes[: max(0, KEPT - len(self.notes))]:
            self.notes[note] = None
        self._tell()

    def _must_be_there(self) -> None:
        """Notice machines that wrote into a folder of their own."""
        asked = self.named - self.failures.keys()
        missing = asked - names_in(self.task.place).keys() if asked else set()
        if missing:
            raise RunError(f"output {text(self.task.place.name)!r} must be a folder that all machines share, but "
                           f"{len(missing)} photos were written elsewhere; choose one on a shared drive or in a "
                           "storage")  # fmt: skip

    def _tell(self) -> None:
        if self.progress is not None:
            passed = time.monotonic() - self.begun
            count = self.task.source.count
            self.progress(State(self.done, len(self.failures), self.there, count, passed))


def _must_be_same(there: Mapping[str, str]) -> None:
    """Refuse a machine with other versions: its values would be others."""
    here = versions()
    for name in SAME:
        if there.get(name) != here.get(name):
            raise RunError(f"{name} must have the same version on all machines, but it is {there.get(name)} where the "
                           f"run began and {here.get(name)} on another; install the same")  # fmt: skip


def _sendable(found: Failed) -> Failed:
    return found if found.general is None else replace(found, general=_sent(found.general))


def _sent(error: Exception) -> Exception:
    """An error that can be sent to another process; one that cannot becomes what it says."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling runs into, the error is told in words
        return RunError(raised(error))
    return error


def must_be_sendable(question: Question) -> None:
    """Refuse what cannot be explained elsewhere in the same way.

    Raises:
        RunError: the model is not on the CPU, or methods are chosen by the first photo.
    """
    device = next((p.device for p in question.explainer.model.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        raise RunError(f"explainer must be on the CPU to be sent to other machines, got {device}; each moves it to "
                       "its own device")  # fmt: skip
    if isinstance(question.asked, str):
        raise RunError(f"methods must be named to be run on several machines, got the group {question.asked!r}; name "
                       "them")  # fmt: skip
