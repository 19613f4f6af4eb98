"""What one call costs on a small network, next to Captum, and how much of the package it runs.

    python examples/benchmarks/small.py [--rounds 200] [--quick]

The network has two 3 × 3 convolutions of 8 channels on 16 × 16 pixels: a forward pass takes a
twentieth of a millisecond, so that what is measured is the package's own work. On a GPU, people
wait for that too. Times are those of the processor with one thread; each ratio is the median over
rounds in which everything is run in turn. LRP is compared with Captum's Grad-CAM. Calls, functions
and modules are those of the package in one warm call, as `sys.setprofile` sees them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from timing import interleaved, ratio
from torch import nn

import explain

PACKAGE = str(Path(explain.__file__).parent)


class Goal(NamedTuple):
    """The Captum method that a method is compared with, and at most how many times its time it may
    take."""

    peer: str
    times: float


GOALS = {
    "gradcam": Goal("gradcam", 2.2),
    "saliency": Goal("saliency", 2.7),
    "guidedbackprop": Goal("guidedbackprop", 2.0),
    "integratedgradients(steps=8)": Goal("integratedgradients", 1.7),
    "occlusion(window=6, stride=5)": Goal("occlusion", 1.2),
    "lrp": Goal("gradcam", 5.6),
}


class Calls(NamedTuple):
    """How much of the package one call runs."""

    calls: int
    functions: int
    modules: int


def network() -> nn.Module:
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def counted(work: Callable[[], object]) -> Calls:
    """Run a piece of work, and count the calls of the package's functions."""
    functions: list[tuple[str, str, int]] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            functions.append((code.co_filename, code.co_qualname, code.co_firstlineno))

    previous = sys.getprofile()
    gc.collect()
    gc.disable()  # finalizers of what earlier work left behind are not calls of this one
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(previous)
        gc.enable()
    return Calls(len(functions), len(set(functions)), len({file for file, _, _ in functions}))


def works_of_explain(model: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    def work(method: str) -> Callable[[], object]:
        return lambda: explain.attribute(model, x, method, target=1)

    return {method: work(method) for method in GOALS}


def works_of_captum(model: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    from captum import attr

    layer = model[3]  # type: ignore[index]
    gradcam = attr.LayerGradCam(model, layer)
    saliency = attr.Saliency(model)
    guided = attr.GuidedBackprop(model)
    path = attr.IntegratedGradients(model)
    occlusion = attr.Occlusion(model)
    windows: dict[str, Any] = {"sliding_window_shapes": (3, 6, 6), "strides": (3, 5, 5)}
    return {
        "gradcam": lambda: gradcam.attribute(x, target=1),
        "saliency": lambda: saliency.attribute(x, target=1),
        "guidedbackprop": lambda: guided.attribute(x, target=1),
        "integratedgradients": lambda: path.attribute(x, target=1, n_steps=8),
        "occlusion": lambda: occlusion.attribute(x, target=1, **windows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="three rounds: shows that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = network()
    x = torch.randn(1, 3, 16, 16, requires_grad=False)
    own = works_of_explain(model, x)
    captum = works_of_captum(model, x)
    works = {f"explain {name}": work for name, work in own.items()}
    works |= {f"captum {name}": work for name, work in captum.items()}
    for work in works.values():
        work()
    seconds = interleaved(works, 3 if options.quick else options.rounds)
    print("| method | ms | × Captum (ms) | goal | calls | functions | modules |")
    print("|---|---|---|---|---|---|---|")
    for name, goal in GOALS.items():
        times = ratio(seconds, f"explain {name}", f"captum {goal.peer}")
        milliseconds = 1e3 * statistics.median(seconds[f"explain {name}"])
        of_peer = 1e3 * statistics.median(seconds[f"captum {goal.peer}"])
        size = counted(own[name])
        cells = [
            f"`{name}`",
            f"{milliseconds:.2f}",
            f"{times:.2f} ({of_peer:.2f})",
            f"{goal.times:g}",
            f"{size.calls:,}",
            str(size.functions),
            str(size.modules),
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
