"""`explain concepts`: what a layer's feature maps are made of, drawn on a photo."""

from __future__ import annotations

import argparse

from explain.arguments import COUNT, FORCE, IMAGES, JSON, LAYER, MODEL, OUTPUT, RECURSIVE, Option
from explain.cli.answer import Answer
from explain.cli.bar import Bar
from explain.cli.command import Command
from explain.cli.each import Result, for_all
from explain.cli.model import blaming, load_explainer
from explain.cli.sources import Source, photos_of, read_photo


def draw_concepts(options: argparse.Namespace, answer: Answer) -> int:
    """Draw the concepts of each photo."""
    photos, missing = photos_of(options)
    explainer = load_explainer(options, answer)

    def work(source: Source, stem: str, bar: Bar) -> Result:
        photo = read_photo(source, answer)
        with blaming(options.model):
            found = explainer.concepts(photo, options.count, layer=options.layer)
        written = [str(place) for place in found.save(options.output, stem=stem, overwrite=options.force)]
        names = found.labels
        about = {"image": str(source), "files": written, "layer": found.concepts.layer, "concepts": names}
        return Result(about, [*(f"  {name}" for name in names), *(f"  wrote {file}" for file in written)], written)

    return for_all(photos, missing, work, answer, verb="drew", folder=options.output)


CONCEPTS = Command(
    "concepts", "draw the concepts that a layer sees in a photo",
    (IMAGES, RECURSIVE, COUNT, LAYER, *MODEL, OUTPUT, FORCE, JSON), draw_concepts,
    flag=Option(
        ("--concepts",), "draw the K concepts that a layer sees in the image, and stop", None,
        {"type": COUNT.how["type"], "metavar": "K"},
    ),
    value="count", example="explain concepts cat.jpg --count 4",
)  # fmt: skip
