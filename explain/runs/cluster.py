"""`run_on_ray`: a run on the machines of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import torch
from torch import nn

from explain._utils.errors import RunError, keywords, raised, shown
from explain.attribution.options import RunOptions
from explain.attribution.records import versions
from explain.explanation.explainer import Explainer
from explain.methods.registry import MethodLike
from explain.metrics import Metric
from explain.models import Classifier
from explain.runs.explaining import RunRequest
from explain.runs.files import source_of
from explain.runs.labels import Labels
from explain.runs.manifest import manifest_of, must_agree
from explain.runs.parts import BEGUN, ENDING, MANIFEST, REMARKS, Attempt, attempt, indexed, write_part
from explain.runs.photo_identity import Comparing, Known
from explain.runs.preparing import Failed, Preparer, in_process
from explain.runs.reading import Stored
from explain.runs.result import Run
from explain.runs.runner import State
from explain.runs.sources import Entry, Source, Trouble, entries_of, text
from explain.runs.storage import Storage
from explain.runs.store import PhotoRecord
from explain.runs.writing import alone
from explain.targets.resolve import TargetLike

KEPT = 1000  # notes that are kept
SAME = ("explain", "torch")  # packages whose versions have to be the same everywhere


@dataclass(frozen=True)
class Task:
    """All that a machine needs to know to explain photos of a run; it can be sent."""

    source: Source
    question: RunRequest
    labels: Labels
    place: Storage
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


class PartExplainer:
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
                write_part(task.place, answers, task.question.methods or [], self._metrics)
        except Exception as error:
            return Report(error=_sent(error))
        notes = dict.fromkeys(note for answer in answers for note in answer.notes)
        return Report(tuple(answer.photo[0] for answer in answers), failures, tuple(notes))

    def _found(self, entries: list[Entry], tried: Attempt) -> Iterator[PhotoRecord | Failed]:
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

    def _explained(self, entries: list[Entry]) -> Iterator[PhotoRecord | Failed]:
        ready = in_process(Preparer(self.task.source, self.task.question.explainer.preprocess), iter(entries))
        for batch in self.task.question.each(ready, self.task.labels):
            yield from batch


Through: TypeAlias = Callable[[Task, Iterator[list[Entry]]], Iterable[Report]]
"""What takes pieces through `PartExplainer`, here or elsewhere; the reports may come in any order."""


@dataclass
class DistributedRun:
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
        files = place.stamps()
        for left in files:  # by a run that was interrupted: attempts count from one again
            if left.startswith(BEGUN):
                place.remove(left)
        there, content = any(file.endswith(ENDING) for file in files), place.read(MANIFEST)
        if there and content is None:
            raise RunError(f"output {text(place.name)!r} must be a new folder or that of a run, got one with other "
                           "Parquet files; choose another")  # fmt: skip
        if there and content is not None:
            must_agree(json.loads(content), manifest, place.name)
            return Stored(indexed(place)[0]).known
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
        missing = asked - Stored(indexed(self.task.place)[0]).known.keys() if asked else set()
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


def must_be_sendable(question: RunRequest) -> None:
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


PER_FILE = 64


@keywords(
    RunOptions,
    elsewhere={
        "device": "gpus puts the model of each actor on a GPU",
        "labels": "explain.Explainer(categories=...) takes them",
        "workers": "actors says how many there are",
    },
)
def run_on_ray(
    source: Any,
    explainer: Explainer | nn.Module | Classifier | str | None = None,
    methods: MethodLike | Iterable[MethodLike] = "gradcam",
    *,
    output: str | os.PathLike[str],
    address: str | None = None,
    actors: int | None = None,
    gpus: float = 0.0,
    per_file: int = PER_FILE,
    target: TargetLike = None,
    metrics: Iterable[Metric | str] = (),
    progress: Callable[[State], None] | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Explain all photos of a source on the machines of a Ray cluster, into a folder of Parquet files.

    The rows are those that `explain.run` finds on one machine. The same call continues a run that was interrupted:
    photos that are in the folder are left out. An actor or machine that is lost costs the time of the photos that it
    was busy with. Needs ``ray`` (extra ``ray``); all machines need this package in the same version, and have to reach
    the photos and the folder under the same names.

    Args:
        source, explainer, methods: as for `explain.run`. The model is sent to the actors.
        output: a folder that all machines share, or an address such as ``s3://bucket/maps``.
        address: of the cluster, as for ``ray.init``; by default one that runs on this machine, or a new one on it.
        actors: processes with a model; by default one for each GPU share or, without GPUs, for each processor.
        gpus: the share of a GPU that each actor takes: 0.25 for four actors on each.
        per_file: photos that are explained at a time, and that are in one file.
        target, targets, top_k, metrics, layer, fuse, batch_size, precision, samples, tolerance, max_seconds: as for
            `explain.run`.
        progress: called with a `State` after each piece.

    Returns:
        The run, as `explain.open_run` opens it.

    Raises:
        RunError: Ray is missing, the folder or the source cannot be used, or the run was begun with other options.
        ExplainError: as for calling an `Explainer`, for what holds for all photos.

    >>> run_on_ray("photos", output="maps", actors=0)
    Traceback (most recent call last):
    explain.RunError: actors must be a whole number from 1, got 0; leave it out
    """
    for name, value in (("actors", actors), ("per_file", per_file), ("batch_size", options.get("batch_size"))):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RunError(f"{name} must be a whole number from 1, got {shown(value)}; leave it out")
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < float("inf"):
        raise RunError(f"gpus must be a number from 0, got {shown(gpus)}; leave it out")
    ray = _ray()
    photos = source_of(source)
    made = explainer if isinstance(explainer, Explainer) else Explainer(explainer)
    question = RunRequest(made, methods, target, list(metrics), **options)
    must_be_sendable(question)
    if photos.count == 0:
        raise RunError(f"source must have photos, but {text(str(source))!r:.100} has none; check what it holds")
    place = Storage(output)
    manifest = manifest_of(
        source=photos, explainer=made, methods=question.asked, targets=question.targets, metrics=question.metrics,
        options=question.options,
    )  # fmt: skip
    task = Task(photos, question, Labels(made.categories, photos.classes), place, manifest)
    with ExitStack() as stack:
        if place.is_local:
            stack.enter_context(alone(Path(place.path, MANIFEST)))
        stack.enter_context(_connected(ray, address))
        DistributedRun(task, partial(_through, ray, actors, float(gpus)), per_file, progress).go()
    return Run(output)


class Actor:
    """What an actor does: pieces in, reports out, both pickled in a table with one column."""

    def __init__(self, task: Any, device: str | None) -> None:
        self._pyarrow: Any = importlib.import_module("pyarrow")
        torch.set_num_threads(1)  # as many actors run as there are processors
        self._explaining = PartExplainer(_ray().get(task), device)

    def __call__(self, table: Any) -> Any:
        found = [pickle.dumps(self._explaining(pickle.loads(piece))) for piece in table["piece"].to_pylist()]
        return self._pyarrow.table({"report": self._pyarrow.array(found, self._pyarrow.binary())})


def _through(
    ray: Any, actors: int | None, gpus: float, task: Task, pieces: Iterator[list[Entry]]
) -> Iterator[Report]:  # fmt: skip
    """Take pieces through actors. A piece is a block: after an actor's death, Ray gives it to another."""
    items = [{"piece": pickle.dumps(piece)} for piece in pieces]
    if not items:
        return
    count = actors or _many(ray, gpus)
    sent = ray.put(task)
    found = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        Actor, batch_size=None, batch_format="pyarrow", zero_copy_batch=True, num_cpus=1, num_gpus=gpus or None,
        fn_constructor_args=(sent, "cuda" if gpus else None),
        compute=ray.data.ActorPoolStrategy(size=min(count, len(items))),
    )  # fmt: skip
    try:
        for row in found.iter_rows():
            yield pickle.loads(row["report"])
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines()
        raise RunError(f"ray must go on until the end, but says: {said[-1] if said else type(error).__name__}; what is "
                       "written is kept, and the same call goes on from there") from error  # fmt: skip


def _many(ray: Any, gpus: float) -> int:
    """How many actors have room."""
    there = ray.cluster_resources()
    room = there.get("GPU", 0) / gpus if gpus else there.get("CPU", 1)
    if room < 1:
        raise RunError(f"gpus must be there, but the cluster has {there.get('GPU', 0):g}; leave gpus out")
    return int(room)


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Be connected to a cluster, which is started on this machine if there is none; afterwards as before."""
    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # or Ray would report its use to its makers
        try:
            ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except Exception as error:
            raise RunError(f"ray must reach a cluster, but {raised(error)}; check the address {address!r}") from error
    try:
        with _quiet(ray):
            yield
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Let Ray Data draw no bars and log no plans."""
    context = ray.data.DataContext.get_current()
    options = {"enable_progress_bars": False, "print_on_execution_start": False}
    before = {name: getattr(context, name) for name in options if hasattr(context, name)}
    logger = logging.getLogger("ray.data")
    level = logger.level
    for name in before:
        setattr(context, name, options[name])
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(context, name, value)


def _ray() -> Any:
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.data")
        return importlib.import_module("ray")
    raise RunError("ray must be installed to run on a cluster; pip install 'explain[ray]'")
