"""`run_on_ray`: a run on the machines of a Ray cluster. Ray is imported when it is asked for, and not before."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from explain.engine import Precision
from explain.errors import RunError, keywords, raised, shown
from explain.explainer import Explainer
from explain.hooks import Where
from explain.methods import Fusion, MethodLike
from explain.metrics import Metric
from explain.models import Classifier
from explain.runs.explaining import Question
from explain.runs.given import source_of
from explain.runs.labels import Labels
from explain.runs.lock import alone
from explain.runs.manifest import manifest_of
from explain.runs.parts import MANIFEST, RunFolder
from explain.runs.places import Place
from explain.runs.runner import State
from explain.runs.sources import Entry, text
from explain.runs.spreading import Explaining, Report, Spread, Task, must_be_sendable
from explain.targets import TargetLike

PER_FILE = 64


@keywords(
    elsewhere={
        "device": "gpus puts the model of each actor on a GPU",
        "labels": "explain.Explainer(categories=...) takes them",
        "workers": "actors says how many there are",
    }
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
    target: TargetLike | Sequence[TargetLike] = None,
    top_k: int | None = None,
    metrics: Iterable[Metric | str] = (),
    layer: Where | None = None,
    fuse: Fusion | None = None,
    batch_size: int | None = None,
    precision: Precision = "full",
    runs: int | None = None,
    until: float | None = None,
    seconds: float | None = None,
    progress: Callable[[State], None] | None = None,
) -> RunFolder:
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
        target, top_k, metrics, layer, fuse, batch_size, precision, runs, until, seconds: as for `explain.run`.
        progress: called with a `State` after each piece.

    Returns:
        The `RunFolder`.

    Raises:
        RunError: Ray is missing, the folder or the source cannot be used, or the run was begun with other options.
        ExplainError: as for calling an `Explainer`, for what holds for all photos.

    >>> run_on_ray("photos", output="maps", actors=0)
    Traceback (most recent call last):
    explain.errors.RunError: actors must be a whole number from 1, got 0; leave it out
    """
    for name, value in (("actors", actors), ("per_file", per_file), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RunError(f"{name} must be a whole number from 1, got {shown(value)}; leave it out")
    if isinstance(gpus, bool) or not isinstance(gpus, (int, float)) or not 0 <= gpus < float("inf"):
        raise RunError(f"gpus must be a number from 0, got {shown(gpus)}; leave it out")
    ray = _ray()
    photos = source_of(source)
    made = explainer if isinstance(explainer, Explainer) else Explainer(explainer)
    question = Question(
        made, methods, target, list(metrics), top_k=top_k, layer=layer, fuse=fuse, batch_size=batch_size,
        precision=precision, runs=runs, until=until, seconds=seconds,
    )  # fmt: skip
    must_be_sendable(question)
    if photos.count == 0:
        raise RunError(f"source must have photos, but {text(str(source))!r:.100} has none; check what it holds")
    place = Place(output)
    manifest = manifest_of(
        source=photos, explainer=made, methods=question.asked, targets=question.targets, metrics=question.metrics,
        options=question.options,
    )  # fmt: skip
    task = Task(photos, question, Labels(made.categories, photos.classes), place, manifest)
    with ExitStack() as stack:
        if not place.is_remote:
            stack.enter_context(alone(os.path.join(place.name, MANIFEST)))  # type: ignore[arg-type]
        stack.enter_context(_connected(ray, address))
        Spread(task, partial(_through, ray, actors, float(gpus)), per_file, progress).go()
    return RunFolder(place)


class Actor:
    """What an actor does: pieces in, reports out, both pickled in a table with one column."""

    def __init__(self, task: Any, device: str | None) -> None:
        self._pyarrow: Any = importlib.import_module("pyarrow")
        torch.set_num_threads(1)  # as many actors run as there are processors
        self._explaining = Explaining(_ray().get(task), device)

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
