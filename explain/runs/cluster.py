"""`run_on_ray`: a run on the machines of a Ray cluster."""

import logging
import os
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, Unpack

from torch import nn

from explain._utils.errors import (
    RunError,
    check_whole_number,
    keywords,
    muted,
    optional,
    raised,
    shown,
)
from explain.attribution.options import RunOptions
from explain.attribution.records import versions
from explain.explanation.explainer import Explainer
from explain.methods.base import MethodLike
from explain.metrics import Metric
from explain.models import Classifier
from explain.runs.job import Job
from explain.runs.parts import (
    DESCRIPTION,
    ENDING,
    Storage,
    describe,
    imported,
    index_file,
    read_part,
    write_part,
)
from explain.runs.result import Run
from explain.runs.runner import ELSEWHERE, RunCall, State
from explain.store.lists import source_of
from explain.store.sources import Entry, Failed, path_text
from explain.store.writing import PhotoRecord, Store, locked_run
from explain.targets.resolve import TargetLike

SAME_VERSIONS = ("explain", "torch")  # packages whose versions have to be the same everywhere
PER_FILE = 64  # photos of a piece, which go into one Parquet file
ATTEMPTS = 2  # at a piece as a whole: a machine may be lost without the fault of any photo

Piece = list[Entry]


@dataclass(frozen=True)
class Report:
    """The outcome of a piece: the file that its photos are in, and those that failed; ``error``
    ends the run."""

    file: str | None = None
    failures: tuple[Failed, ...] = ()
    error: Exception | None = None


class PartExplainer:
    """Explains pieces of a run with one copy of the model on ``device``, and writes their Parquet
    files into ``folder``.
    """

    def __init__(self, job: Job, folder: Storage, device: str | None = None) -> None:
        """Keep the job and the folder, and move the model to ``device`` ("cuda" or None), once for
        all pieces of this process."""
        self.job = job
        self.folder = folder
        if device is not None:
            job.explainer.model.to(device)

    def report(self, piece: Piece) -> Report:
        """Explain a piece's photos into one Parquet file of the folder, on an actor's machine, and
        report file and failures; an error that ends the run is reported, not raised.
        """
        job = self.job
        try:
            self._check_versions()
            batches = job.explained(map(job.preparer, piece))
            answers = [answer for batch in batches for answer in batch]
            records = [answer for answer in answers if isinstance(answer, PhotoRecord)]
            metrics = sorted(metric.name for metric in job.metrics)
            file = write_part(self.folder, records, metrics, job.methods or ()) if records else None
        except Exception as error:  # not an interrupt: it may be the end of the process
            return Report(error=_sendable(error))
        failures = []
        for answer in answers:
            if isinstance(answer, Failed):
                general = None if answer.general is None else _sendable(answer.general)
                failures.append(replace(answer, general=general))
        return Report(file, tuple(failures))

    def _check_versions(self) -> None:
        """Refuse to explain with other versions of `SAME_VERSIONS` than on the machine where the
        run began: the values could differ."""
        installed = versions()
        expected = self.job.manifest["versions"]
        for name in SAME_VERSIONS:
            if expected.get(name) != installed.get(name):
                raise RunError(
                    f"{name} must have the same version on all machines, but it is "
                    f"{expected.get(name)} where the run began and {installed.get(name)} on "
                    "another; install that"
                )


def _sendable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled, or else a `RunError` with its text: reports go
    to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling runs into
        return RunError(raised(error))
    return error


class Actors(Protocol):
    """Processes that each have a `PartExplainer`; `reports` drives them. Tests and `run_on_ray`
    have classes of their own."""

    def are_busy(self) -> bool:
        """Whether each process has a piece, so that none can be sent now."""
        ...

    def send(self, piece: Piece) -> None:
        """Give a piece to a process that has none; `are_busy` was False."""
        ...

    def receive(self) -> tuple[Piece, Report | None] | None:
        """Wait for the end of any piece: return it with its report, or with None where its process
        died; None if no piece is in work."""
        ...


def reports(actors: Actors, pieces: Iterator[Piece]) -> Iterator[Report]:
    """Yield the actors' reports of pieces as they come. A piece whose process died is tried
    `ATTEMPTS` times, then photo by photo, to report the fatal one after as many deaths.
    """
    to_retry: deque[Piece] = deque()
    deaths: Counter[tuple[str, int]] = Counter()  # of processes, by the piece that each had
    while True:
        while not actors.are_busy():
            piece = to_retry.popleft() if to_retry else next(pieces, None)
            if piece is None:
                break
            actors.send(piece)
        finished = actors.receive()
        if finished is None:
            return
        piece, report = finished
        key = (piece[0].name, len(piece))  # its first photo may also be tried alone
        if report is not None:
            yield report
            continue
        deaths[key] += 1
        if deaths[key] < ATTEMPTS:
            to_retry.append(piece)
        elif len(piece) > 1:
            to_retry.extend([entry] for entry in piece)
        else:
            (entry,) = piece
            reason = (
                f"image {entry.name!r} ended the process that explained it (out of memory?); "
                "explain it alone"
            )
            yield Report(failures=(Failed(entry.name, reason, entry.path, stamp=entry.stamp),))


def explain_in_pieces(
    job: Job,
    folder: Storage,
    actors: Callable[[], Actors],
    per_file: int = PER_FILE,
    progress: Callable[[State], None] | bool | None = None,
) -> None:
    """Explain what a folder lacks, in Parquet files of ``per_file`` photos, with the same rows in
    its SQLite file; ``actors`` is called once, when pieces are sent.
    """
    stamps = folder.stamps()
    file = index_file(folder)
    if DESCRIPTION in stamps:  # the run was begun: its SQLite file gets all that is in the folder
        with muted():  # files that are missing are written again
            imported(folder)
    elif any(name.endswith(ENDING) for name in stamps):
        raise RunError(
            f"output {path_text(folder.name)!r} must be empty or hold a run, got other Parquet; "
            "choose another"
        )
    else:  # an SQLite file is of a run that is no longer in the folder
        file.unlink(missing_ok=True)
    files: list[str] = []
    # no further methods or metrics: each Parquet file has all results of its photos
    with locked_run(file), closing(Store(file, job.manifest, more=False)) as store:
        describe(folder, store, files)  # so that the folder can be opened from now on
        call = RunCall(job, store, progress)
        entries = _missing(call)
        # until an empty list says that no entry is left
        pieces = iter(lambda: list(islice(entries, per_file)), [])
        try:
            call.store_answers(_answers(folder, reports(actors(), pieces), files))
        finally:  # also of an interrupted run, which has some of the files
            describe(folder, store, files)


def _missing(call: RunCall) -> Iterator[Entry]:
    """Give the entries whose photos the folder lacks. A photo that it has, and whose stamp does not
    show that it is the same, is read here and compared.
    """
    for entry in call.unstored_entries():
        photo = call.job.preparer(entry) if entry.name in call.stored_photos else None
        if photo is None:
            yield entry
        # one that cannot be read any more stays as it is stored
        elif not isinstance(photo, Failed) and not call.note_if_stored(photo):
            raise RunError(
                f"photo {entry.name!r}, its label or boxes have changed since; give another folder"
            )


def _answers(
    folder: Storage, done: Iterable[Report], files: list[str]
) -> Iterator[list[PhotoRecord | Failed]]:
    """The records and failures of each report, read from its Parquet file, whose name is appended
    to ``files``: those are noted as imported.
    """
    for report in done:
        if report.error is not None:
            raise report.error
        answers: list[PhotoRecord | Failed] = list(report.failures)
        if report.file is not None:
            _, records = read_part(folder, report.file)
            answers += records
            files.append(report.file)
        yield answers


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
    boxes: str | os.PathLike[str] | None = None,
    progress: Callable[[State], None] | bool | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Explain all photos of a source on the machines of a Ray cluster, into a folder of Parquet
    files.

    The rows are those that `explain.run` finds on one machine. The same call continues a run that
    was interrupted: photos that are in the folder are left out. An actor or machine that is lost
    costs the time of the photos that it worked on. Needs ``ray`` (extra ``ray``); all machines need
    this package in the same version, and have to reach the photos and the folder under the same
    names.

    Args:
        source, explainer, methods: as for `explain.run`. The model is sent to the actors.
        output: a folder that all machines share, or an address such as ``s3://bucket/maps``.
        address: of the cluster, as for ``ray.init``; by default one that runs on this machine, or a
            new one on it.
        actors: processes with a model; by default one for each GPU share or, without GPUs, for each
            processor.
        gpus: the share of a GPU that each actor takes: 0.25 for four actors on each.
        per_file: photos that are explained at a time, and that are in one file.
        target, targets, top_k, metrics, boxes, layer, fuse, batch_size: as for `explain.run`.
        samples, tolerance, max_seconds: as for `explain.run`.
        progress: called with a `State` after each piece.

    Returns:
        The run, as `explain.open_run` opens it.

    Raises:
        RunError: Ray is missing, the folder or the source cannot be used, or the run was begun with
            other options.
        ExplainError: as for calling an `Explainer`, for what holds for all photos.

    >>> run_on_ray("photos", output="maps", actors=0)
    Traceback (most recent call last):
    explain.RunError: actors must be a whole number from 1, got 0; leave it out
    """
    check_whole_number("actors", actors, 1)
    check_whole_number("per_file", per_file, 1, optional=False)
    check_whole_number("batch_size", options.get("batch_size"), 1)
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < float("inf"):
        raise RunError(f"gpus must be a number from 0, got {shown(gpus)}; leave it out")
    job = Job(source_of(source, boxes), explainer, methods, target, metrics, **options)
    if job.device.type != "cpu":
        raise RunError(
            f"explainer must be on the CPU to be sent elsewhere, got {job.device}; gpus= moves it"
        )
    group = job.session.methods
    if isinstance(group, str):
        raise RunError(
            f"methods must be named for many machines, got the group {group!r}; name them"
        )
    ray = optional("ray", "to run on a cluster", "ray", RunError)
    folder = Storage(output)
    with _connected(ray, address):
        explain_in_pieces(
            job,
            folder,
            lambda: _RayActors(ray, job, folder, count=actors, gpus=float(gpus)),
            per_file=per_file,
            progress=progress,
        )
    return Run(output)


class _RayActors:
    """`Actors` of Ray, which begin when they are needed."""

    def __init__(
        self, ray: Any, job: Job, folder: Storage, *, count: int | None, gpus: float
    ) -> None:
        """Check that the cluster has what ``count`` actors with a share ``gpus`` of a GPU need, and
        send it the job; actors start with their first piece.
        """
        if count is None:
            # as many as the GPUs are enough for or, without a share of these, the processors
            resources = ray.cluster_resources()
            count = int(resources.get("GPU", 0) / gpus if gpus else resources.get("CPU", 1))
            if count < 1:  # only of GPUs: every cluster has a processor
                raise RunError(
                    f"gpus must be there, but the cluster has {resources.get('GPU', 0):g}; "
                    "leave gpus out"
                )
        self._ray = ray
        self._count = count
        self._free: list[Any] = []  # actors without a piece
        self._running: dict[Any, tuple[Any, Piece]] = {}  # by the future of the report
        # Ray gives an actor one processor, and so one thread
        self._actor = ray.remote(num_cpus=1, num_gpus=gpus or None)(PartExplainer)
        self._job = ray.put(job)
        self._folder = folder
        self._device = "cuda" if gpus else None

    def are_busy(self) -> bool:
        return len(self._running) >= self._count

    def send(self, piece: Piece) -> None:
        """Send a piece to a free actor, or start one: see `Actors.send`."""
        actor = (
            self._free.pop()
            if self._free
            else self._actor.remote(self._job, self._folder, self._device)
        )
        self._running[actor.report.remote(piece)] = (actor, piece)

    def receive(self) -> tuple[Piece, Report | None] | None:
        """Wait for any piece: see `Actors.receive`. An actor that died is dropped, and `send`
        starts another; other errors of Ray end the run."""
        if not self._running:
            return None
        (future,), _ = self._ray.wait(list(self._running))  # the first that is ready, and the rest
        actor, piece = self._running.pop(future)
        try:
            report = self._ray.get(future)
        except self._ray.exceptions.RayActorError:  # it died
            return piece, None
        except self._ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise RunError(
                f"the Ray job failed: {last}; the same call continues from what is stored"
            ) from error
        self._free.append(actor)
        return piece, report


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at ``address`` while a block lasts, or start one on this machine.
    If Ray was connected already, that connection is used and stays."""
    is_ours = not ray.is_initialized()
    if is_ours:
        # or Ray would report its use to its makers
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address or None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False,
            )
        except Exception as error:
            raise RunError(
                f"ray must reach a cluster, but {raised(error)}; check the address {address!r}"
            ) from error
    try:
        yield
    finally:
        if is_ours:
            ray.shutdown()
