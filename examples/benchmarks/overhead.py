"""What an explanation costs, as a multiple of a bare forward pass of the same model on the same
input.

    python examples/benchmarks/overhead.py [--rounds 9] [--json file] [--models resnet50 tiny]

The baseline is ``model(x)`` in inference mode. Weights are random, which changes no time. Each
figure is the median of the ratios to the baseline run next to it; behind it, the peak of what torch
allocates, by that of the bare pass. What is printed is the table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torchvision
from tables import Table, line, shown
from timing import interleaved, peak_bytes, ratio
from torch import nn

import explain
from explain.models import load

METHODS = ("gradcam", "saliency", "guidedbackprop")
CASES = [
    ("resnet18", 1),
    ("resnet18", 16),
    ("resnet50", 1),
    ("resnet50", 16),
    ("mobilenet_v3_small", 1),
    ("mobilenet_v3_small", 16),
    ("tiny", 1),
    ("tiny", 16),
]


def side_of(name: str) -> int:
    return 80 if name == "tiny" else 224


def label(name: str) -> str:
    return f"{name}, {side_of(name)} px"


def table() -> Table:
    return Table(
        "overhead",
        ("model", "batch", *METHODS),
        tuple((label(name), str(batch)) for name, batch in CASES),
    )


def build(name: str) -> tuple[nn.Module, int]:
    if name == "tiny":
        return load("tiny").model, side_of(name)
    model = torchvision.models.get_model(name, weights=None)
    # random weights with these statistics: with the initial ones, scores of deep networks vanish,
    # and maps of rounding errors take further passes
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(8, 3, side_of(name), side_of(name)))
    return model.eval(), side_of(name)


def measure(name: str, batch: int, rounds: int) -> dict[str, object]:
    model, side = build(name)
    x = torch.randn(batch, 3, side, side)

    def bare() -> object:
        with torch.inference_mode():
            return model(x)

    works = {"bare": bare} | {
        m: (lambda m=m: explain.attribute(model, x, m, target=1)) for m in METHODS
    }
    seconds = interleaved(works, rounds)
    memory = {work: peak_bytes(run) for work, run in works.items()}
    return {
        "model": name,
        "batch": batch,
        "pixels": side,
        "bare_ms": 1e3 * sorted(seconds["bare"])[rounds // 2],
        "time": {m: ratio(seconds, m, "bare") for m in METHODS},
        "memory": {m: memory[m] / memory["bare"] for m in METHODS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=sorted({name for name, _ in CASES}))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    print(table().head())
    found = []
    for name, batch in CASES:
        if name not in options.models:
            continue
        row = measure(name, batch, options.rounds if batch > 1 else 3 * options.rounds)
        found.append(row)
        cells = [(f"{shown(row['time'][m])} ({shown(row['memory'][m])})") for m in METHODS]  # type: ignore[index]
        print(line([label(name), str(batch), *cells]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
