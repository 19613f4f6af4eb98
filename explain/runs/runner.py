"""`run`: the photos of a source explained one batch after the other, and stored as they come."""

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from explain._utils.errors import RunError, check_whole_number, keywords, shown, warn
from explain._utils.progress import show_progress
from explain.answers import AnswerExplainer
from explain.attribution.options import RunOptions
from explain.explanation.explainer import Explainer
from explain.methods.base import MethodLike
from explain.metrics import Metric
from explain.models import Classifier
from explain.runs.answers import AnswerJob
from explain.runs.job import TIME, Job
from explain.runs.preparing import Prepared, Ready
from explain.runs.result import Run
from explain.runs.workers import default_workers, read_ahead
from explain.store.lists import source_of
from explain.store.reading import StoredPhoto
from explain.store.sources import (
    Entry,
    Failed,
    Label,
    ObjectBox,
    boxes_as_text,
    entries_of,
    labels_as_text,
    path_text,
)
from explain.store.writing import PhotoRecord, Store, locked_run, method_row
from explain.targets.resolve import TargetLike

TIMEOUT = 60.0  # seconds that one photo may take to be read


@dataclass(frozen=True)
class State:
    """The progress of a run: photos that were explained and that failed in this call, and those
    explained before. ``total`` is None where the source does not know how many photos it has.
    """

    done: int
    failed: int
    there: int
    total: int | None
    seconds: float

    @property
    def rate(self) -> float:
        """How many photos this call has explained, or failed on, in a second."""
        return (self.done + self.failed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """The estimated seconds for the remaining photos, at the rate so far; None while that is
        unknown, or the source does not know its number of photos."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.there - self.done - self.failed) / self.rate


ELSEWHERE = {
    "device": "explain.Explainer(device=...) takes it",
    "labels": "explain.Explainer(categories=...) takes them",
}


@keywords(RunOptions, elsewhere=ELSEWHERE)
def run(
    source: Any,
    explainer: Explainer | AnswerExplainer | nn.Module | Classifier | str | None = None,
    methods: MethodLike | Iterable[MethodLike] | None = None,
    *,
    output: str | os.PathLike[str],
    target: TargetLike = None,
    metrics: Iterable[Metric | str] = (),
    boxes: str | os.PathLike[str] | None = None,
    ask: str | None = None,
    answer: str | None = None,
    words: str | Sequence[str | int] | None = None,
    workers: int | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[State], None] | bool | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Explain all photos of a source, and store the maps in one SQLite file.

    A run may be interrupted in any way, also by a loss of power: the same call continues it. With
    more methods or metrics than before, they are added, and only what is missing is computed. A
    photo is in the file with all its results or not at all, and never twice. A photo that fails is
    listed in ``run.failures``, and tried again when the run is continued; a photo whose file, label
    or boxes have changed since is explained again.

    Args:
        source: a folder (with the folders inside it; where these hold all photos, their names are
            labels), a list in a file (CSV, TSV, JSON: ``path``, ``label``, ``x0 y0 x1 y1`` or
            ``boxes``), WebDataset shards (tar), a data set of PyTorch or Hugging Face, or a list or
            iterator of photos.
        explainer: an `Explainer`, a model, the name of one, or None for the default model; an
            image-text model, or an `explain.answers.AnswerExplainer`, for answers in words.
        methods, target, targets, top_k, layer, fuse, samples, tolerance, max_seconds: as
            for calling an `Explainer`; ``target`` is one for all photos, and ``methods`` are
            "gradcam" by default.
        output: the file. A run that it holds is continued.
        metrics: evaluate each map by these, too; those that need boxes skip photos without them.
        boxes: a file with the labels and boxes of the photos: annotations as COCO has them, or a
            list. Of boxes with labels, those of the explained class count.
        batch_size: photos, and altered inputs of methods that run the model many times, at once; by
            default as many photos as suit the size of the input. Of costly methods, photos are
            fewer, so that each is stored soon.
        ask, answer, words: as for calling an `AnswerExplainer`: there is a row for each word, in
            whose metrics are the shares of the photo ("image"), the prompt and the words before,
            and whether it is grounded.
        workers: processes that read and preprocess photos ahead; by default one for every two
            processors, and 0 for none. With workers, a photo that takes longer than ``timeout``
            seconds to be read is given up.
        progress: called with a `State` after each batch; True prints a line.

    Returns:
        The `Run`: ``len(run)``, ``run.rows()``, ``run.failures``.

    Raises:
        RunError: the source or the file cannot be used, another run writes the file, or it was
            begun with other options; the message says which.
        ExplainError: as for calling an `Explainer`, for what holds for all photos.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ... )
    >>> explainer = explain.Explainer(model, preprocess=explain.models.CenterCrop(8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     photos = [Image.linear_gradient("L"), Image.radial_gradient("L")]
    ...     found = run(photos, explainer, output=f"{folder}/run.sqlite", workers=0)
    ...     [(row.name, tuple(row.values.shape)) for row in found.rows()], found.ended
    ([('photo 0', (6, 6)), ('photo 1', (6, 6))], True)
    """
    check_whole_number("workers", workers, 0)
    check_whole_number("batch_size", options.get("batch_size"), 1)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise RunError(
            f"timeout must be a number of seconds above 0, got {shown(timeout)}; leave it out"
        )
    entries = source_of(source, boxes)
    has_question = any(part is not None for part in (ask, answer, words))
    job: Job
    if isinstance(explainer, AnswerExplainer) or has_question:
        # of these, `AnswerJob` refuses what is given and has no effect
        more: Any = {"target": target, "metrics": tuple(metrics), "boxes": boxes, **options}
        job = AnswerJob(entries, explainer, methods, ask=ask, answer=answer, words=words, **more)
    else:
        methods = "gradcam" if methods is None else methods  # of answers, another is the default
        job = Job(entries, explainer, methods, target, metrics, **options)
    file = Path(output)
    if os.path.isdir(file):  # unlike Path.is_dir, this accepts any name
        raise RunError(
            f"output {path_text(file)!r} must be a file, got a folder; name a file in it, such as "
            "run.sqlite"
        )
    worker_count = default_workers() if workers is None else workers
    with locked_run(file), closing(Store(file, job.manifest)) as store:
        call = RunCall(job, store, progress)
        with closing(call.prepared(worker_count, timeout)) as ready:
            call.store_answers(job.explained(call.to_explain(ready)))
    result = Run(file)
    box_metrics = [metric.name for metric in job.metrics if metric.needs_object]
    with_boxes = result.query("SELECT 1 FROM photos WHERE boxes IS NOT NULL LIMIT 1")
    if box_metrics and not any(with_boxes):
        warn(
            f"no photo has boxes, so that {', '.join(box_metrics)} has no values; give a source "
            "with boxes, such as a list"
        )
    return result


class RunCall:
    """One call of `run`: reads and explains the photos that need it, stores the answers, and
    reports the progress. A photo whose file has the stored stamp is not read."""

    def __init__(
        self, job: Job, store: Store, progress: Callable[[State], None] | bool | None
    ) -> None:
        """Read what the store has. ``_done``, ``_failed`` and ``_there`` count photos explained,
        failed and kept; ``_confirmed`` are entries whose new stamps are written at the end.
        """
        stored = Run(store.file)
        methods = [method.name for method in job.methods or ()]  # of a group, none are known yet
        self.job = job
        self.store = store
        self.stored_photos = stored.identified
        self.lacking = stored.lacking(methods, [metric.name for metric in job.metrics])
        self._progress = progress
        self._done = 0
        self._failed = 0
        self._there = 0
        self._begun = time.monotonic()
        self._names: set[str] = set()
        self._confirmed: list[Entry] = []

    def unstored_entries(self) -> Iterator[Entry]:
        """The entries to read: all but those stored with all results whose file has the same stamp,
        which are counted. Collects all names of the source on the way.
        """
        for entry in entries_of(self.job.source):
            self._names.add(entry.name)
            if self._is_stored_file(entry):
                self._there += 1
            else:
                yield entry

    def prepared(self, workers: int, timeout: float) -> Generator[Ready, None, None]:
        """Give the photos of `unstored_entries`, ready for the model, in their order; ``workers``
        processes read them ahead, or this process does for 0."""
        if workers:
            yield from read_ahead(self.job.preparer, self.unstored_entries(), workers, timeout)
        else:
            yield from map(self.job.preparer, self.unstored_entries())

    def to_explain(self, ready: Iterable[Ready]) -> Iterator[Ready]:
        """Of the photos read, the new and changed ones, and those that lack methods or metrics
        (``lacking``). Those that could not be read pass through, to be stored as failures.
        """
        for photo in ready:
            if not isinstance(photo, Prepared) or not self.note_if_stored(photo):
                yield photo
            elif photo.entry.name in self.lacking:
                yield replace(photo, lacking=self.lacking[photo.entry.name])

    def store_answers(self, answers: Iterable[list[PhotoRecord | Failed]]) -> None:
        """Store each batch's answers and report the progress; the manifest changes only with the
        first photo explained. Raises if none could be for a reason that need not be the photo's.
        """
        for batch in answers:
            failures = [answer for answer in batch if isinstance(answer, Failed)]
            self._failed += len(failures)
            # not before: a call that explains no photo leaves the run its methods and metrics
            if not self._done and len(failures) < len(batch):
                names = ("methods", "metrics")
                self.store.enter_methods(map(method_row, self.job.methods or ()))
                self.store.enter_in_manifest({name: self.job.manifest[name] for name in names})
            self._done += len(batch) - len(failures)
            # nothing was ever explained with these options (each stored photo, too, lacks some
            # results): the photos are not to blame
            if not self._done and self.stored_photos.keys() <= self.lacking.keys():
                for failure in failures:
                    if failure.general is not None:
                        raise failure.general
            self.store.write(batch)
            self._report()
        self.store.confirm(self._confirmed)
        self._report()
        self.store.end(time.strftime(TIME, time.gmtime()), self._names)

    def note_if_stored(self, photo: Prepared) -> bool:
        """Whether a photo that was read is stored with the same pixels, labels and boxes. If it
        also lacks no results, its new stamp is noted, to be written at the end of the call.
        """
        entry = photo.entry
        stored = self.stored_photos.get(entry.name)
        if stored is None:
            return False
        if (photo.sha256, *photo.size) != (stored.sha256, stored.width, stored.height):
            # not another file: the source itself gives other pixels under this name
            if entry.stamp in (None, stored.stamp):
                raise RunError(
                    f"photo {entry.name!r} must have the pixels that it had, got others; give "
                    "another output"
                )
            return False
        if not self._is_labelled(stored, photo.label, photo.boxes):
            return False
        if entry.name not in self.lacking:
            self._there += 1
            self._confirmed.append(entry)
        return True

    def _is_stored_file(self, entry: Entry) -> bool:
        """Whether a photo need not be read: it is stored with all its results, label and boxes, and
        its file has the stamp that it had."""
        stored = self.stored_photos.get(entry.name)
        if stored is None or entry.stamp is None or entry.stamp != stored.stamp:
            return False
        # a data set may make something else of the same file
        if entry.name in self.lacking or not self.job.source.by_file:
            return False
        return self._is_labelled(stored, entry.label, entry.boxes)

    def _is_labelled(self, stored: StoredPhoto, label: Label, boxes: tuple[ObjectBox, ...]) -> bool:
        """Whether the label and boxes of a photo in the source are those that are stored, compared
        as the JSON of the database."""
        labels = labels_as_text(self.job.labels.of(label))
        boxes_text = boxes_as_text(self.job.labels.of_boxes(boxes))
        return stored.labels == labels and stored.boxes == boxes_text

    def _report(self) -> None:
        """Call the caller's ``progress`` with a `State`, or print a line if it is True."""
        total = self.job.source.count
        if self._progress is True:
            show_progress(self._done + self._failed + self._there, total)
        elif self._progress:
            seconds = time.monotonic() - self._begun
            state = State(self._done, self._failed, self._there, total=total, seconds=seconds)
            self._progress(state)
