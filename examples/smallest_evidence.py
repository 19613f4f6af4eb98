"""Measure the smallest evidence: how small sets are, what they cost, and how other ways to find
them compare.

    python examples/smallest_evidence.py FOLDER [--model NAME] [--photos 200] [--results FILE]
    [--rex 8] [--only WAY …] python examples/smallest_evidence.py --table [--update] --results
    imagenet.jsonl tiny.jsonl python examples/smallest_evidence.py --figure assets/evidence.png
    --results FILE [FILE …] python examples/smallest_evidence.py --picture
    assets/evidence-espresso.png

FOLDER has photos named ``<class number>_...``, as in a folder of ImageNet photos, or is an unpacked
tiny-imagenet-200. Only photos that the model gets right count. Everything absent is zero after
normalisation, for all ways alike, and a set is enough if the class is still on top; this is checked
again with a plain forward pass.

- `Sufficient` and `Necessary` with their defaults, and what `Sufficient` finds with fewer passes;
- ``--rex``: the package ``rex-xai`` with its defaults, in batches of so many;
- the shortest beginning of a map, in steps of 1% of the pixels, that is enough, for maps of five
  methods;
- extremal perturbation, on the first ``--costly`` photos: the smallest of five areas that is
  enough.

Each result is a line of the file, and those that are there are used again. So the work goes on
where it stopped, and ways can be measured one after the other (``--only``), ReX in an environment
of its own. ``--table`` prints the tables of what is there by now; ``--update`` writes them into
docs/evidence.md. Times are those of the processor, as multiples of the time of `Sufficient` on the
same photos. ``--figure`` draws size against passes, and ``--picture`` two reasons for the class of
a photo.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
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
sys.path.append(str(ROOT / "examples" / "benchmarks"))

from tables import Table, line, replaced  # noqa: E402

PAGE = ROOT / "docs" / "evidence.md"
FEWEST = 10  # photos of a row
OWN = "`sufficient`"
COLUMNS = (
    "way",
    "photos",
    "median size",
    "mean size",
    "size, × `sufficient`",
    "passes",
    "time, × `sufficient`",
    "minimal",
)
COMPARED = (
    "results",
    "photos",
    "size",
    "size, median photo",
    "passes",
    "time",
    "not larger in",
    "size in half of ReX's time",
)
MAPS = ("gradcam", "lrp", "integratedgradients", "occlusion", "rise(samples=2000)")
BUDGETS = (200, 400, 800)
AREAS = (0.02, 0.05, 0.1, 0.2, 0.4)
ITERATIONS = (2, 5)  # of ReX, beside its default
STEPS = 100
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#18181c", "#7f3b08")
NAMES = {
    "sufficient": OWN,
    "ReX": "ReX",
    "map: gradcam": "smallest part of a Grad-CAM that is enough",
    "map: lrp": "… of LRP",
    "map: occlusion": "… of occlusion",
    "map: rise(samples=2000)": "… of RISE, 2,000 masks",
    "map: integratedgradients": "… of integrated gradients",
    "extremal perturbation": "smallest area of extremal perturbation that is enough",
    "necessary": "`necessary`",
}
Found = dict[str, Any]


class Counted(nn.Module):
    """A model that counts the photos that it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += len(x)
        scores: torch.Tensor = self.model(x)
        return scores


def photos_of(folder: Path, count: int) -> Iterable[tuple[str, int, Path]]:
    """Names, classes and files of photos, in a random order that is always the same."""
    if (folder / "val").is_dir():
        # that of the classes of the small models
        order = (folder / "wnids.txt").read_text().split()
        lines = [
            line.split()
            for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()
        ]
        found = [
            (name, order.index(wnid), folder / "val" / "images" / name) for name, wnid, *_ in lines
        ]
    else:
        found = [
            (path.name, int(path.name.split("_")[0]), path) for path in sorted(folder.glob("*.jpg"))
        ]
    random.Random(0).shuffle(found)
    return found[:count]


def is_enough(model: nn.Module, x: torch.Tensor, masks: torch.Tensor, target: int) -> torch.Tensor:
    """Which masks ``(M, H, W)`` keep the class of an input ``(1, C, H, W)`` on top, by plain
    forward passes."""
    with torch.inference_mode():
        parts = [model(x * part[:, None]).argmax(1) == target for part in masks.split(32)]
    return torch.cat(parts)


def by_sets(method: Any, model: Counted, x: torch.Tensor, target: int) -> Found:
    """The first set, and what the search would have found with fewer samples: see `at_budget`."""
    history: list[list[float]] = []
    passes = model.passes
    seconds = time.process_time()

    def so_far(done: float, size: float) -> list[float]:
        return [done, size, model.passes - passes, round(time.process_time() - seconds, 3)]

    latest = so_far(0, 1.0)

    def watch(done: int, _: int, maps: dict[str, torch.Tensor]) -> None:
        """Note the set that an end after this batch would give, where it is another one."""
        nonlocal latest
        latest = so_far(done, float((maps[method.name][0] > 0).double().mean()))
        if not history or history[-1][1] != latest[1]:
            history.append(latest)

    sets = explain.attribute(model, x, method, target=target, progress=watch).sets
    if not sets or not sets[0]:
        return {"size": None}
    first = sets[0][0]
    history.append([latest[0], first.size, *latest[2:]])
    return {"size": first.size, "proof": first.proof, "mask": first.mask, "history": history}


def at_budget(found: Found, samples: float = math.inf, seconds: float = math.inf) -> Found:
    """What `Sufficient(samples=samples)` finds: its search is the same up to where the samples, or
    the time, end.

    A test compares the two.
    """
    if found["size"] is None or (
        samples >= found["history"][-1][0] and seconds >= found["seconds"]
    ):
        return found
    _, size, passes, time_ = [
        each for each in found["history"] if each[0] <= samples and each[3] <= seconds
    ][-1]
    return {"size": size, "passes": passes, "seconds": time_, "proof": "found"}


def by_threshold(method: Any, model: Counted, x: torch.Tensor, target: int) -> Found:
    values = explain.attribute(model, x, method, target=target).heatmap[0]
    order = values.flatten().argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order))
    masks = (
        ranks.reshape(values.shape)[None]
        < (torch.arange(1, STEPS + 1) * len(order) // STEPS)[:, None, None]
    )
    number = int(is_enough(model, x, masks, target).nonzero()[0])
    return {"size": float(masks[number].double().mean()), "mask": masks[number]}


def by_areas(model: Counted, x: torch.Tensor, target: int) -> Found:
    for area in AREAS:
        values = explain.attribute(model, x, ExtremalPerturbation(area), target=target).heatmap[0]
        mask = values >= values.flatten().sort(descending=True).values[int(area * values.numel())]
        if is_enough(model, x, mask[None], target).item():
            return {"size": float(mask.double().mean()), "mask": mask}
    return {"size": None}


def by_rex(
    iterations: int | None, batch: int, photo: Path, model: Counted, x: torch.Tensor, target: int
) -> Found:
    from rex_xai.explanation.explanation import Explanation
    from rex_xai.explanation.rex import calculate_responsibility
    from rex_xai.input.config import CausalArgs
    from rex_xai.input.input_data import Data
    from rex_xai.responsibility.prediction import Prediction, default_prediction_function

    settings = CausalArgs()
    settings.progress_bar = False
    settings.batch_size = batch
    settings.seed = 0
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


def ways(
    photo: Path, batch: int, costly: bool
) -> dict[str, Callable[[Counted, torch.Tensor, int], Found]]:
    """All ways to find a small set."""
    found: dict[str, Callable[[Counted, torch.Tensor, int], Found]] = {}
    if batch:
        for count in (None, *ITERATIONS):
            name = f"ReX, {count} iterations" if count else "ReX"
            found[name] = lambda *a, count=count: by_rex(count, batch, photo, *a)  # type: ignore[misc]
    for name, method in {
        "sufficient": Sufficient(baseline="zero"),
        "necessary": Necessary(baseline="zero"),
    }.items():  # type: ignore[arg-type]
        found[name] = lambda *a, method=method: by_sets(method, *a)  # type: ignore[misc]
    for name in MAPS:
        found[f"map: {name}"] = lambda *a, name=name: by_threshold(name, *a)  # type: ignore[misc]
    if costly:
        found["extremal perturbation"] = by_areas
    return found


def measured(
    way: Callable[..., Found], model: Counted, x: torch.Tensor, target: int, *, alone: bool
) -> Found:
    before = model.passes
    begun = time.process_time()
    found = way(model, x, target)
    found = {"seconds": time.process_time() - begun, "passes": model.passes - before} | found
    mask = found.pop("mask", None)
    if mask is not None:
        found["right"] = (
            bool(is_enough(model, x, (mask if alone else ~mask)[None], target).item()) is alone
        )
    return found


def rows_of(results: Sequence[dict[str, Found]]) -> dict[str, list[tuple[Found, Found | None]]]:
    """What each way found in each photo, with what `Sufficient` found there."""
    rows: dict[str, list[tuple[Found, Found | None]]] = {}
    for name in sorted(dict.fromkeys(name for each in results for name in each), key=place):
        pairs = [(each[name], each.get("sufficient")) for each in results if name in each]
        if name == "sufficient":
            rows[OWN] = pairs
            for count in reversed(BUDGETS):
                rows[f"… {count} passes at most"] = [
                    (at_budget(found, count), own) for found, own in pairs
                ]
        else:
            rows[NAMES.get(name, name)] = pairs
    return rows


def place(name: str) -> int:
    """The place of a way in the table."""
    return [*NAMES].index(name) if name in NAMES else len(NAMES)


def ratio(pairs: Sequence[tuple[Found, Found | None]], key: str) -> float:
    """The mean of a figure, as a multiple of its mean for the other way in the same photos, where
    both have a set."""
    both = [
        (one[key], own[key])
        for one, own in pairs
        if own and one["size"] is not None and own["size"] is not None
    ]
    one, own = (sum(side) for side in zip(*both, strict=True))
    return float(one / own)


def summary(results: Sequence[dict[str, Found]]) -> str:
    """The table of all ways: how many photos, sizes, passes, times, what is proved."""
    lines = [Table("", COLUMNS, ()).head()]
    for name, pairs in rows_of(results).items():
        found = [one for one, _ in pairs]
        sizes = [each["size"] for each in found if each["size"] is not None]
        if len(sizes) < FEWEST:
            continue
        proofs = [each.get("proof") in ("minimal", "smallest") for each in found]
        without = len(found) - len(sizes)
        lines.append(
            line(
                (
                    name,
                    str(len(found)) + (f", {without} without a set" if without else ""),
                    f"{statistics.median(sizes):.1%}",
                    f"{statistics.mean(sizes):.1%}",
                    f"{ratio(pairs, 'size'):.2f}",
                    f"{statistics.median(each['passes'] for each in found):.0f}",
                    f"{ratio(pairs, 'seconds'):.2f}",
                    f"{statistics.mean(proofs):.1%}" if "proof" in found[0] else "–",
                )
            )
        )
        wrong = sum(not each.get("right", True) for each in found)
        if wrong:
            print(f"{name}: {wrong} of {len(found)} sets do not do what they should")
    return "\n".join(lines)


def stored(file: Path) -> dict[str, dict[str, Found]]:
    """The results of each photo, by the way that they were found in."""
    results: dict[str, dict[str, Found]] = {}
    for each in file.read_text().splitlines() if file.exists() else ():
        found = json.loads(each)
        results.setdefault(found.pop("photo"), {})[found.pop("way")] = found
    return results


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


def compared(name: str, results: Sequence[dict[str, Found]]) -> str:
    """A row that compares `Sufficient` with ReX on the same photos, with at most as many passes;
    empty without ReX."""
    both = [
        (each["sufficient"], each["ReX"])
        for each in results
        if {"ReX", "sufficient"} <= each.keys()
    ]
    pairs = [(at_budget(own, rex["passes"]), rex) for own, rex in both]
    if len(pairs) < FEWEST:
        return ""
    middle = statistics.median(own["size"] / rex["size"] for own, rex in pairs)
    smaller = sum(own["size"] <= rex["size"] for own, rex in pairs)
    size, passes, seconds = (f"{ratio(pairs, key):.2f}" for key in ("size", "passes", "seconds"))
    half = ratio([(at_budget(own, seconds=rex["seconds"] / 2), rex) for own, rex in both], "size")
    share = f"{smaller} of {len(pairs)}"
    return line(
        (name, str(len(pairs)), size, f"{middle:.2f}", passes, seconds, share, f"{half:.2f}")
    )


def tables(files: Sequence[Path]) -> dict[str, str]:
    """The tables of these results, by name."""
    results = {file.stem: list(stored(file).values()) for file in files}
    found = {f"evidence-{name}": summary(each) for name, each in results.items()}
    rows = [row for name, each in results.items() if (row := compared(name, each))]
    return found | {"evidence-rex": "\n".join([Table("", COMPARED, ()).head(), *rows])}


def draw(files: Sequence[Path], place: Path) -> None:
    """Draw size against passes: medians over photos, a panel for each file of results."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(
        1, len(files), figsize=(5.4 * len(files), 4.8), squeeze=False, layout="constrained"
    )
    for axis, file in zip(axes[0], files, strict=True):
        results = list(stored(file).values())
        rows = rows_of(results)
        own = [found for found, _ in rows[OWN]]
        counts = [100 * 10 ** (k / 10) for k in range(20)]
        curve = [
            statistics.median(at_budget(each, count)["size"] for each in own) for count in counts
        ]
        axis.plot(
            counts,
            [100 * size for size in curve],
            color="#d55e00",
            label=f"sufficient, at most so many passes, {len(own)} photos",
        )
        others = [
            name for name in rows if name not in (OWN, "`necessary`") and "at most" not in name
        ]
        marks = zip(others, COLORS[1:], "s^DvP*X", strict=False)
        for name, color, mark in marks:
            found = [one for one, _ in rows[name]]
            passes = statistics.median(one["passes"] for one in found)
            # the whole photo
            size = statistics.median(1 if one["size"] is None else one["size"] for one in found)
            label = (
                name.removeprefix("smallest part of a ")
                .removeprefix("smallest area of ")
                .removeprefix("… of ")
            )
            label = f"{label.removesuffix(' that is enough')}, {len(found)} photos"
            axis.plot(passes, 100 * size, mark, color=color, label=label, markersize=8)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="passes (of other ways: median)",
            ylabel="size, % of the photo (median)",
        )
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter("")
        axis.set_title(file.stem, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.savefig(place, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", default="efficientnet-lite0")
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--costly", type=int, default=200, help="photos for extremal perturbation")
    parser.add_argument("--results", type=Path, nargs="+", default=[Path("evidence-results.jsonl")])
    parser.add_argument(
        "--only", nargs="*", default=["*"], help="ways of these names; * stands for anything"
    )
    parser.add_argument(
        "--rex",
        type=int,
        default=0,
        metavar="BATCH",
        help="run ReX, with so many photos in a batch",
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--update", action="store_true", help="write the tables into docs/evidence.md"
    )
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.folder is not None:
        measure(options)
    if options.picture is not None:
        explanation = explain.Explainer(options.model)(
            ROOT / "assets" / "coffee.png", Sufficient(reasons=2)
        )
        explanation.overlay(caption=True).save(options.picture)
    if options.figure is not None:
        draw(options.results, options.figure)
    found = tables(options.results) if options.table or options.update else {}
    print("\n\n".join(found.values()))
    if options.update:
        page = PAGE.read_text("utf-8")
        for name, text in found.items():
            page = replaced(page, name, text)
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
