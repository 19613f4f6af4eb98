"""`explain run`: all photos of a source into one file; `explain export`: that file as a table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from explain.arguments import (
    ACTORS,
    BATCH_SIZE,
    BF16,
    BUDGET,
    COMPOSITE,
    FILE,
    FORCE,
    FUSE,
    GPUS,
    JSON,
    LAYER,
    METHOD,
    METRIC,
    MODEL,
    PICTURES,
    RAY,
    RUN_OUTPUT,
    SOURCE,
    STYLE,
    TARGET,
    TOP_K,
    WORKERS,
    UsageError,
)
from explain.arguments import RUN as RUN_FILE
from explain.cli.answer import DONE, FAILED, INTERRUPTED, Answer, notes
from explain.cli.bar import PAUSE, SURE, WIDTH, duration
from explain.cli.budgets import given_budget, within_budget
from explain.cli.command import Command
from explain.cli.each import ASKED
from explain.cli.effects import refuse_without_effect
from explain.cli.explaining import targets_of
from explain.cli.judging import checked_metrics
from explain.cli.model import blaming, load_explainer
from explain.cli.rules import with_rules
from explain.errors import ExplainError

if TYPE_CHECKING:
    from explain.methods import Method
    from explain.runs import Run, RunFolder, State

LISTED = 20  # failures that are told; the rest is in the file


class _Line:
    """How far the run is, in one line on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._drawn, self._shown = float("-inf"), False
        self.state: State | None = None

    def __call__(self, state: State) -> None:
        self.state = state
        now = time.monotonic()
        if sys.stderr is None or not sys.stderr.isatty() or now - self._drawn < PAUSE:
            return
        done = state.there + state.done + state.failed
        bar = ""
        if state.total:
            filled = round(WIDTH * min(1.0, done / state.total))
            bar = "█" * filled + "░" * (WIDTH - filled) + " "
        parts = [f"{done}/{state.total} photos" if state.total else f"{done} photos", f"{state.rate:.3g} a second"]
        if state.left is not None and state.seconds >= SURE:
            parts.append(f"about {duration(state.left)} left")
        if state.failed:
            parts.append(f"{state.failed} failed")
        print(f"\r\x1b[2K{bar}{', '.join(parts)}", end="", file=sys.stderr, flush=True)
        self._drawn, self._shown = now, True

    def wipe(self) -> None:
        """Take the line away, so that others can be printed."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._shown = False


def run(options: argparse.Namespace, answer: Answer) -> int:
    """Explain all photos of a source, and store the maps."""
    from explain import runs

    methods, metrics = _checked(options), checked_metrics(options, boxes=True)
    source = runs.source_of(options.source)
    explainer = load_explainer(options, answer)
    target = targets_of(options.target, explainer.categories)
    line = _Line()
    begun = time.monotonic()
    try:
        with notes(answer), blaming(options.model):
            found = _runner(options)(
                source, explainer, methods, output=options.output, target=target,
                top_k=options.top_k, metrics=metrics, layer=options.layer, fuse=options.fuse,
                batch_size=options.batch_size, precision="bf16" if options.bf16 else "full", progress=line,
            )  # fmt: skip
    except ASKED as error:  # it holds for every photo
        line.wipe()
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        line.wipe()
        answer.complain(f"interrupted{_so_far(options)}")
        return INTERRUPTED
    finally:
        line.wipe()
    about = _told(found, line.state, time.monotonic() - begun, answer)
    answer.add({**about, "pictures": _pictures(options, found, source, answer)})
    return FAILED if answer.errors else DONE


def _runner(options: argparse.Namespace) -> Callable[..., Run | RunFolder]:
    """Return what runs, with what only that takes."""
    from explain import runs

    if options.ray is None:
        return partial(runs.run, workers=options.workers)
    return partial(runs.run_on_ray, address=options.ray or None, actors=options.actors, gpus=options.gpus or 0.0)


def _checked(options: argparse.Namespace) -> str | list[Method]:
    """Return the methods, or the name of a group; refuse what cannot be meant."""
    from explain.methods import get_method
    from explain.pictures import Look
    from explain.runs.pictures import choice
    from explain.selection import GROUPS

    if options.source is None:
        raise UsageError("name a source: a folder, a list or shards; explain run --help shows the options")
    if options.top_k and options.target:
        raise UsageError("--top-k and --target cannot both be given; leave one out")
    for name in ("style", "force"):
        if name in options.given and options.pictures is None:
            raise UsageError(f"--{name} would have no effect without --pictures; leave it out")
    _check_cluster(options)
    names = options.method or ["gradcam" if options.composite is None else "lrp"]
    groups = [name for name in names if name in GROUPS]
    if groups and len(names) > 1:
        raise UsageError(f"--method {groups[0]} takes the others too, in a run; leave them out")
    if groups and options.ray is not None:
        raise UsageError(f"--method {groups[0]} chooses by the first photo, which --ray cannot; name the methods")
    if groups and given_budget(options):
        raise UsageError(f"--{next(iter(given_budget(options)))} must be given with named methods in a run; name them")
    if groups and options.composite is not None:
        raise UsageError("--composite must be given with named methods in a run; name lrp")
    try:
        Look(options.style)
        if options.pictures is not None:
            choice(options.pictures)
        if groups:
            return str(groups[0])
        known = with_rules(map(get_method, names), options.composite)
        methods = within_budget(dict.fromkeys(known), options)
    except ExplainError as error:
        raise UsageError(str(error)) from None
    refuse_without_effect(options, methods)
    return methods


def _check_cluster(options: argparse.Namespace) -> None:
    """Refuse what has no effect on a cluster, or only there."""
    for name in ("actors", "gpus") if options.ray is None else ("workers", "pictures"):
        if name in options.given:
            where = "without" if options.ray is None else "with"
            raise UsageError(f"--{name} would have no effect {where} --ray; leave it out")
    if options.ray is not None and "output" not in options.given:
        raise UsageError("--ray writes into a folder that all machines share; name it with --output")


def _so_far(options: argparse.Namespace) -> str:
    from explain.errors import RunError
    from explain.runs import RunFolder, open_run

    file = options.output
    try:
        photos = (open_run(file) if options.ray is None else RunFolder(file)).photos
    except RunError:
        return ""
    return f"; {photos} photos are in {file}, and the same command goes on from there"


def _pictures(options: argparse.Namespace, found: Any, source: Any, answer: Answer) -> list[str]:
    """Draw the photos that were asked for, in a folder beside the run."""
    from explain.runs import write_pictures

    if options.pictures is None:
        return []
    folder = f"{os.path.splitext(options.output)[0]}-pictures"
    written, failures = write_pictures(
        found, options.pictures, folder, source=source, style=options.style, overwrite=options.force
    )
    for name, reason in failures.items():
        answer.complain(f"{name}: {reason}")
    answer.say(f"{len(written)} pictures written to {folder}")
    return list(map(str, written))


def _told(found: Run | RunFolder, state: State | None, seconds: float, answer: Answer) -> dict[str, Any]:
    """Say what came of it, and return the same for the document."""
    failures, remarks, lists = found.failures, found.notes, found.listing
    for name, reason in list(failures.items())[:LISTED]:
        answer.complain(reason if repr(name) in reason else f"{name}: {reason}")
    if len(failures) > LISTED:
        answer.complain(f"{len(failures) - LISTED} more photos failed; {lists.format('failures')} lists them")
    if remarks:
        more = f" (and {len(remarks) - 1} more, in {lists.format('notes')})" if len(remarks) > 1 else ""
        answer.note(f"{remarks[0]}{more}")
    done, there = (0, 0) if state is None else (state.done, state.there)
    parts = [f"{there} were there"] if there else []
    parts += [f"{len(failures)} failed"] if failures else []
    told = f" ({', '.join(parts)})" if parts else ""
    answer.say(f"explained {done} photos in {duration(seconds)}{told}; {len(found)} rows in {found.path}")
    return {
        "run": str(found.path), "rows": len(found), "photos": found.photos, "explained": done, "there": there,
        "failures": failures, "notes": remarks,
    }  # fmt: skip


def export(options: argparse.Namespace, answer: Answer) -> int:
    """Write a run as a table."""
    from explain.runs import export, open_run

    if options.run is None or options.file is None:
        raise UsageError("name a run and the file to write, as in explain export run.sqlite run.parquet")
    count = export(open_run(options.run), options.file, overwrite=options.force)
    answer.add({"run": options.run, "file": options.file, "rows": count})
    answer.say(f"{count} rows written to {options.file}")
    return DONE


RUN = Command(
    "run", "explain all photos of a folder, list or shards, and store the maps in one file",
    (
        SOURCE, METHOD, METRIC, TARGET, TOP_K, LAYER, FUSE, COMPOSITE, *MODEL, BATCH_SIZE, BF16, *BUDGET,
        RUN_OUTPUT, WORKERS, RAY, ACTORS, GPUS, PICTURES, STYLE, FORCE, JSON,
    ),
    run, "runs", example="explain run photos --output run.sqlite --method gradcam",
)  # fmt: skip
EXPORT = Command(
    "export", "write a run as a table: Parquet with the maps, CSV or JSON lines without",
    (RUN_FILE, FILE, FORCE, JSON), export, "files", example="explain export run.sqlite run.parquet",
)  # fmt: skip
