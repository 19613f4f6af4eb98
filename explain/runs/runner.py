"""`run`: the photos of a source explained one batch after the other, and stored as they come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from explain._utils.errors import RunError, keywords, shown, warn
from explain.attribution.options import RunOptions
from explain.explanation.explainer import Explainer
from explain.methods.registry import MethodLike
from explain.metrics import Metric
from explain.models import Classifier
from explain.runs.explaining import RunRequest
from explain.runs.files import source_of
from explain.runs.labels import Labels
from explain.runs.manifest import manifest_of
from explain.runs.photo_identity import Comparing
from explain.runs.preparing import Failed, Prepared, Preparer, Ready, in_process
from explain.runs.reading import Stored
from explain.runs.result import Run
from explain.runs.sources import Entry, Source, Trouble, entries_of, text
from explain.runs.store import PhotoRecord, Store
from explain.runs.workers import CannotBeginError, Workers, default_workers
from explain.runs.writing import Writer, alone
from explain.targets.resolve import TargetLike

TIMEOUT = 60.0  # seconds that one photo may take to be read


@dataclass(frozen=True)
class State:
    """How far a run is: photos that were explained and that failed, in this go; those that were there before.

    ``total`` is None where the source does not know how many photos it has.
    """

    done: int
    failed: int
    there: int
    total: int | None
    seconds: float

    @property
    def rate(self) -> float:
        """Photos a second."""
        return (self.done + self.failed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes at this rate; None while nothing is known.

        >>> State(10, 0, 50, 100, 5.0).left
        20.0
        """
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.there - self.done - self.failed) / self.rate


@keywords(
    RunOptions,
    elsewhere={
        "device": "explain.Explainer(device=...) takes it",
        "labels": "explain.Explainer(categories=...) takes them",
    },
)
def run(
    source: Any,
    explainer: Explainer | nn.Module | Classifier | str | None = None,
    methods: MethodLike | Iterable[MethodLike] = "gradcam",
    *,
    output: str | os.PathLike[str],
    target: TargetLike = None,
    metrics: Iterable[Metric | str] = (),
    workers: int | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[State], None] | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Explain all photos of a source, and store the maps in one SQLite file.

    A run may be interrupted in any way, also by a loss of power: the same call continues it. A photo is in the file
    with all its results or not at all, and never twice. What cannot be explained is listed in ``run.failures``, and
    tried again when the run is continued; a photo whose file, label or boxes have changed since is explained again.

    Args:
        source: a folder (with the folders inside it; where these hold all photos, their names are labels), a list in a
            file (CSV, TSV, JSON: ``path``, ``label``, ``x0 y0 x1 y1`` or ``boxes``), WebDataset shards (tar), a data
            set of PyTorch or Hugging Face, or a list or iterator of photos.
        explainer: an `Explainer`, or what one is made of: a model, its name, or None for the default model.
        methods, target, targets, top_k, layer, fuse, precision, samples, tolerance, max_seconds: as for calling an
            `Explainer`; ``target`` is one for all photos.
        output: the file. If there is a run in it already, it is continued.
        metrics: judge each map by these, too; those that need boxes leave photos without them out.
        batch_size: photos, and altered inputs of methods that run the model many times, at once; by default as many
            photos as suit the size of the input.
        workers: processes that read and preprocess photos ahead; by default one for every two processors, and 0 for
            none. With workers, a photo that takes longer than ``timeout`` seconds to be read is given up.
        progress: called with a `State` after each batch.

    Returns:
        The `Run`: ``len(run)``, ``run.rows()``, ``run.failures``.

    Raises:
        RunError: the source or the file cannot be used, another run writes the file, or it was begun with other
            options; the message says which.
        ExplainError: as for calling an `Explainer`, for what holds for all photos.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> explainer = explain.Explainer(model, preprocess=explain.models.CenterCrop(8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     photos = [Image.new("RGB", (9, 8), color) for color in ("red", "blue")]
    ...     found = run(photos, explainer, output=f"{folder}/run.sqlite", workers=0)
    ...     [(row.name, tuple(row.values.shape)) for row in found.rows()], found.ended
    ([('photo 0', (6, 6)), ('photo 1', (6, 6))], True)
    """
    _check(workers, timeout, options.get("batch_size"))
    photos = source_of(source)
    made = explainer if isinstance(explainer, Explainer) else Explainer(explainer)
    question = RunRequest(made, methods, target, list(metrics), **options)
    if photos.count == 0:
        raise RunError(f"source must have photos, but {text(str(source))!r:.100} has none; check what it holds")
    file = Path(output)
    _make_folder(file)
    manifest = manifest_of(
        source=photos, explainer=made, methods=question.asked, targets=question.targets, metrics=question.metrics,
        options=question.options,
    )  # fmt: skip
    with alone(file):
        store = Store(file, manifest)
        try:
            count = default_workers() if workers is None else workers
            _Go(photos, question, store, count, timeout, progress).through()
        finally:
            store.close()
    found = Run(file)
    _tell_unjudged(found, question)
    return found


def _tell_unjudged(found: Run, question: RunRequest) -> None:
    """Say which metrics had nothing to judge by, as no photo came with boxes."""
    placed = [metric.name for metric in question.metrics if metric.needs_object]
    if placed and not next(found.query("SELECT count(*) FROM photos WHERE boxes IS NOT NULL"))[0]:
        warn(f"no photo has boxes, so that {', '.join(placed)} judged none; give a source with boxes, such as a list")


@dataclass
class _Go:
    """One go at a run: from where it was to its end, or to what stops it."""

    source: Source
    question: RunRequest
    store: Store
    workers: int
    timeout: float
    progress: Callable[[State], None] | None
    begun: float = field(default_factory=time.monotonic)
    done: int = 0
    failed: int = 0
    there: int = 0

    def through(self) -> None:
        known = Stored(self.store.file).known
        self.succeeded = bool(known)
        self.labels = Labels(self.question.explainer.categories, self.source.classes)
        self.comparing = Comparing(self.source, self.labels, known)
        self.read_again: list[Entry] = []
        self.troubles: list[Failed] = []
        self.named: set[str] = set()
        writer = Writer()
        try:
            with closing(self._explained()) as batches:
                for found in batches:
                    self._enter(found, writer)
        except BaseException:  # what is done is kept; what stopped us is more to the point than what the writer says
            with suppress(RunError):
                writer.close()
            raise
        writer.put(lambda: self.store.write(self.troubles))
        writer.put(lambda: self.store.confirm(self.read_again))
        writer.close()
        self.failed += len(self.troubles)
        self._tell()
        self.store.forget_failures(but=self.named | {each.name for each in self.troubles})
        self.store.end(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def _enter(self, found: list[PhotoRecord | Failed], writer: Writer) -> None:
        failures = [each for each in found if isinstance(each, Failed)]
        self.succeeded |= len(failures) < len(found)
        general = [each.general for each in failures if each.general is not None]
        if general and not self.succeeded:
            raise general[0]
        methods = self.question.methods
        if not self.done and methods is not None:
            writer.put(lambda: self.store.enter_methods(methods))
        self.done += len(found) - len(failures)
        self.failed += len(failures)
        writer.put(lambda: self.store.write(found))
        self._tell()

    def _explained(self) -> Generator[list[PhotoRecord | Failed], None, None]:
        """The results of each batch."""
        preparer = Preparer(self.source, self.question.explainer.preprocess)
        ready, close = self._ready(preparer)
        try:
            yield from self.question.each(self._changed(ready), self.labels)
        finally:
            close()

    def _ready(self, preparer: Preparer) -> tuple[Iterable[Ready], Callable[[], None]]:
        """Photos as the model takes them, and what ends the processes that prepare them."""
        entries = self._entries()
        if self.workers:
            try:
                found = Workers(preparer, entries, self.workers, self.timeout)
                return found, found.close
            except CannotBeginError as error:
                warn(f"photos are read one after the other, since no worker process can be started ({error})")
        return in_process(preparer, entries), lambda: None

    def _entries(self) -> Iterator[Entry]:
        """What is still to be explained, or to be compared with what is there."""
        for entry in entries_of(self.source):
            if isinstance(entry, Trouble):
                self.troubles.append(Failed(entry.name, entry.reason))
                continue
            self.named.add(entry.name)
            if self.comparing.has_file(entry):
                self.there += 1
            else:
                yield entry

    def _changed(self, ready: Iterable[Ready]) -> Iterator[Ready]:
        """What is still to be explained."""
        for found in ready:
            if isinstance(found, Prepared) and self.comparing.has(found):
                self.there += 1
                self.read_again.append(found.entry)
            else:
                yield found

    def _tell(self) -> None:
        if self.progress is not None:
            passed = time.monotonic() - self.begun
            self.progress(State(self.done, self.failed, self.there, self.source.count, passed))


def _check(workers: int | None, timeout: float, batch_size: int | None) -> None:
    for name, value, least in (("workers", workers, 0), ("batch_size", batch_size, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise RunError(f"{name} must be a whole number from {least}, got {shown(value)}; leave it out")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise RunError(f"timeout must be a number of seconds above 0, got {shown(timeout)}; leave it out")


def _make_folder(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"output {text(file)!r} cannot be written: {error.strerror}; choose another file") from None
    if file.is_dir():
        raise RunError(f"output {text(file)!r} must be a file, got a folder; name a file in it, such as run.sqlite")
