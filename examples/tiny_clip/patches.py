"""Which patches of a photo are similar to its text? Four answers of tiny-clip, against the boxes of
Tiny-ImageNet.

    python examples/tiny_clip/patches.py tiny-imagenet-200/ [--photos 300]

"tokens" reads what the last block gives for each patch, as `explain.lens` does. "values" reads what
the last attention takes from each patch, without what goes around it, as MaskCLIP does (Zhou, Loy
and Dai, ECCV 2022). Only photos count that the model names right, and whose box has a tenth to six
tenths of the photo. Printed are the share of pairs of a patch in the box and one outside in which
that in the box has more (0.5 is chance), and how often the largest patch lies in the box; chance is
then the share that boxes have of a photo.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import explain
from explain.hooks import Replace, capture, intervene
from explain.targets import Text

BLOCK = "image_tower.layers.4"


def of_values(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What the last attention takes from each token alone: each looks at itself."""
    attention = f"{BLOCK}.self_attention"
    alone = Replace(
        f"{attention}:pattern", lambda weights: torch.eye(weights.shape[-1]).expand_as(weights)
    )
    with (
        torch.no_grad(),
        intervene(model, [alone]),
        capture(model, [attention], gradients=False) as seen,
    ):
        model.encode_image(x)
    found: torch.Tensor = seen.of(attention).activation  # type: ignore[union-attr]
    return found


def of_tokens(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What the last block gives."""
    with torch.no_grad(), capture(model, [BLOCK], gradients=False) as seen:
        model.encode_image(x)
    found: torch.Tensor = seen.of(BLOCK).activation  # type: ignore[union-attr]
    return found


def similarity(
    read: Callable[[Any, torch.Tensor], torch.Tensor], model: Any, x: torch.Tensor, text: str
) -> torch.Tensor:
    """The cosine of each patch and a text ``(8, 8)``."""
    with torch.no_grad():
        patches = F.normalize(
            model.image_projection(model.image_tower.ln(read(model, x)))[0, 1:], dim=-1
        )
        return (
            patches @ F.normalize(model.encode_text(model.tokenizer([text])), dim=-1)[0]
        ).reshape(8, 8)


def by_method(name: str, model: Any, x: torch.Tensor, text: str) -> torch.Tensor:
    return explain.attribute(model, x, name, target=Text(text)).values[0]


MAPS: dict[str, Callable[[Any, torch.Tensor, str], torch.Tensor]] = {
    "tokens": lambda *given: similarity(of_tokens, *given),
    "values": lambda *given: similarity(of_values, *given),
    "`gradeclip`": lambda *given: by_method("gradeclip", *given),
    "`gradcam`": lambda *given: by_method("gradcam", *given),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Tiny-ImageNet")
    parser.add_argument("--photos", type=int, default=300, help="how many are tried")
    options = parser.parse_args()
    rows = [
        line.split()
        for line in (options.folder / "val" / "val_annotations.txt").read_text().splitlines()
    ]
    lines = (line.split("\t") for line in (options.folder / "words.txt").read_text().splitlines())
    names = {number: name.split(",")[0] for number, name in lines}
    known = sorted({row[1] for row in rows})
    explainer = explain.Explainer(
        "tiny-clip", categories=[f"a photo of a {names[each]}" for each in known]
    )
    model = explainer.model
    sums = dict[str, list[tuple[float, float]]]()
    boxed = list[float]()
    for file, label, *edges in random.Random(0).sample(rows, options.photos):
        x = explainer.as_input(str(options.folder / "val" / "images" / file))
        x0, y0, x1, y1 = map(int, edges)
        middle = torch.arange(8) * 8 + 4
        inside = ((middle >= y0) & (middle < y1))[:, None] & ((middle >= x0) & (middle < x1))
        with torch.no_grad():
            right = int(model(x)["logits"].argmax()) == known.index(label)
        if not right or not 0.1 < float(inside.float().mean()) < 0.6:
            continue
        boxed.append(float(inside.float().mean()))
        for name, read in MAPS.items():
            found = read(model, x, f"a photo of a {names[label]}")
            pairs = found[inside][:, None] - found[~inside]
            more = float((pairs > 0).float().mean() + (pairs == 0).float().mean() / 2)
            sums.setdefault(name, []).append((more, float(inside.flatten()[found.argmax()])))
    print(f"{len(boxed)} photos, whose boxes have {sum(boxed) / len(boxed):.0%} of them\n")
    print("| map | more in the box | largest patch in the box |\n|---|---|---|")
    for name, of_photos in sums.items():
        more, hits = torch.tensor(of_photos).mean(0).tolist()
        print(f"| {name} | {more:.2f} | {hits:.0%} |")


if __name__ == "__main__":
    main()
