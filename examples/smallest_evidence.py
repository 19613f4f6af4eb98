"""Measure the smallest evidence: how small sets are, what they cost, and how other ways to find them compare.

    python examples/smallest_evidence.py FOLDER [--model NAME] [--photos 200] [--results FILE] [--rex] [--only WAY …]
    python examples/smallest_evidence.py --table [--results FILE] [--paired]
    python examples/smallest_evidence.py --figure assets/evidence.png --results FILE [FILE …]
    python examples/smallest_evidence.py --picture assets/evidence-espresso.png

FOLDER has photos named ``<class number>_...``, as in a folder of ImageNet photos, or is an unpacked
tiny-imagenet-200. Only photos that the model gets right count. Everything absent is zero after normalisation, for all
ways alike, and a set is enough if the class is still on top; this is checked again with a plain forward pass.

- `Sufficient` and `Necessary` with their defaults, and `Sufficient` with fewer passes;
- ``--rex``: the package ``rex-xai`` with its defaults, in batches of 32, and `Sufficient` with as many passes;
- the shortest beginning of a map, in steps of 1% of the pixels, that is enough, for maps of five methods;
- extremal perturbation, on the first ``--costly`` photos: the smallest of five areas that is enough.

Each result is a line of the file, and those that are there are used again. So the work goes on where it stopped, ways
can be measured one after the other (``--only``), and ``--table`` prints the table of what is there by now, with
``--paired`` of the photos that ReX has too. ``--figure`` draws size against passes. Seconds are those of the processor.
``--picture`` draws two reasons for the class of a photo.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

import explain
from explain.data.images import load_image
from explain.methods import ExtremalPerturbation, Necessary, Sufficient

ROOT = Path(__file__).resolve().parents[1]
MAPS = ("gradcam", "lrp", "integratedgradients", "occlusion", "rise(samples=2000)")
BUDGETS = (100, 200, 400, 800)
AREAS = (0.02, 0.05, 0.1, 0.2, 0.4)
ITERATIONS = (2, 5)  # of ReX, beside its default
STEPS = 100
Found = dict[str, Any]


class Counted(nn.Module):
    """A model that counts the photos that it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += len(x)
        scores: torch.Tensor = self.model(x)
        return scores


def photos_of(folder: Path, count: int) -> Iterable[tuple[str, int, Path]]:
    """Names, classes and files of photos, in a random order that is always the same."""
    if (folder / "val").is_dir():
        order = (folder / "wnids.txt").read_text().split()  # that of the classes of the small models
        lines = [line.split() for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]
        found = [(name, order.index(wnid), folder / "val" / "images" / name) for name, wnid, *_ in lines]
    else:
        found = [(path.name, int(path.name.split("_")[0]), path) for path in sorted(folder.glob("*.jpg"))]
    random.Random(0).shuffle(found)
    return found[:count]


def is_enough(model: nn.Module, x: torch.Tensor, masks: torch.Tensor, target: int) -> torch.Tensor:
    """Which masks ``(M, H, W)`` keep the class of an input ``(1, C, H, W)`` on top, by plain forward passes."""
    with torch.inference_mode():
        parts = [model(x * part[:, None]).argmax(1) == target for part in masks.split(32)]
    return torch.cat(parts)


def by_sets(method: Any, model: Counted, x: torch.Tensor, target: int) -> Found:
    sets = explain.attribute(model, x, method, target=target).sets
    if not sets or not sets[0]:
        return {"size": None}
    first = sets[0][0]
    return {"size": first.size, "proof": first.proof, "mask": first.mask}


def by_threshold(method: Any, model: Counted, x: torch.Tensor, target: int) -> Found:
    values = explain.attribute(model, x, method, target=target).heatmap[0]
    order = values.flatten().argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order))
    masks = ranks.reshape(values.shape)[None] < (torch.arange(1, STEPS + 1) * len(order) // STEPS)[:, None, None]
    number = int(is_enough(model, x, masks, target).nonzero()[0])
    return {"size": float(masks[number].double().mean()), "mask": masks[number]}


def by_areas(model: Counted, x: torch.Tensor, target: int) -> Found:
    for area in AREAS:
        values = explain.attribute(model, x, ExtremalPerturbation(area), target=target).heatmap[0]
        mask = values >= values.flatten().sort(descending=True).values[int(area * values.numel())]
        if is_enough(model, x, mask[None], target).item():
            return {"size": float(mask.double().mean()), "mask": mask}
    return {"size": None}


def by_rex(iterations: int | None, photo: Path, model: Counted, x: torch.Tensor, target: int) -> Found:
    from rex_xai.explanation.explanation import Explanation
    from rex_xai.explanation.rex import calculate_responsibility
    from rex_xai.input.config import CausalArgs
    from rex_xai.input.input_data import Data
    from rex_xai.responsibility.prediction import Prediction, default_prediction_function

    settings = CausalArgs()
    settings.progress_bar, settings.batch_size, settings.seed = False, 32, 0
    settings.iters = iterations or settings.iters
    data = Data(load_image(photo), list(x.shape), "cpu", mode="RGB")
    data.data = x
    data.set_mask_value(0)
    function = default_prediction_function(model)
    data.target = Prediction(target, function(x)[0].confidence)
    maps, told = calculate_responsibility(data, settings, function)
    found = Explanation(maps, function, data, settings, told)
    found.extract()
    mask = found.sufficiency_mask.reshape(-1, *x.shape[2:]).any(0)
    return {"size": float(mask.double().mean()), "mask": mask}


def ways(photo: Path, rex: bool, costly: bool) -> dict[str, Callable[[Counted, torch.Tensor, int], Found]]:
    """All ways to find a small set."""
    found: dict[str, Callable[[Counted, torch.Tensor, int], Found]] = {}
    if rex:
        for count in (None, *ITERATIONS):
            name = f"ReX, {count} iterations" if count else "ReX"
            found[name] = lambda *a, count=count: by_rex(count, photo, *a)  # type: ignore[misc]
    for name, method in {"sufficient": Sufficient(baseline="zero"), "necessary": Necessary(baseline="zero")}.items():  # type: ignore[arg-type]
        found[name] = lambda *a, method=method: by_sets(method, *a)  # type: ignore[misc]
    for name in MAPS:
        found[f"map: {name}"] = lambda *a, name=name: by_threshold(name, *a)  # type: ignore[misc]
    if costly:
        found["extremal perturbation"] = by_areas
    return found


def with_budgets(
    one: dict[str, Found], model: Counted, x: torch.Tensor, target: int
) -> Iterable[tuple[str, Callable[..., Found]]]:
    """`Sufficient` with fewer passes, and with as many as ReX. What ends before is the same as without a limit."""
    limits = {f"sufficient, {count} passes": count for count in BUDGETS}
    limits |= {f"sufficient, as {name}": one[name]["passes"] for name in one if name.startswith("ReX")}
    for name, count in limits.items():
        if name not in one and "sufficient" in one:
            whole = one["sufficient"]
            method = Sufficient(baseline="zero", samples=count)  # type: ignore[arg-type]
            if whole["passes"] <= count:
                yield name, lambda *_, whole=whole: dict(whole)  # type: ignore[misc]
            else:
                yield name, lambda *a, method=method: by_sets(method, *a)  # type: ignore[misc]


def measured(way: Callable[..., Found], model: Counted, x: torch.Tensor, target: int, *, alone: bool) -> Found:
    before, begun = model.passes, time.process_time()
    found = way(model, x, target)
    found = {"seconds": time.process_time() - begun, "passes": model.passes - before} | found
    mask = found.pop("mask", None)
    if mask is not None:
        found["right"] = bool(is_enough(model, x, (mask if alone else ~mask)[None], target).item()) is alone
    return found


def summary(results: Sequence[dict[str, Found]]) -> list[tuple[str, ...]]:
    """A row for each way: how many photos, sizes, passes, seconds, what is proved."""
    rows = []
    for name in dict.fromkeys(name for each in results for name in each):
        found = [each[name] for each in results if name in each]
        sizes = [each["size"] for each in found if each["size"] is not None]
        proofs = [each.get("proof") in ("minimal", "smallest") for each in found]
        rows.append((
            name, str(len(found)), f"{statistics.median(sizes):.1%}", f"{statistics.mean(sizes):.1%}",
            f"{statistics.median(each['passes'] for each in found):.0f}",
            f"{statistics.median(each['seconds'] for each in found):.2f}",
            f"{statistics.mean(proofs):.0%}" if "proof" in found[0] else "–",
        ))  # fmt: skip
        wrong = sum(not each.get("right", True) for each in found)
        if wrong:
            print(f"{name}: {wrong} of {len(found)} sets do not do what they should")
    return rows


def stored(file: Path) -> dict[str, dict[str, Found]]:
    """The results of each photo, by the way that they were found in."""
    results: dict[str, dict[str, Found]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        found = json.loads(line)
        results.setdefault(found.pop("photo"), {})[found.pop("way")] = found
    return results


def print_table(results: Sequence[dict[str, Found]]) -> None:
    print("| way | photos | median size | mean size | passes | seconds | minimal |\n|" + "---|" * 7)
    for row in summary(results):
        print(f"| {' | '.join(row)} |")


def measure(options: argparse.Namespace) -> None:
    explainer = explain.Explainer(options.model)
    model = Counted(explainer.model)
    file = options.results[0]
    results = stored(file)
    for number, (name, target, path) in enumerate(photos_of(options.folder, options.photos)):
        x = explainer.as_input(path)
        with torch.inference_mode():
            if model(x).argmax(1).item() != target:
                continue
        one = results.setdefault(name, {})
        known = ways(path, options.rex, number < options.costly)
        todo = [(way, function) for way, function in known.items() if way not in one]

        def take(way: str, function: Callable[..., Found]) -> None:
            if any(fnmatch(way, only) for only in options.only):
                one[way] = measured(function, model, x, target, alone=way != "necessary")  # noqa: B023
                with file.open("a") as lines:
                    lines.write(json.dumps({"photo": name, "way": way, **one[way]}) + "\n")  # noqa: B023

        for each in todo:
            take(*each)
        for each in with_budgets(one, model, x, target):
            take(*each)


def paired(results: Sequence[dict[str, Found]]) -> list[dict[str, Found]]:
    """The photos with results of ReX and of `Sufficient`."""
    wanted = {name for each in results if "ReX" in each for name in each if name in ("ReX", "sufficient")}
    return [each for each in results if wanted <= each.keys()]


def print_ratios(results: Sequence[dict[str, Found]]) -> None:
    """Compare with ReX on the same photos, at most at its budget."""
    pairs = [
        (each["sufficient, as ReX"], each["ReX"]) for each in results if {"ReX", "sufficient, as ReX"} <= each.keys()
    ]
    if not pairs:
        return
    for name in ("size", "seconds", "passes"):
        means = [statistics.mean(each[name] or 0 for each in side) for side in zip(*pairs, strict=True)]
        ratios = [one[name] / other[name] for one, other in pairs if one[name] and other[name]]
        middle = statistics.median(ratios)
        print(f"{name} as a share of ReX's: {means[0] / means[1]:.2f} of the mean, {middle:.2f} in the median photo")
    smaller = sum((one["size"] or 0) <= other["size"] for one, other in pairs)
    print(f"not larger than ReX's in {smaller} of {len(pairs)} photos")


def draw(files: Sequence[Path], place: Path) -> None:
    """Draw size against passes: means over photos, a panel for each file of results."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(1, len(files), figsize=(5.4 * len(files), 4), squeeze=False, layout="constrained")
    for axis, file in zip(axes[0], files, strict=True):
        results = list(stored(file).values())
        points = {}
        for name in dict.fromkeys(name for each in results for name in each):
            found = [each[name] for each in results if name in each and each[name]["size"] is not None]
            middle = [statistics.median(each[key] for each in found) for key in ("passes", "size")]
            points[name] = (middle[0], 100 * middle[1])
        budgets = [f"sufficient, {count} passes" for count in BUDGETS]
        line = sorted(points[name] for name in (*budgets, "sufficient") if name in points)
        axis.plot(*zip(*line, strict=True), "o-", color="#d55e00", label="sufficient", zorder=3)
        others = [name for name in points if name == "ReX" or name.startswith(("ReX,", "map", "extremal"))]
        marks = zip(others, ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#18181c"), "sD^vP*", strict=False)
        for name, color, mark in marks:
            axis.plot(*points[name], mark, color=color, label=name.removeprefix("map: "), markersize=8)
        axis.set(xscale="log", yscale="log", xlabel="passes (median)", ylabel="size, % of the photo (median)")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter("")
        axis.set_title(f"{file.stem}, {len(results)} photos", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(place, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", default="efficientnet-lite0")
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--costly", type=int, default=20, help="photos for extremal perturbation")
    parser.add_argument("--results", type=Path, nargs="+", default=[Path("evidence-results.jsonl")])
    parser.add_argument("--only", nargs="*", default=["*"], help="ways of these names; * stands for anything")
    parser.add_argument("--rex", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--paired", action="store_true", help="a table of the photos that have ReX's result too")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.folder is not None:
        measure(options)
    if options.picture is not None:
        found = explain.Explainer(options.model)(ROOT / "assets" / "coffee.png", Sufficient(reasons=2))
        found.overlay(caption=True).save(options.picture)
    if options.figure is not None:
        draw(options.results, options.figure)
    for file in options.results if options.folder is not None or options.table else ():
        results = list(stored(file).values())
        print_table(paired(results) if options.paired else results)
        print_ratios(results)


if __name__ == "__main__":
    main()
