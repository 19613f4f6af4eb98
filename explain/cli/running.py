"""`explain run`, `export`, `insight` and `film`: data sets explained into one file, and what is made of it."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from explain._utils.errors import ExplainError
from explain.cli import arguments as args
from explain.cli.arguments import UsageError
from explain.cli.each import ASKED
from explain.cli.explaining import targets_of
from explain.cli.inputs import blaming, load_explainer
from explain.cli.options import checked_metrics, given_budget, refuse_without_effect, with_rules, within_budget
from explain.cli.output import DONE, FAILED, INTERRUPTED, Command, Output, notes
from explain.cli.progress import RunProgress, duration

if TYPE_CHECKING:
    from explain.methods import Method
    from explain.runs import State
    from explain.runs.result import Run


LISTED = 20  # failures that are told; the rest is in the file


def run(options: argparse.Namespace, answer: Output) -> int:
    """Explain all photos of a source, and store the maps."""
    from explain.runs.files import source_of

    methods, metrics = _checked(options), checked_metrics(options, boxes=True)
    source = source_of(options.source)
    explainer = load_explainer(options, answer)
    targets = targets_of(options.target, explainer.categories)
    line = RunProgress()
    begun = time.monotonic()
    try:
        with notes(answer), blaming(options.model):
            found = _runner(options)(
                source, explainer, methods, output=options.output, targets=targets,
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
    about = _summary(options, found, line.state, time.monotonic() - begun, answer)
    answer.add({**about, "pictures": _pictures(options, found, source, answer)})
    return FAILED if answer.errors else DONE


def _runner(options: argparse.Namespace) -> Callable[..., Run]:
    """Return what runs, with what only that takes."""
    from explain.runs import run_on_ray
    from explain.runs.runner import run

    if options.ray is None:
        return partial(run, workers=options.workers)
    return partial(run_on_ray, address=options.ray or None, actors=options.actors, gpus=options.gpus or 0.0)


def _checked(options: argparse.Namespace) -> str | list[Method]:
    """Return the methods, or the name of a group; refuse what cannot be meant."""
    from explain.attribution.pictures import Look
    from explain.attribution.selection import GROUPS
    from explain.methods.registry import get_method
    from explain.runs.pictures import choice

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
    for name in ("actors", "gpus") if options.ray is None else ("workers",):
        if name in options.given:
            where = "without" if options.ray is None else "with"
            raise UsageError(f"--{name} would have no effect {where} --ray; leave it out")
    if options.ray is not None and "output" not in options.given:
        raise UsageError("--ray writes into a folder that all machines share; name it with --output")
    if "://" in options.output and options.pictures is not None:
        raise UsageError("--pictures writes beside a folder, which --output must name, but it is an address")


def _so_far(options: argparse.Namespace) -> str:
    from explain._utils.errors import RunError
    from explain.runs.result import open_run

    file = options.output
    try:
        photos = open_run(file).photos
    except RunError:
        return ""
    return f"; {photos} photos are in {file}, and the same command goes on from there"


def _pictures(options: argparse.Namespace, found: Any, source: Any, answer: Output) -> list[str]:
    """Draw the photos that were asked for, in a folder beside the run."""
    if options.pictures is None:
        return []
    folder = f"{os.path.splitext(options.output)[0]}-pictures"
    written, failures = found.write_pictures(
        options.pictures, folder, source=source, style=options.style, overwrite=options.force
    )
    for name, reason in failures.items():
        answer.complain(f"{name}: {reason}")
    answer.say(f"{len(written)} pictures written to {folder}")
    return list(map(str, written))


def _summary(
    options: argparse.Namespace, found: Run, state: State | None, seconds: float, answer: Output
) -> dict[str, Any]:
    """Say what came of it, and return the same for the document."""
    failures, remarks, lists = found.failures, found.notes, f"the table '{{}}' of {found.path}"
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
    answer.say(f"explained {done} photos in {duration(seconds)}{told}; {len(found)} rows in {options.output}")
    return {
        "run": options.output, "rows": len(found), "photos": found.photos, "explained": done, "there": there,
        "failures": failures, "notes": remarks,
    }  # fmt: skip


def export(options: argparse.Namespace, answer: Output) -> int:
    """Write a run as a table."""
    from explain.runs.result import open_run

    if options.run is None or options.file is None:
        raise UsageError("name a run and the file to write, as in explain export run.sqlite run.parquet")
    with notes(answer):
        count = open_run(options.run).export(options.file, overwrite=options.force)
    answer.add({"run": options.run, "file": options.file, "rows": count})
    answer.say(f"{count} rows written to {options.file}")
    return DONE


RUN = Command(
    "run", "explain all photos of a folder, list or shards, and store the maps in one file",
    (
        args.SOURCE, args.METHOD, args.METRIC, args.TARGET, args.TOP_K, args.LAYER, args.FUSE, args.COMPOSITE,
        *args.MODEL, args.BATCH_SIZE, args.BF16, *args.BUDGET,
        args.RUN_OUTPUT, args.WORKERS, args.RAY, args.ACTORS, args.GPUS, args.PICTURES, args.STYLE, args.FORCE,
        args.JSON,
    ),
    run, "runs", example="explain run photos --output run.sqlite --method gradcam",
)  # fmt: skip
EXPORT = Command(
    "export", "write a run as a table: Parquet with the maps, CSV or JSON lines without",
    (args.RUN_FILE, args.TABLE_FILE, args.FORCE, args.JSON), export, "files",
    example="explain export run.sqlite run.parquet",
)  # fmt: skip


FURTHER = (args.CHANNELS, args.SHARED, args.CONCEPT_PHOTOS)
"""What takes one more look at the model."""


def tell_insight(options: argparse.Namespace, answer: Output) -> int:
    """Say what the maps of a run say together; with a model, mistakes are explained, and more can be asked for."""
    from explain.runs.result import open_run

    _check(options)
    with notes(answer):
        run = open_run(options.run)
    explainer = None if options.model is None else load_explainer(options, answer)
    target = None
    if options.target is not None and explainer is not None:
        target = (targets_of([options.target], explainer.categories) or [0])[0]
    with notes(answer), blaming(options.model):
        found = run.insight(
            options.method, explainer=explainer, source=options.source, channels=options.channels or 0,
            concepts=options.concepts or 0, examples=options.examples, target=target, layer=options.layer,
        )  # fmt: skip
    answer.say(*found.lines(options.count))
    files = []
    if options.output is not None:
        files = [str(path) for path in found.save(options.output, source=options.source, overwrite=options.force)]
        answer.say("", *(f"wrote {file}" for file in files))
    answer.add({**found.to_dict(), "files": files})
    return DONE


def _check(options: argparse.Namespace) -> None:
    """Refuse what would have no effect, or lacks what it needs."""
    if options.run is None:
        raise UsageError("name a run, as in explain insight run.sqlite")
    if "force" in options.given and options.output is None:
        raise UsageError("--force would have no effect without --output; leave it out")
    asked = [option.flags[0] for option in FURTHER if option.name in options.given]
    for option in (args.CLASS, args.ONE_LAYER):
        if option.name in options.given and not asked:
            raise UsageError(
                f"{option.flags[0]} would have no effect without --channels, --concepts or --examples; leave it out"
            )
    if asked == ["--concepts"] and options.target is not None:
        raise UsageError("--target would have no effect with --concepts, which all photos share; leave it out")
    if options.examples is not None and options.target is None:
        raise UsageError("--examples needs the class that they may be a reason for; give --target")
    if options.model is not None:
        return
    if asked:
        raise UsageError(f"{asked[0]} needs the model that the run was made with; give --model")
    settings = sorted(options.given & {option.name for option in args.MODEL if option.name != "model"})
    if settings:
        raise UsageError(f"--{settings[0]} would have no effect without --model; name the model")


INSIGHT = Command(
    "insight", "say what the maps of a run say together: where classes look, clusters of reasons, mistakes",
    (args.RUN_FILE, args.MAPS_OF, args.ROWS, *args.MODEL, args.PHOTOS_OF, *FURTHER, args.CLASS, args.ONE_LAYER,
    args.PICTURES_TO, args.FORCE, args.JSON), tell_insight,
    "insights", example="explain insight run.sqlite --output insight",
)  # fmt: skip


def film(options: argparse.Namespace, answer: Output) -> int:
    """Write the film of a photo, and a figure beside it."""
    from explain.training import film

    if options.run is None or options.photo is None:
        raise UsageError("name a run and a photo of it, as in explain film training.sqlite cat.jpg")
    found = film(options.run, options.photo, method=options.method, target=options.target, style=options.style)
    files = list(map(str, found.save(options.output, seconds=options.seconds, overwrite=options.force)))
    answer.add({"run": options.run, "photo": found.name, "method": found.method, "steps": found.steps, "files": files})
    answer.say(
        f"{found.name}, {found.method}: {len(found)} looks from step {found.steps[0]} to step {found.steps[-1]}",
        *(f"  wrote {file}" for file in files),
    )
    return DONE


FILM = Command(
    "film", "show how the map of a photo moved during training",
    (args.RUN_FILE, args.PHOTO, *args.IN_RUN, args.FILM_OUTPUT, args.SECONDS_EACH, args.STYLE, args.FORCE, args.JSON),
    film, "films",
    example="explain film training.sqlite cat.jpg --output cat.webp",
)  # fmt: skip
