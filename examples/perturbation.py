"""Draw what methods that cover a photo say of it, how sure they are, and how few runs they need.

    python examples/perturbation.py [FOLDER] [--photo cat.jpg] [--samples 500] [--model tiny]
    [--errors] [--quick]

Writes a picture of each photo: in the upper row the maps, from occlusion to PartitionSHAP, and
below each one its standard error, in shares of the largest value; occlusion and PartitionSHAP have
none, since nothing is drawn at random, nor has an estimate of so few runs that they do not tell.
With ``--errors``, it draws instead how far estimates are from a long reference of the same method,
against the number of runs. ``--quick`` takes few runs, to see that it works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import explain
from explain.methods import (
    HSIC,
    LIME,
    RISE,
    KernelSHAP,
    Method,
    Occlusion,
    PartitionSHAP,
    ShapleySampling,
    Sobol,
)

ROOT = Path(__file__).resolve().parents[1]
PHOTOS = [ROOT / "assets" / f"{name}.png" for name in ("chelsea", "astronaut", "coffee")]
COUNTS = [30, 60, 125, 250, 500, 1000]


def methods(samples: int) -> list[Method]:
    return [
        Occlusion(),
        RISE(samples, centred=True),
        LIME(samples),
        KernelSHAP(samples),
        ShapleySampling(max(samples, 96)),
        PartitionSHAP(samples),
        Sobol(max(samples, 264)),
        HSIC(max(samples, 20)),
    ]


def enlarged(values: torch.Tensor, size: tuple[int, ...]) -> Any:
    """A map at the size of the photo, without smoothing."""
    found = torch.nn.functional.interpolate(values[None, None].float(), size=size, mode="nearest")
    return found[0, 0].numpy()


def picture(explainer: explain.Explainer, photo: Path, samples: int) -> Figure:
    """Maps above, their standard errors below."""
    with Image.open(photo) as opened:
        x = explainer.preprocess(opened.convert("RGB"))[None]
    found = explain.attribute(explainer.model, x, methods(samples))
    figure = Figure(figsize=(2.2 * len(found), 4.9), layout="constrained")
    axes = figure.subplots(2, len(found))
    shown = (x[0] - x.min()) / (x.max() - x.min())
    for column, (name, each) in enumerate(found.items()):
        peak = float(each.values.abs().max()) or 1.0
        for axis, values, label in (
            (axes[0, column], each.values[0], f"{name}\n{each.samples} samples"),
            (axes[1, column], None if each.error is None else each.error[0], "standard error"),
        ):
            axis.imshow(shown.mean(0).numpy(), cmap="gray")
            axis.set_xticks([])
            axis.set_yticks([])
            if values is None:
                axis.set_title("no standard error", fontsize=9)
                continue
            extent = (-0.5, x.shape[3] - 0.5, x.shape[2] - 0.5, -0.5)
            drawn = enlarged(values, tuple(x.shape[2:])) / peak
            if label == "standard error":
                axis.imshow(drawn, cmap="magma", vmin=0, vmax=0.5, alpha=0.8, extent=extent)
                label = f"error at most {float(values.max()) / peak:.0%}"
            else:
                axis.imshow(drawn, cmap="RdBu_r", vmin=-1, vmax=1, alpha=0.7, extent=extent)
            axis.set_title(label, fontsize=9)
    category = (
        explainer.categories[int(next(iter(found.values())).target[0])]
        if explainer.categories
        else ""
    )
    figure.suptitle(
        f"{category}: red raises the score, blue lowers it (Sobol and HSIC have no sign)",
        fontsize=10,
    )
    return figure


KINDS: dict[str, Callable[[int, int], Method]] = {
    "rise (centred)": lambda samples, seed: RISE(samples, centred=True, seed=seed),
    "sobol, 4 × 4 cells": lambda samples, seed: Sobol(max(samples, 72), grid=4, seed=seed),
    "kernelshap, 16 squares": lambda samples, seed: KernelSHAP(samples, 4, seed=seed),
    "partitionshap": lambda samples, seed: PartitionSHAP(samples),
}


def distances(
    explainer: explain.Explainer,
    photo: Path,
    make: Callable[[int, int], Method],
    counts: list[int],
    reference: int,
) -> dict[int, float]:
    """By the runs that were spent, the relative distance to a reference of many other runs."""
    x = explainer.as_input(photo)
    long = explain.attribute(explainer.model, x, make(reference, 0)).values
    each = [explain.attribute(explainer.model, x, make(samples, 1)) for samples in counts]
    return {
        int(found.samples or 0): float((found.values - long).norm() / long.norm()) for found in each
    }


def errors(found: dict[str, list[dict[int, float]]], reference: int) -> Figure:
    """The distance to the reference against the number of runs: of each photo, and on average."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, of_photos in found.items():
        samples = list(of_photos[0])
        off = [[each[count] for count in samples] for each in of_photos]
        (line,) = axis.plot(samples, np.mean(off, 0), marker="o", label=name)
        for each in off:
            axis.plot(samples, each, color=line.get_color(), alpha=0.3, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="covered photos")
    axis.set_xticks(COUNTS, labels=[str(count) for count in COUNTS])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel(f"relative distance to {reference:,} other runs")
    spent = [samples for of_photos in found.values() for samples in of_photos[0]]
    axis.set_xlim(0.9 * min(spent), 1.1 * max(spent))
    axis.legend()
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("perturbation"))
    parser.add_argument("--photo", type=Path, action="append", help="may be given several times")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument(
        "--model", help="a name that explain.Explainer takes (default: its default model)"
    )
    parser.add_argument(
        "--errors", action="store_true", help="draw the error against the number of runs instead"
    )
    parser.add_argument(
        "--reference", type=int, default=8000, help="runs of what estimates are compared with then"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"perturbation.py: {error}") from None
    photos = (options.photo or PHOTOS)[: 1 if options.quick else None]
    explainer = explain.Explainer(options.model or ("tiny" if options.quick else None))
    for photo in () if options.errors else photos:
        file = options.folder / f"{photo.stem}.png"
        picture(explainer, photo, 40 if options.quick else options.samples).savefig(file, dpi=110)
        print(f"written to {file}")
    if options.errors:
        reference = 160 if options.quick else options.reference
        counts = [40, 80] if options.quick else [each for each in COUNTS if each <= reference // 4]
        found: dict[str, list[dict[int, float]]] = {name: [] for name in KINDS}
        for photo in photos:
            for name, make in KINDS.items():
                found[name].append(distances(explainer, photo, make, counts, reference))
                told = ", ".join(
                    f"{off:.3f} at {samples}" for samples, off in found[name][-1].items()
                )
                print(f"{photo.stem}, {name}: {told}", flush=True)
        file = options.folder / "errors.png"
        errors(found, reference).savefig(file, dpi=110)
        print(f"written to {file}")


if __name__ == "__main__":
    main()
