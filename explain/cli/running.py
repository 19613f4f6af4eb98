"""`explain run`, `export`, `insight`, `repair`, `film`: runs over data sets, and what is made of them; and `serve`."""

import argparse
import os
import time
import webbrowser
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import explain
from explain._utils.progress import duration
from explain.cli import arguments as args
from explain.cli.commands import UsageError, as_usage
from explain.cli.explaining import target_of, targets_of
from explain.cli.output import DONE, FAILED, INTERRUPTED, Output, RunProgress, notes
from explain.data.opening import hushed, photos_in
from explain.methods import Method
from explain.runs import run_on_ray
from explain.runs.result import choice
from explain.runs.runner import State
from explain.store.lists import source_of

LISTED = 20  # failures that are told; the rest is in the file


def run(options: argparse.Namespace, answer: Output) -> int:
    """Explain all photos of a source, and store the maps."""
    methods, metrics = _checked(options), args.checked_metrics(options, boxes=True)
    source = source_of(options.source)
    explainer = args.load_explainer(options, answer)
    runner: Any = partial(run_on_ray, address=options.ray or None, actors=options.actors, gpus=options.gpus or 0.0)
    if options.ray is None:
        runner = partial(explain.run, workers=options.workers)
    line, begun = RunProgress(), time.monotonic()
    line.hidden = answer.quiet
    try:
        with (
            as_usage(*args.ASKED), closing(line), notes(answer), args.blaming(options.model),  # for every photo
            hushed() if answer.quiet else nullcontext(),
        ):  # fmt: skip
            found = runner(
                source, explainer, methods, output=options.output,
                targets=targets_of(options.target, explainer.categories), top_k=options.top_k, metrics=metrics,
                layer=options.layer, fuse=options.fuse, batch_size=options.batch_size,
                precision="bf16" if options.bf16 else "full", progress=line,
            )  # fmt: skip
    except KeyboardInterrupt:
        so_far = ""
        with suppress(explain.RunError):
            photos = explain.open_run(options.output).photos
            so_far = f"; {photos} photos are in {options.output}, and the same command goes on from there"
        answer.complain(f"interrupted{so_far}")
        return INTERRUPTED
    about = _summary(options, found, line.state, time.monotonic() - begun, answer)
    answer.add({**about, "pictures": _pictures(options, found, source, answer)})
    return FAILED if answer.errors else DONE


def _checked(options: argparse.Namespace) -> str | list[Method]:
    """Return the methods, or the name of a group; refuse what cannot be meant."""
    on_ray, draws = options.ray is not None, options.pictures is not None
    args.refuse_without_effect(
        options, ("style", draws, " without --pictures"), ("force", draws, " without --pictures"),
        ("actors", on_ray, " without --ray"), ("gpus", on_ray, " without --ray"),
        ("workers", not on_ray, " with --ray"),
    )  # fmt: skip
    if on_ray and "output" not in options.given:
        raise UsageError("--ray writes into a folder that all machines share; name it with --output")
    if "://" in options.output and draws:
        raise UsageError("--pictures writes beside a folder, which --output must name, but it is an address")
    groups, methods = args.checked_methods(options)
    if draws:
        with as_usage(explain.ExplainError):
            choice(options.pictures)
    if not groups:
        return methods
    if methods or len(groups) > 1:
        raise UsageError(f"--method {groups[0]} takes the others too, in a run; leave them out")
    if on_ray:
        raise UsageError(f"--method {groups[0]} chooses by the first photo, which --ray cannot; name the methods")
    for name in (*args.given_budget(options), "composite"):
        if name in options.given:
            raise UsageError(f"--{name.replace('_', '-')} must be given with named methods in a run; name them")
    return groups[0]


def _pictures(options: argparse.Namespace, found: Any, source: Any, answer: Output) -> list[str]:
    """Draw the photos that were asked for, in a folder beside the run."""
    if options.pictures is None:
        return []
    folder = f"{os.path.splitext(options.output)[0]}-pictures"
    how: Any = {"source": source, "style": options.style, "overwrite": options.force}
    written, failures = found.write_pictures(options.pictures, folder, **how)
    for name, reason in failures.items():
        answer.complain(f"{name}: {reason}")
    answer.say(f"{len(written)} pictures written to {folder}")
    return list(map(str, written))


def _summary(
    options: argparse.Namespace, found: explain.Run, state: State | None, seconds: float, answer: Output
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


def export(options: argparse.Namespace, answer: Output) -> None:
    """Write a run as a table."""
    with notes(answer):
        count = explain.open_run(options.run).export(options.file, overwrite=options.force)
    answer.add({"run": options.run, "file": options.file, "rows": count})
    answer.say(f"{count} rows written to {options.file}")


def tell_insight(options: argparse.Namespace, answer: Output) -> None:
    """Summarise the maps of a run; with a model, mistakes are explained, and more can be asked for."""
    of_model = options.model is not None
    args.refuse_without_effect(
        options, ("force", options.output is not None, " without --output"),
        *((name, of_model, " without --model") for name in ("labels", *args.SETTINGS) if name != "channels"),
    )  # fmt: skip
    with notes(answer):
        run = explain.open_run(options.run)
    own = argparse.Namespace(**{**vars(options), "channels": None})  # here, the option is about those of a layer
    explainer = args.load_explainer(own, answer) if of_model else None
    with notes(answer), args.blaming(options.model):
        found = run.insight(
            options.method, explainer=explainer, source=options.source, channels=options.channels or 0,
            concepts=options.concepts or 0, examples=options.examples,
            target=target_of(options.target, None if explainer is None else explainer.categories), layer=options.layer,
        )  # fmt: skip
    answer.say(*found.lines(options.count))
    files = []
    if options.output is not None:
        files = [str(path) for path in found.save(options.output, source=options.source, overwrite=options.force)]
        answer.say("", *(f"wrote {file}" for file in files))
    answer.add({**found.to_dict(), "files": files})


def repair(options: argparse.Namespace, answer: Output) -> None:
    """Write a model without a finding of insight, and a page with the proof."""
    from explain.insight import RunPhotos
    from explain.insight.repair import repair as repaired

    args.refuse_without_effect(options, ("layer", not options.train, " with --train"))
    with notes(answer):
        run = explain.open_run(options.run)
    explainer = args.load_explainer(options, answer)
    with notes(answer), args.blaming(options.model):
        finding = run.insight(options.method).finding(options.finding)
        how = "train" if options.train else "project"
        made = repaired(finding, RunPhotos(run, explainer, options.source), how=how, layer=options.layer)
        files = [str(path) for path in made.save(options.output, overwrite=options.force)]
    answer.say(*str(made).split("\n"), *(f"wrote {file}" for file in files))
    answer.add({**made.to_dict(), "files": files})


def film(options: argparse.Namespace, answer: Output) -> None:
    """Write the film of a photo, and a figure beside it."""
    from explain.training import film

    found = film(options.run, options.photo, method=options.method, target=options.target, style=options.style)
    files = list(map(str, found.save(options.output, seconds=options.seconds, overwrite=options.force)))
    answer.add({"run": options.run, "photo": found.name, "method": found.method, "steps": found.steps, "files": files})
    answer.say(
        f"{found.name}, {found.method}: {len(found)} snapshots from step {found.steps[0]} to step {found.steps[-1]}",
        *(f"  wrote {file}" for file in files),
    )


MOST_EXAMPLES = 12
LAST_PORT = 65535


def serve(options: argparse.Namespace, answer: Output) -> None:
    """Listen until an interrupt."""
    from explain.app import application
    from explain.app.service import Service
    from explain.app.web import access_for, address, bound, listen

    if options.port > LAST_PORT:
        raise UsageError(f"--port must be at most {LAST_PORT}, got {options.port}; 0 takes a free one")
    examples = _examples(options.examples)
    access = access_for(options.host)
    usual = {**dict.fromkeys((*args.SETTINGS, "labels")), "crop": "center", "device": options.device}
    beside = (argparse.Namespace(**usual, model=name) for name in options.beside or ())
    explainers = [args.load_explainer(each, answer) for each in (options, *beside)]
    with closing(Service(explainers, examples=examples)) as service:
        made = application(service, access)
        with bound(options.host, options.port) as socket:
            url = address(options.host, socket.getsockname()[1], access.token)

            def begun() -> None:
                names = ", ".join(explainer.name for explainer in explainers)
                answer.say(f"{names}: {url}", "Ctrl-C ends it.")
                answer.flush()
                if options.open:
                    webbrowser.open(url)

            service.prepare()
            with suppress(KeyboardInterrupt):
                listen(made, socket, begun)


def _examples(folder: str | None) -> dict[str, Path]:
    """The photos of a folder by their names, the first few."""
    if folder is None:
        return {}
    if not Path(folder).is_dir():
        raise UsageError(f"--examples must be a folder of photos, got {folder!r}; name one, or leave it out")
    found = [name for name, problem in photos_in(folder, recursive=False) if problem is None]
    return {name: Path(folder, name) for name in found[:MOST_EXAMPLES]}
