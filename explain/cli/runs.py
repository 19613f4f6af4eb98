"""`explain run`, `export`, `insight`, `repair`, `film`: runs over data sets, and what is made of
them."""

import os
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from explain._utils.errors import ExplainError, RunError, TargetError
from explain._utils.progress import duration
from explain.cli import answers
from explain.cli import commands as cli
from explain.cli.commands import (
    COUNT,
    POSITIVE,
    UsageError,
    as_usage,
    commands,
    is_typed,
    model_options,
    option,
    refuse_without_effect,
)
from explain.cli.interrupts import code_of
from explain.cli.output import (
    FAILED,
    Output,
    RunProgress,
    in_brackets,
    notes,
    wrote,
)
from explain.cli.questions import (
    call_options,
    methods_of,
    metrics_of,
    target_of,
    targets_of,
    thresholds_of,
)
from explain.cli.several import ASKED, blaming, load_explainer

if TYPE_CHECKING:
    from explain import Run

LISTED = 20  # how many failures are printed; the file of the run has all

source_option = option(
    "--source SOURCE", "where the photos of the run are, if they had no file or it has moved"
)
target_option = option(
    "--target -t CLASS", "label or index of the class that --channels and --examples are about"
)


@commands.command(
    "run", key="runs", epilog="Example: explain run photos --output run.sqlite --method gradcam"
)
@click.argument("source")
@option(
    "--boxes FILE",
    "the labels and boxes of the photos: annotations as COCO has them (.json), or a list",
)
@cli.method
@cli.ask
@cli.answer
@cli.words
@cli.evidence
@cli.metric
@option("--check", "also say which methods the photos support: the metrics of 'check' are stored")
@cli.targets
@cli.threshold
@cli.top_k
@cli.layers
@cli.fuse
@cli.placement
@model_options()
@cli.batch_size
@cli.budget
@cli.output(
    "run.sqlite", "RUN", "the file of the run, or with --ray the folder; continued if it is there"
)
@option(
    "--workers N",
    "processes that read photos",
    type=click.IntRange(min=0),
    show_default="half the processors",
)
@option(
    "--ray ADDRESS",
    "run on a Ray cluster, into a folder of Parquet files; without ADDRESS, on one on this machine",
    is_flag=False,
    flag_value="",
)
@option(
    "--actors N",
    "with --ray: processes with a model",
    type=COUNT,
    show_default="one for each processor or share of a GPU",
)
@option(
    "--gpus SHARE",
    "with --ray: the share of a GPU for each actor",
    type=POSITIVE,
    show_default="none",
)
@option(
    "--table FILE",
    "write a row for each photo, with the probability of every label (.csv or .jsonl)",
)
@option(
    "--pictures WHICH",
    "draw the maps of some photos: worst:50 (the least probable labels), best:50, or source (all)",
)
@cli.style
@cli.force
@cli.quiet
@cli.json
@click.pass_context
def run(context: click.Context, /, **values: Any) -> int:
    """Explain a data set, and store the maps in one file.

    SOURCE is a folder of photos, a list (.csv, .tsv, .json, .jsonl: path, label, x0, y0, x1, y1;
    several labels as "a|b", or a column of 0 and 1 for each class), COCO's annotations (.json), or
    WebDataset shards (.tar).
    """
    import explain
    from explain.data.opening import hushed
    from explain.runs import run_on_ray
    from explain.store.lists import source_of
    from explain.store.manifest import changes_in_words

    options = SimpleNamespace(**values)
    answer: Output = context.obj
    _check_run(context, options)
    source = source_of(options.source, options.boxes)
    explainer, call = _asked(context, options) or _called(context, options)
    progress = RunProgress()
    progress.hidden = answer.quiet
    runner: Any = partial(explain.run, workers=options.workers)
    if options.ray is not None:
        runner = partial(
            run_on_ray,
            address=options.ray or None,
            actors=options.actors,
            gpus=options.gpus or 0.0,
        )
    earlier = _manifest_of(options.output)  # read before the run changes it
    begun = time.monotonic()
    try:
        with (
            as_usage(ASKED),  # a run raises these for what would fail for every photo
            closing(progress),
            notes(answer),
            blaming(options.model),
            # --quiet prints errors only, and what decoders say of a photo is none
            hushed() if answer.quiet else nullcontext(),
        ):
            finished = runner(source, explainer, output=options.output, progress=progress, **call)
    except KeyboardInterrupt as interrupt:
        answer.complain(f"interrupted{_so_far(options.output)}")
        return code_of(interrupt)
    for change in changes_in_words(earlier, finished.manifest) if earlier else ():
        answer.note(f"{change}; what the photos of {options.output} lacked is added")
    seconds = time.monotonic() - begun
    document = _summary(options.output, finished, progress, seconds=seconds, answer=answer)
    document["pictures"] = _pictures(options, finished, source, answer)
    if options.check:
        document["check"] = _supported(finished, answer)
    if options.table is not None:
        with notes(answer):
            finished.export(options.table, photos=True, overwrite=options.force)
        answer.say(f"wrote {options.table}")
    document["table"] = options.table
    answer.add(document)
    return FAILED if answer.errors else 0


def _asked(context: click.Context, options: SimpleNamespace) -> tuple[Any, dict[str, Any]] | None:
    """The explainer of answers, and what is asked of every photo; None without a question."""
    if options.ask is None and options.answer is None:
        refuse_without_effect(context, "words", " without --ask", unless=False)
        return None
    methods = answers.word_methods(context, options, answers.HEEDED_BY_RUNS)
    asker = answers.asker_of(options, context.obj)
    asked = {"ask": options.ask or None, "answer": options.answer, "words": options.words}
    return asker, {"methods": methods or None, **asked}


def _called(context: click.Context, options: SimpleNamespace) -> tuple[Any, dict[str, Any]]:
    """The explainer, and how it explains every photo. What can be checked without a model comes
    before it is loaded, which is slow."""
    group, methods = methods_of(context, options)
    if group and options.ray is not None:
        raise UsageError(
            f"--method {group} chooses by the first photo, which --ray cannot; name the methods"
        )
    metrics: list[Any] = [*metrics_of(options.metric, has_boxes=True)]
    if options.check:
        metrics.append("check")  # which stands for all metrics of the check
    settings = {name: getattr(options, name) for name in cli.MODEL_SETTINGS}
    explainer = load_explainer(context.obj, model=options.model, **settings)
    targets = targets_of(options.target, explainer.categories, thresholds=options.threshold)
    of_run = {"methods": group or methods, "metrics": metrics, "targets": targets}
    return explainer, {**of_run, **call_options(options)}


def _manifest_of(file: str) -> dict[str, Any]:
    """Return the manifest of the run in a file before it is continued (model, methods, options),
    with which the new one is compared; empty without a run, or without photos in it."""
    import explain

    if not os.path.isfile(file):
        return {}
    with suppress(RunError):  # it is another file, which the run itself refuses
        earlier = explain.open_run(file)
        if earlier.photos:
            return earlier.manifest
    return {}


def _check_run(context: click.Context, options: SimpleNamespace) -> None:
    """Refuse options of `explain run` that have no effect without others, and values that cannot
    work; before the model is loaded."""
    from explain.runs.exporting import check_table
    from explain.runs.result import choice

    is_on_ray = options.ray is not None
    draws = options.pictures is not None
    has_table = options.table is not None
    refuse_without_effect(context, "style", " without --pictures", unless=draws)
    refuse_without_effect(
        context, "force", " without --pictures or --table", unless=draws or has_table
    )
    if has_table:  # at once: the table is written at the end, perhaps hours later
        with as_usage(ExplainError):
            check_table(options.table, photos=True, overwrite=options.force)
    for name in ("actors", "gpus"):
        refuse_without_effect(context, name, " without --ray", unless=is_on_ray)
    refuse_without_effect(context, "workers", " with --ray", unless=not is_on_ray)
    if is_on_ray and not is_typed(context, "output"):
        raise UsageError(
            "--ray writes into a folder that all machines share; name it with --output"
        )
    if "://" in options.output and draws:
        raise UsageError(
            "--pictures writes beside a folder, which --output must name, but it is an address"
        )
    if draws:
        with as_usage(ExplainError):
            choice(options.pictures)  # which raises where it is malformed


def _so_far(file: str) -> str:
    """Return the end of the message for an interrupted run: how many photos its file has, and that
    the same command continues it; empty where there is no run yet."""
    import explain

    with suppress(RunError):
        photos = explain.open_run(file).photos
        are = "photo is" if photos == 1 else "photos are"
        return f"; {photos} {are} in {file}, and the same command goes on from there"
    return ""


def _pictures(options: SimpleNamespace, finished: "Run", source: Any, answer: Output) -> list[str]:
    """Draw the maps of the photos that --pictures names, read again from ``source``, beside the
    run's file; returns the paths. Those that cannot be drawn are reported.
    """
    if options.pictures is None:
        return []
    folder = f"{os.path.splitext(options.output)[0]}-pictures"
    written, failures = finished.write_pictures(
        options.pictures, folder, source=source, style=options.style, overwrite=options.force
    )
    for name, reason in failures.items():
        answer.complain(f"{name}: {reason}")
    answer.say(f"{len(written)} pictures written to {folder}")
    return list(map(str, written))


def _supported(finished: "Run", answer: Output) -> dict[str, Any]:
    """Print which methods the photos of a run support (--check); return it by method."""
    from explain._utils.rounding import finite_or_none
    from explain.metrics.supported import lines_of

    support = finished.support
    for line in lines_of(support):
        answer.say(line)
    return {
        method: {
            "supported": of_method.supported,
            "failed": of_method.failed,
            "intervals": {
                name: [finite_or_none(interval.mean), finite_or_none(interval.half), interval.count]
                for name, interval in of_method.intervals.items()
            },
        }
        for method, of_method in support.items()
    }


def _summary(
    output: str, finished: "Run", progress: RunProgress, *, seconds: float, answer: Output
) -> dict[str, Any]:
    """Print how a run went (failures up to `LISTED`, its first note, numbers), and return its part
    of the JSON document, whose keys scripts read.
    """
    failures = finished.failures
    for name, reason in list(failures.items())[:LISTED]:
        answer.complain(reason if repr(name) in reason else f"{name}: {reason}")
    unlisted = len(failures) - LISTED
    if unlisted > 0:
        answer.complain(
            f"{unlisted} more photos failed; the table 'failures' of {finished.path} lists them"
        )
    remarks = finished.notes
    if len(remarks) > 1:
        more = f"(and {len(remarks) - 1} more, in the table 'notes' of {finished.path})"
        answer.note(f"{remarks[0]} {more}")
    elif remarks:
        answer.note(remarks[0])
    rest = in_brackets({"were there": progress.there, "failed": len(failures)})
    answer.say(
        f"explained {progress.done} photos in {duration(seconds)}{rest}; {len(finished)} rows in "
        f"{output}"
    )
    return {
        "run": output,
        "rows": len(finished),
        "photos": finished.photos,
        "explained": progress.done,
        "there": progress.there,
        "failures": failures,
        "notes": remarks,
    }


@commands.command("export", key="files", epilog="Example: explain export run.sqlite run.parquet")
@cli.run_file
@click.argument("file")
@option(
    "--photos",
    "a row for each photo, with the probability of every label, instead of one for each map",
)
@option(
    "--boxes FILE",
    "COCO's annotations, whose numbers of photos and categories the results get",
    show_default="those of the run",
)
@cli.force
@cli.json
@click.pass_obj
def export(
    answer: Output, run_file: str, file: str, photos: bool, boxes: str | None, force: bool
) -> None:
    """Write a run as a table.

    FILE ends in .parquet, with the maps, or in .csv or .jsonl, without; or in .json, for what a
    detector finds as results of COCO.
    """
    import explain

    with notes(answer):
        run = explain.open_run(run_file)
        count = run.export(file, photos=photos, boxes=boxes, overwrite=force)
    answer.add({"run": run_file, "file": file, "rows": count}, [f"{count} rows written to {file}"])


@commands.command(
    "insight", key="insights", epilog="Example: explain insight run.sqlite --output insight"
)
@cli.run_file
@cli.method_of_run
@option("--count -k K", "rows of each table", type=COUNT, default=10)
@model_options(colours=False)
@source_option
@option(
    "--channels K", "show what excites the K channels that matter most for --target", type=COUNT
)
@option("--concepts K", "find K concepts that all photos share", type=COUNT)
@option("--examples SOURCE", "five or more photos of a concept: does --target depend on it?")
@target_option
@cli.layer
@option(
    "--threshold SHARE",
    "the probability from which on a label is predicted, where several may be true of a photo, or "
    "that of one label, as Edema=0.2; repeatable",
    multiple=True,
    show_default="as the run, else 0.5",
)
@cli.output(None, "FOLDER", "write pictures, tables and a page into this folder")
@cli.force
@cli.json
@click.pass_context
def tell_insight(
    context: click.Context,
    /,
    run_file: str,
    method: str | None,
    count: int,
    source: str | None,
    channels: int | None,
    concepts: int | None,
    examples: str | None,
    target: str | None,
    layer: str | None,
    threshold: Sequence[str],
    output: str | None,
    force: bool,
    **model: Any,
) -> None:
    """Summarise the maps of a run: evidence of classes, clusters, mistakes."""
    import explain

    answer: Output = context.obj
    has_model = model["model"] is not None
    refuse_without_effect(context, "force", " without --output", unless=output is not None)
    for name in model:
        refuse_without_effect(context, name, " without --model", unless=has_model)
    with notes(answer):
        run = explain.open_run(run_file)
    explainer = load_explainer(answer, **model) if has_model else None
    with as_usage(TargetError):
        thresholds = thresholds_of(threshold, run.categories)
    with notes(answer), blaming(model["model"]):
        insight = run.insight(
            method,
            explainer=explainer,
            source=source,
            channels=channels or 0,  # None without the option: then none are looked for
            concepts=concepts or 0,
            examples=examples,
            target=target_of(target),
            layer=layer,
            threshold=thresholds,
        )
    lines = insight.lines(count)
    files: list[str] = []
    if output is not None:
        files = [str(path) for path in insight.save(output, source=source, overwrite=force)]
        lines += ["", *wrote(files)]
    answer.add({**insight.to_dict(), "files": files}, lines)


@commands.command(
    "repair",
    key="repairs",
    epilog="Example: explain repair run.sqlite --finding 2 --output repaired.pt",
)
@cli.run_file
@option(
    "--finding FINDING",
    "which finding: the number of a cluster in 'explain insight', or the label of a class"
    " whose evidence is off its object",
    show_default="the one whose pattern draws most other photos to its class",
)
@cli.method_of_run
@model_options()
@source_option
@option(
    "--layer NAME",
    "the layer of the projection; the best of several is taken; repeatable",
    multiple=True,
    show_default="the last one of each resolution",
)
@option("--train", "train a copy of the model, instead of a projection that is inserted at once")
@cli.output(
    "repaired.pt",
    "FILE",
    "where to write the model, .pt or .pt2 (an exported program), with a page beside it",
)
@cli.force
@cli.json
@click.pass_context
def repair(
    context: click.Context,
    /,
    run_file: str,
    finding: str | None,
    method: str | None,
    source: str | None,
    layer: tuple[str, ...],
    train: bool,
    output: str,
    force: bool,
    **model: Any,
) -> None:
    """Remove a finding of insight from a model, and test the result."""
    import explain
    from explain.insight import RunPhotos
    from explain.insight.repair import repair as repair_model

    answer: Output = context.obj
    refuse_without_effect(context, "layer", " with --train", unless=not train)
    with notes(answer):
        run = explain.open_run(run_file)
    explainer = load_explainer(answer, **model)
    with notes(answer), blaming(model["model"]):
        photos = RunPhotos(run, explainer, source)
        insight = replace(run.insight(method), photos=photos)  # on which findings can be tried
        # without --finding, findings are tried on the model: its result says which and why
        tried = insight.confirmed() if finding is None else None
        chosen = insight.finding(finding) if tried is None else tried.finding
        result = repair_model(
            chosen, photos, how="train" if train else "project", layer=list(layer) or None
        )
        files = [str(path) for path in result.save(output, overwrite=force)]
    lines = [] if tried is None else [f"finding: {tried}"]
    lines += [*str(result).splitlines(), *wrote(files)]
    answer.add({**result.to_dict(), "files": files}, lines)


@commands.command(
    "film", key="films", epilog="Example: explain film training.sqlite cat.jpg --output cat.webp"
)
@cli.run_file
@click.argument("photo")
@option("--method -m NAME", "of which method, where the run has several")
@option("--target -t CLASS", "of which label or index, where several were explained")
@cli.output("film.gif", "FILM", "the film, .gif or .webp; a figure is written beside it")
@option("--seconds S", "how long each map is shown", type=POSITIVE, default=0.4)
@cli.style
@cli.force
@cli.json
@click.pass_obj
def film(
    answer: Output,
    run_file: str,
    photo: str,
    method: str | None,
    target: str | None,
    output: str,
    seconds: float,
    style: Any,
    force: bool,
) -> None:
    """Show how the map of a photo changed during training.

    PHOTO is its name in the run, or the end of it.
    """
    from explain.training import film

    moving = film(run_file, photo, method=method, target=target, style=style)
    files = [str(path) for path in moving.save(output, seconds=seconds, overwrite=force)]
    document = {
        "run": run_file,
        "photo": moving.name,
        "method": moving.method,
        "steps": moving.steps,
        "files": files,
    }
    steps = f"from step {moving.steps[0]} to step {moving.steps[-1]}"
    lines = [f"{moving.name}, {moving.method}: {len(moving)} snapshots {steps}"]
    answer.add(document, lines + [f"  {line}" for line in wrote(files)])
