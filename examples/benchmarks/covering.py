"""What methods that cover photos cost here and in Captum, for each covered photo, beside the
batched forward pass.

    python examples/benchmarks/covering.py [--rows kernelshap] [--rounds 3] [--threads 1] [--quick]

ResNet-18, one photo of 224 pixels, random weights. Both packages cover as many photos. A figure is
the median over the rounds of the time for each covered photo, all else included, by that of the
batched forward pass in the same round: of batches of 4, 8, 16 and 32 in both memory layouts, the
one with the best median. ``--quick`` shrinks everything and says nothing about speed. What is over
the goal of 1.10 is told.

    python examples/benchmarks/covering.py --memory

runs 5,000 masks of RISE, and tells by how much the memory of the process has grown at its highest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import resource
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from covered import Case, cases
from peers import BATCHES, LAYOUTS, Row, Work, captum, network, of_batch, ours, seconds
from tables import Table, line, shown

from explain.methods import RISE

COLUMNS = {"explain": "explain", "Captum": "captum"}
GOAL = 1.10
RUNS = 192
QUICK_RUNS = 72


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(versions: dict[str, str | None]) -> Table:
    heads = (
        f"{name} {versions[name]}" if name != "explain" and versions[name] else name
        for name in COLUMNS
    )
    names = tuple((f"`{case.name}`",) for case in cases(torch.zeros(1, 3, 224, 224), RUNS))
    return Table(
        "covering", ("method, each covered photo by one of the batched pass", *heads), names
    )


def works_of(
    case: Case, model: torch.nn.Module, x: torch.Tensor, *, peers: bool
) -> dict[str, Work]:
    """The work in each package's words, where it has any."""
    works = {"explain": ours(model, x, [case.method])}
    if case.theirs is not None and peers:
        works["Captum"] = captum(case.theirs, model, x, **case.given)
    return works


def measured(
    case: Case, works: dict[str, Work], model: torch.nn.Module, x: torch.Tensor, rounds: int
) -> dict[str, float]:
    """For each package the time of a covered photo by that of one in the best batched pass."""
    row = Row(case.name, GOAL, model, x, works)
    passes = {
        (batch, layout): of_batch(row, batch, layout) for batch in BATCHES for layout in LAYOUTS
    }
    for work in (*passes.values(), *works.values()):
        work()
    of_passes: dict[Any, list[float]] = {way: [] for way in passes}
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for way, work in passes.items():
            of_passes[way].append(seconds(work) / way[0])
        for name, work in works.items():
            found[name].append(seconds(work) / case.photos)
    best = min(of_passes.values(), key=statistics.median)
    return {
        name: statistics.median(one / batched for one, batched in zip(each, best, strict=True))
        for name, each in found.items()
    }


def memory(samples: int) -> float:
    """By how many bytes the process grows at its highest while RISE runs so many masks."""
    model = network("resnet18")
    x = torch.randn(1, 3, 224, 224)
    model(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours(model, x, [RISE(samples)])()
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="a part of the names of the rows to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.memory:
        samples = 50 if options.quick else 5000
        print(f"{samples} masks of RISE: {memory(samples) / 2**20:.0f} MB more at the highest")
        return
    side, samples = (64, QUICK_RUNS) if options.quick else (224, RUNS)
    model = network("resnet18")
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    versions = {name: version(distribution) for name, distribution in COLUMNS.items()}
    print(table(versions).head())
    for case in cases(x, samples):
        if options.rows not in case.name:
            continue
        works = works_of(case, model, x, peers=versions["Captum"] is not None)
        found = measured(case, works, model, x, 1 if options.quick else options.rounds)
        absent = "–" if case.theirs is None else "not installed"
        print(
            line([f"`{case.name}`", *(shown(found[n]) if n in found else absent for n in COLUMNS)]),
            flush=True,
        )
        if found["explain"] > GOAL:
            print(f"over the goal of {GOAL}: {case.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
