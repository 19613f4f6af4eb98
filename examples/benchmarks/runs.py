"""How fast a run is, next to bare inference in batches over the same photos, and by how much the
process grows.

    python examples/benchmarks/runs.py FOLDER [--model resnet18] [--count 2000] [--rounds 3]
    [--workers 1]

Both sides read and preprocess the same photos in as many workers: bare inference with PyTorch's own
`DataLoader`, in batches of the same size and without gradients; the run with Grad-CAM, and all of
it stored. The figure is the median of the ratios of rounds in which both run in turn. Without
weights on this machine, `--model` takes any of torchvision's networks with random weights: the
speed is the same.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torchvision
from memory import resident
from torch.utils.data import DataLoader, Dataset

import explain
from explain.data.images import load_image
from explain.models import CenterCrop
from explain.runs import Entry
from explain.runs.preparing import at_once
from explain.runs.runner import State
from explain.store.sources import Folder

WARM_UP = 500  # photos after which growth counts


class Photos(Dataset):  # type: ignore[type-arg]
    """The photos as the model takes them, as anybody would write it."""

    def __init__(self, paths: list[str], preprocess: Any) -> None:
        self.paths = paths
        self.preprocess = preprocess

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.preprocess(load_image(self.paths[place]))


def explainer_of(name: str) -> explain.Explainer:
    """One of the models that come along, or a network of torchvision with random weights."""
    if name in ("tiny", "efficientnet-lite0"):
        return explain.Explainer(name)
    torch.manual_seed(0)
    return explain.Explainer(
        torchvision.models.get_model(name, weights=None).eval(), preprocess=CenterCrop()
    )


def seconds_of(work: Any) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def processor() -> float:
    """Seconds of processors that this process and its workers have used, where the machine is
    shared with others."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    explainer = explainer_of(options.model)
    found = (entry for entry in Folder(options.folder).entries() if isinstance(entry, Entry))
    paths = [str(entry.where) for entry in islice(found, options.count)]
    size = at_once(explainer.preprocess(load_image(paths[0])), torch.device("cpu"))
    sizes: list[float] = []
    growths: list[float] = []

    def bare() -> None:
        loader = DataLoader(Photos(paths, explainer.preprocess), size, num_workers=options.workers)
        with torch.inference_mode():
            for x in loader:
                explainer.model(x).softmax(1).max(1)

    def grown(state: State) -> None:
        if state.done >= WARM_UP:
            sizes.append(resident())

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "run.sqlite")
            explain.run(
                paths, explainer, "gradcam", output=file, workers=options.workers, progress=grown
            )

    ratios = []
    used = []
    for number in range(options.rounds):
        times = []
        before = processor()
        for work in (bare, run):
            times.append((seconds_of(work), processor() - before))
            before = processor()
        growths += [max(sizes) - sizes[0]] if sizes else []
        sizes.clear()
        ratios.append(times[0][0] / times[1][0])
        used.append(times[0][1] / times[1][1])
        rates = [len(paths) / seconds for seconds, _ in times]
        print(
            f"round {number + 1}: bare {rates[0]:.1f}, run {rates[1]:.1f} photos a second, "
            f"{ratios[-1]:.0%}",
            flush=True,
        )
    reached = statistics.median(ratios)
    by_processors = statistics.median(used)
    print(
        f"{options.model}, {len(paths)} photos in batches of {size}: a run reaches {reached:.0%} "
        "of bare inference"
    )
    print(
        "the same by seconds of processors, which count on a machine that others use too: "
        f"{by_processors:.0%}"
    )
    if growths:
        print(
            f"memory: {max(growths):+.0f} MB at most in any round after the first {WARM_UP} photos"
        )


if __name__ == "__main__":
    main()
