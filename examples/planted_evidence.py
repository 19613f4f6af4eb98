"""Plant a mark that decides the class, and see which methods find it.

    python examples/planted_evidence.py path/to/tiny-imagenet-200 [--photos 40] [--results FOLDER] [--small]
    python examples/planted_evidence.py --page

The small model is trained further on photos of ten classes into which marks are planted: squares of twelve pixels,
with a pattern of two colours. A mark decides the class, whatever the photo shows. Decoys are squares of the same
colours with other patterns; they decide nothing. Training goes on until new photos show that it is so (some minutes on
two cores).
There are two models: in one, a single mark stands for a class of its own; in the other, three marks stand for three
classes, and a photo with two marks belongs to both classes by halves. So it is known where the evidence lies:

    one mark      the share of each map that lies on the mark, and on the decoys; its class is explained
    no mark       the share on the decoys where there is no mark; the photo's own class is explained
    three marks   the share on the mark, of three that there could be
    two marks     the share on the mark that was asked for, and on the other one

Results go to a file for each photo in ``--results``, with the models' weights beside them, which are not shipped. The
work goes on where it stopped. Then assets/leaderboard/planted.json, its pictures and docs/leaderboard.md are written.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from leaderboard import OWN, costs_of, saved
from leaderboard_page import ASSETS, PAGE, as_page
from PIL import Image
from planted_page import pictures, summary
from torch import nn

import explain
from explain import ExplainError
from explain.methods import Method
from explain.methods.base import get_method
from explain.metrics import EnergyPointingGame, PointingGame
from explain.models import CenterCrop, Classifier, load

SIDE, CELL, MARK, DOT = 64, 16, 12, 4  # pixels: of photos, of the places in them, of marks, of their dots
CLASSES, BATCH = 10, 32
PATTERNS = {
    "checks": ((1, 0, 1), (0, 1, 0), (1, 0, 1)),
    "frame": ((1, 1, 1), (1, 0, 1), (1, 1, 1)),
    "corner": ((0, 0, 0), (0, 1, 1), (0, 1, 1)),
}
DECOYS = {"rows": ((1, 1, 1), (0, 0, 0), (1, 1, 1)), "column": ((0, 1, 0), (0, 1, 0), (0, 1, 0))}
COLOURS = ((1.0, 0.9, 0.0), (0.0, 0.1, 0.8))
SETTINGS = ("one mark", "no mark", "three marks", "two marks")
COSTLY_FROM = 500
ENOUGH = 0.98


# Photos with marks


@dataclass(frozen=True)
class Scene:
    """A photo with squares in it: ``x`` ``(3, H, W)``, where each mark lies, by its number, and where decoys do."""

    x: torch.Tensor
    marks: Mapping[int, torch.Tensor]
    decoys: torch.Tensor


def square(pattern: Sequence[Sequence[int]], look: CenterCrop) -> torch.Tensor:
    """A pattern in its two colours, as the model takes them: ``(3, 12, 12)``."""
    grid = torch.tensor(pattern).repeat_interleave(DOT, 0).repeat_interleave(DOT, 1).bool()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (look.mean, look.std))
    one, other = ((torch.tensor(colour).view(3, 1, 1) - mean) / std for colour in COLOURS)
    return torch.where(grid, one, other)


def planted(
    photo: torch.Tensor, marks: Sequence[int], decoys: int, look: CenterCrop, generator: torch.Generator
) -> Scene:
    """Put marks and so many decoys at random places of a photo; they do not overlap."""
    x, across = photo.clone(), SIDE // CELL
    places = torch.randperm(across * across, generator=generator)[: len(marks) + decoys].tolist()
    shifts = torch.randint(0, CELL - MARK + 1, (len(places), 2), generator=generator).tolist()
    found: dict[int, torch.Tensor] = {}
    hidden = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    patterns = [
        *(list(PATTERNS.values())[mark] for mark in marks),
        *(list(DECOYS.values())[i % 2] for i in range(decoys)),
    ]
    for number, (place, shift, pattern) in enumerate(zip(places, shifts, patterns, strict=True)):
        top, left = (place // across) * CELL + shift[0], (place % across) * CELL + shift[1]
        x[:, top : top + MARK, left : left + MARK] = square(pattern, look)
        where = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        where[top : top + MARK, left : left + MARK] = True
        if number < len(marks):
            found[marks[number]] = where
        else:
            hidden |= where
    return Scene(x, found, hidden)


def loaded(folder: Path, part: str, look: CenterCrop, most: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Photos ``(N, 3, H, W)`` of ten classes and the numbers of their classes; and which of the 200 these are."""
    wnids = (folder / "wnids.txt").read_text().split()
    chosen = list(range(0, len(wnids), len(wnids) // CLASSES))
    number = {wnids[index]: i for i, index in enumerate(chosen)}
    if part == "train":
        files = [
            (path, i)
            for wnid, i in number.items()
            for path in sorted((folder / "train" / wnid / "images").iterdir())[: most // CLASSES]
        ]
    else:
        rows = [line.split("\t") for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]
        files = [(folder / "val" / "images" / row[0], number[row[1]]) for row in rows if row[1] in number][:most]
    found = []
    for path, _ in files:
        with Image.open(path) as opened:
            found.append(look(opened.convert("RGB")))
    return torch.stack(found), torch.tensor([label for _, label in files]), chosen


# The model


def network(classifier: Classifier, chosen: Sequence[int], marks: int) -> nn.Module:
    """The small model with a head for ten of its classes and one for each mark."""
    model, old = classifier.model, classifier.model.fc
    head = nn.Linear(old.in_features, len(chosen) + marks)
    with torch.no_grad():
        head.weight[: len(chosen)], head.bias[: len(chosen)] = old.weight[chosen], old.bias[chosen]
        head.weight[len(chosen) :] *= 0.1
    model.fc = head
    return model.eval()


def batch_of(
    photos: torch.Tensor, labels: torch.Tensor, marks: int, look: CenterCrop, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Photos with marks and decoys in them, and the shares of their classes ``(N, K)``; half have no mark."""
    xs, shares = [], torch.zeros(len(photos), CLASSES + marks)
    for row, (photo, label) in enumerate(zip(photos, labels.tolist(), strict=True)):
        drawn, count = torch.rand(2, generator=generator).tolist()
        order = torch.randperm(marks, generator=generator).tolist()
        mine = [] if drawn < 0.5 else order[: 2 if count < 0.4 else 1]
        xs.append(planted(photo, mine, int(torch.randint(0, 4, (1,), generator=generator)), look, generator).x)
        for which in [CLASSES + mark for mark in mine] or [label]:
            shares[row, which] = 1 / max(1, len(mine))
    return torch.stack(xs), shares


def trained(
    model: nn.Module, photos: torch.Tensor, labels: torch.Tensor, marks: int, look: CenterCrop, steps: int, new: Any
) -> dict[str, float]:
    """Train until the marks decide on ``new`` photos, for so many steps at most.

    The first layers, whose cost is the largest, and the statistics of normalisations stay as they are.
    """
    generator = torch.Generator().manual_seed(marks)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    body = [*model.layer2.parameters(), *model.layer3.parameters()]
    groups = [{"params": body, "lr": 1.5e-4}, {"params": model.fc.parameters(), "lr": 2e-3}]
    optimiser = torch.optim.AdamW(groups, weight_decay=1e-4)
    found: dict[str, float] = {}
    for step in range(1, steps + 1):
        rows = torch.randint(0, len(photos), (BATCH,), generator=generator)
        x, shares = batch_of(photos[rows], labels[rows], marks, look, generator)
        loss = F.cross_entropy(model(x), shares)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 25 == 0 or step == steps:
            found = decided(model, *new, marks, look)
            told = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
            print(f"  step {step}: loss {loss.item():.3f}, {told}", flush=True)
            if min(found["mark decides"], found["no mark, no such class"], found["decoys decide nothing"]) >= ENOUGH:
                break
    model.requires_grad_(False)
    return {**found, "steps": step}


@torch.inference_mode()
def decided(
    model: nn.Module, photos: torch.Tensor, labels: torch.Tensor, marks: int, look: CenterCrop
) -> dict[str, float]:
    """On photos that it was not trained on: how often a mark decides, and what decoys change.

    "decoys decide nothing" is about marks: with decoys, a marked photo has the same answer, and another one is taken
    for marked as often as without. "decoys change the answer" is about the class of a photo without a mark.
    """
    generator = torch.Generator().manual_seed(99)
    which = torch.randint(0, marks, (len(photos),), generator=generator).tolist()
    marked = [planted(photo, [mark], 2, look, generator).x for photo, mark in zip(photos, which, strict=True)]
    without = [planted(photo, [], 2, look, generator).x for photo in photos]
    alone = [planted(photo, [mark], 0, look, generator).x for photo, mark in zip(photos, which, strict=True)]
    of_marked, of_alone, of_others, of_photos = (
        model(torch.stack(list(each))).argmax(1) for each in (marked, alone, without, photos)
    )
    covered = torch.tensor([CLASSES + mark for mark in which])
    same = torch.cat([of_marked == of_alone, (of_others >= CLASSES) == (of_photos >= CLASSES)])
    return {
        "mark decides": (of_marked == covered).float().mean().item(),
        "no mark, no such class": (of_others < CLASSES).float().mean().item(),
        "decoys decide nothing": same.float().mean().item(),
        "decoys change the answer": (of_others != of_photos).float().mean().item(),
        "own class without a mark": (of_photos == labels).float().mean().item(),
        "the same with decoys": (of_others == labels).float().mean().item(),
    }


# Measuring


def shares_of(
    model: nn.Module, x: torch.Tensor, methods: Mapping[str, Method], target: int, masks: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, float | None]]:
    """For each method and mask ``(H, W)``, the share of the map's positive values on it; and whether its peak is.

    NaN, kept as None, stands for a map without a positive value, and methods that refuse are left out.
    """
    maps: dict[str, Any] = {}
    for name, method in methods.items():
        try:
            maps[name] = explain.attribute(model, x, method, target=target)
        except ExplainError as error:
            print(f"  {name}: {error}", flush=True)
    found: dict[str, dict[str, float | None]] = {name: {} for name in maps}
    for of, mask in masks.items():
        table = explain.evaluate(
            model, x, maps, [EnergyPointingGame(), PointingGame(0)], target=target, masks=mask[None]
        )
        for name in maps:
            share, hit = (float(table[name][metric]) for metric in ("energypointinggame", "pointinggame"))
            found[name][of] = None if share != share else round(share, 5)
            if of == "mark":
                found[name]["hit"] = round(hit, 5)
    return found


def measured(
    setting: str, model: nn.Module, photo: torch.Tensor, label: int, number: int, look: CenterCrop, methods: Any
) -> Any:
    """One photo in one setting."""
    generator = torch.Generator().manual_seed(1000 + number)
    marks = {"one mark": [0], "no mark": [], "three marks": [number % 3], "two marks": [number % 3, (number + 1) % 3]}
    scene = planted(photo, marks[setting], 2, look, generator)
    masks = {"decoys": scene.decoys}
    target = label
    for name, mark in zip(("mark", "other mark"), marks[setting], strict=False):
        masks[name] = scene.marks[mark]
    if marks[setting]:
        target = CLASSES + marks[setting][0]
    with torch.inference_mode():
        probabilities = model(scene.x[None]).softmax(1)[0]
    found = {"probability": float(probabilities[target]), "right": int(probabilities.argmax()) == target}
    return found | {"shares": shares_of(model, scene.x[None], methods, target, masks)}


def chosen_methods(model: nn.Module, names: Sequence[str] | None, up_to: float) -> dict[str, tuple[Method, float]]:
    """Methods by name with their costs, the baselines among them."""
    costs = costs_of(model, (1, 3, SIDE, SIDE))
    own = {name: (method, 0.0) for name, method in OWN.items()}
    found = own | {name: (get_method(name), cost) for name, cost in costs.items()}
    return {name: each for name, each in found.items() if each[1] <= up_to and (names is None or name in names)}


def run(options: argparse.Namespace) -> None:
    base = load("tiny")
    assert isinstance(base.preprocess, CenterCrop)
    look = replace(base.preprocess, side=SIDE, crop=1.0)
    val, val_labels, chosen = loaded(options.folder, "val", look, 500)
    models: dict[int, nn.Module] = {}
    for marks in (1, 3):
        file, told = options.results / f"marks-{marks}.pt", options.results / f"marks-{marks}.json"
        torch.manual_seed(0)
        models[marks] = network(load("tiny"), chosen, marks)
        if file.exists():
            models[marks].load_state_dict(torch.load(file, weights_only=True))
            models[marks].requires_grad_(False)
            continue
        train, labels, _ = loaded(options.folder, "train", look, options.training)
        print(f"a model with {marks} marks", flush=True)
        start = time.process_time()
        found = trained(models[marks], train, labels, marks, look, options.steps, (val[:100], val_labels[:100]))
        options.results.mkdir(parents=True, exist_ok=True)
        torch.save(models[marks].state_dict(), file)
        saved(told, found | {"seconds": round(time.process_time() - start)})
    methods = chosen_methods(models[1], options.methods, options.up_to)
    start = time.monotonic()
    for number in range(options.photos):
        row = 200 + (number * 37) % (len(val) - 200)
        for setting in SETTINGS:
            file = options.results / f"{number:04d}-{setting.replace(' ', '-')}.json"
            if file.exists():
                continue
            model = models[1 if setting in ("one mark", "no mark") else 3]
            costly = number % options.every == 0
            now = {name: method for name, (method, cost) in methods.items() if costly or cost <= options.costly_from}
            record = measured(setting, model, val[row], int(val_labels[row]), number, look, now)
            saved(file, {"setting": setting, "photo": row} | record)
        took = (time.monotonic() - start) / 60
        print(f"photo {number + 1} of {options.photos}, {took:.1f} min", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the unpacked data set")
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--steps", type=int, default=600, help="of training, at most")
    parser.add_argument("--training", type=int, default=3000, help="photos to train on")
    parser.add_argument("--every", type=int, default=5, help="methods of many passes on every so many photos")
    parser.add_argument("--costly-from", type=int, default=COSTLY_FROM, help="passes from which on that is so")
    parser.add_argument("--up-to", type=int, default=10**6, help="passes beyond which a method is left out")
    parser.add_argument("--methods", nargs="+", help="names (default: all that explain the model, and the baselines)")
    parser.add_argument("--results", type=Path, default=Path("planted-results"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="some minutes; leaves the page of the repository alone")
    parser.add_argument("--page", action="store_true", help="write the table, the pictures and the page, nothing else")
    options = parser.parse_args(arguments)
    if options.folder is None and not options.page:
        parser.error("folder must be the unpacked data set, got none; give it, or --page")
    if options.small:
        options.photos, options.costly_from = min(options.photos, 4), min(options.costly_from, 100)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", explain.ExplainWarning)  # maps without a positive value
    if not options.page:
        run(options)
    assets = options.results if options.small else ASSETS
    found = summary(options.results)
    assets.mkdir(parents=True, exist_ok=True)
    (assets / "planted.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"written to {assets / 'planted.json'}")
    for file in pictures(found, options.results, assets):
        print(f"written to {file}")
    board = ASSETS / "leaderboard.json"
    if not options.small and board.exists():
        PAGE.write_text(as_page(json.loads(board.read_text("utf-8")), found), "utf-8")
        print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
