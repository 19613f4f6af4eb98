"""What it costs to watch a training: resnet18 at 64 pixels in batches of 64, 8 photos every 500
steps, with Grad-CAM.

    python examples/benchmarks/watching.py [--rounds 5] [--steps 10] [--every 500] [--photos 8]
    [--threads 2]

A look, the hooks of its window and the steps between are timed apart, since 500 steps take minutes:
what is added in every 500 steps is one look (photos explained and written to the file), and what
hooks on gradients add to the steps of the window. Each figure is a median over rounds in which all
kinds of steps are run in turn. The goal is 2 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from PIL import Image

import explain
from explain.models import CenterCrop
from explain.training import DeadUnits, GradientFlow, Monitor

SIDE = 64
BATCH = 64
CLASSES = 200
GOAL = 0.02


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of each kind in a round")
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--photos", type=int, default=8)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None, num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x = torch.randn(BATCH, 3, SIDE, SIDE)
    y = torch.randint(CLASSES, (BATCH,))
    pixels = torch.randint(256, (options.photos, SIDE, SIDE, 3), dtype=torch.uint8).numpy()
    photos = [(Image.fromarray(each), number) for number, each in enumerate(pixels)]

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def plain() -> None:
        for _ in range(options.steps):
            step()

    def hooked() -> None:
        with GradientFlow(model), DeadUnits(model):
            plain()

    explainer = explain.Explainer(model.train(), preprocess=CenterCrop(SIDE))
    bare: list[float] = []
    hooks: list[float] = []
    looks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.sqlite"
        with Monitor(explainer, photos, every=1, window=0, output=file) as watch:
            step()
            for number in range(options.rounds):
                bare.append(seconds_of(plain) / options.steps)
                hooks.append(seconds_of(hooked) / options.steps - bare[-1])
                looks.append(seconds_of(watch.step))
                print(
                    f"round {number + 1}: a step {1e3 * bare[-1]:.1f} ms, hooks add "
                    f"{1e3 * hooks[-1]:.1f} ms to a "
                    f"step, a look {1e3 * looks[-1]:.1f} ms",
                    flush=True,
                )
    one, added, look = (statistics.median(each) for each in (bare, hooks, looks))
    window = min(options.window, options.every)
    cost = (look + window * max(0.0, added)) / (options.every * one)
    said = "ok" if cost < GOAL else "over"
    print(
        f"resnet18 at {SIDE} pixels, batch {BATCH}: {options.photos} photos every {options.every} "
        "steps, and gradients"
    )
    print(f"in {window} of them, cost {cost:.2%} of the training time ({said}: at most {GOAL:.0%})")


if __name__ == "__main__":
    main()
