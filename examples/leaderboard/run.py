"""Measure all methods on images whose evidence is known (marks.py), network by network.

    python examples/leaderboard/run.py [RESULTS.jsonl] [--weights FOLDER] [--cells 10] [--quick]

A record is of one network: a kind of mark, an architecture, the side of the images and a seed. Its
line has the mean of each score (scores.py) for each method over images that the network gets
right, the mean of each metric over some of them, and what was reduced. The order is such that the
table is balanced wherever it stops: first one seed of all kinds and architectures, then the next.
A later call goes on after the last whole line.

Networks are trained when they are met (networks.py) and kept in ``--weights``, in the user's cache
by default. ``--quick`` takes few images and short training: it shows that all works, and its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from marks import KINDS, Scene, batch, explained
from networks import ARCHITECTURES, TRAINING, Training, accuracy, network
from scores import all_scores
from torch import nn

import explain
from explain import ExplainError
from explain.attribution.selection import select
from explain.engine import Evidence, Need
from explain.methods import Method
from explain.methods.base import get_method
from explain.metrics import Metric, get_metric
from explain.metrics.covering import edges_of, middle_of
from explain.metrics.maps import Maps

METRIC_IMAGES = 10  # of the images of a network, for metrics
ROUNDS = (
    ("scores", 32, 0),
    ("metrics", 32, 0),
    ("scores", 32, 1),
    ("scores", 64, 0),
    ("scores", 32, 2),
    ("scores", 64, 1),
    ("scores", 32, 3),
    ("scores", 32, 4),
    ("scores", 64, 2),
    ("scores", 64, 3),
    ("scores", 64, 4),
)
WEIGHTS = Path.home() / ".cache" / "explain-leaderboard"
PHOTOS = 8  # baselines of methods that take several

SAMPLES = 48
STEPS = 12
REDUCED: dict[str, dict[str, Any]] = {
    "blurintegratedgradients": {"steps": 12},
    "extremalperturbation": {"steps": 60},
    "iscam": {"steps": 2},
    "kernelshap": {"samples": 160},
    "necessary": {"samples": 160},
    "partitionshap": {"samples": 128},
    "shapleysampling": {"samples": 96},
    "smoothgradcam++": {"samples": 8},
    "sobol": {"samples": 264},
    "sscam": {"samples": 2},
    "sufficient": {"samples": 160},
}
"""Settings that differ from `SAMPLES` and `STEPS`: some methods find nothing with so few."""
METRICS: dict[str, dict[str, Any]] = {
    "averagedrop": {},
    "complexity": {},
    "comprehensiveness": {"percentiles": (5, 20, 50)},
    "deletion": {"steps": 10},
    "effectivecomplexity": {},
    "faithfulnesscorrelation": {"samples": 24},
    "infidelity": {"samples": 24},
    "insertion": {"steps": 10},
    "sensitivityn": {"shares": (1, 5, 20, 50), "samples": 6},
    "sparseness": {},
    "sufficiency": {"percentiles": (5, 20, 50)},
}


@dataclass(frozen=True)
class ControlMap(Method):
    """A map of the photo alone, which does not use the network."""

    summary: ClassVar[str] = "does not use the network"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()
    of: ClassVar[Callable[[torch.Tensor], torch.Tensor]]

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return type(self).of(evidence.inputs)


def contrast_of(images: torch.Tensor) -> torch.Tensor:
    """The standard deviation of grey values around each pixel ``(N, H, W)``."""
    grey = images.mean(1, keepdim=True)
    side = max(3, min(images.shape[2:]) // 10 | 1)
    around = partial(F.avg_pool2d, kernel_size=side, stride=1, padding=side // 2)
    return around((grey - around(grey)).square()).clamp(min=0).sqrt()[:, 0]


@dataclass(frozen=True)
class NoiseMap(Method):
    """Independent random numbers."""

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "does not use the network"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        count, _, height, width = evidence.inputs.shape
        return torch.rand(count, height, width, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class ContrastMap(ControlMap):
    """The local contrast of the photo."""

    name: ClassVar[str] = "contrast"
    of = staticmethod(contrast_of)


@dataclass(frozen=True)
class EdgeMap(ControlMap):
    """The edges of the photo."""

    name: ClassVar[str] = "edges"
    of = staticmethod(edges_of)


@dataclass(frozen=True)
class CentreMap(ControlMap):
    """A blob in the middle."""

    name: ClassVar[str] = "centre"
    of = staticmethod(middle_of)


CONTROLS: tuple[Method, ...] = (NoiseMap(), ContrastMap(), EdgeMap(), CentreMap())


@dataclass(frozen=True)
class Effort:
    """How much is done for a network: images by their side, training, and which methods.

    A network that is right on a smaller share of test images than ``least_accuracy`` is left out;
    where this is zero, images that it gets wrong are taken too.
    """

    images: dict[int, int]
    training: Training = TRAINING
    tests: int = 200
    least_accuracy: float = 0.9
    most_passes: float = math.inf


FULL = Effort({32: 13, 64: 13})
QUICK = Effort({32: 3, 64: 3}, Training(20, 2, 1), tests=20, least_accuracy=0.0, most_passes=3)


@dataclass(frozen=True)
class Cell:
    """One network: what it learned, its architecture, its images' side, and its seed."""

    kind: str
    architecture: str
    side: int
    seed: int

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.architecture}-{self.side}-{self.seed}"


def all_cells() -> list[tuple[str, Cell]]:
    """What is measured of which network, in order: architectures take turns."""
    cells = []
    for what, side, seed in ROUNDS:
        for turn in range(len(ARCHITECTURES)):
            for number, kind in enumerate(KINDS):
                architecture = ARCHITECTURES[(number + turn) % len(ARCHITECTURES)]
                cells.append((what, Cell(kind, architecture, side, seed)))
    return cells


# Methods and metrics


def reduced(method: Any, photos: torch.Tensor) -> Any:
    """A method with few samples and steps; with photos as baselines where it takes several."""
    names = {field.name for field in fields(method)}
    changes: dict[str, Any] = {}
    for option, most in (("samples", SAMPLES), ("steps", STEPS)):
        value = getattr(method, option, None)
        if option in names and isinstance(value, int):
            changes[option] = min(value, most)
    if method.name in ("expectedgradients", "gradientshap", "deepliftshap"):
        changes["baseline"] = photos
    changes |= REDUCED.get(method.name, {})
    return replace(method, **changes)


def methods_for(
    model: nn.Module, photos: torch.Tensor, most_passes: float = math.inf
) -> dict[str, Method]:
    """All methods that explain a network, reduced, and the control maps."""
    methods = {control.name: control for control in CONTROLS}
    for name in select(model, photos[:2], "everything").methods:
        method = reduced(get_method(name), photos)
        if cost(model, photos[:2], method) <= most_passes:
            methods[name] = method
    return methods


def metrics() -> list[Metric]:
    """The metrics that are judged, with few steps."""
    return [replace(get_metric(name), **options) for name, options in METRICS.items()]


def cost(model: nn.Module, x: torch.Tensor, method: Any) -> float:
    """About how many passes a method takes for each image."""
    passes = explain.plan(model, x, method, target=0).cost()
    if math.isfinite(passes):
        return round(passes / len(x), 1)
    return float(getattr(method, "samples", getattr(method, "steps", SAMPLES)))


# Measuring


def network_of(cell: Cell, weights: Path, effort: Effort) -> nn.Module:
    """The network of a cell, trained if need be."""
    return network(cell.kind, cell.architecture, cell.side, cell.seed, weights, effort.training)


def right_scenes(cell: Cell, model: nn.Module, effort: Effort) -> list[Scene]:
    """The first test images that a network gets right."""
    wanted = effort.images[cell.side]
    if not effort.least_accuracy:
        return list(islice(explained(cell.kind, cell.side, cell.seed), wanted))
    chosen: list[Scene] = []
    for scene in islice(explained(cell.kind, cell.side, cell.seed), 3 * wanted):
        with torch.inference_mode():
            answer = int(model(scene.image()[None]).argmax())
        if answer == scene.label:
            chosen.append(scene)
        if len(chosen) == wanted:
            break
    return chosen


def maps_of(
    model: nn.Module, x: torch.Tensor, methods: Mapping[str, Method], target: Sequence[int]
) -> dict[str, Any]:
    """The maps of all methods: together, which shares passes; one by one where one refuses."""
    try:
        return dict(explain.attribute(model, x, list(methods.values()), target=target))
    except ExplainError:
        maps = {}
        for name, method in methods.items():
            try:
                maps[name] = explain.attribute(model, x, method, target=target)
            except ExplainError as error:
                print(f"    {name}: {error}", flush=True)
        return maps


def mean(values: Sequence[float]) -> float | None:
    """The mean of what is defined, with four digits; None where nothing is."""
    defined = [value for value in values if value == value]
    if not defined:
        return None
    return float(f"{sum(defined) / len(defined):.4g}")


def score_means(
    model: nn.Module, scenes: Sequence[Scene], maps: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, float | None]]:
    """The mean of each score for each map ``(N, H, W)``; and the share of the magnitudes that are
    on the evidence (``inside``), divided by its share of the area."""
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in maps}
    for number, scene in enumerate(scenes):
        with torch.inference_mode():
            logits = model(scene.without_each_set())[:, scene.label].double()
        mask = scene.mask
        for name, values in maps.items():
            scores = all_scores(values[number], mask, len(scene.evidence), scene.parts, logits)
            sizes = values[number].double().abs()
            share = float(sizes[mask].mean() / sizes.mean()) if sizes.any() else math.nan
            for key, value in (scores | {"inside": share}).items():
                rows[name].setdefault(key, []).append(value)
    return {
        name: {key: mean(values) for key, values in columns.items()}
        for name, columns in rows.items()
    }


def metric_means(
    model: nn.Module, x: torch.Tensor, maps: Mapping[str, torch.Tensor], target: Sequence[int]
) -> dict[str, dict[str, float | None]]:
    """The mean of each metric for each map."""
    table = explain.evaluate(model, x, maps, metrics(), target=target)
    means: dict[str, dict[str, float | None]] = {}
    for name in table:
        means[name] = {metric: mean(values.tolist()) for metric, values in table[name].items()}
    return means


def measured_scores(cell: Cell, weights: Path, effort: Effort) -> dict[str, Any]:
    """The record of a network: how right it is, and the scores of all maps. The first maps are kept
    for its metrics."""
    started = time.process_time()
    model = network_of(cell, weights, effort)
    tests, labels = batch(cell.kind, cell.side, "test", effort.tests, 3000 + cell.seed)
    record = cell.fields | {"accuracy": round(accuracy(model, tests, labels), 3)}
    if record["accuracy"] < effort.least_accuracy:
        return record
    trained = time.process_time()
    scenes = right_scenes(cell, model, effort)
    x = torch.stack([scene.image() for scene in scenes])
    target = [scene.label for scene in scenes]
    photos, _ = batch(cell.kind, cell.side, "train", PHOTOS, 4000 + cell.seed)
    methods = methods_for(model, photos, effort.most_passes)
    attributions = maps_of(model, x, methods, target)
    maps = {name: Maps.of(name, each, x).per_pixel() for name, each in attributions.items()}
    explained_after = time.process_time()
    record["images"] = len(scenes)
    record["scores"] = score_means(model, scenes, maps)
    record["passes"] = {name: cost(model, x[:2], method) for name, method in methods.items()}
    record["seconds"] = {
        "training": round(trained - started, 1),
        "maps": round(explained_after - trained, 1),
        "scores": round(time.process_time() - explained_after, 1),
    }
    few = {name: values[:METRIC_IMAGES].clone() for name, values in maps.items()}
    kept = {"x": x[:METRIC_IMAGES].clone(), "target": target[:METRIC_IMAGES], "maps": few}
    torch.save(kept, weights / f"{cell.name}-maps.pt")
    return record


def measured_metrics(cell: Cell, weights: Path, effort: Effort) -> dict[str, Any]:
    """The metrics of a network's maps."""
    started = time.process_time()
    model = network_of(cell, weights, effort)
    kept = torch.load(weights / f"{cell.name}-maps.pt", weights_only=True)
    record = cell.fields | {"metric_images": len(kept["x"])}
    record["metrics"] = metric_means(model, kept["x"], kept["maps"], kept["target"])
    record["seconds"] = {"metrics": round(time.process_time() - started, 1)}
    return record


def records(file: Path) -> list[dict[str, Any]]:
    """The records of a file. What comes after its last whole line is cut off: it was not written to
    its end."""
    if not file.exists():
        return []
    text = file.read_text("utf-8")
    lines = text.split("\n")
    if lines[-1]:
        file.write_text(text.removesuffix(lines[-1]), "utf-8")
    return [json.loads(line) for line in lines[:-1]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, default=Path("leaderboard.jsonl"))
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="the folder of networks")
    parser.add_argument("--cells", type=int, default=10_000, help="networks to measure, at most")
    parser.add_argument("--only", choices=["scores", "metrics"], help="leave out the rest")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # maps that are zero, and figures that are not defined
    warnings.simplefilter("ignore")
    effort = QUICK if options.quick else FULL
    measured = set()
    for record in records(options.results):
        cell = Cell(record["kind"], record["architecture"], record["side"], record["seed"])
        if "accuracy" in record:
            measured.add(("scores", cell))
        if "metrics" in record:
            measured.add(("metrics", cell))
    missing = [each for each in all_cells() if each not in measured]
    if options.only:
        missing = [each for each in missing if each[0] == options.only]
    for what, cell in missing[: options.cells]:
        if what == "metrics" and not (options.weights / f"{cell.name}-maps.pt").exists():
            continue  # this network did not learn its rule
        if what == "metrics":
            record = measured_metrics(cell, options.weights, effort)
        else:
            record = measured_scores(cell, options.weights, effort)
        with options.results.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        spent = record.get("seconds", "not learned")
        print(f"{what} of {cell.name}: {record.get('accuracy', '')} {spent}", flush=True)


if __name__ == "__main__":
    main()
