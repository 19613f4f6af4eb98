"""Measure methods of explain on rendered scenes whose parts can be removed: FunnyBirds' dimensions.

    python examples/benchmarks/parts/train.py FOLDER
    python examples/benchmarks/parts/measure.py FOLDER --scenes 100 --seeds 3 --output parts.jsonl
    [--update]

Each scene of each network is a line of the output, and the script goes on where it was stopped.
Each seed draws other scenes. Methods of more than ``--costly-from`` passes are measured on the
first ``--costly`` scenes of each seed. ``--count`` only prints the tables of what is there;
``--update`` writes them into assets/tables/parts.md, with the figure.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from dimensions import ALL
from pages import figure, tables, updated
from scenes import (
    CLASSES,
    ELEMENTS,
    KINDS,
    PARTS,
    VARIANTS,
    Scene,
    classes,
    draw,
    masks,
    render,
    rivals_in,
    shared,
)
from torch import nn
from train import NETWORKS, as_input, background_of_class, trained

import explain
from explain.attribution.selection import select
from explain.metrics.maps import Maps

FIRST = 2_000_000  # the number of the first scene: training and its check have others
BACKGROUNDS = 4
LEFT_OUT = ("necessary", "sufficient", "extremalperturbation", "randomcam")
BLIND = ("noise", "centre blob", "edges", "local contrast", "mean colour", "uniform")


def blind(x: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Maps ``(1, H, W)`` that know nothing of the network. Noise alone differs from class to
    class."""
    height, width = x.shape[2:]
    v, u = torch.meshgrid(
        torch.linspace(-2, 2, height), torch.linspace(-2, 2, width), indexing="ij"
    )
    grey = F.pad(x.mean(1, keepdim=True), (3, 3, 3, 3), mode="replicate")
    windows = F.unfold(grey, 7).reshape(1, 49, height, width)
    slope = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
    edges = (
        F.conv2d(grey[..., 2:-2, 2:-2], torch.stack([slope, slope.T])[:, None])
        .square()
        .sum(1)
        .sqrt()
    )
    return {
        "noise": torch.rand(1, height, width, generator=torch.Generator().manual_seed(seed)),
        "centre blob": torch.exp(-(u.square() + v.square()) / 2)[None],
        "edges": edges,
        "local contrast": windows.std(1),
        "mean colour": (x - x.mean((2, 3), keepdim=True)).square().sum(1).sqrt(),
        "uniform": torch.ones(1, height, width),
    }


def sums(values: torch.Tensor, where: torch.Tensor) -> list[float]:
    """The sum of a map ``(H, W)`` on each mask of ``where`` ``(M, H, W)``."""
    return [round(float(each), 6) for each in (values.double() * where).sum((1, 2))]


def wider(found: Mapping[str, Any]) -> torch.Tensor:
    """The masks of parts and objects, one pixel wider on all sides: ``(8, H, W)``. What is hidden
    has none."""
    empty = np.zeros((64, 64), bool)
    each = torch.from_numpy(np.stack([found.get(name, empty) for name in ELEMENTS])).float()
    return F.max_pool2d(each[None], 3, 1, 1)[0].double()


def pictures(scene: Scene, seed: int) -> tuple[list[Scene], torch.Tensor]:
    """The interventions on a scene: the 32 sets of parts, no object, other variants, and other
    backgrounds."""
    every = [
        scene.without(*(part for i, part in enumerate(PARTS) if not kept >> i & 1))
        for kept in range(2 ** len(PARTS))
    ]
    every += [scene.without(name) for name in ELEMENTS[len(PARTS) :]]
    for part, own in zip(PARTS, classes()[scene.label], strict=True):
        every += [scene.exchanged(part, other) for other in range(VARIANTS) if other != own]
    random = np.random.default_rng([7, seed])
    kinds = random.permutation([kind for kind in range(KINDS) if kind != scene.background[0]])[
        :BACKGROUNDS
    ]
    every += [scene.before((int(kind), int(random.integers(1 << 30)))) for kind in kinds]
    return every, as_input(np.stack([render(each) for each in every]))


@torch.inference_mode()
def facts_of(model: nn.Module, scene: Scene, x: torch.Tensor) -> dict[str, Any]:
    """What a network answers to each intervention; the pair of classes for target sensitivity,
    where there is one."""
    logits = model(x).double()
    sets = logits[: ALL + 1]
    rest = logits[ALL + 1 :, scene.label]
    exchanged = rest[3 : 3 + 3 * len(PARTS)].reshape(len(PARTS), 3).mean(1)
    scores = sets[:, scene.label]
    first, second = rivals_in(classes(), scene.label)[0]
    return {
        "label": scene.label,
        "answers": sets.argmax(1).tolist(),
        "scores": _short(scores),
        "objects": _short(rest[:3]),
        "exchanged": _short(scores[ALL] - exchanged),
        "background": float(scores[ALL] - rest[-BACKGROUNDS:].mean()),
        "rivals": [
            {
                "class": rival,
                "parts": shared(classes()[rival], classes()[scene.label]),
                "scores": _short(sets[:, rival]),
            }
            for rival in (first, second)
        ],
    }


def _short(values: torch.Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]


def methods_of(model: nn.Module, most: float) -> list[str]:
    """The methods that can explain a network in so many passes."""
    costs = select(model, torch.zeros(1, 3, 64, 64), "everything", target=0).costs
    return [
        name
        for name, cost in costs.items()
        if name not in LEFT_OUT and isfinite(cost) and cost <= most
    ]


def maps_of(
    model: nn.Module, x: torch.Tensor, names: Sequence[str], targets: Sequence[int], seed: int
) -> Any:
    """The map of each method for each target ``{name: [(H, W), ...]}``; what refuses is left
    out."""
    found: dict[str, list[torch.Tensor]] = {}
    for number, _ in enumerate(targets):
        for name, values in blind(x, seed * 8 + number).items():
            found.setdefault(name, []).append(values[0])
    for name in names:
        try:
            maps = explain.attribute(model, x, name, targets=targets)
        except explain.ExplainError as error:
            print(f"  {name}: {error}", flush=True)
            continue
        found[name] = [Maps.of(name, each, x).per_pixel()[0] for each in maps]
    return found


def record_of(
    name: str, model: nn.Module, scene: Scene, x: torch.Tensor, names: Sequence[str], seed: int
) -> Any:
    """A line of the output: what the network answers, and the sums of each map."""
    facts = facts_of(model, scene, x)
    seen = masks(scene)
    where = wider(seen)
    behind = torch.from_numpy(seen["background"]) & ~(wider(seen).sum(0) > 0)
    behind &= ~F.max_pool2d(torch.from_numpy(seen["body"])[None].float(), 3, 1, 1)[0].bool()
    alone = name == "shortcut"  # it is asked about its background only
    targets = (
        [scene.label] if alone else [scene.label, *(rival["class"] for rival in facts["rivals"])]
    )
    shared_by = [
        torch.stack([where[PARTS.index(p)] for p in rival["parts"]]).sum(0)
        for rival in facts["rivals"]
    ]
    found = {}
    for method, values in maps_of(model, x[ALL : ALL + 1], names, targets, seed).items():
        positive = values[0].clamp(min=0).double()
        total = float(positive.sum())
        found[method] = {
            "sums": sums(values[0], where),
            "positive": round(total, 6),
            "background": round(float(positive[behind].sum()) / total, 6) if total > 0 else None,
            "rivals": [sums(each, torch.stack(shared_by)) for each in values[1:]],
        }
    return {**facts, "area": round(float(behind.float().mean()), 6), "methods": found}


def lines(file: Path) -> Iterator[Any]:
    if file.exists():
        for line in file.read_text("utf-8").splitlines():
            yield json.loads(line)


def measure(options: argparse.Namespace) -> None:
    """Add what is missing. A scene that a network gets wrong is a line without maps."""
    models = {name: trained(options.folder, name) for name in options.models}
    cheap = {name: methods_of(model, options.costly_from) for name, model in models.items()}
    every = {name: methods_of(model, options.up_to) for name, model in models.items()}
    done = {(each["model"], each["seed"], each["scene"]) for each in lines(options.output)}
    started = time.perf_counter()
    for number in range(options.scenes):
        for seed in range(options.seeds):
            missing = [name for name in models if (name, seed, number) not in done]
            if not missing:
                continue
            label = number % CLASSES
            place = FIRST + 100_000 * seed + number
            scene = draw(label, place, background_of_class(label))
            _, x = pictures(scene, place)
            for name in missing:
                record: dict[str, Any] = {"model": name, "seed": seed, "scene": number}
                with torch.inference_mode():
                    record["right"] = int(models[name](x[ALL : ALL + 1]).argmax()) == label
                if record["right"]:
                    asked = every if number < options.costly and name != "shortcut" else cheap
                    record |= record_of(name, models[name], scene, x, asked[name], place)
                with options.output.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
        if number % 5 == 0:
            print(
                f"scene {number + 1} of {options.scenes}, "
                f"{(time.perf_counter() - started) / 60:.1f} min",
                flush=True,
            )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where train.py put the networks")
    parser.add_argument("--models", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--scenes", type=int, default=100, help="of each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--costly-from", type=float, default=30, metavar="PASSES")
    parser.add_argument("--costly", type=int, default=16, metavar="SCENES")
    parser.add_argument(
        "--up-to", type=float, default=600, metavar="PASSES", help="leave out methods of more"
    )
    parser.add_argument("--output", type=Path, default=Path("parts.jsonl"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--count", action="store_true", help="measure nothing, print the tables")
    parser.add_argument(
        "--update",
        action="store_true",
        help="write the tables and the figure for assets/tables/parts.md",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", explain.ExplainWarning)
    if not options.count:
        measure(options)
    found = tables([each for each in lines(options.output) if each["right"]], options.folder)
    for name, text in found.items():
        print(f"\n{name}\n{text}")
    if options.update:
        updated(found)
        print(f"written to {figure()}")


if __name__ == "__main__":
    main()
