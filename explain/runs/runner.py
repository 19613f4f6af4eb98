"""`run`: the photos of a source explained one batch after the other, and stored as they come."""

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from explain._utils.errors import RunError, keywords, shown, warn
from explain._utils.progress import show_progress
from explain.attribution.options import RunOptions
from explain.explanation.explainer import Explainer
from explain.methods.base import MethodLike
from explain.metrics import Metric
from explain.models import Classifier
from explain.runs.labels import Labels
from explain.runs.preparing import Prepared, Preparer, Ready
from explain.runs.request import TIME, RunRequest
from explain.runs.result import Run
from explain.runs.workers import CannotBeginError, Workers, default_workers
from explain.store.lists import source_of
from explain.store.reading import KnownPhoto
from explain.store.sources import (
    Corners,
    Entry,
    Failed,
    Label,
    Source,
    boxes_as_text,
    check_count,
    entries_of,
    labels_as_text,
    text,
)
from explain.store.writing import Store, locked, method_row
from explain.targets.resolve import TargetLike

TIMEOUT = 60.0  # seconds that one photo may take to be read


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
    ) -> "Job":
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
        return cls(photos, request, Labels(explainer.categories, photos.classes), request.manifest(photos))

    @property
    def preparer(self) -> Preparer:
        return Preparer(self.source, self.request.explainer.preprocess)


ELSEWHERE = {
    "device": "explain.Explainer(device=...) takes it",
    "labels": "explain.Explainer(categories=...) takes them",
}


@keywords(RunOptions, elsewhere=ELSEWHERE)
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
    progress: Callable[[State], None] | bool | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Explain all photos of a source, and store the maps in one SQLite file.

    A run may be interrupted in any way, also by a loss of power: the same call continues it. With more methods or
    metrics than before, they are added, and only what is missing is computed. A photo is in the file
    with all its results or not at all, and never twice. A photo that fails is listed in ``run.failures``, and
    tried again when the run is continued; a photo whose file, label or boxes have changed since is explained again.

    Args:
        source: a folder (with the folders inside it; where these hold all photos, their names are labels), a list in a
            file (CSV, TSV, JSON: ``path``, ``label``, ``x0 y0 x1 y1`` or ``boxes``), WebDataset shards (tar), a data
            set of PyTorch or Hugging Face, or a list or iterator of photos.
        explainer: an `Explainer`, a model, the name of one, or None for the default model.
        methods, target, targets, top_k, layer, fuse, precision, samples, tolerance, max_seconds: as for
            calling an `Explainer`; ``target`` is one for all photos.
        output: the file. A run that it holds is continued.
        metrics: evaluate each map by these, too; those that need boxes skip photos without them.
        batch_size: photos, and altered inputs of methods that run the model many times, at once; by default as many
            photos as suit the size of the input.
        workers: processes that read and preprocess photos ahead; by default one for every two processors, and 0 for
            none. With workers, a photo that takes longer than ``timeout`` seconds to be read is given up.
        progress: called with a `State` after each batch; True prints a line.

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
    request = job.request
    with locked(file), closing(Store(file, job.manifest)) as store:
        before = Run(file)
        methods_now = [method.name for method in request.methods or ()]
        metrics_now = [metric.name for metric in request.metrics]
        call = RunCall(job, progress, before.known, before.lacking(methods_now, metrics_now))
        _explain_missing(call, store, default_workers() if workers is None else workers, timeout)
    result = Run(file)
    by_box = [metric.name for metric in request.metrics if metric.needs_object]
    if by_box and not any(result.query("SELECT 1 FROM photos WHERE boxes IS NOT NULL LIMIT 1")):
        warn(f"no photo has boxes, so that {', '.join(by_box)} has no values; give a source with boxes, such as a list")
    return result


@dataclass
class RunCall:
    """One call of a run: the photos of its source that are stored already, and what becomes of the others.

    ``known`` has the photos that are stored, by name. Where the stamp of a file is the same, the file need not be read.
    Everything else is read and compared by its pixels.
    """

    job: Job
    progress: Callable[[State], None] | bool | None
    known: Mapping[str, KnownPhoto]
    lacking: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The methods that some of these photos lack."""
    done: int = 0
    failed: int = 0
    there: int = 0
    begun: float = field(default_factory=time.monotonic)
    names: set[str] = field(default_factory=set)
    """Of all photos of the source, as far as it was listed."""

    def entries(self) -> Iterator[Entry]:
        """The photos that are not stored by the stamp of their file."""
        for entry in entries_of(self.job.source):
            self.names.add(entry.name)
            if self.has_file(entry):
                self.there += 1
            else:
                yield entry

    def count(self, done: int, failures: Sequence[Failed]) -> None:
        """Count photos, and raise the error of a failure if no photo could be explained until then."""
        self.done += done
        self.failed += len(failures)
        if self.done or not self.known.keys() <= self.lacking.keys():
            return
        for failure in failures:
            if failure.general is not None:
                raise failure.general

    def has_file(self, entry: Entry) -> bool:
        """Whether a photo is stored with all its results, judging by the stamp of its file."""
        stored = self.known.get(entry.name)
        if stored is None or entry.stamp is None or entry.stamp != stored.stamp:
            return False
        if entry.name in self.lacking or not self.job.source.by_file:
            return False
        return self._is_labelled(stored, entry.label, entry.boxes)

    def has(self, photo: Prepared) -> bool:
        """Whether a photo that was read is stored.

        Raises:
            RunError: it has other pixels than before, although its file has not changed, or it has none: the source is
                another one.
        """
        entry = photo.entry
        stored = self.known.get(entry.name)
        if stored is None:
            return False
        if (photo.sha256, *photo.size) == (stored.sha256, stored.width, stored.height):
            return self._is_labelled(stored, photo.label, photo.boxes)
        if entry.stamp in (None, stored.stamp):
            raise RunError(f"photo {entry.name!r} must have the pixels that it had, got others; give another output")
        return False

    def _is_labelled(self, stored: KnownPhoto, label: Label, boxes: tuple[Corners, ...]) -> bool:
        labels = labels_as_text(self.job.labels.of(label))
        return stored.labels == labels and stored.boxes == boxes_as_text(boxes)

    def report(self) -> None:
        """Tell the caller of the progress."""
        if self.progress is True:
            show_progress(self.done + self.failed + self.there, self.job.source.count)
        elif self.progress:
            seconds = time.monotonic() - self.begun
            self.progress(State(self.done, self.failed, self.there, self.job.source.count, seconds))


def _explain_missing(call: RunCall, store: Store, workers: int, timeout: float) -> None:
    """Explain the photos that the file lacks, which are prepared by so many workers."""
    request = call.job.request
    confirmed: list[Entry] = []  # photos that were read, and are those of the file
    with closing(_prepared(call, workers, timeout)) as ready:
        for answers in request.each(_changed(ready, call, confirmed), call.job.labels):
            failures = [answer for answer in answers if isinstance(answer, Failed)]
            first = not call.done
            call.count(len(answers) - len(failures), failures)
            if first and call.done:
                store.enter_methods(map(method_row, request.methods or ()))
                store.enter_in_manifest("methods", call.job.manifest["methods"])
                store.enter_in_manifest("metrics", call.job.manifest["metrics"])
            store.write(answers)
            call.report()
    store.confirm(confirmed)
    call.report()
    store.forget_failures(but=call.names)
    store.end(time.strftime(TIME, time.gmtime()))


def _prepared(call: RunCall, count: int, timeout: float) -> Generator[Ready, None, None]:
    """Photos ready for the model, prepared in worker processes or here."""
    if count:
        try:
            workers = Workers(call.job.preparer, call.entries(), count, timeout)
        except CannotBeginError as error:
            warn(f"photos are read one after the other, since no worker process can be started ({error})")
        else:
            with closing(workers):
                yield from workers
            return
    yield from map(call.job.preparer, call.entries())


def _changed(ready: Iterable[Ready], call: RunCall, confirmed: list[Entry]) -> Iterator[Ready]:
    """The photos to explain; those that are stored with these pixels are ``confirmed``."""
    for photo in ready:
        if not isinstance(photo, Prepared) or not call.has(photo):
            yield photo
        elif photo.entry.name in call.lacking:
            yield replace(photo, lacking=call.lacking[photo.entry.name])
        else:
            call.there += 1
            confirmed.append(photo.entry)
