"""What methods that cover photos cost here and in Captum, for each covered photo, beside the batched forward pass.

    python examples/benchmarks/covering.py [--rows kernelshap] [--rounds 3] [--threads 1] [--quick]

ResNet-18, one photo of 224 pixels, random weights. Both packages cover as many photos. A figure is the median over the
rounds of the time for each covered photo, all else included, by that of the batched forward pass: the best of batches
of 4, 8, 16 and 32 in both memory layouts, run in the same rounds. ``--quick`` shrinks everything and says nothing about
speed.

    python examples/benchmarks/covering.py --memory

runs 5,000 masks of RISE, and tells by how much the memory of the process has grown at its highest.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from peers import Row, captum, network, of_batch, ours, seconds
from tables import Table, line, shown

from explain.methods import LIME, RISE, FeatureAblation, KernelSHAP, Occlusion, ShapleySampling, Squares

BATCHES = (4, 8, 16, 32)


def rows(quick: bool) -> Iterator[tuple[str, partial[Row]]]:
    side, runs = (64, 48) if quick else (224, 192)
    model, x = network("resnet18"), torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    cells = Squares(4)
    mask = cells(x)[:, None]
    window, stride = side // 7, side // 14

    def row(method: object, per: int, theirs: str | None = None, **more: object) -> Row:
        works = {"explain": ours(model, x, [method])}
        if theirs is not None:
            works["captum"] = captum(theirs, model, x, **more)  # type: ignore[arg-type]
        return Row(getattr(method, "name", ""), 1.10, model, x, works, per=per)

    windows = len(Occlusion(window, stride).found.of.masks.boxes((side, side)))  # type: ignore[attr-defined]
    sliding = {
        "sliding_window_shapes": (3, window, window),
        "strides": (3, stride, stride),
        "perturbations_per_eval": 16,
    }
    one = {"feature_mask": mask, "perturbations_per_eval": 16}
    yield (
        "occlusion",
        partial(row, Occlusion(window, stride), windows, "Occlusion", **sliding),
    )
    yield "featureablation", partial(row, FeatureAblation(cells), 16, "FeatureAblation", **one)
    orders = runs // 30
    yield (
        "shapleysampling",
        partial(
            row, ShapleySampling(30 * orders, cells), 30 * orders, "ShapleyValueSampling", n_samples=2 * orders, **one
        ),
    )
    yield (
        "kernelshap",
        partial(
            row,
            KernelSHAP(runs, cells),
            runs,
            "KernelShap",
            n_samples=runs,
            feature_mask=mask,
            perturbations_per_eval=16,
        ),
    )
    yield (
        "lime",
        partial(row, LIME(runs, cells), runs, "Lime", n_samples=runs, feature_mask=mask, perturbations_per_eval=16),
    )
    yield "rise", partial(row, RISE(runs), runs)


def measured(row: Row, rounds: int) -> dict[str, float]:
    """For each package the time of a covered photo by that of one in the best batched pass."""
    passes = {
        (batch, layout): of_batch(row, batch, layout)
        for batch in BATCHES
        for layout in (torch.contiguous_format, torch.channels_last)
    }
    for work in (*passes.values(), *row.works.values()):
        work()
    times: dict[object, list[float]] = {way: [] for way in (*passes, *row.works)}
    for _ in range(rounds):
        for way, work in passes.items():
            times[way].append(seconds(work) / way[0])
        for name, work in row.works.items():
            times[name].append(seconds(work) / row.per)
    best = min(statistics.median(times[way]) for way in passes)
    return {name: statistics.median(times[name]) / best for name in row.works}


def memory(runs: int) -> float:
    """By how many bytes the process grows at its highest while RISE runs so many masks."""
    model, x = network("resnet18"), torch.randn(1, 3, 224, 224)
    model(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours(model, x, [RISE(runs)])()
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="a part of the names of the rows to run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        runs = 50 if options.quick else 5000
        print(f"{runs} masks of RISE: {memory(runs) / 2**20:.0f} MB more at the highest")
        return
    print(Table("covering", ("method", "explain", "Captum"), ()).head())
    for name, build in rows(options.quick):
        if options.rows in name:
            found = measured(build(), 1 if options.quick else options.rounds)
            print(
                line([name, *(shown(found[each]) if each in found else "–" for each in ("explain", "captum"))]),
                flush=True,
            )


if __name__ == "__main__":
    main()
