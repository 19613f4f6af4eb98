"""What a covered photo costs where only the part of the network that the window changes is
computed, and in Captum.

    python examples/benchmarks/incremental.py [--rows vgg16] [--rounds 5] [--threads 1] [--quick]

Occlusion with windows of 32 and of 16 pixels, at every 16th pixel, one photo of 224 pixels. A
figure is the time for each covered photo, all else included, by that of one in the best batched
forward pass, as in covering.py: the median over the rounds, and behind it the range. ``--quick``
shrinks everything and says nothing about speed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from covered import TOGETHER, Case
from covering import version
from peers import BATCHES, LAYOUTS, Row, captum, network, of_batch, ours, seconds
from tables import Table, line, shown

import explain
from explain.methods import Occlusion

GOALS = {"resnet18": 0.65, "vgg16": 0.40, "efficientnet-lite0": 0.75}
WINDOWS = (32, 16)
STRIDE = 16
COLUMNS = {"explain": "explain", "Captum": "captum"}


def table(versions: dict[str, str | None]) -> Table:
    heads = (
        f"{name} {versions[name]}" if name != "explain" and versions[name] else name
        for name in COLUMNS
    )
    names = tuple((name, str(window)) for name in GOALS for window in WINDOWS)
    return Table("incremental", ("network", "window", *heads), names)


def case(side: int, window: int) -> Case:
    count = (-(-(side - window) // STRIDE) + 1) ** 2
    slides = {"sliding_window_shapes": (3, window, window), "strides": (3, STRIDE, STRIDE)}
    more = {"perturbations_per_eval": TOGETHER}
    return Case(Occlusion(window=window, stride=STRIDE), count, "Occlusion", {**slides, **more})


def spread(values: Sequence[float]) -> str:
    return f"{shown(statistics.median(values))} ({shown(min(values))}–{shown(max(values))})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="a part of the names of the networks to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    side, rounds = (64, 1) if options.quick else (224, options.rounds)
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    print(table({name: version(distribution) for name, distribution in COLUMNS.items()}).head())
    for name in GOALS:
        for window in WINDOWS if options.rows in name else ():
            model = explain.Explainer().model if name == "efficientnet-lite0" else network(name)
            of = case(side, window)
            works = {"explain": ours(model, x, [of.method])}
            if version("captum"):
                works["Captum"] = captum("Occlusion", model, x, **of.given)
            row = Row(name, GOALS[name], model, x, works)
            passes = {
                (batch, layout): of_batch(row, batch, layout)
                for batch in BATCHES
                for layout in LAYOUTS
            }
            for work in (*passes.values(), *works.values()):
                work()
            found: dict[str, list[float]] = {each: [] for each in works}
            of_passes = {way: seconds(work) / way[0] for way, work in passes.items()}
            best = min(of_passes, key=of_passes.__getitem__)
            for _ in range(rounds):
                batched = seconds(passes[best]) / best[0]
                for each, work in works.items():
                    found[each].append(seconds(work) / of.photos / batched)
            told = [spread(found[each]) if each in found else "not installed" for each in COLUMNS]
            print(line([name, str(window), *told]), flush=True)


if __name__ == "__main__":
    main()
