"""Check maps that are right: do they pass, and does the verdict rank methods as the truth does?

    python examples/verdict_right.py FOLDER WEIGHTS RESULTS.jsonl [--photos 60] [--models residual]
    [--update]

FOLDER is an unpacked tiny-imagenet-200; WEIGHTS holds the networks that ``leaderboard/run.py
train`` makes.

Two kinds of networks have a known answer:

- networks that were trained to name a planted mark, whatever the photo shows. For twenty methods,
  the share of maps that point at the mark (the square as large as the mark with the largest sum
  overlaps the mark by more than 0.3, IoU) is compared with the share that passes the checks, by
  rank correlation.
- `Linear` networks, for which weights × (photo - baseline) says what each pixel adds; and `Window`,
  the small network behind a window, which sees one square of the photo only, at a place that
  differs from photo to photo.

The mark itself and the window itself are maps, too. They are the same for all classes and models,
so only the third check applies to them.

Each photo's results are a line of RESULTS, so that the script goes on where it stopped; ``--count``
only prints the tables of what is there, and ``--update`` writes them into assets/tables/verdict.md.
``--small`` takes 2 photos.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from verdicts import PAGE, updated

import explain
from explain._utils.errors import muted
from explain.engine import Evidence, Need
from explain.methods import IntegratedGradients, Method
from explain.methods.base import Style, get_method
from explain.metrics import Faithful
from explain.metrics.maps import Maps
from explain.metrics.verdict import Share, check_maps
from explain.models import load
from explain.targets import ClassTarget

sys.path.append(str(Path(__file__).resolve().parent / "leaderboard"))

import planted_evidence
from subjects import Subject, look, network, overlap, planted, rank_correlation

CHECKS = ("depends_on_model", "depends_on_class", "faithful", "stable")
METHODS = {
    "residual": (
        "gradcam",
        "layercam",
        "hirescam",
        "gradcam++",
        "eigencam",
        "randomcam",
        "refinecam",
        "fullgrad",
        "guidedgradcam",
        "saliency",
        "inputxgradient",
        "guidedbackprop",
        "deconvnet",
        "lrp",
        "attnlrp",
        "deeplift",
        "integratedgradients(steps=16)",
        "smooth(saliency, samples=8)",
        "featureablation",
        "kpcacam",
    ),
    "transformer": (
        "gradcam",
        "layercam",
        "hirescam",
        "gradcam++",
        "eigencam",
        "randomcam",
        "rollout",
        "gradientrollout",
        "cheferattribution",
        "legrad",
        "saliency",
        "inputxgradient",
        "guidedbackprop",
        "lrp",
        "attnlrp",
        "deeplift",
        "integratedgradients(steps=16)",
        "smooth(saliency, samples=8)",
        "featureablation",
        "fullgrad",
    ),
}
HIT = 0.3
SIDE = 64
CLASSES = 10
SEEN = 24


# Networks whose exact attribution is known


class Linear(nn.Module):
    """Scores that are linear in the pixels; weights are smooth, as those of a trained network."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIDE * SIDE, CLASSES)
        drawn = torch.randn(
            CLASSES, 3, SIDE // 4, SIDE // 4, generator=torch.Generator().manual_seed(seed)
        )
        with torch.no_grad():
            self.head.weight.copy_(
                F.interpolate(drawn, scale_factor=4.0, mode="bilinear").flatten(1) / 20
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(x.flatten(1))
        return scores


class Window(nn.Module):
    """The small network, which sees one square of the photo only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.top, self.left = torch.randint(
            0, SIDE - SEEN + 1, (2,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        self.body = load("tiny").model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x[:, :, self.top : self.top + SEEN, self.left : self.left + SEEN]
        scores: torch.Tensor = self.body(F.interpolate(seen, size=SIDE, mode="bilinear"))
        return scores

    @property
    def mask(self) -> torch.Tensor:
        found = torch.zeros(SIDE, SIDE)
        found[self.top : self.top + SEEN, self.left : self.left + SEEN] = 1
        return found


@dataclass(frozen=True, eq=False)
class Given(Method):
    """A map ``(H, W)`` that is known."""

    given: torch.Tensor = field(default_factory=lambda: torch.zeros(SIDE, SIDE), repr=False)

    name: ClassVar[str] = "given"
    summary: ClassVar[str] = "a map that is known"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return self.given.to(evidence.inputs).expand(len(evidence.inputs), -1, -1)


# Checking


def points_at(values: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether the square of the mark's size with the largest sum overlaps the mark ``(H, W)``."""
    return overlap(values, mask) > HIT


def checked(
    model: nn.Module,
    x: torch.Tensor,
    target: int,
    methods: Mapping[str, Method],
    checks: Any = None,
) -> tuple[dict[str, Any], Any]:
    """Whether each method's map passes each check, and the maps."""
    with muted():
        maps = {
            name: explain.attribute(model, x, method, target=target)
            for name, method in methods.items()
        }
        pairs = [(methods[name], each) for name, each in maps.items()]
        verdict = check_maps(model, x, pairs, ClassTarget((target,)), "it", checks=checks)
    own = {name: verdict[each.method] for name, each in maps.items()}
    return {
        name: {each.check: each.passed for each in results} for name, results in own.items()
    }, maps


def planted_record(classifier: Any, architecture: str, subject: Subject) -> dict[str, Any]:
    methods = {name: get_method(name) for name in METHODS[architecture]}
    found, maps = checked(classifier.model, subject.x, subject.target, methods)
    for name, each in maps.items():
        found[name]["hit"] = points_at(
            Maps.of(name, each, subject.x).contributions[0], subject.mask
        )
    return {"network": f"planted, {architecture}", "photo": subject.name, "maps": found}


def known_record(
    number: int, architecture: str, classifier: Any, subject: Subject, photo: torch.Tensor
) -> dict[str, Any]:
    """The results of maps that are right: of a photo, and of one with marks."""
    x = photo[None]
    linear = Linear(number).eval()
    window = Window(number).eval()
    exact = IntegratedGradients(baseline="mean", steps=1)
    found, _ = checked(
        linear, x, int(linear(x).argmax()), {"linear network: weights × (photo - mean)": exact}
    )
    for name, model, given, target, mask in (
        ("network behind a window: the window", window, x, int(window(x).argmax()), window.mask),
        (
            f"planted, {architecture}: the mark",
            classifier.model,
            subject.x,
            subject.target,
            subject.mask,
        ),
    ):
        for samples in (60, 240):
            each = f"{name}, {samples} masks"
            found |= checked(
                model, given, target, {each: Given(mask.float())}, (Faithful(samples),)
            )[0]
    return {"network": "known", "photo": f"{architecture}, {number}", "maps": found}


# Tables


def passes(results: dict[str, Any]) -> bool:
    return all(results.get(check) is not False for check in CHECKS)


def share(found: Sequence[dict[str, Any]], check: str) -> str:
    if check not in found[0]:
        return "–"
    return f"{sum(each[check] is not False for each in found) / len(found):.0%}"


def rows_of(records: Sequence[Any]) -> list[list[str]]:
    """For each map: the share that points at the mark, that passes each check, and that passes
    all."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record["maps"]):
        found = [record["maps"][name] for record in records if name in record["maps"]]
        hits = sum(map(passes, found))
        low, high = Share(hits, len(found)).interval
        own = (
            [f"{sum(each['hit'] for each in found) / len(found):.0%}"] if "hit" in found[0] else []
        )
        shares = [share(found, check) for check in CHECKS]
        rows.append(
            [
                name,
                str(len(found)),
                *own,
                *shares,
                f"{hits / len(found):.0%} ({low:.0%} to {high:.0%})",
            ]
        )
    return rows


def tables(records: Sequence[Any]) -> dict[str, str]:
    found = {}
    for name in dict.fromkeys(record["network"] for record in records):
        mine = [record for record in records if record["network"] == name]
        rows = rows_of(mine)
        told = ["points at the mark"] if name != "known" else []
        rows.sort(key=lambda row: -float(row[2].rstrip("%")) if told else 0)
        lines = [
            ["map", "photos", *told, *CHECKS, "all (95 % interval)"],
            ["---"] * len(rows[0]),
            *rows,
        ]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        if told:
            methods = [row[0] for row in rows]
            each = [[record["maps"][method] for record in mine] for method in methods]
            truth = np.array([sum(one["hit"] for one in of) / len(of) for of in each])
            alike = {
                check: [sum(one[check] is not False for one in of) / len(of) for of in each]
                for check in CHECKS
            }
            alike["all"] = [sum(map(passes, of)) / len(of) for of in each]
            told = [
                f"{check} {rank_correlation(truth, np.array(shares)):.2f}"
                for check, shares in alike.items()
            ]
            text += (
                f"\n\nRank correlation with the share that points at the mark: {', '.join(told)}."
            )
        found[name] = text
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--photos", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="2 photos")
    parser.add_argument(
        "--count", action="store_true", help="only print the tables of what is there"
    )
    parser.add_argument(
        "--update", action="store_true", help="write them into assets/tables/verdict.md"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    there = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    done = [json.loads(line) for line in there]
    known = {(line["network"], line["photo"]) for line in done}

    def keep(record: dict[str, Any]) -> None:
        done.append(record)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    count = 0 if options.count else 2 if options.small else options.photos
    for architecture in options.models if count else ():
        classifier = network("planted", architecture, 0, options.weights, SIDE)
        photos, _, _ = planted_evidence.loaded(options.folder, "val", look(), 500)
        for number, subject in enumerate(islice(planted(classifier, options.folder), count)):
            if ("planted, " + architecture, subject.name) not in known:
                keep(planted_record(classifier, architecture, subject))
            if ("known", f"{architecture}, {number}") not in known:
                keep(known_record(number, architecture, classifier, subject, photos[number]))
    for name, text in tables(done).items():
        print(f"{name}\n\n{text}\n")
        if options.update:
            PAGE.write_text(updated(PAGE.read_text("utf-8"), f"right, {name}", text), "utf-8")


if __name__ == "__main__":
    main()
