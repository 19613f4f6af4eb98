"""Which maps of words are right? Measured on pictures of which it is known what each word is about.

    python examples/answers/table.py [--pictures 30]

Only pictures count that the model describes without a mistake.

For each word that names a color or a shape, the table has the share of the map's magnitude in the
box of its shape (against that in the other shape's box), how often the largest field lies in it,
and the share of the photo in the word.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from shapes import COLORS, PATCH, PROMPT, SHAPES, SIDE, draw, load_shapes, pixels, whole_answers

import explain
from explain.targets import Answer

METHODS = {
    "inputxgradient": "inputxgradient",
    "integratedgradients": "integratedgradients(steps=16)",
    "attnlrp": "attnlrp",
    "rollout": "rollout",
    "gradientrollout": "gradientrollout",
    "cheferattribution": "cheferattribution",
    "gradeclip": "gradeclip",
    "gradcam": "gradcam",
    "occlusion": f"occlusion(window={PATCH}, stride={PATCH})",
    "random": "randomcam",
}


def fields(a: explain.Attribution) -> torch.Tensor:
    """The magnitude of a map on the grid of patches ``(8, 8)``."""
    if a.layer is not None:
        return a.values[0].clamp(min=0)
    places = a.values[0].sum(0) if a.values.ndim == 4 else a.values[0]
    if len(places) == SIDE // PATCH:
        return places
    return torch.nn.functional.avg_pool2d(places[None], PATCH)[0].abs()


def inside(box: tuple[int, int, int, int]) -> torch.Tensor:
    """Which patches a box touches ``(8, 8)``."""
    mask = torch.zeros(SIDE // PATCH, SIDE // PATCH)
    x0, y0, x1, y1 = (edge // PATCH for edge in box)
    mask[y0 : y1 + 1, x0 : x1 + 1] = 1
    return mask


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=30)
    count = parser.parse_args().pictures
    model = load_shapes()
    prompt = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    sums: dict[str, list[torch.Tensor]] = {name: [] for name in METHODS}
    shares: dict[str, list[float]] = {}
    described = (
        draw(seed) for seed in range(10**6) if whole_answers(model, range(seed, seed + 1)) == 1
    )
    for scene in itertools.islice(described, count):
        inputs: dict[str, Any] = {"pixel_values": pixels(scene.image)[None], "input_ids": prompt}
        words = scene.answer.split()
        named = [i for i, word in enumerate(words) if word in COLORS or word in SHAPES]
        every = [Answer(scene.answer, word=i, words=True) for i in range(len(words))]
        for i, a in enumerate(
            explain.attribute(model, inputs, "integratedgradients(steps=16)", targets=every)
        ):
            kind = "color" if words[i] in COLORS else "shape" if words[i] in SHAPES else words[i]
            kind = "second a" if kind == "a" and i else kind
            shares.setdefault(kind, []).append(float(a.shares["pixel_values"]))
        for name, method in METHODS.items():
            targets = [Answer(scene.answer, word=i) for i in named]
            for i, a in zip(
                named, explain.attribute(model, inputs, method, targets=targets), strict=True
            ):
                own = scene.boxes[i]
                other = next(box for box in scene.boxes if box is not None and box != own)
                assert own is not None
                found = fields(a)
                mine = inside(own)
                whole = found.sum().clamp(min=1e-12)
                hit = mine.flatten()[found.argmax()]
                sums[name].append(
                    torch.stack(
                        [(found * mine).sum() / whole, (found * inside(other)).sum() / whole, hit]
                    )
                )
    print(
        "| method | in the word's shape | in the other shape | largest field in the shape "
        "|\n|---|---|---|---|"
    )
    for name, rows in sums.items():
        own_share, other_share, hits = torch.stack(rows).mean(0).tolist()
        print(f"| `{name}` | {own_share:.0%} | {other_share:.0%} | {hits:.0%} |")
    print("\n| word | share of the photo |\n|---|---|")
    for kind, found_shares in shares.items():
        print(f"| {kind} | {sum(found_shares) / len(found_shares):.0%} |")


if __name__ == "__main__":
    main()
