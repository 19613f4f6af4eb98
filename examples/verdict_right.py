"""Check maps that are right: are they supported?

    python examples/verdict_right.py FOLDER RESULTS.jsonl [--photos 20] [--side 32] [--update]

FOLDER is an unpacked tiny-imagenet-200. Three kinds of networks have a known answer:

- `Linear` networks, for which weights × (photo - mean) says what each pixel adds. All checks apply.
- `Window`, the small network behind a window, which sees one square of the photo only, at a place
  that differs from photo to photo; the map is the window.
- networks that read planted marks of seven kinds (leaderboard/marks.py), which are trained here in
  seconds each; the map is where the marks are.

A window and a mark are the same for all classes and models, so only the check of faithfulness
applies to them.

Each map's answers are a line of RESULTS, so that the script goes on where it stopped; ``--count``
only prints the table of what is there, and ``--update`` writes it into assets/tables/verdict.md.
``--small`` takes 2 photos.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from verdicts import PAGE, clustered, updated

import explain
from explain._utils.errors import muted
from explain.engine import Evidence, Need
from explain.methods import IntegratedGradients, Method
from explain.methods.base import Style
from explain.metrics import Faithful
from explain.metrics.checking import check_maps
from explain.metrics.sanity import MASKS
from explain.models import CenterCrop, load
from explain.targets import ClassTarget

sys.path.append(str(Path(__file__).resolve().parent / "leaderboard"))

import planted_evidence

CHECKS = ("depends_on_model", "depends_on_class", "faithful")
ARCHITECTURE = "residual"
LEAST_ACCURACY = 0.9
"""Of a network that reads marks: one that has not learned its rule has no right map."""
SIDE = 64
CLASSES = 10
TEST_IMAGES = 200
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
        mask = torch.zeros(SIDE, SIDE)
        mask[self.top : self.top + SEEN, self.left : self.left + SEEN] = 1
        return mask


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


@dataclass(frozen=True)
class RightMap:
    """A right map of a photo ``(1, 3, H, W)``, as a method; and the checks that apply, by default
    all."""

    name: str
    model: nn.Module
    x: torch.Tensor
    target: int
    method: Method
    checks: tuple[Any, ...] | None = (Faithful(MASKS),)

    def answers(self) -> dict[str, str]:
        """What the checks say, by check; and "all" of them together."""
        with muted():
            attribution = explain.attribute(self.model, self.x, self.method, target=self.target)
            maps = [(self.method, attribution)]
            target = ClassTarget((self.target,))
            verdict = check_maps(self.model, self.x, maps, target, "it", checks=self.checks)
        results = verdict[attribution.method]
        return {**{each.check: each.answer for each in results}, "all": results.answer}


@cache
def reader(kind: str, side: int) -> tuple[nn.Module, Iterator[Any]]:
    """A network that reads marks of a kind, and scenes with them."""
    from marks import batch, explained
    from networks import accuracy, trained

    model = trained(kind, ARCHITECTURE, side, 0)
    share = accuracy(model, *batch(kind, side, "test", TEST_IMAGES, 0))
    if share < LEAST_ACCURACY:
        raise SystemExit(f"the network for {kind} must learn its rule, but gets {share:.0%} right")
    return model, explained(kind, side, 0)


def planted(kind: str, side: int) -> RightMap:
    """The marks of the next image that the network for its kind gets right."""
    model, scenes = reader(kind, side)
    for scene in scenes:
        x = scene.image()[None]
        if int(model(x).argmax()) == scene.label:
            return RightMap(f"marks: {kind}", model, x, scene.label, Given(scene.mask.float()))
    raise AssertionError("scenes have no end")


def right_maps(number: int, photo: torch.Tensor, side: int) -> Iterator[RightMap]:
    """One map of each kind."""
    from marks import KINDS

    x = photo[None]
    linear = Linear(number).eval()
    exact = IntegratedGradients(baseline="mean", steps=1)
    yield RightMap("linear", linear, x, int(linear(x).argmax()), exact, None)
    window = Window(number).eval()
    yield RightMap("window", window, x, int(window(x).argmax()), Given(window.mask))
    for kind in KINDS:
        yield planted(kind, side)


def table(lines: Sequence[Any]) -> str:
    """For each kind of map, the share that each check supports, and all that apply; and how many
    are contradicted."""
    heads = ["right map", "maps", "model", "class", "faithful", "supported (95 % interval)"]
    rows = [[*heads, "contradicted"], ["---"] * (1 + len(heads))]
    for name in dict.fromkeys(line["map"] for line in lines):
        answers = [line["answers"] for line in lines if line["map"] == name]
        cells = [name, str(len(answers))]
        for check in CHECKS:
            shares = [each[check] == "supported" for each in answers if check in each]
            cells.append(f"{sum(shares) / len(shares):.0%}" if shares else "–")
        share, low, high = clustered([[each["all"] == "supported"] for each in answers])
        cells.append(f"{share:.0%} ({low:.0%} to {high:.0%})")
        wrong = sum(each["all"] == "contradicted" for each in answers)
        rows.append([*cells, f"{wrong / len(answers):.0%}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--photos", type=int, default=20)
    parser.add_argument("--side", type=int, choices=[32, 64], default=32, help="of marked images")
    parser.add_argument("--small", action="store_true", help="2 photos")
    parser.add_argument(
        "--count", action="store_true", help="only print the table of what is there"
    )
    parser.add_argument(
        "--update", action="store_true", help="write it into assets/tables/verdict.md"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    there = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    done = [json.loads(line) for line in there]
    if not options.count:
        count = 2 if options.small else options.photos
        own = load("tiny").preprocess
        assert isinstance(own, CenterCrop)
        look = replace(own, side=SIDE, crop=1.0)
        photos, _, _ = planted_evidence.loaded(options.folder, "val", look, 500)
        known = {(line["map"], line["number"]) for line in done}
        for number in range(count):
            for right in right_maps(number, photos[number], options.side):
                if (right.name, number) in known:
                    continue
                done.append({"map": right.name, "number": number, "answers": right.answers()})
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    text = table(done)
    print(text)
    if options.update:
        PAGE.write_text(updated(PAGE.read_text("utf-8"), "right", text), "utf-8")


if __name__ == "__main__":
    main()
