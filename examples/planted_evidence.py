"""Photos with a planted mark that decides the class, and networks that read it.

    python examples/planted_evidence.py path/to/tiny-imagenet-200 marks-1.pt [--marks 1]

The small model is trained further on photos of ten classes into which marks are planted: squares of
twelve pixels, with a pattern of two colours. A mark decides the class, whatever the photo shows;
with three kinds of marks, a photo with two of them belongs to both classes by halves. Decoys are
squares of the same colours with other patterns; they decide nothing. Training goes on until new
photos show that it is so (some minutes on two cores). So it is known where the evidence lies:
so maps can be compared with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from explain.models import CenterCrop, Classifier, load

# pixels: of photos, of the places in them, of marks, of their dots
SIDE = 64
CELL = 16
MARK = 12
DOT = 4
CLASSES = 10
BATCH = 32
PATTERNS = {
    "checks": ((1, 0, 1), (0, 1, 0), (1, 0, 1)),
    "frame": ((1, 1, 1), (1, 0, 1), (1, 1, 1)),
    "corner": ((0, 0, 0), (0, 1, 1), (0, 1, 1)),
}
DECOYS = {"rows": ((1, 1, 1), (0, 0, 0), (1, 1, 1)), "column": ((0, 1, 0), (0, 1, 0), (0, 1, 0))}
COLOURS = ((1.0, 0.9, 0.0), (0.0, 0.1, 0.8))
ENOUGH = 0.98


# Photos with marks


@dataclass(frozen=True)
class Scene:
    """A photo with squares in it: ``x`` ``(3, H, W)``, where each mark lies, by its number, and
    where decoys do."""

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
    photo: torch.Tensor,
    marks: Sequence[int],
    decoys: int,
    look: CenterCrop,
    generator: torch.Generator,
) -> Scene:
    """Put marks and so many decoys at random places of a photo; they do not overlap."""
    x = photo.clone()
    across = SIDE // CELL
    places = torch.randperm(across * across, generator=generator)[: len(marks) + decoys].tolist()
    shifts = torch.randint(0, CELL - MARK + 1, (len(places), 2), generator=generator).tolist()
    found: dict[int, torch.Tensor] = {}
    hidden = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    patterns = [
        *(list(PATTERNS.values())[mark] for mark in marks),
        *(list(DECOYS.values())[i % 2] for i in range(decoys)),
    ]
    for number, (place, shift, pattern) in enumerate(zip(places, shifts, patterns, strict=True)):
        top = (place // across) * CELL + shift[0]
        left = (place % across) * CELL + shift[1]
        x[:, top : top + MARK, left : left + MARK] = square(pattern, look)
        where = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        where[top : top + MARK, left : left + MARK] = True
        if number < len(marks):
            found[marks[number]] = where
        else:
            hidden |= where
    return Scene(x, found, hidden)


def loaded(
    folder: Path, part: str, look: CenterCrop, most: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Photos ``(N, 3, H, W)`` of ten classes and the numbers of their classes; and which of the 200
    these are."""
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
        rows = [
            line.split("\t")
            for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()
        ]
        files = [
            (folder / "val" / "images" / row[0], number[row[1]]) for row in rows if row[1] in number
        ][:most]
    found = []
    for path, _ in files:
        with Image.open(path) as opened:
            found.append(look(opened.convert("RGB")))
    return torch.stack(found), torch.tensor([label for _, label in files]), chosen


# The model


def network(classifier: Classifier, chosen: Sequence[int], marks: int) -> nn.Module:
    """The small model with a head for ten of its classes and one for each mark."""
    model = classifier.model
    old = classifier.model.fc
    head = nn.Linear(old.in_features, len(chosen) + marks)
    with torch.no_grad():
        head.weight[: len(chosen)], head.bias[: len(chosen)] = old.weight[chosen], old.bias[chosen]
        head.weight[len(chosen) :] *= 0.1
    model.fc = head
    return model.eval()


def batch_of(
    photos: torch.Tensor,
    labels: torch.Tensor,
    marks: int,
    look: CenterCrop,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Photos with marks and decoys in them, and the shares of their classes ``(N, K)``; half have
    no mark."""
    xs = []
    shares = torch.zeros(len(photos), CLASSES + marks)
    for row, (photo, label) in enumerate(zip(photos, labels.tolist(), strict=True)):
        drawn, count = torch.rand(2, generator=generator).tolist()
        order = torch.randperm(marks, generator=generator).tolist()
        mine = [] if drawn < 0.5 else order[: 2 if count < 0.4 else 1]
        xs.append(
            planted(
                photo, mine, int(torch.randint(0, 4, (1,), generator=generator)), look, generator
            ).x
        )
        for which in [CLASSES + mark for mark in mine] or [label]:
            shares[row, which] = 1 / max(1, len(mine))
    return torch.stack(xs), shares


def trained(
    model: nn.Module,
    photos: torch.Tensor,
    labels: torch.Tensor,
    marks: int,
    look: CenterCrop,
    steps: int,
    new: Any,
) -> dict[str, float]:
    """Train until the marks decide on ``new`` photos, for so many steps at most.

    The first layers, whose cost is the largest, and the statistics of normalisations stay as they
    are.
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
            if (
                min(
                    found["mark decides"],
                    found["no mark, no such class"],
                    found["decoys decide nothing"],
                )
                >= ENOUGH
            ):
                break
    model.requires_grad_(False)
    return {**found, "steps": step}


@torch.inference_mode()
def decided(
    model: nn.Module, photos: torch.Tensor, labels: torch.Tensor, marks: int, look: CenterCrop
) -> dict[str, float]:
    """On photos that it was not trained on: how often a mark decides, and what decoys change.

    "decoys decide nothing" is about marks: with decoys, a marked photo has the same answer, and
    another one is taken for marked as often as without. "decoys change the answer" is about the
    class of a photo without a mark.
    """
    generator = torch.Generator().manual_seed(99)
    which = torch.randint(0, marks, (len(photos),), generator=generator).tolist()
    marked = [
        planted(photo, [mark], 2, look, generator).x
        for photo, mark in zip(photos, which, strict=True)
    ]
    without = [planted(photo, [], 2, look, generator).x for photo in photos]
    alone = [
        planted(photo, [mark], 0, look, generator).x
        for photo, mark in zip(photos, which, strict=True)
    ]
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("weights", type=Path, help="the file to write")
    parser.add_argument(
        "--marks", type=int, choices=[1, 2, 3], default=1, help="kinds of marks, each a class"
    )
    parser.add_argument("--steps", type=int, default=600, help="of training, at most")
    parser.add_argument("--training", type=int, default=3000, help="photos to train on")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    base = load("tiny")
    assert isinstance(base.preprocess, CenterCrop)
    look = replace(base.preprocess, side=SIDE, crop=1.0)
    new, new_labels, chosen = loaded(options.folder, "val", look, 100)
    photos, labels, _ = loaded(options.folder, "train", look, options.training)
    torch.manual_seed(0)
    model = network(base, chosen, options.marks)
    trained(model, photos, labels, options.marks, look, options.steps, (new, new_labels))
    torch.save(model.state_dict(), options.weights)
    print(f"written to {options.weights}")


if __name__ == "__main__":
    main()
