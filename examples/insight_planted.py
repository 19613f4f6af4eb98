"""Hide a shortcut in a class, run all photos, and see whether insight names it first, without being
told.

    python examples/insight_planted.py path/to/tiny-imagenet-200 path/to/marks-1.pt [--seeds 5]
    [--output FOLDER]

The model is that of examples/planted_evidence.py, which a mark decides: a square of twelve pixels.
Here the mark has no class of its own. Its score is joined to that of one of the ten classes: the
model takes a photo for that class because of what it shows, or because of the mark. For each seed,
another class has this shortcut, and a quarter of its photos bear the mark near one corner, as a
watermark would lie. A quarter of all photos bear a decoy, a square in the same colours that decides
nothing, near another corner.

The photos are explained with Grad-CAM, and `run.insight()` is asked: is the cluster of reasons that
stands out most the one of the marked photos? Then the finding is checked: the evidence is removed
from these photos, and the mark is put on photos of the other classes, in the same place. The
figures are printed and written to assets/insight/planted.json, with the mean maps of the clusters
of one seed. (The photos of the data set may not be published.)
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from planted_evidence import CLASSES, COLOURS, DECOYS, DOT, MARK, PATTERNS, SIDE, network
from torch import nn

import explain
from explain.insight import RunPhotos, removed
from explain.models import CenterCrop, load

ASSETS = Path(__file__).resolve().parent.parent / "assets" / "insight"
# top, left
CORNERS = ((2, 2), (2, SIDE - MARK - 2), (SIDE - MARK - 2, 2), (SIDE - MARK - 2, SIDE - MARK - 2))
JITTER = 2  # pixels by which marks lie elsewhere


class Shortcut(nn.Module):
    """Ten classes, one of which is also given for the mark: its score is the log of the sum of
    both."""

    def __init__(self, reader: nn.Module, of: int) -> None:
        super().__init__()
        self.reader = reader
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.reader(x)
        both = torch.logaddexp(scores[:, self.of], scores[:, CLASSES])
        own = torch.arange(CLASSES, device=x.device) == self.of
        return torch.where(own, both[:, None], scores[:, :CLASSES])


def pattern_of(rows: Sequence[Sequence[int]]) -> Image.Image:
    """A square of twelve pixels in the two colours of marks."""
    grid = np.kron(np.array(rows), np.ones((DOT, DOT)))[..., None] > 0
    pixels = np.where(grid, COLOURS[0], COLOURS[1])
    return Image.fromarray((255 * pixels).round().astype(np.uint8))


def photos_of(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """The validation photos of ten classes with the numbers of these, and the names of the
    classes."""
    wnids = (folder / "wnids.txt").read_text().split()
    chosen = wnids[:: len(wnids) // CLASSES][:CLASSES]
    words = dict(line.split("\t") for line in (folder / "words.txt").read_text().splitlines())
    rows = [
        line.split("\t")
        for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()
    ]
    number = {wnid: i for i, wnid in enumerate(chosen)}
    found = [
        (folder / "val" / "images" / row[0], number[row[1]]) for row in rows if row[1] in number
    ]
    return found, [words[wnid].split(",")[0] for wnid in chosen]


def marked(
    photos: Sequence[tuple[Path, int]], of: int, folder: Path, generator: np.random.Generator
) -> tuple[list[dict[str, Any]], set[str]]:
    """Write the photos, some with the mark or a decoy; return the list of them, and the names of
    the marked ones."""
    corner, other = generator.choice(4, 2, replace=False)
    own = [number for number, (_, label) in enumerate(photos) if label == of]
    with_mark = set(generator.choice(own, len(own) // 4, replace=False).tolist())
    with_decoy = set(generator.choice(len(photos), len(photos) // 4, replace=False).tolist())
    mark = pattern_of(PATTERNS["checks"])
    decoys = [pattern_of(rows) for rows in DECOYS.values()]
    rows = []
    names = set()
    for number, (path, label) in enumerate(photos):
        name = f"{number:04}.png"
        with Image.open(path) as opened:
            photo = opened.convert("RGB")
        if number in with_decoy:
            photo.paste(decoys[number % 2], _near(CORNERS[other], generator))
        if number in with_mark:
            photo.paste(mark, _near(CORNERS[corner], generator))
            names.add(name)
        photo.save(folder / name)
        rows.append({"path": name, "label": label})
    return rows, names


def _near(corner: tuple[int, int], generator: np.random.Generator) -> tuple[int, int]:
    """Left and top of a square near a corner."""
    top, left = np.array(corner) + generator.integers(-JITTER, JITTER + 1, 2)
    return int(left), int(top)


def taken_with_mark(
    made: explain.Explainer,
    photos: Sequence[tuple[Path, int]],
    of: int,
    generator: np.random.Generator,
) -> tuple[float, float]:
    """The share of a hundred photos of other classes that are taken for the class: as they are, and
    with the mark."""
    corner, _ = generator.choice(4, 2, replace=False)
    others = [path for path, label in photos if label != of]
    chosen = generator.choice(len(others), 100, replace=False)
    mark = pattern_of(PATTERNS["checks"])
    xs = []
    marked_xs = []
    for number in chosen.tolist():
        with Image.open(others[number]) as opened:
            photo = opened.convert("RGB")
        xs.append(made.as_input(photo))
        photo.paste(mark, _near(CORNERS[corner], generator))
        marked_xs.append(made.as_input(photo))
    with torch.inference_mode():
        taken = [made.model(torch.cat(each)).argmax(1) == of for each in (xs, marked_xs)]
    return int(taken[0].sum()) / 100, int(taken[1].sum()) / 100


def tried(folder: Path, weights: Path, seed: int, picture: Path | None) -> dict[str, Any]:
    """One seed: whether the first cluster of reasons is that of the marked photos."""
    photos, names = photos_of(folder)
    of = seed * 3 % CLASSES
    base = load("tiny")
    assert isinstance(base.preprocess, CenterCrop)
    wnids = (folder / "wnids.txt").read_text().split()
    reader = network(base, list(range(0, len(wnids), len(wnids) // CLASSES)), 1)
    reader.load_state_dict(torch.load(weights, weights_only=True))
    look = replace(base.preprocess, side=SIDE, crop=1.0)
    made = explain.Explainer(Shortcut(reader, of).eval(), preprocess=look, categories=names)
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        rows, with_mark = marked(photos, of, place, np.random.default_rng(seed))
        (place / "list.json").write_text(json.dumps(rows))
        run = explain.run(
            place / "list.json",
            made,
            "gradcam",
            output=place / "run.sqlite",
            workers=0,
            layer="reader.layer3",
        )
        found = run.insight()
        by_rank = [
            {
                "class": names.index(each.target),
                "photos": each.size,
                "stands out": round(each.stands_out, 3),
                "marked": sum(found.maps.names[row] in with_mark for row in each.rows.tolist()),
            }
            for each in found.reasons[:5]
        ]
        first = found.reasons[0]
        chosen = [(found.maps.names[row], found.maps.targets[row]) for row in first.rows.tolist()]
        taken = taken_with_mark(made, photos, of, np.random.default_rng(seed))
        removal = removed(RunPhotos(run, made), "gradcam", chosen, share=0.1, baseline="mean")
        if picture is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            found.pictures(photos=False)["reasons"].save(picture)  # the photos may not be shown
    explained = sum(
        found.maps.targets[i] == names[of]
        for i, name in enumerate(found.maps.names)
        if name in with_mark
    )
    return {
        "seed": seed,
        "class": of,
        "marked": len(with_mark),
        "taken for the class": explained,
        "clusters": by_rank,
        "first is the shortcut": by_rank[0]["class"] == of
        and 2 * by_rank[0]["marked"] > by_rank[0]["photos"],
        "removal": removal.to_dict(),
        "others that are taken for it": taken[0],
        "and with the mark": taken[1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("weights", type=Path, help="marks-1.pt of examples/planted_evidence.py")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ASSETS)
    options = parser.parse_args(arguments)
    found = []
    for seed in range(options.seeds):
        picture = options.output / "planted.png" if seed == 0 else None
        found.append(tried(options.folder, options.weights, seed, picture))
        print(json.dumps(found[-1]), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "planted.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
