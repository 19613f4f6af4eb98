"""`run_on_ray`: a run on the machines of a Ray cluster."""

import importlib
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import torch
from torch import nn

from explain._utils.errors import RunError, keywords, muted, optional, raised, shown
from explain.attribution.options import RunOptions
from explain.attribution.records import versions
from explain.explanation.explainer import Explainer
from explain.methods.base import MethodLike
from explain.metrics import Metric
from explain.models import Classifier
from explain.runs.exporting import arrow_modules
from explain.runs.parts import ENDING, MANIFEST, REMARKS, Storage, indexed, key_of, write_part
from explain.runs.request import TIME
from explain.runs.result import Run
from explain.runs.runner import ELSEWHERE, Job, RunCall, State
from explain.store.manifest import must_agree
from explain.store.sources import Entry, Failed, check_count, text
from explain.store.writing import PhotoRecord, locked
from explain.targets.resolve import TargetLike

MAX_NOTES = 1000
SAME = ("explain", "torch")  # packages whose versions have to be the same everywhere
PER_FILE = 64
BEGUN = "_begun-"  # how files begin that say which pieces were begun
TOGETHER = 2  # attempts at a piece as a whole: a machine may be lost without any photo's fault


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
        self.job = job
        self.folder = folder
        if device is not None:
            job.request.explainer.model.to(device)

    def __call__(self, entries: list[Entry]) -> Report:
        """Explain photos, write them into the folder, and report; an error is part of the report."""
        file = f"{BEGUN}{key_of([entry.name for entry in entries])}.json"
        request = self.job.request
        try:
            self._check_versions()
            answers = self._explained(entries, file)
            records = [answer for answer in answers if isinstance(answer, PhotoRecord)]
            metrics = sorted(metric.name for metric in request.metrics)
            write_part(self.folder, records, request.methods or [], metrics)
        except Exception as error:  # not an interrupt: it may be the end of the process
            self.folder.remove(file)
            return Report(error=_sendable(error))
        self.folder.remove(file)
        failures = [answer for answer in answers if isinstance(answer, Failed)]
        sent = [replace(failure, general=failure.general and _sendable(failure.general)) for failure in failures]
        notes = dict.fromkeys(note for record in records for note in record.notes)
        return Report(tuple(record.name for record in records), tuple(sent), tuple(notes))

    def _check_versions(self) -> None:
        """Refuse packages of other versions than where the run began: values would be others."""
        here = versions()
        expected = self.job.manifest["versions"]
        for name in SAME:
            if expected.get(name) != here.get(name):
                got = f"{expected.get(name)} where the run began and {here.get(name)} on another"
                raise RunError(f"{name} must have the same version on all machines, but it is {got}; install that")

    def _explained(self, entries: list[Entry], file: str) -> list[PhotoRecord | Failed]:
        """Explain photos, and note in a file for the next attempt what was begun: it stays if the process dies.

        After `TOGETHER` attempts that came to no end, the photos are explained one by one, but for those during which
        the process died then.
        """
        before = self.folder.read_object(file) or {"attempts": 0, "ended": [], "now": None}
        ended = list(before["ended"])
        if before["now"] is not None:
            ended.append(before["now"])
        alone = before["attempts"] >= TOGETHER
        answers: list[PhotoRecord | Failed] = []
        for piece in [[entry] for entry in entries] if alone else [entries]:
            first = piece[0]
            if alone and first.name in ended:
                reason = f"image {first.name!r} ended the process that explained it (out of memory?); explain it alone"
                answers.append(Failed(first.name, reason, first.path, stamp=first.stamp))
                continue
            state = {"attempts": before["attempts"] + 1, "ended": ended, "now": first.name if alone else None}
            self.folder.write(file, json.dumps(state).encode())
            for batch in self.job.request.each(map(self.job.preparer, piece), self.job.labels):
                answers += batch
        return answers


def _sendable(error: Exception) -> Exception:
    """An error that can be sent to another process: one that cannot is replaced by its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling runs into
        return RunError(raised(error))
    return error


Workers: TypeAlias = Callable[[Job, Storage, Iterator[list[Entry]]], Iterable[Report]]
"""Has each piece done by a `PartExplainer`, here or elsewhere; the reports may come in any order."""


def explain_in_pieces(
    job: Job,
    folder: Storage,
    workers: Workers,
    per_file: int = PER_FILE,
    progress: Callable[[State], None] | bool | None = None,
) -> None:
    """Explain the photos that a folder lacks in pieces of ``per_file`` photos, one file each.

    Raises:
        RunError: the folder is that of another run, cannot be written, or machines write into folders of their own.
        ExplainError: what holds for all photos.
    """
    before = _run_in(folder, job.manifest)
    call = RunCall(job, progress, {} if before is None else before.known)
    failures: dict[str, str] = {}
    notes: dict[str, None] = {}
    pending: set[str] = set()
    ended = None

    def missing() -> Iterator[Entry]:
        for entry in call.entries():
            if entry.name in call.known:
                _check_stored(entry, call, failures)
            else:
                pending.add(entry.name)
                yield entry

    entries = missing()
    pieces = iter(lambda: list(islice(entries, per_file)), [])
    try:
        for report in workers(job, folder, pieces):
            if report.error is not None:
                raise report.error
            call.count(len(report.done), report.failures)
            failures |= {failure.name: failure.reason for failure in report.failures}
            pending.difference_update(report.done, failures)
            notes |= dict.fromkeys(report.notes[: max(0, MAX_NOTES - len(notes))])
            call.report()
        if pending:
            raise RunError(f"pieces must all come back, but {len(pending)} photos did not; start once more")
        call.report()
        with muted():
            elsewhere = call.names - failures.keys() - Run(indexed(folder)[0]).known.keys()
        if elsewhere:
            got = f"{len(elsewhere)} photos were written elsewhere; choose one on a shared drive or in a storage"
            raise RunError(f"output {text(folder.name)!r} must be a folder that all machines share, but {got}")
        ended = time.strftime(TIME, time.gmtime())
    finally:
        files = [name for name in folder.stamps() if name.endswith(ENDING)]
        remarks = {"ended": ended, "failures": failures, "notes": list(notes), "files": files}
        folder.write(REMARKS, json.dumps(remarks, ensure_ascii=False, indent=1).encode())


def _check_stored(entry: Entry, call: RunCall, failures: dict[str, str]) -> None:
    """Read a photo that is in the folder, since it cannot be identified by its file, and compare it.

    Raises:
        RunError: it has changed.
    """
    call.there += 1
    photo = call.job.preparer(entry)
    if isinstance(photo, Failed):
        call.count(0, [photo])
        failures[entry.name] = photo.reason
    elif not call.has(photo):
        raise RunError(f"photo {entry.name!r}, its label or boxes have changed since; give another folder")


def _run_in(folder: Storage, manifest: Mapping[str, Any]) -> Run | None:
    """What a folder has of this run; None where it has no photo yet."""
    files = folder.stamps()
    for file in files:  # of a run that was interrupted: attempts count from one again
        if file.startswith(BEGUN):
            folder.remove(file)
    if not any(file.endswith(ENDING) for file in files):
        folder.write(MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1).encode())
        return None
    before = folder.read_object(MANIFEST)
    if before is None:
        raise RunError(f"output {text(folder.name)!r} must be empty or hold a run, got other Parquet; choose another")
    must_agree(before, manifest, folder.name)
    with muted():  # files that are missing are written again
        return Run(indexed(folder)[0])


NOT_HERE = {
    **ELSEWHERE,
    "device": "gpus puts the model of each actor on a GPU",
    "workers": "actors says how many there are",
}


@keywords(RunOptions, elsewhere=NOT_HERE)
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
    progress: Callable[[State], None] | bool | None = None,
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
        target, targets, top_k, metrics, layer, fuse, batch_size, precision, samples, tolerance, max_seconds:
            as for `explain.run`.
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
    check_count("per_file", per_file, 1, optional=False)
    check_count("batch_size", options.get("batch_size"), 1)
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < float("inf"):
        raise RunError(f"gpus must be a number from 0, got {shown(gpus)}; leave it out")
    job = Job.of(source, explainer, methods, target, metrics, **options)
    if job.request.device.type != "cpu":
        raise RunError(f"explainer must be on the CPU to be sent elsewhere, got {job.request.device}; gpus= moves it")
    if isinstance(job.request.requested, str):
        raise RunError(f"methods must be named for many machines, got the group {job.request.requested!r}; name them")
    ray = _ray()
    folder = Storage(output)
    with ExitStack() as stack:
        if folder.is_local:
            stack.enter_context(locked(Path(folder.path, MANIFEST)))
        stack.enter_context(_connected(ray, address))
        explain_in_pieces(job, folder, partial(_on_ray, ray, actors, float(gpus)), per_file, progress)
    return Run(output)


class Actor:
    """A process of Ray that explains pieces: they come, and the reports go, pickled in a table with one column."""

    def __init__(self, job: Any, folder: Storage, device: str | None) -> None:
        torch.set_num_threads(1)  # as many actors run as there are processors
        self._explain = PartExplainer(_ray().get(job), folder, device)

    def __call__(self, table: Any) -> Any:
        arrow, _ = arrow_modules()
        reports = [pickle.dumps(self._explain(pickle.loads(piece))) for piece in table["piece"].to_pylist()]
        return arrow.table({"report": arrow.array(reports, arrow.binary())})


def _on_ray(
    ray: Any, actors: int | None, gpus: float, job: Job, folder: Storage, pieces: Iterator[list[Entry]]
) -> Iterator[Report]:
    """Have actors do the pieces. A piece is a block: after an actor's death, Ray gives it to another."""
    items = [{"piece": pickle.dumps(piece)} for piece in pieces]
    if not items:
        return
    if actors is None:
        resources = ray.cluster_resources()
        actors = int(resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1))
        if actors < 1:
            raise RunError(f"gpus must be there, but the cluster has {resources.get('GPU', 0):g}; leave gpus out")
    blocks = ray.data.from_items(items, override_num_blocks=len(items))
    reports = blocks.map_batches(
        Actor,
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=1,
        num_gpus=gpus or None,
        fn_constructor_args=(ray.put(job), folder, "cuda" if gpus else None),
        compute=ray.data.ActorPoolStrategy(size=min(actors, len(items))),
    )
    try:
        for row in reports.iter_rows():
            yield pickle.loads(row["report"])
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(f"the Ray job failed: {lines[-1]}; the same call continues from what is stored") from error


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster, which is started on this machine if there is none, without bars and logs of Ray Data;
    afterwards as before."""
    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # or Ray would report its use to its makers
        try:
            ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except Exception as error:
            raise RunError(f"ray must reach a cluster, but {raised(error)}; check the address {address!r}") from error
    context = ray.data.DataContext.get_current()
    logger = logging.getLogger("ray.data")
    level = logger.level
    bars = context.enable_progress_bars
    told = context.print_on_execution_start
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        context.enable_progress_bars = bars
        context.print_on_execution_start = told
        if ours:
            ray.shutdown()


def _ray() -> Any:
    optional("ray.data", "to run on a cluster", "ray", RunError)
    return importlib.import_module("ray")
