"""Plant a shortcut by training, find it in a run, repair the model in two ways, and measure both.

    python examples/repair_planted.py path/to/tiny-imagenet-200 [--seeds 5] [--weights FOLDER]
    [--output FOLDER]

For each seed, the small model is fine-tuned twice on 2,000 training photos of ten classes of
Tiny-ImageNet. In the first set, a class was collected badly: half of its photos have a mark in a
corner, and so have a tenth of all other photos, which are labelled as this class too. So the mark
decides. The second model never sees the mark: it is the reference. A quarter of all photos have
decoys in the colours of the mark, in another corner.

The validation photos of the ten classes, of which a quarter of one class have the mark, are
explained with Grad-CAM. The first cluster of `run.insight()` is repaired: at once, by a projection,
and by training. Neither is told what the mark is. The repaired models are then tested with the true
mark on 2,000 photos that no one has used before.

Weights and results of seeds that are in the folder are used again. The figures are printed, and
written to assets/insight/repair.json and docs/runs.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from insight_planted import ASSETS, CORNERS, JITTER, marked, photos_of
from insight_tiny import PAGE
from planted_evidence import BATCH, CLASSES, DECOYS, MARK, PATTERNS, SIDE, loaded, network, square
from torch import nn

import explain
from explain.insight import RunPhotos, repair
from explain.models import CenterCrop, load

TRAINED_ON = 2000
TESTED_ON = 2000
STEPS = 60
HOWS = ("project", "train")


def with_squares(
    x: torch.Tensor,
    which: Sequence[int],
    corner: int,
    pattern: str,
    look: CenterCrop,
    generator: np.random.Generator,
) -> torch.Tensor:
    """Photos ``(N, 3, H, W)``, some of which have a square near a corner."""
    x = x.clone()
    pixels = square({**PATTERNS, **DECOYS}[pattern], look)
    for number in which:
        top, left = (
            np.array(CORNERS[corner]) + generator.integers(-JITTER, JITTER + 1, 2)
        ).tolist()
        x[number, :, top : top + MARK, left : left + MARK] = pixels
    return x


def trained(x: torch.Tensor, labels: torch.Tensor, seed: int, file: Path) -> nn.Module:
    """The small model with a head for ten classes, fine-tuned; its first layers stay as they
    are."""
    torch.manual_seed(seed)
    model = network(load("tiny"), range(0, 200, 200 // CLASSES), 0)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.requires_grad_(False)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    body = [*model.layer2.parameters(), *model.layer3.parameters()]
    groups = [{"params": body, "lr": 1.5e-4}, {"params": model.fc.parameters(), "lr": 2e-3}]
    optimiser = torch.optim.AdamW(groups, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randint(0, len(x), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(x[rows]), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model.requires_grad_(False)


class Planted:
    """What is planted for a seed: the class, the corner, and the photos to train, run and test
    on."""

    def __init__(
        self, seed: int, photos: tuple[torch.Tensor, torch.Tensor], look: CenterCrop
    ) -> None:
        self.seed = seed
        self.of = seed * 3 % CLASSES
        self.look = look
        generator = np.random.default_rng(seed)
        self.corner, other = generator.choice(4, 2, replace=False).tolist()
        x, labels = photos
        per_class = len(x) // CLASSES
        first = torch.arange(len(x)) % per_class < TRAINED_ON // CLASSES
        self.test_x = x[~first]
        self.test_labels = labels[~first]
        x = x[first]
        self.labels = labels[first]
        decoys = generator.choice(len(x), len(x) // 4, replace=False).tolist()
        for number, name in enumerate(DECOYS):
            x = with_squares(x, decoys[number::2], other, name, look, generator)
        own = (self.labels == self.of).nonzero().flatten()
        others = (self.labels != self.of).nonzero().flatten()
        with_mark = [
            *generator.choice(own, len(own) // 2, replace=False).tolist(),
            *generator.choice(others, len(x) // 10, replace=False).tolist(),
        ]
        self.clean_x, self.marked_x = (
            x,
            with_squares(x, with_mark, self.corner, "checks", look, generator),
        )
        self.marked_labels = self.labels.clone()
        self.marked_labels[with_mark] = self.of

    def tested(self, model: nn.Module) -> dict[str, float]:
        """Accuracies on the photos that nothing else has used."""
        generator = np.random.default_rng(1000 + self.seed)
        everywhere = range(len(self.test_x))
        marked_x = with_squares(
            self.test_x, everywhere, self.corner, "checks", self.look, generator
        )
        with torch.inference_mode():
            plain, moved = (
                torch.cat([model(part).argmax(1) for part in x.split(100)])
                for x in (self.test_x, marked_x)
            )
        own = self.test_labels == self.of
        right = (plain == self.test_labels).double()
        return {
            "class with the mark": float((moved == self.test_labels)[own].double().mean()),
            "class without": float(right[own].mean()),
            "others with the mark": float((moved == self.test_labels)[~own].double().mean()),
            "others without": float(right[~own].mean()),
            "all without": float(right.mean()),
            "others with the mark taken for the class": float(
                (moved == self.of)[~own].double().mean()
            ),
        }


def tried(
    folder: Path,
    seed: int,
    how: str,
    photos: tuple[torch.Tensor, torch.Tensor],
    look: CenterCrop,
    weights: Path,
) -> dict[str, Any]:
    """One seed: is the shortcut found first, and what does a repair do?"""
    planted = Planted(seed, photos, look)
    model = trained(planted.marked_x, planted.marked_labels, seed, weights / f"marked-{seed}.pt")
    validation, names = photos_of(folder)
    made = explain.Explainer(model, preprocess=look, categories=names)
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        rows, with_mark = marked(validation, planted.of, place, np.random.default_rng(seed))
        (place / "list.json").write_text(json.dumps(rows))
        run = explain.run(
            place / "list.json", made, "gradcam", output=place / "run.sqlite", workers=0
        )
        first = run.insight().reasons[0]
        begun = time.process_time()
        repaired = repair(first, RunPhotos(run, made), how=how, steps=STEPS, seed=seed)
    marks = sum(name in with_mark for name in first.members)
    return {
        "seed": seed,
        "class": planted.of,
        "how": how,
        "first": {
            "class": names.index(first.target),
            "photos": first.size,
            "marked": marks,
            "stands out": round(first.stands_out, 3),
        },
        "found first": names.index(first.target) == planted.of and 2 * marks > first.size,
        "processor seconds": round(time.process_time() - begun),
        "repair": repaired.to_dict(),
        "after": planted.tested(repaired.model),
    }


def compared(
    seed: int, photos: tuple[torch.Tensor, torch.Tensor], look: CenterCrop, weights: Path
) -> dict[str, Any]:
    """One seed: the model before, and the one that never saw the mark."""
    planted = Planted(seed, photos, look)
    model = trained(planted.marked_x, planted.marked_labels, seed, weights / f"marked-{seed}.pt")
    never = trained(planted.clean_x, planted.labels, seed, weights / f"never-{seed}.pt")
    return {"before": planted.tested(model), "never saw the mark": planted.tested(never)}


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    """The goals, and how far they are met."""
    lines = [
        f"found first: {sum(each['project']['found first'] for each in found)} of {len(found)}"
    ]
    for how in HOWS:
        moved = []
        lost = []
        for each in found:
            before = each["models"]["before"]
            never = each["models"]["never saw the mark"]
            after = each[how]["after"]
            moved.append(
                [
                    one["others with the mark"] / never["others with the mark"]
                    for one in (before, after)
                ]
            )
            lost.append(100 * (before["all without"] - after["all without"]))
        old, new = zip(*moved, strict=True)
        seconds = max(each[how]["repair"]["seconds"] for each in found)
        processor = max(each[how]["processor seconds"] for each in found)
        lines.append(
            f"{how}: accuracy on moved marks {statistics.mean(old):.0%} of the reference before, "
            f"{statistics.mean(new):.0%} after (least {min(new):.0%}); {statistics.mean(lost):.1f} "
            "points lost without "
            f"marks (most {max(lost):.1f}); {seconds:.0f} s at most ({processor} s of a processor)"
        )
    return lines


def table(found: Sequence[dict[str, Any]]) -> str:
    """The table of docs/runs.md: for each model, means over the seeds, and the range."""
    models: dict[str, list[dict[str, float]]] = {}
    for seed in found:
        for name in ("before", "never saw the mark"):
            models.setdefault(name, []).append(seed["models"][name])
        for how in HOWS:
            models.setdefault(f"repaired: {how}", []).append(seed[how]["after"])
    head = (
        "model",
        "other classes with the mark",
        "other classes without",
        "the class with the mark",
        "the class without",
    )
    rows = [head, ("---",) * len(head)]
    for name, results in models.items():
        row = [name]
        for key in (
            "others with the mark",
            "others without",
            "class with the mark",
            "class without",
        ):
            shares = [each[key] for each in results]
            row.append(f"{statistics.mean(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})")
        rows.append(tuple(row))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--weights", type=Path, default=Path("repair-weights"), help="for weights and results"
    )
    parser.add_argument("--output", type=Path, default=ASSETS)
    options = parser.parse_args(arguments)
    usual = load("tiny").preprocess
    assert isinstance(usual, CenterCrop)
    look = replace(usual, side=SIDE, crop=1.0)
    photos = loaded(options.folder, "train", look, TRAINED_ON + TESTED_ON)[:2]
    options.weights.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = [{"seed": seed} for seed in range(options.seeds)]
    for stage in ("project", "models", "train"):
        for seed, results in enumerate(found):
            place = options.weights / f"seed-{seed}-{stage}.json"
            if not place.exists():
                made = (
                    compared(seed, photos, look, options.weights)
                    if stage == "models"
                    else tried(options.folder, seed, stage, photos, look, options.weights)
                )
                place.write_text(json.dumps(made))
            results[stage] = json.loads(place.read_text())
            print(stage, json.dumps(results[stage]), flush=True)
    print("\n".join(summary(found)))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "repair.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    before, rest = PAGE.read_text("utf-8").split("<!-- begin repair -->")
    after = rest.split("<!-- end repair -->")[1]
    PAGE.write_text(
        f"{before}<!-- begin repair -->\n{table(found)}\n<!-- end repair -->{after}", "utf-8"
    )


if __name__ == "__main__":
    main()
