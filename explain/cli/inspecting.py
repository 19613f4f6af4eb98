"""`explain inspect`: what every layer of the model does with a photo."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from explain.arguments import IMAGES, JSON, MODEL, RECURSIVE, Option
from explain.cli.answer import Answer
from explain.cli.bar import Bar
from explain.cli.command import Command
from explain.cli.each import Result, for_all
from explain.cli.model import blaming, load_explainer
from explain.cli.sources import Source, photos_of, read_photo


def inspect(options: argparse.Namespace, answer: Answer) -> int:
    """Print what the layers do with each photo."""
    photos, missing = photos_of(options)
    explainer = load_explainer(options, answer)

    def work(source: Source, stem: str, bar: Bar) -> Result:
        photo = read_photo(source, answer)
        with blaming(options.model):
            found = explainer.inspect(photo)
        first = found.first_nonfinite
        lines = [*str(found).split("\n"), *([] if first is None else [f"first NaN or infinity: {first.name}"])]
        return Result({"image": str(source), "layers": [asdict(row) for row in found.rows]}, lines)

    return for_all(photos, missing, work, answer, verb="inspected")


INSPECT = Command(
    "inspect", "print what every layer of the model does with a photo", (IMAGES, RECURSIVE, *MODEL, JSON), inspect,
    "inspected",
    Option(
        ("--inspect",), "print what every layer of the model does with the image, and stop", False,
        {"action": "store_true"},
    ),
    example="explain inspect cat.jpg --model resnet50",
)  # fmt: skip
