"""`explain insight`: what the maps of a run say together."""

from __future__ import annotations

import argparse

from explain.arguments import (
    CHANNELS,
    CLASS,
    CONCEPT_PHOTOS,
    FORCE,
    JSON,
    MAPS_OF,
    MODEL,
    ONE_LAYER,
    PHOTOS_OF,
    PICTURES_TO,
    ROWS,
    RUN,
    SHARED,
    UsageError,
)
from explain.cli.answer import DONE, Answer, notes
from explain.cli.command import Command
from explain.cli.explaining import targets_of
from explain.cli.model import blaming, load_explainer

FURTHER = (CHANNELS, SHARED, CONCEPT_PHOTOS)
"""What takes one more look at the model."""


def tell_insight(options: argparse.Namespace, answer: Answer) -> int:
    """Say what the maps of a run say together; with a model, mistakes are explained, and more can be asked for."""
    from explain.runs import open_run

    _check(options)
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
    for option in (CLASS, ONE_LAYER):
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
    settings = sorted(options.given & {option.name for option in MODEL if option.name != "model"})
    if settings:
        raise UsageError(f"--{settings[0]} would have no effect without --model; name the model")


INSIGHT = Command(
    "insight", "say what the maps of a run say together: where classes look, clusters of reasons, mistakes",
    (RUN, MAPS_OF, ROWS, *MODEL, PHOTOS_OF, *FURTHER, CLASS, ONE_LAYER, PICTURES_TO, FORCE, JSON), tell_insight,
    "insights", example="explain insight run.sqlite --output insight",
)  # fmt: skip
