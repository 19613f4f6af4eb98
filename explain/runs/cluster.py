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
from explain.runs.known_photos import KnownPhoto, KnownPhotos
from explain.runs.manifest import must_agree
from explain.runs.parts import BEGUN, ENDING, MANIFEST, REMARKS, Attempt, Storage, attempt, indexed, write_part
from explain.runs.preparing import Failed
from explain.runs.result import Run
from explain.runs.runner import TIME, Job, State, check_count
from explain.runs.sources import Entry, entries_of, text
from explain.runs.store import PhotoRecord, locked
from explain.targets.resolve import TargetLike

MAX_NOTES = 1000
SAME = ("explain", "torch")  # packages whose versions have to be the same everywhere
PER_FILE = 64


@dataclass(frozen=True)
class Report:
    """The outcome of a piece: the photos that are in the folder now, those that failed, and warnings.

    ``error`` ends the run.
    """

    done: tuple[str, ...] = ()
    failures: tuple[Failed, ...] = ()
    notes: tuple[str, ...] = ()
    error: Exception | None = None


class PartExplainer:
    """Explains pieces of a run with one copy of the model.

    Args:
        job: the run.
        folder: where its Parquet files are written.
        device: where to run the model; by default where it is.
    """

    def __init__(self, job: Job, folder: Storage, device: str | None = None) -> None:
        self.job, self.folder = job, folder
        if device is not None:
            job.request.explainer.model.to(device)

    def __call__(self, entries: list[Entry]) -> Report:
        """Explain photos, write them into the folder, and report; an error is part of the report."""
        request = self.job.request
        try:
            _check_versions(self.job.manifest["versions"])
            with attempt(self.folder, entries) as tried:
                found = list(self._explained(entries, tried))
                records = [each for each in found if isinstance(each, PhotoRecord)]
                metrics = sorted(metric.name for metric in request.metrics)
                write_part(self.folder, records, request.methods or [], metrics)
        except Exception as error:
            return Report(error=_sendable(error))
        failures = tuple(
            each if each.general is None else replace(each, general=_sendable(each.general))
            for each in found
            if isinstance(each, Failed)
        )
        notes = dict.fromkeys(note for record in records for note in record.notes)
        return Report(tuple(record.photo[0] for record in records), failures, tuple(notes))

    def _explained(self, entries: list[Entry], tried: Attempt) -> Iterator[PhotoRecord | Failed]:
        pieces = [[entry] for entry in entries] if tried.alone else [entries]
        for piece in pieces:
            first = piece[0]
            if tried.alone and first.name in tried.ended:
                yield Failed(first.name, f"image {first.name!r} ended the process that explained it (out of memory?); "
                             "explain it alone", first.path, stamp=first.stamp)  # fmt: skip
                continue
            if tried.alone:
                tried.begin(first.name)
            for batch in self.job.request.each(map(self.job.preparer, piece), self.job.labels):
                yield from batch


def _check_versions(expected: Mapping[str, str]) -> None:
    """Refuse a machine with other versions: its values would be others."""
    here = versions()
    for name in SAME:
        if expected.get(name) != here.get(name):
            raise RunError(f"{name} must have the same version on all machines, but it is {expected.get(name)} where "
                           f"the run began and {here.get(name)} on another; install the same")  # fmt: skip


def _sendable(error: Exception) -> Exception:
    """An error that can be sent to another process: one that cannot is replaced by its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling runs into
        return RunError(raised(error))
    return error


Workers: TypeAlias = Callable[[Job, Storage, Iterator[list[Entry]]], Iterable[Report]]
"""Has each piece done by a `PartExplainer`, here or elsewhere; the reports may come in any order."""


@dataclass
class DistributedRun:
    """One call of a run in pieces of ``per_file`` photos, one file each; photos in the folder are skipped."""

    job: Job
    folder: Storage
    workers: Workers
    per_file: int = PER_FILE
    progress: Callable[[State], None] | None = None
    begun: float = field(default_factory=time.monotonic)
    done: int = 0
    there: int = 0

    def go(self) -> None:
        """Explain the photos that the folder lacks.

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
            for report in self.workers(self.job, self.folder, self._pieces()):
                self._enter(report)
            if self.open:
                raise RunError(f"pieces must all come back, but {len(self.open)} photos did not; start once more")
            self._report()
            self._check_complete()
            ended = time.strftime(TIME, time.gmtime())
        finally:
            remarks = {"ended": ended, "failures": self.failures, "notes": list(self.notes)}
            self.folder.write(REMARKS, json.dumps(remarks, ensure_ascii=False, indent=1).encode())

    def _begin(self) -> dict[str, KnownPhoto]:
        """Check that the folder is that of this run, and return the photos in it."""
        folder, manifest = self.folder, self.job.manifest
        files = folder.stamps()
        for file in files:  # of a run that was interrupted: attempts count from one again
            if file.startswith(BEGUN):
                folder.remove(file)
        if not any(file.endswith(ENDING) for file in files):
            folder.write(MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1).encode())
            return {}
        before = folder.read(MANIFEST)
        if before is None:
            raise RunError(f"output {text(folder.name)!r} must be a new folder or that of a run, got one with other "
                           "Parquet files; choose another")  # fmt: skip
        must_agree(json.loads(before), manifest, folder.name)
        return Run(indexed(folder)[0]).known

    def _pieces(self) -> Iterator[list[Entry]]:
        entries = self._entries()
        while piece := list(islice(entries, self.per_file)):
            self.open.update(entry.name for entry in piece)
            yield piece

    def _entries(self) -> Iterator[Entry]:
        """The photos to explain; those in the folder are compared with those of the source."""
        known = KnownPhotos(self.job.source, self.job.labels, self.known)
        for entry in entries_of(self.job.source):
            self.named.add(entry.name)
            if entry.name not in self.known:
                yield entry
                continue
            self.there += 1
            if known.has_file(entry):
                continue
            found = self.job.preparer(entry)
            if isinstance(found, Failed):
                self.failures[entry.name] = found.reason
            elif not known.has(found):
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
        self.notes |= dict.fromkeys(report.notes[: max(0, MAX_NOTES - len(self.notes))])
        self._report()

    def _check_complete(self) -> None:
        """Notice machines that wrote into a folder of their own."""
        expected = self.named - self.failures.keys()
        missing = expected - Run(indexed(self.folder)[0]).known.keys() if expected else set()
        if missing:
            raise RunError(f"output {text(self.folder.name)!r} must be a folder that all machines share, but "
                           f"{len(missing)} photos were written elsewhere; choose one on a shared drive or in a "
                           "storage")  # fmt: skip

    def _report(self) -> None:
        if self.progress is not None:
            seconds = time.monotonic() - self.begun
            self.progress(State(self.done, len(self.failures), self.there, self.job.source.count, seconds))


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
    worked on. Needs ``ray`` (extra ``ray``); all machines need this package in the same version, and have to reach
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
    check_count("actors", actors, 1)
    check_count("per_file", per_file, 1)
    check_count("batch_size", options.get("batch_size"), 1)
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < float("inf"):
        raise RunError(f"gpus must be a number from 0, got {shown(gpus)}; leave it out")
    job = Job.of(source, explainer, methods, target, metrics, **options)
    if job.request.device.type != "cpu":
        raise RunError(f"explainer must be on the CPU to be sent to other machines, got {job.request.device}; each "
                       "moves it to its own device")  # fmt: skip
    if isinstance(job.request.requested, str):
        raise RunError(f"methods must be named to run on several machines, got the group {job.request.requested!r}; "
                       "name them")  # fmt: skip
    ray = _ray()
    folder = Storage(output)
    with ExitStack() as stack:
        if folder.is_local:
            stack.enter_context(locked(Path(folder.path, MANIFEST)))
        stack.enter_context(_connected(ray, address))
        DistributedRun(job, folder, partial(_on_ray, ray, actors, float(gpus)), per_file, progress).go()
    return Run(output)


class Actor:
    """A process of Ray that explains pieces: they come, and the reports go, pickled in a table with one column."""

    def __init__(self, job: Any, folder: Storage, device: str | None) -> None:
        self._pyarrow: Any = importlib.import_module("pyarrow")
        torch.set_num_threads(1)  # as many actors run as there are processors
        self._explain = PartExplainer(_ray().get(job), folder, device)

    def __call__(self, table: Any) -> Any:
        reports = [pickle.dumps(self._explain(pickle.loads(piece))) for piece in table["piece"].to_pylist()]
        return self._pyarrow.table({"report": self._pyarrow.array(reports, self._pyarrow.binary())})


def _on_ray(
    ray: Any, actors: int | None, gpus: float, job: Job, folder: Storage, pieces: Iterator[list[Entry]]
) -> Iterator[Report]:  # fmt: skip
    """Have actors do the pieces. A piece is a block: after an actor's death, Ray gives it to another."""
    items = [{"piece": pickle.dumps(piece)} for piece in pieces]
    if not items:
        return
    if actors is None:
        resources = ray.cluster_resources()
        actors = int(resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1))
        if actors < 1:
            raise RunError(f"gpus must be there, but the cluster has {resources.get('GPU', 0):g}; leave gpus out")
    found = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        Actor, batch_size=None, batch_format="pyarrow", zero_copy_batch=True, num_cpus=1, num_gpus=gpus or None,
        fn_constructor_args=(ray.put(job), folder, "cuda" if gpus else None),
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(items))),
    )  # fmt: skip
    try:
        for row in found.iter_rows():
            yield pickle.loads(row["report"])
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(f"the Ray job failed: {lines[-1]}; the results until then are stored, and the same call "
                       "continues from there") from error  # fmt: skip


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster, which is started on this machine if there is none; afterwards as before."""
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
    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    names = [name for name in ("enable_progress_bars", "print_on_execution_start") if hasattr(context, name)]
    before, level = {name: getattr(context, name) for name in names}, logger.level
    for name in names:
        setattr(context, name, False)
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
