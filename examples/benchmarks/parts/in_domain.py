"""Score maps by the in-domain single deletion score, on a network that has seen photos with covered
squares.

    python examples/benchmarks/parts/train.py FOLDER --models covered --photos
    path/to/tiny-imagenet-200 python examples/benchmarks/parts/in_domain.py FOLDER
    path/to/tiny-imagenet-200 --photos 100 --output idsds.jsonl

For each photo, the rank correlation of the sums of a map on 16 squares with how much the score of
the class falls when each square is covered with the mean colour. Photos are of the validation part,
in a shuffled order that is always the same; those that the network gets right, with no square
covered. The same is done with the network as it comes, to which covered photos are new. Each photo
is a line of the output, and the script goes on where it was stopped. ``--count`` prints the table,
``--update`` writes it into assets/tables/parts.md.

After: R. Hesse, S. Schaub-Meyer, S. Roth, Benchmarking the attribution quality of vision models,
NeurIPS 2024.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dimensions import mean_of, rank_correlation
from measure import lines, maps_of, methods_of
from pages import BLIND, cell, listed, styled, updated
from torch import nn
from train import GRID, cover, trained

import explain
from explain.models import load

sys.path.append(str(Path(__file__).resolve().parents[2] / "bundled"))

NETWORKS = ("covered", "tiny")
REFERENCE = "each square covered"


def squares(values: torch.Tensor) -> list[float]:
    """The sum of a map ``(H, W)`` on each of the 16 squares, row by row.

    >>> squares(torch.ones(8, 8))[:2]
    [4.0, 4.0]
    """
    side = values.shape[-1] // GRID
    return values.double().reshape(GRID, side, GRID, side).sum((1, 3)).flatten().tolist()


@torch.inference_mode()
def drops(model: nn.Module, x: torch.Tensor, target: int) -> list[float]:
    """How much the score of a photo ``(1, C, H, W)`` falls when each square is covered."""
    every = torch.arange(-1, GRID * GRID)
    scores = model(cover(x.expand(len(every), -1, -1, -1), every))[:, target].double()
    return (scores[0] - scores[1:]).tolist()


def score(
    model: nn.Module, x: torch.Tensor, target: int, methods: Sequence[str], seed: int
) -> dict[str, float]:
    """The score of each method's map of a photo, and of control maps."""
    truth = drops(model, x, target)
    maps = maps_of(model, x, methods, [target], seed)
    found = {name: rank_correlation(squares(values[0]), truth) for name, values in maps.items()}
    return {name: round(value, 6) for name, value in found.items()}


def measure(options: argparse.Namespace) -> None:
    from data import decode, validation_files

    known = load("tiny")
    look = known.preprocess
    models = {"covered": trained(options.folder, "covered"), "tiny": known.model}
    cheap, every = (methods_of(known.model, most) for most in (options.costly_from, options.up_to))
    every = [name for name in every if name in cheap or name in (options.costly_methods or every)]
    files = validation_files(options.photos_of)
    order = np.random.default_rng(0).permutation(len(files))
    pixels, labels = decode([files[i] for i in order[: 4 * options.photos]])
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (look.mean, look.std))
    done = {(each["model"], each["photo"]) for each in lines(options.output)}
    count = 0
    for number, label in enumerate(labels.tolist()):
        x = (
            torch.from_numpy(pixels[number : number + 1]).permute(0, 3, 1, 2).float() / 255 - mean
        ) / std
        with torch.inference_mode():
            right = all(int(model(x).argmax()) == label for model in models.values())
        if not right or count == options.photos:
            continue
        count += 1
        for name in NETWORKS:
            if (name, number) in done:
                continue
            record = {"model": name, "photo": number}
            chosen = every if count <= options.costly else cheap
            record["scores"] = score(models[name], x, label, chosen, number)
            with options.output.open("a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
        if count % 10 == 0:
            print(f"photo {count} of {options.photos}", flush=True)


def above(scores: Sequence[Mapping[str, float]], name: str) -> bool:
    """Whether a method is better than every control map, by the mean difference on the same
    photos."""
    differences = [
        mean_of([each[name] - each[other] for each in scores if name in each]) for other in BLIND
    ]
    return all(each["low"] > 0 for each in differences)


def table(records: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """The scores on both networks, and what the networks reach."""
    by = {name: [each["scores"] for each in records if each["model"] == name] for name in NETWORKS}
    found = {
        network: {
            name: mean_of([s[name] for s in scores if name in s])
            for name in {n for s in scores for n in s}
        }
        for network, scores in by.items()
    }
    own = found["covered"]
    other = found["tiny"]
    order = sorted(own, key=lambda name: (name in BLIND, -own[name]["mean"]))
    kept = [name for name in order if name not in BLIND and above(by["covered"], name)]
    both = [name for name in order if name not in BLIND and name in other]
    alike = rank_correlation(
        [own[name]["mean"] for name in both], [other[name]["mean"] for name in both]
    )
    facts = json.loads((folder / "covered.json").read_text("utf-8"))
    rows = [
        "- Accuracy on 2,000 validation photos, whole and with one square covered: "
        f"{facts['accuracy before']:.1%} and "
        f"{facts['covered, before']:.1%} before, {facts['accuracy']:.1%} and "
        f"{facts['covered']:.1%} after "
        f"{facts['minutes']:.0f} minutes of further training.",
        f"- {len(by['covered'])} photos that both networks get right.",
        f"- Better than every control map: {listed(kept)}.",
        f"- The orders of the methods on the two networks correlate by {alike:.2f}.",
        "",
        "| map | photos | has seen covered photos | as it comes |",
        "|---|---|---|---|",
        f"| **{REFERENCE}** | {len(by['covered'])} | 1 | 1 |",
    ]
    rows += [
        f"| {styled(n)} | {own[n]['scenes']} | {cell(own[n])} | {cell(other.get(n, {}))} |"
        for n in order
    ]
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where train.py put the network")
    parser.add_argument("photos_of", type=Path, metavar="PHOTOS", help="an unpacked Tiny-ImageNet")
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--costly-from", type=float, default=30, metavar="PASSES")
    parser.add_argument(
        "--costly", type=int, default=30, metavar="PHOTOS", help="for methods of more passes"
    )
    parser.add_argument(
        "--up-to", type=float, default=600, metavar="PASSES", help="leave out methods of more"
    )
    parser.add_argument("--costly-methods", nargs="+", metavar="NAME", help="only these of them")
    parser.add_argument("--output", type=Path, default=Path("idsds.jsonl"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--count", action="store_true", help="measure nothing, print the table")
    parser.add_argument(
        "--update", action="store_true", help="write the table into assets/tables/parts.md"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", explain.ExplainWarning)
    if not options.count:
        measure(options)
    found = table(list(lines(options.output)), options.folder)
    print(found)
    if options.update:
        updated({"parts-idsds": found})


if __name__ == "__main__":
    main()
