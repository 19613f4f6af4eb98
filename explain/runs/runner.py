"""`run`: the photos of a source explained one batch after the other, and stored as they come."""

import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from explain._utils.errors import RunError, TargetError, keywords, naming, overheard, shown, warn
from explain._utils.progress import show_progress
from explain.attribution.api import attribute
from explain.attribution.encoding import encode
from explain.attribution.options import RunOptions
from explain.attribution.records import versions
from explain.attribution.result import Attribution
from explain.attribution.selection import select
from explain.explanation.explainer import Explainer
from explain.explanation.photos import rows_are_apart
from explain.hooks import intervene
from explain.methods.base import Method, MethodLike
from explain.metrics import Metric, ReattributionMetric, evaluate, get_metric
from explain.models import Classifier
from explain.runs import preparing
from explain.runs.manifest import identity, named_layer
from explain.runs.preparing import Labels, Prepared, Preparer, Ready
from explain.runs.result import Run
from explain.store.lists import source_of
from explain.store.manifest import described_method
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
    on_input,
    text,
)
from explain.store.writing import FORMAT, MapRecord, PhotoRecord, Store, locked, method_row, pack
from explain.targets.outputs import Outputs, Prediction
from explain.targets.resolve import TargetLike, one_per_image


class RunRequest:
    """What to explain of every photo of a run, and how.

    Args:
        explainer: the model with all that belongs to it.
        methods, target, options: as for calling an `Explainer`.
        metrics: how the maps are evaluated.

    Raises:
        ExplainError: something of it is unknown, or does not go together.
    """

    def __init__(
        self, explainer: Explainer, methods: MethodLike | Iterable[MethodLike], target: TargetLike,
        metrics: Sequence[Metric | str], **options: Any,
    ) -> None:  # fmt: skip
        if explainer.layout is not None:
            got = f"one of frames or tiles, layout {explainer.layout}"
            raise RunError(f"explainer must be one of photos in a run, got {got}; take explainer.each")
        if one_per_image(target) is not None:
            raise TargetError(f"target must be one for all photos, got {shown(target)}; targets= takes several")
        request = explainer._request(methods, target, **options)
        self.explainer = explainer
        self.requested: Sequence[Method] | str = request.methods
        self.methods = None if isinstance(request.methods, str) else list(request.methods)
        self.targets = request.targets
        self.options: Any = request.options
        self.metrics = list({metric.name: metric for metric in map(get_metric, metrics)}.values())
        self.batch_size: int | None = options.get("batch_size")
        self._independent: bool | None = False if request.alone else None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next((p.device for p in self.explainer.model.parameters()), torch.device("cpu"))

    def manifest(self, source: Source, *, trained: bool = False) -> dict[str, Any]:
        """What fixes a run, in values of JSON; ``trained`` says that the model changes meanwhile."""
        model, methods = self.explainer.model, self.requested
        own = {name: value for name, value in self.options.items() if name not in ("layer", "progress", "keep_partial")}
        found = {
            "format": FORMAT,
            "source": source.identity(),
            **identity(self.explainer, trained=trained),
            "methods": methods if isinstance(methods, str) else {each.name: described_method(each) for each in methods},
            "targets": [encode(each) for each in self.targets],
            "metrics": {metric.name: repr(metric) for metric in self.metrics},
            "layer": named_layer(model, self.options.get("layer")),
            **{name: encode(value) for name, value in own.items()},
            "versions": {name: version for name, version in versions().items() if name != "torchvision"},
            "device": str(self.device),
            "begun": time.strftime(TIME, time.gmtime()),
        }
        plain: dict[str, Any] = json.loads(json.dumps(found))  # so that it compares with what was read
        return plain

    def at_once(self, photo: Prepared) -> int:
        """How many photos like this one are explained together."""
        return 1 if self._independent is False else self.batch_size or preparing.at_once(photo.x, self.device)

    def each(self, ready: Iterable[Ready], labels: Labels) -> Iterator[list[PhotoRecord | Failed]]:
        """Explain photos in batches, as they come; the results of each batch."""
        for batch in preparing.in_batches(ready, self.at_once):
            if isinstance(batch, Failed):
                yield [batch]
            else:
                with intervene(self.explainer.model, self.explainer.interventions):
                    found = preparing.each_explained(batch, lambda photos: self.answers(photos, labels))
                yield found

    def answers(self, photos: list[Prepared], labels: Labels) -> list[PhotoRecord]:
        """Explain photos whose inputs have one shape, together where that is the same as each alone."""
        if self._independent is None and len(photos) > 1:
            self._independent = rows_are_apart(self.explainer.model, self._batch(photos[:1]))
        if len(photos) > 1 and not self._independent:
            return [answer for photo in photos for answer in self.answers([photo], labels)]
        photos = list(photos)
        if self.metrics:  # those with boxes first, so that each kind is one slice of the batch
            photos.sort(key=lambda photo: not on_input(photo.boxes, photo.box, photo.x.shape[-2:]))
        notes: list[str] = []
        with overheard(notes), naming([photo.entry.name for photo in photos]):
            x = self._batch(photos)
            if self.methods is None:  # those of a group are chosen by the first photo
                names = select(
                    self.explainer.model, x[:1], str(self.requested), layer=self.options.get("layer"),
                    target=self.targets[0], categories=self.explainer.categories,
                ).methods  # fmt: skip
                self.methods = self.explainer._methods(names)
            lacking = photos[0].lacking  # of a batch, all photos lack the same
            methods = [each for each in self.methods if lacking is None or each.name in lacking]
            found = attribute(
                self.explainer.model, x, methods, targets=self.targets, categories=self.explainer.categories,
                activation=self.explainer.activation, **self.options,
            )  # fmt: skip
            logits = next(iter(found[0].values())).logits
            probabilities = self.explainer._probabilities(x, logits)
            answers = self.explainer._answers(len(photos), probabilities, logits)
            known = [None] * len(photos) if probabilities is None else list(probabilities.float().cpu())
            results: list[list[MapRecord]] = [[] for _ in photos]
            for target, of_target in zip(self.targets, found, strict=False):
                metrics = self._evaluated(photos, x, of_target, target)
                for name, attribution in of_target.items():
                    for i, result in enumerate(self._results(attribution, known)):
                        results[i].append(replace(result, metrics={**result.metrics, **metrics[i][name]}))
        photos[0] = replace(photos[0], notes=(*photos[0].notes, *notes))
        each = zip(photos, known, answers, results, strict=True)
        return [
            PhotoRecord(self._columns(photo, labels, own, best), tuple(of), photo.notes, photo.lacking is not None)
            for photo, own, best, of in each
        ]

    def _batch(self, photos: list[Prepared]) -> torch.Tensor:
        return self.explainer._placed(torch.stack([photo.x for photo in photos]))

    def _evaluated(
        self, photos: Sequence[Prepared], x: torch.Tensor, found: Mapping[str, Attribution], target: TargetLike
    ) -> list[dict[str, dict[str, float | None]]]:
        """The metrics of each photo by method, None where one is not defined: those of boxes need photos with boxes."""
        by_box = any(metric.needs_object for metric in self.metrics)
        boxes = [on_input(photo.boxes, photo.box, photo.x.shape[-2:]) for photo in photos]
        with_boxes = sum(map(bool, boxes)) if by_box else len(photos)
        others = [metric for metric in self.metrics if not metric.needs_object]
        parts = [(slice(0, with_boxes), self.metrics), (slice(with_boxes, len(photos)), others)]
        undefined: dict[str, float | None] = {metric.name: None for metric in self.metrics}
        figures = [{name: dict(undefined) for name in found} for _ in photos]
        reattributes = any(isinstance(metric, ReattributionMetric) for metric in self.metrics)
        methods = {method.name: method for method in self.methods or ()}
        options = {name: self.options.get(name) for name in ("layer", "fuse", "batch_size")}
        for part, metrics in parts:
            if not metrics or not photos[part]:
                continue
            maps = {name: attribution[part] for name, attribution in found.items()}
            classes = next(iter(maps.values())).target
            given: Any = {name: methods[name] for name in maps} if reattributes else maps
            table = evaluate(
                self.explainer.model, x[part], given, metrics, boxes=boxes[part] if by_box and not part.start else None,
                target=target if isinstance(classes, str) else classes, activation=self.explainer.activation, **options,
            )  # fmt: skip
            for name in maps:
                for metric, values in table[name].items():
                    for i, value in enumerate(values.tolist(), part.start):
                        figures[i][name][metric] = None if math.isnan(value) else value
        return figures

    def _results(self, attribution: Attribution, known: Sequence[torch.Tensor | None]) -> Iterator[MapRecord]:
        """The rows of one method and target, one for each photo, whose probabilities are ``known``."""
        values: np.ndarray[Any, Any] = attribution.values.float().cpu().numpy()
        outputs, categories = self.explainer._outputs or Outputs(), self.explainer.categories
        classes = None if attribution.logits is None else attribution.logits.shape[1]
        layer = attribution.layer if not isinstance(attribution.layer, tuple) else json.dumps(attribution.layer)
        for i, score in enumerate(attribution.score.tolist()):
            index = None if isinstance(attribution.target, str) else int(attribution.target[i])
            target = str(attribution.target) if index is None else outputs.label(categories, index, classes)
            delta, spent, error = (
                None if each is None or each[i].isnan() else float(each[i])
                for each in (attribution.delta, attribution.spent, attribution.relative_error)
            )
            yield MapRecord(
                attribution.method, target, index, float(score), _probability(known[i], index), layer, pack(values[i]),
                delta=delta, runs=None if spent is None else int(spent), error=error,
                metrics=_set_figures(attribution, i),
            )  # fmt: skip

    def _columns(
        self, photo: Prepared, labels: Labels, probabilities: torch.Tensor | None, best: Prediction | None
    ) -> tuple[Any, ...]:
        """The columns of ``photos``."""
        true_labels = labels.of(photo.label)
        index, label = _most_probable(true_labels, probabilities)
        prediction: tuple[Any, ...] = (None, None, None)
        # Labels of a model with one output may be 0 for no and 1 for yes: its class 0 is none of them.
        single = probabilities is not None and len(probabilities) == 1
        if best is not None and best.probability is None:
            prediction = best.amount, None, None
        elif best is not None:
            prediction = best.label, None if single else best.category, best.probability
        return (
            photo.entry.name, photo.entry.path, photo.entry.stamp, photo.sha256, *photo.size, label, index,
            None if single else _probability(probabilities, index),
            *prediction,
            photo.box.left, photo.box.top, photo.box.right, photo.box.bottom, *map(int, photo.x.shape[-2:]),
            boxes_as_text(photo.boxes), labels_as_text(true_labels),
        )  # fmt: skip


def _set_figures(attribution: Attribution, image: int) -> dict[str, float | None]:
    """The share of the photo in its first set of regions, and the scores with it alone and without it."""
    if attribution.sets is None:
        return {}
    sets = attribution.sets[image]
    return {f"set_{name}": getattr(sets[0], name) if sets else None for name in ("size", "alone", "without")}


def _most_probable(
    labels: Sequence[tuple[int | None, str]], probabilities: torch.Tensor | None
) -> tuple[int | None, str | None]:
    """Of several labels that are true, the one that the model finds most probable: a prediction of any is right."""
    if not labels:
        return None, None
    return max(labels, key=lambda label: _probability(probabilities, label[0]) or 0.0)


def _probability(known: torch.Tensor | None, index: int | None) -> float | None:
    """The probability of a class, where it is one of the model's."""
    return None if known is None or index is None or index >= len(known) else float(known[index])


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
        cls, source: Any, explainer: Explainer | nn.Module | Classifier | str | None,
        methods: MethodLike | Iterable[MethodLike], target: TargetLike, metrics: Iterable[Metric | str], **options: Any,
    ) -> "Job":  # fmt: skip
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


@keywords(RunOptions, elsewhere={
    "device": "explain.Explainer(device=...) takes it", "labels": "explain.Explainer(categories=...) takes them",
})  # fmt: skip
def run(
    source: Any, explainer: Explainer | nn.Module | Classifier | str | None = None,
    methods: MethodLike | Iterable[MethodLike] = "gradcam", *, output: str | os.PathLike[str],
    target: TargetLike = None, metrics: Iterable[Metric | str] = (), workers: int | None = None,
    timeout: float = TIMEOUT, progress: Callable[[State], None] | bool | None = None, **options: Unpack[RunOptions],
) -> Run:  # fmt: skip
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
    with locked(file), closing(Store(file, job.manifest)) as store:
        before = Run(file)
        names = [method.name for method in job.request.methods or ()]
        call = RunCall(job, progress, before.known, before.lacking(names, len(job.request.metrics)))
        _go(call, store, preparing.default_workers() if workers is None else workers, timeout)
    found = Run(file)
    by_box = [metric.name for metric in job.request.metrics if metric.needs_object]
    if by_box and not next(found.query("SELECT count(*) FROM photos WHERE boxes IS NOT NULL"))[0]:
        warn(f"no photo has boxes, so that {', '.join(by_box)} has no values; give a source with boxes, such as a list")
    return found


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

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self.named: set[str] = set()  # all photos of the source

    def entries(self) -> Iterator[Entry]:
        """The photos that are not stored by the stamp of their file."""
        for entry in entries_of(self.job.source):
            self.named.add(entry.name)
            if self.has_file(entry):
                self.there += 1
            else:
                yield entry

    def count(self, done: int, failures: Sequence[Failed]) -> None:
        """Count photos, and raise the error of a failure if no photo could be explained until then."""
        self.done += done
        self.failed += len(failures)
        general = [each.general for each in failures if each.general is not None]
        if general and not self.done and self.known.keys() <= self.lacking.keys():
            raise general[0]

    def has_file(self, entry: Entry) -> bool:
        """Whether a photo is stored, judging by the stamp of its file."""
        before = self.known.get(entry.name)
        same = before is not None and entry.stamp is not None and before.stamp == entry.stamp
        same = same and entry.name not in self.lacking
        return same and self.job.source.by_file and self._same_about(entry.name, entry.label, entry.boxes)

    def has(self, photo: Prepared) -> bool:
        """Whether a photo that was read is stored.

        Raises:
            RunError: it has other pixels than before, although its file has not changed, or it has none: the source is
                another one.
        """
        entry, before = photo.entry, self.known.get(photo.entry.name)
        if before is None:
            return False
        same = (photo.sha256, *photo.size) == (before.sha256, before.width, before.height)
        if not same and entry.stamp in (None, before.stamp):
            raise RunError(f"photo {entry.name!r} must have the pixels that it had, got others; give another output")
        return same and self._same_about(entry.name, photo.label, photo.boxes)

    def _same_about(self, name: str, label: Label, boxes: tuple[Corners, ...]) -> bool:
        before = self.known[name]
        labels = labels_as_text(self.job.labels.of(label))
        return (before.labels, before.boxes) == (labels, boxes_as_text(boxes))

    def report(self) -> None:
        """Tell the caller of the progress."""
        if self.progress is True:
            show_progress(self.done + self.failed + self.there, self.job.source.count)
        elif self.progress:
            seconds = time.monotonic() - self.begun
            self.progress(State(self.done, self.failed, self.there, self.job.source.count, seconds))


def _go(call: RunCall, store: Store, count: int, timeout: float) -> None:
    """Explain the photos that the file lacks, which are prepared by ``count`` workers."""
    same: list[Entry] = []  # photos that were read, and are those of the file
    with closing(_prepared(call, count, timeout)) as ready:
        for found in call.job.request.each(_changed(ready, call, same), call.job.labels):
            failures = [each for each in found if isinstance(each, Failed)]
            first = not call.done
            call.count(len(found) - len(failures), failures)
            if first and call.done:
                store.enter_methods(map(method_row, call.job.request.methods or ()), call.job.manifest)
            store.write(found)
            call.report()
    store.confirm(same)
    call.report()
    store.forget_failures(but=call.named)
    store.end(time.strftime(TIME, time.gmtime()))


def _prepared(call: RunCall, count: int, timeout: float) -> Generator[Ready, None, None]:
    """Photos ready for the model, prepared in worker processes or here."""
    if count:
        try:
            workers = preparing.Workers(call.job.preparer, call.entries(), count, timeout)
        except preparing.CannotBeginError as error:
            warn(f"photos are read one after the other, since no worker process can be started ({error})")
        else:
            with closing(workers):
                yield from workers
            return
    yield from map(call.job.preparer, call.entries())


def _changed(ready: Iterable[Ready], call: RunCall, same: list[Entry]) -> Iterator[Ready]:
    """The photos to explain; those that are stored with these pixels go to ``same``."""
    for found in ready:
        if isinstance(found, Prepared) and call.has(found):
            if found.entry.name in call.lacking:
                yield replace(found, lacking=call.lacking[found.entry.name])
                continue
            call.there += 1
            same.append(found.entry)
        else:
            yield found
