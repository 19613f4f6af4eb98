"""By how much a process grows over a thousand explanations: tensors in, photos in, and the command
line in one process.

    python examples/benchmarks/memory.py [--count 1000]

The figure is the growth of the resident set after a warm-up of 50; torch uses one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

import explain
from explain import cli

PHOTO = Path(__file__).resolve().parents[2] / "assets" / "chelsea.png"
METHODS = ["gradcam", "guidedbackprop", "layercam", "fullgrad"]
WARM_UP = 50


def resident() -> float:
    """Return the megabytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def growth(work: Callable[[int], object], count: int) -> float:
    """Return by how many megabytes the process grows over ``count`` rounds of ``work(round)``."""
    for i in range(WARM_UP):
        work(i)
    before = resident()
    for i in range(count):
        work(i)
    return resident() - before


def ways(folder: Path) -> dict[str, Callable[[int], object]]:
    """Return each way of explaining, as a function of the number of the round."""
    explainer = explain.Explainer()
    with Image.open(PHOTO) as opened:
        photo = opened.convert("RGB").resize((300, 200))
    photo.save(folder / "photo.png")
    x = explainer.preprocess(photo)[None]

    def from_photo(i: int) -> None:
        explanation = explainer(photo, METHODS[i % 4])
        if i % 2:
            explanation.overlay(caption=True)
        if i % 10 == 0:
            explanation.figure()
            explanation.save(folder / "saved", overwrite=True)

    def from_command_line(i: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main(
                [
                    str(folder / "photo.png"),
                    "--force",
                    "--output",
                    str(folder / "out"),
                    "--method",
                    METHODS[i % 4],
                ]
            )

    return {
        "attribute": lambda i: explain.attribute(explainer.model, x, METHODS[i % 4]),
        "Explainer": from_photo,
        "command line": from_command_line,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, work in ways(Path(folder)).items():
            print(
                f"{name:<14} {growth(work, options.count):+6.1f} MB after {options.count} "
                "explanations",
                flush=True,
            )


if __name__ == "__main__":
    main()
