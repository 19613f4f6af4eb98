"""`explain film`: how the map of a photo moved during training."""

from __future__ import annotations

import argparse

from explain.arguments import FILM_OUTPUT, FORCE, IN_RUN, JSON, PHOTO, RUN, SECONDS_EACH, STYLE, UsageError
from explain.cli.answer import DONE, Answer
from explain.cli.command import Command


def film(options: argparse.Namespace, answer: Answer) -> int:
    """Write the film of a photo, and a figure beside it."""
    from explain.watching import film

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
    (RUN, PHOTO, *IN_RUN, FILM_OUTPUT, SECONDS_EACH, STYLE, FORCE, JSON), film, "films",
    example="explain film training.sqlite cat.jpg --output cat.webp",
)  # fmt: skip
