"""Photos of Tiny-ImageNet with planted marks (examples/planted_evidence.py), and networks that read
them: what examples/verdict_right.py checks maps on.

    python examples/leaderboard/subjects.py path/to/tiny-imagenet-200 WEIGHTS

trains a network of each architecture, in one to three minutes: residual, transformer, plain (as
VGG), mobile (EfficientNet-Lite0). Each is kept in the folder WEIGHTS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path

import torch
from scores import best_squares
from torch import nn

from explain.models import CenterCrop, Classifier, load
from explain.models.small_networks import SmallResNet, SmallTransformer

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "benchmarks" / "parts")]

import planted_evidence  # noqa: E402
from dimensions import rank_correlation as rank_correlation  # noqa: E402
from train import fit  # noqa: E402

MARKS = len(planted_evidence.PATTERNS)
CLASSES = planted_evidence.CLASSES + MARKS
RATES = {"residual": 4e-3, "transformer": 1.5e-3, "plain": 2e-3, "mobile": 1e-3}
STEPS = {"residual": 400, "transformer": 600, "plain": 400, "mobile": 150}


@dataclass(frozen=True)
class Subject:
    """A photo ``x`` ``(1, C, H, W)``, the class that is explained, and where its evidence lies."""

    name: str
    x: torch.Tensor
    target: int
    mask: torch.Tensor


# Networks


def plain(
    classes: int, widths: Sequence[int] = (24, 48, 48, 96, 96, 192, 192, 256)
) -> nn.Sequential:
    """Eight convolutions with max-pooling between them and two linear layers, without a
    shortcut."""
    layers: list[nn.Module] = []
    inputs = 3
    for number, outputs in enumerate(widths):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU())
        if number % 2 == 0:
            layers.append(nn.MaxPool2d(2))
        inputs = outputs
    layers.append(nn.AdaptiveAvgPool2d(2))
    layers.append(nn.Flatten())
    layers.append(nn.Linear(4 * inputs, 256))
    layers.append(nn.ReLU())
    layers.append(nn.Linear(256, classes))
    return nn.Sequential(*layers)


def small(architecture: str) -> nn.Module:
    """A network for 64 pixels; the mobile one begins with what it learned of ImageNet."""
    if architecture == "residual":
        return SmallResNet(CLASSES, 16, (64, 128, 192), (1, 1, 1))
    if architecture == "transformer":
        return SmallTransformer(CLASSES, 64, (16, 64, 64), 96, 4, 3)
    if architecture == "plain":
        return plain(CLASSES, (16, 32, 32, 64, 64, 96, 96, 128))
    model = load("efficientnet-lite0").model.requires_grad_(True)
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    parent, _, last = linear[-1].rpartition(".")
    features = model.get_submodule(linear[-1]).in_features
    setattr(model.get_submodule(parent), last, nn.Linear(features, CLASSES))
    return model


def look() -> CenterCrop:
    """How photos of 64 pixels become inputs, as a whole."""
    preprocess = load("tiny").preprocess
    assert isinstance(preprocess, CenterCrop)
    return replace(preprocess, side=64, crop=1.0)


def batches(folder: Path, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of inputs and of wanted outputs, without an end."""
    generator = torch.Generator().manual_seed(seed)
    photos, labels, _ = planted_evidence.loaded(folder, "train", look(), 4000)
    while True:
        rows = torch.randint(0, len(photos), (planted_evidence.BATCH,), generator=generator)
        yield planted_evidence.batch_of(photos[rows], labels[rows], MARKS, look(), generator)


def train(architecture: str, seed: int, folder: Path) -> nn.Module:
    torch.manual_seed(seed)
    model = small(architecture).train()
    fit(model, batches(folder, seed), STEPS[architecture], RATES[architecture])
    return model.eval().requires_grad_(False)


@cache
def network(truth: str, architecture: str, seed: int, weights: Path, side: int) -> Classifier:
    """A network as it was trained, always the same object."""
    model = small(architecture)
    file = weights / f"{truth}-{architecture}-{seed}.pt"
    model.load_state_dict(torch.load(file, weights_only=True))
    return Classifier(model.eval().requires_grad_(False), look(), None, architecture)


# Photos


def planted(classifier: Classifier, folder: Path) -> Iterator[Subject]:
    """Photos with one mark and two decoys, and in turn with two marks and one decoy, that the
    network finds."""
    photos, _, _ = planted_evidence.loaded(folder, "val", look(), 500)
    for number in count():
        marks = [number % MARKS, (number + 1) % MARKS][: 1 + number % 2]
        generator = torch.Generator().manual_seed(5000 + number)
        photo = photos[number * 37 % len(photos)]
        scene = planted_evidence.planted(photo, marks, 3 - len(marks), look(), generator)
        target = planted_evidence.CLASSES + marks[0]
        with torch.inference_mode():
            probability = float(classifier.model(scene.x[None]).softmax(1)[0, target])
        if probability > 0.6 / len(marks):
            yield Subject(f"planted-{number}", scene.x[None], target, scene.marks[marks[0]])


def overlap(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Of all squares of a map ``(H, W)`` as large as a mark, that with the largest sum: its overlap
    with it (IoU)."""
    return best_squares(values, mask, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("weights", type=Path, help="the folder for the networks' weights")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    photos, labels, _ = planted_evidence.loaded(options.folder, "val", look(), 300)
    options.weights.mkdir(parents=True, exist_ok=True)
    for architecture in STEPS:
        file = options.weights / f"planted-{architecture}-0.pt"
        if not file.exists():
            torch.save(train(architecture, 0, options.folder).state_dict(), file)
        model = network("planted", architecture, 0, options.weights, 64).model
        shares = planted_evidence.decided(model, photos, labels, MARKS, look())
        figures = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        print(f"{architecture}: {figures}", flush=True)


if __name__ == "__main__":
    main()
