"""What the CAMs of one and of 20 boxes or classes cost, by a bare pass, and what they cost beyond
the backward passes.

    python examples/benchmarks/boxes.py [--rounds 15] [--threads 1] [--quick]

The boxes are the 20 best of NanoDet on one photo, as far as they score 0.1, at the layer that is
the default. In each round, all run in turn; a figure is the median over the rounds. The second one
leaves out the time of plain backward passes from the same scores to the layer. The goal for it is
1.3 passes. Times are those of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tables import Table, line
from timing import interleaved

import explain
from explain.targets import Detections

GOAL = 1.3
MANY = 20
PHOTO = Path(__file__).resolve().parents[2] / "assets" / "grace_hopper.jpg"


def table() -> Table:
    rows = tuple(
        (f"{count} {what}",)
        for what in ("of 20 boxes", "of 20 classes")
        for count in ("one", "all")
    )
    return Table("boxes", ("CAMs", "passes", "beyond the backward passes"), rows)


def score_of(target: Detections | int, output: Any) -> torch.Tensor:
    """The score of a box, or of a class, in the model's output for one photo."""
    return (
        output[0, target]
        if isinstance(target, int)
        else target.resolved(output, 1).pick(output, 1)[0].sum()
    )


def measured(
    model: torch.nn.Module,
    x: torch.Tensor,
    method: str,
    layer: str,
    targets: list[Any],
    rounds: int,
) -> list[list[float]]:
    """For one target and for all of them: passes, and passes beyond the backward passes."""
    starts: list[torch.Tensor] = []

    def start(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        starts.append(output.detach().requires_grad_())
        return starts[-1]

    hook = model.get_submodule(layer).register_forward_hook(start)
    output = model(x)
    hook.remove()
    scores = [score_of(target, output) for target in targets]

    def bare() -> object:
        with torch.inference_mode():
            return model(x)

    def backward(count: int) -> None:
        for score in scores[:count]:
            torch.autograd.grad(score, starts, retain_graph=True)

    works: dict[str, Callable[[], object]] = {"bare": bare}
    counts = 1, len(targets)
    for count in counts:
        works[f"{count}"] = partial(
            explain.attribute, model, x, method, targets=targets[:count], layer=layer
        )
        works[f"{count} back"] = partial(backward, count)
    took = interleaved(works, rounds, time.process_time)
    found = []
    for count in counts:
        every = list(zip(took[f"{count}"], took[f"{count} back"], took["bare"], strict=True))
        passes = statistics.median(seconds / once for seconds, _, once in every)
        found.append(
            [passes, statistics.median((seconds - back) / once for seconds, back, once in every)]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small and quick, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", explain.ExplainWarning)  # the map of a poor box may be zero
    rounds = 1 if options.quick else options.rounds
    detector = explain.Explainer(explain.models.load("nanodet", size=96 if options.quick else None))
    boxes = [
        Detections(index=index, threshold=0.0 if options.quick else 0.1) for index in range(MANY)
    ]
    found = measured(
        detector.model, detector.as_input(PHOTO), "layercam", "neck.reduce.2", boxes, rounds
    )
    classifier = explain.Explainer("tiny" if options.quick else None)
    x = classifier.as_input(PHOTO)
    layer = explain.attribute(classifier.model, x, "gradcam").layer
    assert isinstance(layer, str)
    found += measured(classifier.model, x, "gradcam", layer, list(range(MANY)), rounds)
    print(table().head())
    for (name,), (passes, beyond) in zip(table().rows, found, strict=True):
        print(line([name, f"{passes:.2f}", f"{beyond:.2f}"]))
        if beyond > GOAL:
            print(f"over the goal of {GOAL}: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
