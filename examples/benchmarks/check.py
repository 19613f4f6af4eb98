"""What a check costs: `Explanation.check` of three maps of a photo, in seconds and in forward
passes.

    python examples/benchmarks/check.py [--threads 2] [--rounds 3] [--quick]

A covered photo's time is that of the fastest batch of 8, 16 or 32 photos in bare forward passes, in
the same rounds; the figure beside the seconds is the check's time by that of one such photo, for
each map. The table is in docs/benchmarks.md; ``--quick`` checks two maps once and says nothing about
speed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tables import Table, line
from timing import interleaved

import explain
from explain._utils.errors import muted

PHOTO = Path(__file__).resolve().parents[2] / "assets" / "chelsea.png"
MODELS = ("tiny", "efficientnet-lite0")
METHODS = ["gradcam", "guidedbackprop", "lrp"]


def table() -> Table:
    columns = ("model", "maps", "seconds", "for each map, in passes of the photo")
    return Table("check", columns, tuple((name,) for name in MODELS))


def row(name: str, methods: list[str], rounds: int) -> str:
    explainer = explain.Explainer(name)
    explanation = explainer(PHOTO, methods)
    x = explainer.as_input(PHOTO)
    works: dict[str, Callable[[], object]] = {"check": explanation.check}
    for count in (8, 16, 32):
        works[str(count)] = partial(explainer.model, x.expand(count, -1, -1, -1).contiguous())
    with torch.inference_mode(), muted():
        seconds = interleaved(works, rounds)
    photo = min(statistics.median(seconds[str(count)]) / count for count in (8, 16, 32))
    took = statistics.median(seconds["check"])
    return line([name, str(len(methods)), f"{took:.1f}", f"{took / photo / len(methods):.0f}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(table().head())
    for name in MODELS[:1] if options.quick else MODELS:
        print(
            row(
                name,
                METHODS[:2] if options.quick else METHODS,
                1 if options.quick else options.rounds,
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
