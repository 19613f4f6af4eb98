"""`explain insight`: what the maps of a run say together."""

from __future__ import annotations

import argparse

from explain.arguments import FORCE, JSON, MAPS_OF, MODEL, PHOTOS_OF, PICTURES_TO, ROWS, RUN, UsageError
from explain.cli.answer import DONE, Answer, notes
from explain.cli.command import Command
from explain.cli.model import blaming, load_explainer


def tell_insight(options: argparse.Namespace, answer: Answer) -> int:
    """Say what the maps of a run say together; with a model, mistakes are explained."""
    from explain.runs import open_run

    if options.run is None:
        raise UsageError("name a run, as in explain insight run.sqlite")
    if "force" in options.given and options.output is None:
        raise UsageError("--force would have no effect without --output; leave it out")
    settings = sorted(options.given & {option.name for option in MODEL if option.name != "model"})
    if settings and options.model is None:
        raise UsageError(f"--{settings[0]} would have no effect without --model; name the model")
    run = open_run(options.run)
    explainer = None if options.model is None else load_explainer(options, answer)
    with notes(answer), blaming(options.model):
        found = run.insight(options.method, explainer=explainer, source=options.source)
    answer.say(*found.lines(options.count))
    files = []
    if options.output is not None:
        files = [str(path) for path in found.save(options.output, source=options.source, overwrite=options.force)]
        answer.say("", *(f"wrote {file}" for file in files))
    answer.add({**found.to_dict(), "files": files})
    return DONE


INSIGHT = Command(
    "insight", "say what the maps of a run say together: where classes look, clusters of reasons, mistakes",
    (RUN, MAPS_OF, ROWS, *MODEL, PHOTOS_OF, PICTURES_TO, FORCE, JSON), tell_insight, "insights",
    example="explain insight run.sqlite --output insight",
)  # fmt: skip
