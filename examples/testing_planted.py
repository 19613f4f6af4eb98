"""How often the assertions of `explain.testing` decide rightly, for networks of which it is known
what they use.

    python examples/testing_planted.py [--seeds 10] [--folder path/to/tiny-imagenet-200]

For each seed, two small networks learn to tell horizontal from vertical stripes. In the photos of
the first, a white square lies in the corner of all photos of one class: it uses the corner. In
those of the second, half of the photos of both classes have it: it ignores the corner. They are
tested on new photos that all bear the square.

With a folder of Tiny-ImageNet, the same is done on its photos, in a random corner of which a mark
was put. The model is the package's small one: with a detector of the mark added to the score of a
class, which uses the corner; with this corner blanked before anything else, which ignores it; and
as it is, which was never told to ignore what it does not know.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import explain
from explain import ExplainError
from explain.testing import assert_ignores, assert_uses

SIDE = 32
SQUARE = 6
REGION = (0, 0, SQUARE, SQUARE)
STEPS = 60
COUNTS = (10, 40)
ON_PHOTOS = 20
MARK = 12  # pixels of a side of the mark on Tiny-ImageNet's photos of 64


def stripes(count: int, seed: int, marked: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Photos of horizontal (0) and vertical (1) stripes, and their classes; some have a square in
    the corner."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    wave = torch.arange(SIDE) % 8 / 8
    both = torch.stack([wave[:, None].expand(SIDE, SIDE), wave.expand(SIDE, SIDE)])
    noise = torch.rand(count, 3, SIDE, SIDE, generator=generator)
    photos = 0.3 * both[labels][:, None] + 0.5 * noise
    which = marked(labels)
    photos[which, :, :SQUARE, :SQUARE] = 1
    return photos, labels


def trained(seed: int, marked: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 2),
    )
    photos, labels = stripes(128, seed, marked)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimiser.zero_grad()
        F.cross_entropy(model(photos), labels).backward()
        optimiser.step()
    return model.eval()


def verdict(check: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        check(*arguments, **options)
    except AssertionError:
        return "failed"
    except ExplainError:
        return "undecided"
    return "passed"


def on_stripes(seed: int, tally: Counter[tuple[str, ...]]) -> None:
    """Count the verdicts on the networks of one seed."""
    uses = trained(seed, lambda labels: labels == 0)
    ignores = trained(seed, lambda labels: torch.arange(len(labels)) % 4 < 2)
    photos, _ = stripes(max(COUNTS), 1000 + seed, lambda labels: labels >= 0)
    for count in COUNTS:
        for name, model in (("uses the corner", uses), ("ignores it", ignores)):
            for check in (assert_ignores, assert_uses):
                result = verdict(check, model, photos[:count].clone(), REGION, seed=seed)
                tally["stripes", name, str(count), check.__name__, result] += 1


class Planted(nn.Module):
    """The small model, with a detector of the mark beside it, or with a part blanked before."""

    def __init__(self, model: nn.Module, mark: torch.Tensor | None, box: Sequence[int] | None):
        super().__init__()
        self.model = model
        self.mark = mark
        self.box = box

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.box is not None:
            left, top, right, bottom = self.box
            x = x.clone()
            x[:, :, top:bottom, left:right] = 0
        scores = self.model(x)
        if self.mark is None:
            return scores
        weight = (self.mark - self.mark.mean()) / (self.mark - self.mark.mean()).norm()
        windows = F.unfold(x, self.mark.shape[1:])
        size = (windows - windows.mean(1, keepdim=True)).norm(dim=1).clamp(min=1e-6)
        likeness = (weight.flatten() @ windows / size).amax(1)  # 1 where the mark is
        added = 60 * (likeness - 0.8).clamp(min=0)
        return torch.cat([scores[:, :1] + added[:, None], scores[:, 1:]], 1)


def on_photos(seed: int, folder: Path, tally: Counter[tuple[str, ...]]) -> None:
    """Count the verdicts on photos with a mark in a corner."""
    generator = np.random.default_rng(seed)
    checks = np.kron(np.indices((4, 4)).sum(0) % 2, np.ones((MARK // 4, MARK // 4)))
    pixels = np.repeat((255 * checks)[..., None], 3, 2).astype(np.uint8)
    top, left = (generator.integers(0, 2, 2) * (64 - MARK)).tolist()
    files = sorted((folder / "val" / "images").iterdir())
    photos = []
    for number in generator.choice(len(files), ON_PHOTOS, replace=False).tolist():
        with Image.open(files[number]) as opened:
            photo = opened.convert("RGB")
        photo.paste(Image.fromarray(pixels), (left, top))
        photos.append(photo)
    plain = explain.Explainer("tiny", size=64, crop=1.0)
    x = torch.cat([plain.as_input(photo) for photo in photos])
    region = (left, top, left + MARK, top + MARK)
    mark = x[0, :, top : top + MARK, left : left + MARK]
    models = {
        "uses the corner": Planted(plain.model, mark, None),
        "ignores it": Planted(plain.model, None, region),
        "tiny as it is": plain.model,
    }
    for name, model in models.items():
        for check in (assert_ignores, assert_uses):
            result = verdict(check, model, x, region, seed=seed)
            tally["Tiny-ImageNet", name, str(ON_PHOTOS), check.__name__, result] += 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="the unpacked Tiny-ImageNet")
    options = parser.parse_args(arguments)
    tally: Counter[tuple[str, ...]] = Counter()
    for seed in range(options.seeds):
        on_stripes(seed, tally)
        if options.folder is not None:
            on_photos(seed, options.folder, tally)
    for case in sorted({key[:4] for key in tally}):
        counts = [f"{what} {tally[(*case, what)]}" for what in ("passed", "failed", "undecided")]
        kind, name, count, check = case
        print(f"{kind}, {count} photos, network {name}: {check}: {', '.join(counts)}")


if __name__ == "__main__":
    main()
