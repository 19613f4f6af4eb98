"""Measure all methods by all metrics on four networks and three kinds of ground truth, into one
table.

    python examples/leaderboard/run.py train path/to/tiny-imagenet-200 WEIGHTS [--seeds 1]
    python examples/leaderboard/run.py measure path/to/tiny-imagenet-200 WEIGHTS [--minutes 60]
    [--store STORE.jsonl] python examples/leaderboard/run.py measure IMAGENET WEIGHTS --folder
    [--side 224] python examples/leaderboard/run.py parquet [--store STORE.jsonl]

``WEIGHTS`` holds plain.pt, weights of `subjects.plain` for Tiny-ImageNet, and what ``train`` adds:
small networks that read marks or creatures. ``measure`` takes a few photos of each network and kind
in turn, so that the table is balanced whenever it stops. Each photo is written at once with all
that was measured of it, and a later call goes on after the
last: with those of ``--store``, and with those of assets/leaderboard/table.parquet, into which
``parquet`` puts all.

``--folder``: photos of ImageNet's classes at full size, for the ImageNet model alone: a folder for
each class, named by its number (as in ImageNetV2) or its WordNet id (as in ILSVRC), or files named
NUMBER_*. They have no ground truth, and metrics of localisation are left out.

Round r has seed r modulo three: of the methods and metrics that draw something, and of the
networks, where several were trained. Metrics of a few altered photos are measured in each round,
the others in each 5th (`OFTEN`) or 16th round. In each ``--every``-th round there are all metrics,
also those that run a method again, and all methods, also those of more than ``--costly-from``
passes. Metrics that run a method again get it with few samples, and leave out methods that still
take more than ``--again-to`` passes.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import islice, product
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from store import known, parquet
from subjects import (
    ARCHITECTURES,
    SOURCES,
    TRUTHS,
    Subject,
    learned,
    learnt,
    network,
    overlap,
    rank_correlation,
)
from torch import nn

import explain
from explain import ExplainError
from explain.engine import Evidence, Need
from explain.methods import Method
from explain.methods.base import get_method
from explain.metrics import Faithful, Metric, ReattributionMetric, get_metric
from explain.metrics.maps import Maps
from explain.metrics.masked_scores import photo_maps

SAMPLES = 200
STEPS = 16
AGAIN = 24
COSTLY_FROM = 60  # passes
LOCAL = (
    "attributionlocalisation",
    "auc",
    "energypointinggame",
    "iou",
    "maxboxaccv2",
    "pointinggame",
    "relevancemass",
    "relevancerank",
    "topkintersection",
)
SMALLER: dict[str, dict[str, Any]] = (
    {
        "comprehensiveness": {"percentiles": (5, 20, 50)},
        "sufficiency": {"percentiles": (5, 20, 50)},
        "continuity": {"pixels": (4,)},
        "faithfulnesscorrelation": {"samples": 32},
        "faithfulnessestimate": {"groups": 10},
        "infidelity": {"samples": 24},
        "irof": {"segments": 10},
        "monotonicitycorrelation": {"groups": 8, "samples": 2},
        "randomlogit": {"samples": 1},
        "regionperturbation": {"side": 9, "steps": 10},
        "road": {"percentiles": (20, 50, 80)},
        "selectivity": {"side": 16, "steps": 10},
        "sensitivityn": {"shares": (1, 5, 20, 50), "samples": 8},
        "smprt": {"samples": 1, "steps": 2},
        "faithful": {"samples": 60},
    }
    | {
        name: {"samples": 2}
        for name in (
            "avgsensitivity",
            "maxsensitivity",
            "locallipschitz",
            "relativeinputstability",
            "relativeoutputstability",
        )
    }
    | {name: {"steps": 3} for name in ("mprt", "mprt-bottom", "mprt-independent")}
    | {name: {"steps": 10} for name in ("deletion", "insertion", "lerf", "monotonicity", "morf")}
)
OFTEN = (
    "comprehensiveness",
    "deletion",
    "faithful",
    "insertion",
    "maxboxaccv2",
    "road",
    "sufficiency",
)
SELDOM = (
    "faithfulnessestimate",
    "irof",
    "lerf",
    "monotonicity",
    "monotonicitycorrelation",
    "morf",
    "regionperturbation",
    "selectivity",
)
PERIODS = dict.fromkeys(OFTEN, 5) | dict.fromkeys(SELDOM, 16)
TRUTH_METRICS = {"truth": "more", "truth-removal": "more"}
CLONE = 0.999


# Methods and metrics


@dataclass(frozen=True)
class Blind(Method):
    """A map that knows nothing of the network."""

    summary: ClassVar[str] = "knows nothing of the network"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()
    number: ClassVar[int | None] = None
    seed: int = 0

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        if self.number is None:
            return torch.rand(
                evidence.inputs.shape[2:], generator=torch.Generator().manual_seed(self.seed)
            ).expand(len(evidence.inputs), -1, -1)
        return torch.stack([photo_maps(x)[self.number] for x in evidence.inputs])


PLACES = {
    "noise": None,
    "mean colour": 0,
    "contrast": 1,
    "edges": 2,
    "centre blob": 4,
    "contrast × centre": 6,
}
BLIND: dict[str, Method] = {
    name: dataclass(frozen=True)(
        type("Blind", (Blind,), {"name": name, "number": number, "__doc__": name})
    )()
    for name, number in PLACES.items()
}


def metrics_of(seed: int, *, masks: bool) -> list[Metric]:
    """All metrics, with few steps; those of localisation only where there are masks."""
    names = [name for name in explain.list_metrics() if masks or name not in LOCAL]
    found: list[Metric] = [*map(get_metric, names), Faithful()]
    return [_seeded(replace(each, **SMALLER.get(each.name, {})), seed) for each in found]


def due(number: int, period: int) -> bool:
    """Whether something that is measured in each so many rounds is measured in this one."""
    return number % period == period // 2


def metrics_due(number: int, seed: int, *, every: bool, masks: bool) -> list[Metric]:
    """The metrics of a round, or all."""
    return [
        each
        for each in metrics_of(seed, masks=masks)
        if every
        or (not isinstance(each, ReattributionMetric) and due(number, PERIODS.get(each.name, 1)))
    ]


def better() -> dict[str, str]:
    """Whether more or less of each metric is better."""
    return {metric.name: metric.better for metric in metrics_of(0, masks=True)} | TRUTH_METRICS


def _seeded(one: Any, seed: int) -> Any:
    return replace(one, seed=seed) if any(each.name == "seed" for each in fields(one)) else one


def reduced(method: Any, seed: int, samples: int = SAMPLES, steps: int = STEPS) -> Any:
    """A method with no more samples and steps than given, and those inside it too."""
    changed: dict[str, Any] = {}
    for each in fields(method):
        value = getattr(method, each.name)
        if each.name in ("samples", "steps") and isinstance(value, int):
            most = samples if each.name == "samples" else steps
            changed[each.name] = min(value, most)
        elif each.name == "seed":
            changed["seed"] = seed
        elif isinstance(value, Method) and is_dataclass(value):
            changed[each.name] = reduced(value, seed, samples, steps)
    if method.name in ("iscam", "sscam"):  # a sample is a pass for each channel
        changed["steps" if method.name == "iscam" else "samples"] = 1
    elif method.name == "sobol":  # a multiple of its dimensions + 2
        changed["samples"] = min(method.samples, 4 * 66)
    elif method.name == "extremalperturbation":
        changed["steps"] = min(method.steps, samples // 2)
    elif (
        method.name == "blurintegratedgradients"
        or "smooth" in method.name
        or method.name == "vargrad"
    ):
        changed = {k: min(v, 12) if k in ("steps", "samples") else v for k, v in changed.items()}
    return replace(method, **changed)


@cache
def chosen(
    model: nn.Module, shape: torch.Size, seed: int, samples: int = SAMPLES, steps: int = STEPS
) -> Any:
    """The methods that explain a network, reduced, and about how many passes each takes."""
    found: dict[str, tuple[Method, float]] = {}
    x = torch.zeros(shape)
    for name in explain.applicable_methods(model, x):
        method = reduced(get_method(name), seed, samples, steps)
        cost = explain.plan(model, x, method, target=0).cost()
        if not isfinite(cost):
            cost = float(getattr(method, "samples", getattr(method, "steps", samples)))
        found[name] = (method, cost)
    return found


# Measuring


def attributed(
    model: nn.Module, x: torch.Tensor, methods: Mapping[str, Method], target: Sequence[int]
) -> Any:
    """The maps of methods that do not refuse; together, which shares passes, unless one refuses."""
    try:
        return dict(explain.attribute(model, x, list(methods.values()), target=target))
    except ExplainError:
        found = {}
        for name, method in methods.items():
            try:
                found[name] = explain.attribute(model, x, method, target=target)
            except ExplainError as error:
                print(f"    {name}: {error}", flush=True)
        return found


def truths(subject: Subject, values: torch.Tensor, truth: str) -> dict[str, float]:
    """How right a map ``(H, W)`` is, where that is known.

    planted   of all squares as large as the mark, that with the largest sum: its overlap with the
    mark (IoU) parts     Spearman's correlation of the sums on the parts with what each is worth
    """
    says_nothing = bool(values.max() == values.min())
    if truth == "planted":
        return {"truth": 0.0 if says_nothing else overlap(values, subject.mask)}
    if subject.parts is None:
        return {}
    if says_nothing:
        return dict.fromkeys(TRUTH_METRICS, 0.0)
    sums = (values.double() * subject.parts).sum((1, 2)).numpy()
    found = {
        name: rank_correlation(sums, np.asarray(worth)) for name, worth in subject.worth.items()
    }
    return {"truth": found["shapley"], "truth-removal": found["removal"]}


def around(mask: torch.Tensor) -> torch.Tensor:
    """The box ``(4,)`` around a mask ``(H, W)``."""
    rows, columns = (mask.any(dim).nonzero().flatten() for dim in (1, 0))
    return torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()


def clones(maps: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, str]]:
    """Pairs of methods whose maps ``(H, W)`` have the same order of pixels, by rank correlation."""
    names = list(maps)
    ordered = torch.stack(
        [maps[name].double().flatten().argsort().argsort().double() for name in names]
    )
    ordered = (ordered - ordered.mean(1, keepdim=True)) / ordered.std(1, keepdim=True)
    alike = ordered @ ordered.T / (ordered.shape[1] - 1)
    constant = {name for name in names if maps[name].max() == maps[name].min()}
    for i, one in enumerate(names):
        for j, other in enumerate(names[i + 1 :], i + 1):
            if alike[i, j] > CLONE and one not in constant and other not in constant:
                yield one, other


def measure(
    model: nn.Module,
    truth: str,
    block: Sequence[Subject],
    number: int,
    most: float,
    again_to: float,
) -> list[dict[str, Any]]:
    """The values of the metrics of a round on photos of one network: a record for each photo."""
    seed = number % 3
    x = torch.cat([each.x for each in block])
    target = [each.target for each in block]
    every = {name: (reduced(method, seed), 0.0) for name, method in BLIND.items()} | chosen(
        model, x[:1].shape, seed
    )
    methods = {name: method for name, (method, cost) in every.items() if cost <= most}
    masks = torch.stack([each.mask for each in block]) if truth != "photos" else None
    metrics = metrics_due(number, seed, every=most == float("inf"), masks=masks is not None)
    maps = attributed(model, x, methods, target)
    again = [metric for metric in metrics if isinstance(metric, ReattributionMetric)]
    once = [metric for metric in metrics if not isinstance(metric, ReattributionMetric)]
    where = (
        {}
        if masks is None
        else {"masks": masks, "boxes": torch.stack([around(each) for each in masks])[:, None]}
    )
    tables = [explain.evaluate(model, x, maps, once, target=target, **where)]
    fewer = chosen(model, x[:1].shape, seed, AGAIN, 8) if again else {}
    able = [name for name in maps if again and (name in BLIND or fewer[name][1] <= again_to)]
    fit = {name: BLIND.get(name) or fewer[name][0] for name in able}
    smooth = [metric for metric in again if metric.name == "smprt"]
    tables += evaluated(
        model, x, fit, [metric for metric in again if metric.name != "smprt"], target
    )
    # whose maps cannot be averaged over noise
    even = {name: each for name, each in fit.items() if name != "refinecam"}
    tables += evaluated(model, x, even, smooth, target)
    shown = {name: Maps.of(name, each, x).per_pixel() for name, each in maps.items()}
    records = []
    for place, subject in enumerate(block):
        values: dict[str, dict[str, float]] = {}
        for table in tables:
            for name in table:
                own = {metric: float(each[place]) for metric, each in table[name].items()}
                values.setdefault(name, {}).update(
                    {key: float(f"{v:.5g}") for key, v in own.items() if v == v}
                )
        for name, each in shown.items():
            values[name] |= truths(subject, each[place], truth)
        same = [list(pair) for pair in clones({name: each[place] for name, each in shown.items()})]
        costs = {name: round(cost, 1) for name, (_, cost) in every.items() if name in maps}
        records.append(
            {"photo": subject.name, "seed": seed, "values": values, "clones": same, "costs": costs}
        )
    return records


def evaluated(
    model: nn.Module, x: torch.Tensor, methods: Any, metrics: Sequence[Metric], target: Any
) -> list[Any]:
    """The metrics that run methods again, on all that can be; in halves where one refuses."""
    if not methods or not metrics:
        return []
    try:
        return [explain.evaluate(model, x, methods, metrics, target=target)]
    except ExplainError as error:
        names = list(methods)
        if len(names) == 1:
            print(f"    {names[0]}: {error}", flush=True)
            return []
        half = len(names) // 2
        parts = ({name: methods[name] for name in each} for each in (names[:half], names[half:]))
        return [table for part in parts for table in evaluated(model, x, part, metrics, target)]


def fill(options: argparse.Namespace) -> None:
    """Add photos to the store, a block for each network and kind in turn, until the time is
    over."""
    started = time.perf_counter()
    taken = known(options.store)
    sources: dict[Any, Any] = {}
    for number in range(options.rounds):
        for architecture, truth in product(options.models, options.truths):
            if (time.perf_counter() - started) / 60 > options.minutes:
                return
            mine = taken.setdefault((truth, architecture), set())
            size = 1 if truth in ("boxes", "photos") and architecture == "mobile" else options.block
            if len(mine) > number * size:
                continue
            classifier = network(truth, architecture, number % 3, options.weights, options.side)
            if classifier not in sources:
                sources[classifier] = SOURCES[truth](classifier, options.data, mine)
            block = list(islice(sources[classifier], size))
            if not block:  # there are no more photos
                continue
            mine.update(each.name for each in block)
            most = float("inf") if due(number, options.every) else options.costly_from
            begun = time.perf_counter()
            for record in measure(classifier.model, truth, block, number, most, options.again_to):
                with options.store.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"truth": truth, "model": architecture} | record) + "\n")
            took = time.perf_counter() - begun
            so_far = (time.perf_counter() - started) / 60
            told = f"round {number}, {truth}, {architecture}: {len(block)} photos"
            print(f"{told}, {took:.0f} s, {so_far:.1f} min in all", flush=True)


def train(options: argparse.Namespace) -> None:
    """Train what is missing, and say what each network does on new photos."""
    for seed in range(options.seeds):
        for truth in TRUTHS[1:]:
            for architecture in options.models:
                file = options.weights / f"{truth}-{architecture}-{seed}.pt"
                if not file.exists():
                    print(file.stem, flush=True)
                    torch.save(learned(truth, architecture, seed, options.data).state_dict(), file)
                classifier = network(truth, architecture, seed, options.weights, options.side)
                shares = learnt(truth, classifier, options.data)
                print(
                    f"{file.stem}: "
                    f"{', '.join(f'{name} {share:.1%}' for name, share in shares.items())}",
                    flush=True,
                )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "measure", "parquet"])
    parser.add_argument(
        "data", nargs="?", type=Path, help="the unpacked data set, or a folder of photos"
    )
    parser.add_argument("weights", nargs="?", type=Path, help="the folder of the networks' weights")
    parser.add_argument("--store", type=Path, default=Path("leaderboard.jsonl"))
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--truths", nargs="+", choices=TRUTHS, default=list(TRUTHS))
    parser.add_argument(
        "--folder", action="store_true", help="data is a folder of photos of ImageNet's classes"
    )
    parser.add_argument(
        "--side", type=int, default=112, help="pixels of the ImageNet model's input"
    )
    parser.add_argument("--block", type=int, default=3, help="photos of a round")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--costly-from", type=float, default=COSTLY_FROM, metavar="PASSES")
    parser.add_argument(
        "--every", type=int, default=35, help="rounds of which one has all metrics and methods"
    )
    parser.add_argument("--again-to", type=float, default=60, metavar="PASSES")
    parser.add_argument("--seeds", type=int, default=1, help="networks to train of each kind")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    # figures that are not defined for a photo, and maps that are zero
    warnings.simplefilter("ignore")
    if options.what != "parquet" and (options.data is None or options.weights is None):
        parser.error(
            f"{options.what} must have the data set and the weights, got none; give both folders"
        )
    if options.folder:
        options.truths = ["photos"]
        options.models = ["mobile"]
    if options.what == "parquet":
        print(f"written to {parquet(options.store)}")
    else:
        {"train": train, "measure": fill}[options.what](options)


if __name__ == "__main__":
    main()
