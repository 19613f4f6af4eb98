"""Check the search for the smallest evidence where the right result is known.

    python examples/evidence_checks.py [path/to/tiny-imagenet-200] [--photos 20] [--seeds 5]

**Two marks, either of which is enough.** A small network is trained for each seed to tell photos of
noise with a mark (checks or a frame) from photos with decoys in the same colours, or with nothing.
Test photos have both marks. `Sufficient(4, reasons=2)` has to find one set on each: its 16 squares
hold a mark each, since a part of a mark may be enough, too. Both are found in a photo if one set
touches one mark, and the other set the other one.

**All sets of at most 12 regions.** On photos that the small model gets right, cut into 9 squares, a
quadtree of 10 cells, and 11 and 12 rectangles, the sizes of the sets are compared with those that a
plain loop over all sets finds; and so is the search that is used for more regions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from smallest_evidence import photos_of
from torch import nn

import explain
from explain.methods import Necessary, Quadtree, Squares, Sufficient
from explain.methods import evidence as search

SIDE = 48
CELL = 12
MARKS = {"checks": ((1, 0, 1), (0, 1, 0), (1, 0, 1)), "frame": ((1, 1, 1), (1, 0, 1), (1, 1, 1))}
DECOYS = {"rows": ((1, 1, 1), (0, 0, 0), (1, 1, 1)), "corner": ((0, 0, 0), (0, 1, 1), (0, 1, 1))}
COLORS = torch.tensor([[1.5, 1.2, -1.5], [-1.5, -1.2, 1.5]])
ENOUGH = 0.99
MOST_STEPS = 1500
TESTED = 20


def square(pattern: Any) -> torch.Tensor:
    """A pattern in two colours: ``(3, 9, 9)``."""
    return COLORS[torch.tensor(pattern).repeat_interleave(3, 0).repeat_interleave(3, 1)].movedim(
        -1, 0
    )


def scene(
    squares: list[torch.Tensor], generator: torch.Generator
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A photo of smooth noise with squares in it, and where each of them lies ``(H, W)``."""
    x = F.interpolate(torch.randn(1, 3, 12, 12, generator=generator), SIDE, mode="bilinear")[0]
    across = SIDE // CELL
    places = []
    for cell, pixels in zip(
        torch.randperm(across**2, generator=generator).tolist(), squares, strict=False
    ):
        down, right = torch.randint(0, CELL - 8, (2,), generator=generator).tolist()
        top = cell // across * CELL + down
        left = cell % across * CELL + right
        x[:, top : top + 9, left : left + 9] = pixels
        places.append(torch.zeros(SIDE, SIDE, dtype=torch.bool))
        places[-1][top : top + 9, left : left + 9] = True
    return x, places


def batch(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Photos and their classes: half of them have a mark and a decoy, a quarter two decoys, a
    quarter is pale noise."""
    marks, decoys = ([square(each) for each in kind.values()] for kind in (MARKS, DECOYS))
    photos = []
    for number in range(count):
        first, other = torch.randint(0, 2, (2,), generator=generator).tolist()
        x, _ = scene([(marks if number % 2 else decoys)[first], decoys[other]], generator)
        photos.append(
            scene([], generator)[0] * torch.rand(1, generator=generator) if number % 4 == 0 else x
        )
    return torch.stack(photos), torch.arange(count) % 2


def trained(seed: int) -> tuple[nn.Module, float]:
    """A network that tells photos with a mark, and its accuracy on new photos."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 9),
        nn.ReLU(),
        nn.Conv2d(24, 24, 1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 2),
    )
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    accuracy = 0.0
    for step in range(1, MOST_STEPS + 1):
        x, labels = batch(32, generator)
        loss = F.cross_entropy(model(x), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            x, labels = batch(400, generator)
            with torch.no_grad():
                accuracy = float((model(x).argmax(1) == labels).float().mean())
            if accuracy >= ENOUGH:
                break
    return model.eval().requires_grad_(False), accuracy


def planted(seed: int) -> tuple[float, float]:
    """The accuracy of the network, and the share of photos of which both marks are found as
    separate reasons."""
    model, accuracy = trained(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    found = 0
    for _ in range(TESTED):
        x, places = scene([square(each) for each in MARKS.values()], generator)
        sets = explain.attribute(
            model, x[None], Sufficient(SIDE // CELL, "zero", reasons=2), target=1
        ).sets  # type: ignore[arg-type]
        assert sets is not None
        touched = [[bool((each.mask & place).any()) for place in places] for each in sets[0]]
        found += sorted(touched) == [[False, True], [True, False]]
    return accuracy, found / TESTED


def all_sets(
    model: nn.Module, x: torch.Tensor, labels: torch.Tensor, target: int
) -> tuple[int | None, int | None]:
    """How many regions the smallest set has that is enough, and that is needed, by a plain loop
    over all sets."""
    count = int(labels.max()) + 1
    sets = torch.tensor(
        [[number >> region & 1 for region in range(count)] for number in range(2**count)]
    ).bool()
    with torch.inference_mode():
        masks = (part[:, labels][:, None] for part in sets.split(64))
        stays = torch.cat([model(x * each).argmax(1) == target for each in masks])
    enough = sets[stays].sum(1)
    needed = count - sets[~stays].sum(1)
    return (int(enough.min()) if len(enough) else None, int(needed.min()) if len(needed) else None)


def rectangles(size: tuple[int, int], count: int) -> torch.Tensor:
    """Three rows of four rectangles, of which the last ones are one region if fewer are asked for:
    ``(H, W)``."""
    down, across = (
        torch.arange(side) * parts // side for side, parts in zip(size, (3, 4), strict=True)
    )
    return (down[:, None] * 4 + across).clamp(max=count - 1)


def exhaustive(folder: Path, count: int) -> None:
    """Print how often the sizes are those of a plain loop."""
    explainer = explain.Explainer("tiny")
    model = explainer.model
    cases: dict[int, list[tuple[bool, bool, bool]]] = {}
    for _, target, path in photos_of(folder, count):
        x = explainer.as_input(path)
        with torch.inference_mode():
            if int(model(x).argmax()) != target:
                continue
        height, width = x.shape[2:]
        for regions in (
            Squares(3),
            Quadtree(10),
            *(rectangles((height, width), each) for each in (11, 12)),
        ):
            labels = regions if isinstance(regions, torch.Tensor) else regions(x)[0]
            for kind, wanted in zip(
                (Sufficient, Necessary), all_sets(model, x, labels, target), strict=True
            ):
                results = []
                for limit in (search.EXHAUSTIVE, 0):
                    with patch.object(search, "EXHAUSTIVE", limit):
                        sets = explain.attribute(
                            model, x, kind(regions, "zero"), target=target
                        ).sets  # type: ignore[arg-type]
                    assert sets is not None
                    results.append(
                        (None if not sets[0] else len(labels[sets[0][0].mask].unique()), sets[0])
                    )
                (size, found), (reached, _) = results
                smallest = all(each.proof == "smallest" for each in found)
                cases.setdefault(len(labels.unique()), []).append(
                    (size == wanted, smallest, reached == wanted)
                )
    for count, found in sorted(cases.items()):
        agree, smallest, reached = (sum(each) for each in zip(*found, strict=True))
        print(
            f"{count} regions: {agree} of {len(found)} sizes are those of a plain loop, {smallest} "
            "are proved; "
            f"the search for more regions has {reached}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--photos", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        accuracy, share = planted(seed)
        print(
            f"two marks, seed {seed}: accuracy {accuracy:.1%}, both found in {share:.0%} of "
            f"{TESTED}",
            flush=True,
        )
    if options.folder is not None:
        exhaustive(options.folder, options.photos)


if __name__ == "__main__":
    main()
