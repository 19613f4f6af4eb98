"""Measure every method by every metric on photos whose objects have boxes, and write docs/leaderboard.md.

    python examples/leaderboard.py path/to/tiny-imagenet-200 --small
    python examples/leaderboard.py path/to/tiny-imagenet-200 [--models tiny efficientnet-lite0] [--photos 1000]
    python examples/leaderboard.py --page

Photos of the validation part are taken in a shuffled order that is always the same: those that the model gets right,
and whose box covers no more than three quarters of what the model sees. What is explained is their class. Results go to
a file for each photo in ``--results``, which is written at once when the photo is done: the work can be stopped at any
time, and goes on where it stopped; methods and metrics that came later are added. Photos are done one after the other
with all methods, so that there is something to compare at any time. ``--part 1/2`` and ``--part 2/2`` share the work
between two processes.

Methods of more than ``--costly-from`` passes are measured on ``--costly`` photos, and metrics that ask a method again
(sensitivity, randomisation) on ``--again`` photos, of methods of up to 100 passes; these are spread over the others.
A method's cost is its processor time by that of a bare forward pass of the photo, both measured in turn.

Then the tables, the figure and the page are written, as after ``--page``, which measures nothing. The 1,000 photos of
``tiny`` and 200 of the ImageNet model take some four hours on two cores (``--part``) with ``--costly-from 60``. Of a
photo's time, most goes to the altered photos of the metrics: about 28 for each of some forty methods. One costly method
takes as long as all others together. ``--small`` takes ten minutes on two cores, and leaves the page of the repository
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from leaderboard_page import ASSETS, PAGE, collected, write
from PIL import Image
from torch import nn

import explain
from explain import ExplainError
from explain.attribution.api import select
from explain.engine import Evidence, Need
from explain.methods import Method
from explain.methods.base import get_method
from explain.metrics import MPRT, ROAD, Deletion, Insertion, Metric, RandomLogit, Sensitivity, get_metric
from explain.models import CenterCrop, Classifier, load

PHOTOS = {"tiny": 1000, "tiny-transformer": 200, "efficientnet-lite0": 200}
AGAIN_UP_TO = 100
LARGEST_BOX = 0.75
STEPS = 12

OF_MAPS: list[Metric] = [
    *map(get_metric, ("pointinggame", "energypointinggame", "relevancerank", "auc")),
    Deletion(STEPS), Insertion(STEPS), ROAD((20, 50, 80)), get_metric("complexity"),
]  # fmt: skip
AGAIN: list[Metric] = [Sensitivity(samples=5), MPRT(), RandomLogit()]
METRICS = {metric.name: metric for metric in (*OF_MAPS, *AGAIN)}
NO_NEEDS: frozenset[Need[Any]] = frozenset()


# What any method must beat: maps that know nothing of the model. They are methods as anybody can write them.


@dataclass(frozen=True)
class CentreBlob(Method):
    """A blob in the middle of every photo, a quarter of its sides wide."""

    name: ClassVar[str] = "centre blob"
    about: ClassVar[str] = "a blob in the middle of every photo"
    needs: ClassVar[frozenset[Need[Any]]] = NO_NEEDS

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        x = evidence.inputs
        rows, columns = (torch.linspace(-2, 2, side).to(x) for side in x.shape[2:])
        return torch.exp(-(rows[:, None] ** 2 + columns[None] ** 2) / 2).expand(len(x), -1, -1)


@dataclass(frozen=True)
class Edges(Method):
    """How strong the photo's edges are, by Sobel's filter."""

    name: ClassVar[str] = "edges"
    about: ClassVar[str] = "the photo's edges, by Sobel's filter"
    needs: ClassVar[frozenset[Need[Any]]] = NO_NEEDS

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        grey = F.pad(evidence.inputs.mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
        across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]).to(grey)
        found = F.conv2d(grey, torch.stack([across, across.T])[:, None])
        return found.square().sum(1).sqrt()


@dataclass(frozen=True)
class Uniform(Method):
    """A map that says the same everywhere; metrics that rank pixels see a random order."""

    name: ClassVar[str] = "uniform"
    about: ClassVar[str] = "the same everywhere"
    needs: ClassVar[frozenset[Need[Any]]] = NO_NEEDS

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs.new_ones(len(evidence.inputs), *evidence.size)


OWN: dict[str, Method] = {each.name: each for each in (CentreBlob(), Edges(), Uniform())}
THE_BOX = "the box itself"


# Photos


def seeing_all(classifier: Classifier) -> Classifier:
    """A model that sees the whole photo; the small one as large as the photos are, which it was trained on."""
    look = classifier.preprocess
    assert isinstance(look, CenterCrop)
    return replace(classifier, preprocess=replace(look, crop=1.0, side=64 if classifier.name == "tiny" else look.side))


@dataclass(frozen=True)
class Photo:
    """A photo as a model sees it: ``x`` ``(1, C, H, W)``, its class, and its object's box in the input's pixels."""

    name: str
    x: torch.Tensor
    target: int
    box: tuple[float, float, float, float]
    probability: float

    @property
    def share(self) -> float:
        """The box's share of the photo."""
        return share_of(self.box, self.x)


def share_of(box: Sequence[float], x: torch.Tensor) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) / (x.shape[2] * x.shape[3])


def annotations(folder: Path) -> list[tuple[str, str, tuple[int, int, int, int]]]:
    """Each validation photo's name, class and box, x1 and y1 exclusive."""
    rows = [line.split("\t") for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]
    return [(name, wnid, (int(x0), int(y0), int(x1) + 1, int(y1) + 1)) for name, wnid, x0, y0, x1, y1 in rows]


def classes_of(folder: Path, classifier: Classifier) -> dict[str, int]:
    """The class index of each WordNet id: the small models have them in the order of the data set, others by label."""
    wnids = (folder / "wnids.txt").read_text().split()
    labels = list(load("tiny").categories or ())
    own = list(classifier.categories or ())
    return {wnid: own.index(label) for wnid, label in zip(wnids, labels, strict=True) if label in own}


def within(box: Sequence[float], seen: Any, x: torch.Tensor) -> tuple[float, float, float, float]:
    """A photo's box in the pixels of the input that shows a part of it, cut off at its edges."""
    across, down = x.shape[3] / seen.width, x.shape[2] / seen.height
    found = [(place - (seen.left, seen.top)[i % 2]) * (across, down)[i % 2] for i, place in enumerate(box)]
    ends = (x.shape[3], x.shape[2])
    x0, y0, x1, y1 = (min(max(place, 0.0), ends[i % 2]) for i, place in enumerate(found))
    return x0, y0, x1, y1


def photos(folder: Path, classifier: Classifier, most: int) -> Iterator[Photo]:
    """Photos that the model gets right and whose box leaves something beside it, in a shuffled order."""
    rows, index = annotations(folder), classes_of(folder, classifier)
    found = 0
    for number in np.random.default_rng(0).permutation(len(rows)).tolist():
        name, wnid, box = rows[number]
        if found == most:
            return
        if wnid not in index:
            continue
        with Image.open(folder / "val" / "images" / name) as opened:
            image = opened.convert("RGB")
        x = classifier.preprocess(image)[None]
        inside = within(box, explain.data.images.locate(classifier.preprocess, image.size), x)
        if not 0 < share_of(inside, x) <= LARGEST_BOX or round(inside[0]) == round(inside[2]):
            continue
        with torch.inference_mode():
            probabilities = classifier.probabilities(classifier.model(x))[0]
        if int(probabilities.argmax()) == index[wnid]:
            found += 1
            yield Photo(name, x, index[wnid], inside, float(probabilities.max()))


# Measuring


def bare(model: nn.Module, x: torch.Tensor) -> float:
    """The processor time of a forward pass without anything."""
    found = []
    with torch.inference_mode():
        for _ in range(2):
            start = time.process_time()
            model(x)
            found.append(time.process_time() - start)
    return min(found)


def attributed(
    model: nn.Module, photo: Photo, methods: Mapping[str, Method], record: Any
) -> dict[str, explain.Attribution]:
    """The maps of methods that do not refuse; and, in the record, their cost in bare forward passes run in between."""
    found, before = {}, bare(model, photo.x)
    for name, method in methods.items():
        start = time.process_time()
        try:
            found[name] = explain.attribute(model, photo.x, method, target=photo.target)
        except ExplainError as error:
            record["errors"][name] = str(error)
            continue
        took, after = time.process_time() - start, bare(model, photo.x)
        record["costs"][name] = took / statistics.mean([before, after])
        before = after
    return found


def measure(
    model: nn.Module, photo: Photo, methods: Mapping[str, Method], wanted: Mapping[str, Sequence[str]], record: Any
) -> None:
    """Add to a photo's record what is missing: for each method, the metrics that are ``wanted`` of it."""
    again = {metric.name for metric in AGAIN}
    judged = [name for name in wanted if name != THE_BOX and set(wanted[name]) - again]
    maps: dict[str, Any] = {THE_BOX: drawn(photo)}
    maps |= attributed(model, photo, {name: methods[name] for name in judged}, record)
    groups: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for name, each in wanted.items():
        if name in record["errors"]:
            continue
        for kind in (False, True):
            asked = tuple(metric for metric in each if (metric in again) == kind)
            if asked:
                groups.setdefault((kind, asked), []).append(name)
    for (kind, asked), names in groups.items():
        given = {name: methods[name] if kind else maps[name] for name in names}
        table = explain.evaluate(
            model, photo.x, given, [METRICS[name] for name in asked], target=photo.target, boxes=[photo.box]
        )
        for name in names:
            values = {metric: float(value) for metric, value in table[name].items()}
            record["values"].setdefault(name, {}).update(
                {m: None if v != v else round(v, 6) for m, v in values.items()}
            )
        if "pointinggame" in asked:
            parts = table.parts(names[0], "pointinggame")
            record["pointing"] = {name: round(float(parts[name]), 6) for name in ("random", "centre")}


def drawn(photo: Photo) -> torch.Tensor:
    """The box as a map: 1 on the object, 0 elsewhere."""
    x0, y0, x1, y1 = (round(place) for place in photo.box)
    found = torch.zeros(1, *photo.x.shape[2:])
    found[:, y0:y1, x0:x1] = 1
    return found


@cache
def costs_of(model: nn.Module, shape: tuple[int, ...]) -> dict[str, float]:
    """The methods that explain a network, and how many passes each takes, or may take."""
    costs = select(model, torch.zeros(shape), "everything", target=0).costs
    return {name: cost if isfinite(cost) else getattr(get_method(name), "runs", cost) for name, cost in costs.items()}


def wanted_of(names: Mapping[str, float], metrics: Sequence[str], record: Any, *, again: bool) -> dict[str, list[str]]:
    """The metrics that a photo's record lacks, by method; those of methods that failed are not asked for again."""
    found = {}
    for name, cost in names.items():
        if name in record["errors"]:
            continue
        mine = [metric.name for metric in OF_MAPS]
        if again and cost <= AGAIN_UP_TO and name != THE_BOX:
            mine += [metric.name for metric in AGAIN]
        missing = [metric for metric in mine if metric in metrics and metric not in record["values"].get(name, {})]
        if missing:
            found[name] = missing
    return found


def saved(file: Path, record: Any) -> None:
    """Write a record whole, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(record), "utf-8")
    os.replace(part, file)


def record_of(file: Path, photo: Photo) -> Any:
    """What is known of a photo by now."""
    if file.exists():
        return json.loads(file.read_text("utf-8"))
    about = {"photo": photo.name, "class": photo.target, "probability": photo.probability, "share": photo.share}
    return {**about, "side": photo.x.shape[-1], "costs": {}, "values": {}, "errors": {}}


def run(name: str, options: argparse.Namespace) -> None:
    """Measure a model's photos, and go on where an earlier run stopped."""
    classifier = seeing_all(load(name))
    model, count = classifier.model, options.photos or PHOTOS.get(name, 200)
    every = {
        "costly": count // (options.costly or count // 10 or 1),
        "again": count // (options.again or count // 20 or 1),
    }
    part, parts = options.part
    start = time.monotonic()
    for number, photo in enumerate(photos(options.folder, classifier, count)):
        if number % parts != part - 1:
            continue
        costs = dict.fromkeys((*OWN, THE_BOX), 0.0) | costs_of(model, tuple(photo.x.shape))
        costs = {name: cost for name, cost in costs.items() if options.methods is None or name in options.methods}
        methods = {name: OWN[name] if name in OWN else get_method(name) for name in costs if name != THE_BOX}
        file = options.results / name / f"{Path(photo.name).stem}.json"
        record = record_of(file, photo)
        turn = {"costly": every["costly"] - 1, "again": every["again"] // 2}  # of the first ones, not the very first
        now = {kind: number // parts % each == turn[kind] for kind, each in every.items()}
        most = options.up_to if now["costly"] else min(options.up_to, options.costly_from)
        fit = {name: cost for name, cost in costs.items() if cost <= most}
        wanted = wanted_of(fit, options.metrics, record, again=now["again"])
        if wanted:
            measure(model, photo, methods, wanted, record)
            saved(file, record)
            took = (time.monotonic() - start) / 60
            print(f"{name}: photo {number + 1} of {count}, {photo.name}, {took:.1f} min", flush=True)


def _part(text: str) -> tuple[int, int]:
    one, _, of = text.partition("/")
    if not (one.isdecimal() and of.isdecimal() and 1 <= int(one) <= int(of)):
        raise argparse.ArgumentTypeError(f"must be a part of several, as in 1/2, got {text!r}")
    return int(one), int(of)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the unpacked data set")
    parser.add_argument("--models", nargs="+", default=["tiny", "efficientnet-lite0"])
    parser.add_argument("--photos", type=int, help="how many of each model (default: 1000 of tiny, 200 of ImageNet's)")
    parser.add_argument("--costly", type=int, help="photos for methods of many passes (default: a tenth)")
    parser.add_argument("--costly-from", type=int, default=500, help="passes from which on that is so")
    parser.add_argument("--up-to", type=int, default=10**6, help="passes beyond which a method is left out")
    parser.add_argument("--again", type=int, help="photos for metrics that ask methods again (default: a twentieth)")
    parser.add_argument("--methods", nargs="+", help="names (default: all that explain the model, and the baselines)")
    parser.add_argument("--metrics", nargs="+", choices=list(METRICS), default=list(METRICS))
    parser.add_argument("--results", type=Path, default=Path("leaderboard-results"))
    parser.add_argument("--part", type=_part, default=(1, 1))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--page", action="store_true", help="write the tables, the figure and the page, and nothing else"
    )
    options = parser.parse_args(arguments)
    assets, page = ASSETS, PAGE
    if options.small:
        options.models, options.photos = options.models[:1], options.photos or 12
        options.costly, options.again = options.costly or 2, options.again or 2
        assets, page = options.results, options.results / "leaderboard.md"
    if options.folder is None and not options.page:
        parser.error("folder must be the unpacked data set, got none; give it, or --page")
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", explain.ExplainWarning)  # figures that are not defined for a photo
    if not options.page:
        for name in options.models:
            run(name, options)
    found = collected(options.results, METRICS, *([1] if options.small else []))
    if not found["models"]:
        parser.error(f"results must hold a measured photo, got none in {str(options.results)!r}; give the data set")
    for file in write(found, assets, page):
        print(f"written to {file}")


if __name__ == "__main__":
    main()
