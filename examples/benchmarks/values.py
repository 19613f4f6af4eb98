"""Write the values of all methods, metrics and checks on fixed networks and photos to a file, or
compare with one.

    python examples/benchmarks/values.py write before.npz
    python examples/benchmarks/values.py compare before.npz

Everything is computed in float64 with fixed seeds, so that a change of the code that is not meant
to change values can be held to 1e-9. Each difference is printed with its name; the exit code is 1
if there is any.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-9  # of the largest magnitude
ZERO = 1e-12  # sums of this size are zero but for rounding
OWN_BUDGET = {
    "expectedgradients",
    "gradientshap",
    "smoothgrad",
    "smoothgrad2",
    "smoothgradcam++",
    "sscam",
    "vargrad",
}
"""Methods that had an option ``samples`` before 0.3.0, which the budget of that time did not
change."""


class Residual(nn.Module):
    """Convolutions with biases, batch normalisation, an addition and pooling: a network for the CAM
    family."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1)
        )
        self.pool = nn.MaxPool2d(2)
        self.last = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.SiLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.pool(torch.relu(x + self.block(x)))
        return self.head(self.last(x).mean((2, 3)))


class Chain(nn.Module):
    """Convolution and ReLU, flattened into a linear head: what relevance is exact on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU()
        )
        self.head = nn.Linear(6 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


def networks() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Give each network with its photos, in float64."""
    import explain

    torch.manual_seed(0)
    residual = Residual().eval().double()
    chain = Chain().eval().double()
    norm = residual.stem[1]
    norm.running_mean.uniform_(-0.5, 0.5)
    norm.running_var.uniform_(0.5, 2)
    small = torch.rand(2, 3, 14, 14, dtype=torch.float64) * 2 - 1
    yield "residual", residual, small
    yield "chain", chain, small
    for name in ("tiny", "tiny-transformer"):
        explainer = explain.Explainer(name)
        photos = [
            explainer.as_input(ROOT / "assets" / photo) for photo in ("chelsea.png", "coffee.png")
        ]
        yield name, explainer.model.double().eval(), torch.cat(photos).double()


def few(function, *args, **kwargs):
    """Call with at most 96 altered inputs where the method estimates; the option had another name
    before 0.3.0."""
    import explain

    for budget in ({"samples": 96}, {"runs": 96}):
        try:
            return function(*args, **budget, **kwargs)
        except (TypeError, explain.ExplainError):
            continue
    return function(*args, **kwargs)


def method_values() -> Iterator[tuple[str, np.ndarray]]:
    """Give the values of every method that each network can be explained with."""
    import explain

    for network, model, x in networks():
        for method in explain.list_methods():
            try:
                if network.startswith("tiny") and explain.plan(model, x, method).rows > 500:
                    continue  # the networks above have these methods
                run = explain.attribute if method in OWN_BUDGET else partial(few, explain.attribute)
                found = run(model, x, method, target=1)
            except explain.ExplainError as error:
                yield f"{network}/{method}/error", np.array(type(error).__name__)
                continue
            yield f"{network}/{method}/values", found.values.detach().double().numpy()
            yield f"{network}/{method}/score", found.score.detach().double().numpy()
            if found.delta is not None:
                yield (
                    f"{network}/{method}/delta",
                    torch.as_tensor(found.delta).detach().double().numpy(),
                )


def metric_values() -> Iterator[tuple[str, np.ndarray]]:
    """Give what each metric says of two maps."""
    import explain

    for network, model, x in networks():
        if network != "residual":  # the small networks for photos have their verdicts below
            continue
        side = x.shape[-1]
        boxes = torch.tensor([[side // 4, side // 4, 3 * side // 4, 3 * side // 4]] * len(x))
        for metric in explain.list_metrics():
            try:
                table = explain.evaluate(
                    model, x, ["gradcam", "saliency"], metric, target=1, boxes=boxes
                )
            except explain.ExplainError as error:
                yield f"{network}/metric/{metric}/error", np.array(type(error).__name__)
                continue
            for method in table:
                yield (
                    f"{network}/metric/{metric}/{method}",
                    torch.as_tensor(table[method][metric]).double().numpy(),
                )


def check_values() -> Iterator[tuple[str, np.ndarray]]:
    """Give the figures of the check of two photos."""
    import explain

    explainer = explain.Explainer("tiny")
    explainer.model.double()
    for photo in ("chelsea.png", "coffee.png"):
        try:
            check = explainer(ROOT / "assets" / photo, methods=["gradcam", "saliency"]).check()
        except explain.ExplainError as error:
            yield f"check/{photo}/error", np.array(type(error).__name__)
            continue
        for name in ("gradcam", "saliency"):
            for result in check[name]:
                yield f"check/{photo}/{name}/{result.name}", np.asarray(result.value)


def everything() -> dict[str, np.ndarray]:
    """Return all values by name."""
    found: dict[str, np.ndarray] = {}
    for part in (method_values, metric_values, check_values):
        start = time.perf_counter()
        found |= dict(part())
        print(
            f"{part.__name__}: {len(found)} arrays so far, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return found


def compare(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> int:
    """Print each difference, and return how many there are."""
    different = 0
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            print(f"{name}: only {'before' if name in before else 'after'}")
            different += 1
            continue
        old = before[name]
        new = after[name]
        if old.dtype.kind == "U" or new.dtype.kind == "U":
            same = str(old) == str(new)
            gap = "another error"
        elif old.shape != new.shape:
            same = False
            gap = f"shape {old.shape} -> {new.shape}"
        else:
            scale = max(float(np.nanmax(np.abs(old), initial=0)), ZERO / TOLERANCE)
            gap_value = float(np.nanmax(np.abs(old - new), initial=0)) / scale
            same = gap_value <= TOLERANCE and bool(np.array_equal(np.isnan(old), np.isnan(new)))
            gap = f"{gap_value:.1e} of the largest magnitude"
        if not same:
            print(f"{name}: {gap}")
            different += 1
    print(f"{len(before)} arrays before, {len(after)} after, {different} different")
    return different


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = everything()
    if arguments.what == "write":
        np.savez_compressed(arguments.file, **found)
        return 0
    with np.load(arguments.file) as stored:
        return 1 if compare(dict(stored), found) else 0


if __name__ == "__main__":
    sys.exit(main())
