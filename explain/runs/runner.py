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
from explain.runs.known_photos import KnownPhotos, Labels
from explain.runs.manifest import manifest_of
from explain.runs.preparing import Failed, Prepared, Preparer, Ready
from explain.runs.result import Run
from explain.runs.sources import Entry, Source, entries_of, text
from explain.runs.store import PhotoRecord, Store, Writer, locked
from explain.runs.workers import CannotBeginError, Workers, default_workers
from explain.targets.resolve import TargetLike

TIMEOUT = 60.0  # seconds that one photo may take to be read
TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class State:
    """The progress of a run: photos that were explained and that failed in this call, and those explained before.

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
        """The seconds for the remaining photos at this rate; None while nothing is known.

        >>> State(10, 0, 50, 100, 5.0).left
        20.0
        """
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.there - self.done - self.failed) / self.rate


@dataclass(frozen=True)
class Job:
    """All that fixes a run, whatever machine does it; it can be sent to others."""

    source: Source
    request: RunRequest
    labels: Labels
    manifest: dict[str, Any]

    @classmethod
    def of(
        cls,
        source: Any,
        explainer: Explainer | nn.Module | Classifier | str | None,
        methods: MethodLike | Iterable[MethodLike],
        target: TargetLike,
        metrics: Iterable[Metric | str],
        **options: Any,
    ) -> Job:
        """Check the arguments of `run`.

        Raises:
            RunError: the source cannot be used, or has no photos.
            ExplainError: as for calling an `Explainer`.
        """
        photos = source_of(source)
        explainer = explainer if isinstance(explainer, Explainer) else Explainer(explainer)
        request = RunRequest(explainer, methods, target, list(metrics), **options)
        if photos.count == 0:
            raise RunError(f"source must have photos, but {text(str(source))!r:.100} has none; check its content")
        manifest = manifest_of(
            source=photos, explainer=explainer, methods=request.requested, targets=request.targets,
            metrics=request.metrics, options=request.options,
        )  # fmt: skip
        return cls(photos, request, Labels(explainer.categories, photos.classes), manifest)

    @property
    def preparer(self) -> Preparer:
        return Preparer(self.source, self.request.explainer.preprocess)


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
    with all its results or not at all, and never twice. A photo that fails is listed in ``run.failures``, and
    tried again when the run is continued; a photo whose file, label or boxes have changed since is explained again.

    Args:
        source: a folder (with the folders inside it; where these hold all photos, their names are labels), a list in a
            file (CSV, TSV, JSON: ``path``, ``label``, ``x0 y0 x1 y1`` or ``boxes``), WebDataset shards (tar), a data
            set of PyTorch or Hugging Face, or a list or iterator of photos.
        explainer: an `Explainer`, a model, the name of one, or None for the default model.
        methods, target, targets, top_k, layer, fuse, precision, samples, tolerance, max_seconds: as for calling an
            `Explainer`; ``target`` is one for all photos.
        output: the file. A run that it holds is continued.
        metrics: evaluate each map by these, too; those that need boxes skip photos without them.
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
    check_count("workers", workers, 0)
    check_count("batch_size", options.get("batch_size"), 1)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise RunError(f"timeout must be a number of seconds above 0, got {shown(timeout)}; leave it out")
    job = Job.of(source, explainer, methods, target, metrics, **options)
    file = Path(output)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"output {text(file)!r} cannot be written: {error.strerror}; choose another file") from None
    if file.is_dir():
        raise RunError(f"output {text(file)!r} must be a file, got a folder; name a file in it, such as run.sqlite")
    with locked(file):
        store = Store(file, job.manifest)
        try:
            _LocalRun(job, store, default_workers() if workers is None else workers, timeout, progress).go()
        finally:
            store.close()
    found = Run(file)
    by_box = [metric.name for metric in job.request.metrics if metric.needs_object]
    if by_box and not next(found.query("SELECT count(*) FROM photos WHERE boxes IS NOT NULL"))[0]:
        warn(f"no photo has boxes, so that {', '.join(by_box)} has no values; give a source with boxes, such as a list")
    return found


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse an option that is neither None nor a whole number from ``least``."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise RunError(f"{name} must be a whole number from {least}, got {shown(value)}; leave it out")


@dataclass
class _LocalRun:
    """One call of `run`: explain the photos that the file lacks."""

    job: Job
    store: Store
    workers: int
    timeout: float
    progress: Callable[[State], None] | None
    begun: float = field(default_factory=time.monotonic)
    done: int = 0
    failed: int = 0
    there: int = 0

    def go(self) -> None:
        known = Run(self.store.file).known
        self.known = KnownPhotos(self.job.source, self.job.labels, known)
        self.succeeded = bool(known)
        self.read_again: list[Entry] = []
        self.named: set[str] = set()
        writer = Writer()
        try:
            with closing(self._prepared()) as ready:
                for found in self.job.request.each(self._changed(ready), self.job.labels):
                    self._write(found, writer)
        except BaseException:  # the results until then are stored; our reason to stop counts more than the writer's
            with suppress(RunError):
                writer.close()
            raise
        writer.put(lambda: self.store.confirm(self.read_again))
        writer.close()
        self._report()
        self.store.forget_failures(but=self.named)
        self.store.end(time.strftime(TIME, time.gmtime()))

    def _write(self, found: list[PhotoRecord | Failed], writer: Writer) -> None:
        failures = [each for each in found if isinstance(each, Failed)]
        self.succeeded |= len(failures) < len(found)
        general = [each.general for each in failures if each.general is not None]
        if general and not self.succeeded:
            raise general[0]
        methods = self.job.request.methods
        if not self.done and methods is not None:
            writer.put(lambda: self.store.enter_methods(methods))
        self.done += len(found) - len(failures)
        self.failed += len(failures)
        writer.put(lambda: self.store.write(found))
        self._report()

    def _prepared(self) -> Generator[Ready, None, None]:
        """Photos ready for the model, prepared in worker processes or here."""
        if self.workers:
            try:
                workers = Workers(self.job.preparer, self._entries(), self.workers, self.timeout)
            except CannotBeginError as error:
                warn(f"photos are read one after the other, since no worker process can be started ({error})")
            else:
                with closing(workers):
                    yield from workers
                return
        yield from map(self.job.preparer, self._entries())

    def _entries(self) -> Iterator[Entry]:
        """The photos to explain, or to compare with those in the file."""
        for entry in entries_of(self.job.source):
            self.named.add(entry.name)
            if self.known.has_file(entry):
                self.there += 1
            else:
                yield entry

    def _changed(self, ready: Iterable[Ready]) -> Iterator[Ready]:
        """The photos to explain."""
        for found in ready:
            if isinstance(found, Prepared) and self.known.has(found):
                self.there += 1
                self.read_again.append(found.entry)
            else:
                yield found

    def _report(self) -> None:
        if self.progress is not None:
            seconds = time.monotonic() - self.begun
            self.progress(State(self.done, self.failed, self.there, self.job.source.count, seconds))
