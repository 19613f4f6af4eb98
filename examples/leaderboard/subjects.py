"""What the table is measured on: four networks, and photos of which something is known, of three
kinds.

boxes     validation photos of Tiny-ImageNet with a box around the object: what people see, not what
a network uses planted   photos with a square mark that decides the class, in half of them with a
second mark of another class, and
          with decoys (examples/planted_evidence.py)
parts     rendered creatures, of which every set of parts was removed (examples/benchmarks/parts)

The networks are of four architectures: residual, transformer, plain (as VGG), mobile
(EfficientNet-Lite0). For boxes they are those that come along, and `plain` with 200 classes, whose
weights are given. For the other two kinds `learned` trains small versions, each in one to three
minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from explain.models import CenterCrop, Classifier, load
from explain.models.small_networks import SmallResNet, SmallTransformer

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "benchmarks" / "parts")]

import boxed_photos  # noqa: E402
import planted_evidence  # noqa: E402
import scenes  # noqa: E402
from dimensions import ALL, drops, shapley  # noqa: E402
from standings import rank_correlation as rank_correlation  # noqa: E402
from train import as_input, fit, training_scene  # noqa: E402

ARCHITECTURES = ("residual", "transformer", "plain", "mobile")
BUNDLED = {"residual": "tiny", "transformer": "tiny-transformer", "mobile": "efficientnet-lite0"}
TRUTHS = ("boxes", "planted", "parts")
MARKS = len(planted_evidence.PATTERNS)
FIRST_SCENE = 3_000_000
RATES = {"residual": 4e-3, "transformer": 1.5e-3, "plain": 2e-3, "mobile": 1e-3}
STEPS = {
    "planted": {"residual": 400, "transformer": 600, "plain": 400, "mobile": 150},
    "parts": {"residual": 1000, "transformer": 1000, "plain": 1000, "mobile": 300},
}
CLASSES = {"planted": planted_evidence.CLASSES + MARKS, "parts": scenes.CLASSES}


@dataclass(frozen=True)
class Subject:
    """A photo ``x`` ``(1, C, H, W)``, the class that is explained, and where its evidence or its
    object lies.

    ``parts`` ``(M, H, W)`` and ``worth`` ``(M,)``: places, and what each is worth to the network;
    one row of ``worth`` for each way to ask.
    """

    name: str
    x: torch.Tensor
    target: int
    mask: torch.Tensor
    parts: torch.Tensor | None = None
    worth: Mapping[str, Sequence[float]] = field(default_factory=dict)


# Networks


def plain(
    classes: int, widths: Sequence[int] = (24, 48, 48, 96, 96, 192, 192, 256)
) -> nn.Sequential:
    """Eight convolutions with max-pooling between them and two linear layers, without a
    shortcut."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip((3, *widths), widths, strict=False)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
        layers += [nn.MaxPool2d(2)] if number in (0, 2, 4, 6) else []
    head = [
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * widths[-1], 256),
        nn.ReLU(),
        nn.Linear(256, classes),
    ]
    return nn.Sequential(*layers, *head)


def small(architecture: str, classes: int) -> nn.Module:
    """A network for 64 pixels; the mobile one begins with what it learned of ImageNet."""
    if architecture == "residual":
        return SmallResNet(classes, 16, (64, 128, 192), (1, 1, 1))
    if architecture == "transformer":
        return SmallTransformer(classes, 64, (16, 64, 64), 96, 4, 3)
    if architecture == "plain":
        return plain(classes, (16, 32, 32, 64, 64, 96, 96, 128))
    model = load("efficientnet-lite0").model.requires_grad_(True)
    last = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)][-1]
    parent, _, own = last.rpartition(".")
    setattr(
        model.get_submodule(parent), own, nn.Linear(model.get_submodule(last).in_features, classes)
    )
    return model


def look() -> CenterCrop:
    """How photos of 64 pixels become inputs, as a whole."""
    found = load("tiny").preprocess
    assert isinstance(found, CenterCrop)
    return replace(found, side=64, crop=1.0)


def classifier_of(architecture: str, weights: Path, side: int) -> Classifier:
    """The network for photos with boxes, which sees the whole photo; the ImageNet model sees it at
    ``side`` pixels."""
    if architecture == "plain":
        model = plain(200)
        model.load_state_dict(torch.load(weights / "plain.pt", weights_only=True))
        return Classifier(
            model.eval().requires_grad_(False), look(), load("tiny").categories, "plain"
        )
    found = load(BUNDLED[architecture])
    own = found.preprocess
    assert isinstance(own, CenterCrop)
    return replace(
        found, preprocess=replace(own, crop=1.0, side=side if architecture == "mobile" else 64)
    )


def batches_of(
    truth: str, folder: Path, count: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of inputs and of wanted outputs, without an end."""
    size = planted_evidence.BATCH
    generator = torch.Generator().manual_seed(seed)
    if truth == "planted":
        photos, labels, _ = planted_evidence.loaded(folder, "train", look(), count)
        while True:
            rows = torch.randint(0, len(photos), (size,), generator=generator)
            yield planted_evidence.batch_of(photos[rows], labels[rows], MARKS, look(), generator)
    drawn = [training_scene(number + count * seed, False) for number in range(count)]
    x = as_input(np.stack([scenes.render(scene) for scene, _ in drawn]))
    wanted = torch.stack([w for _, w in drawn])
    while True:
        rows = torch.randint(0, count, (size,), generator=generator)
        yield x[rows], wanted[rows]


def learned(truth: str, architecture: str, seed: int, folder: Path, count: int = 4000) -> nn.Module:
    torch.manual_seed(seed)
    model = small(architecture, CLASSES[truth]).train()
    fit(
        model,
        batches_of(truth, folder, count, seed),
        STEPS[truth][architecture],
        RATES[architecture],
    )
    return model.eval().requires_grad_(False)


def learnt(truth: str, classifier: Classifier, folder: Path, most: int = 300) -> dict[str, float]:
    """What a network does on photos that it was not trained on, as shares of them."""
    if truth == "planted":
        photos, labels, _ = planted_evidence.loaded(folder, "val", look(), most)
        return planted_evidence.decided(classifier.model, photos, labels, MARKS, look())
    labels = torch.arange(most) % scenes.CLASSES
    drawn = [
        scenes.draw(label, FIRST_SCENE - most + number)
        for number, label in enumerate(labels.tolist())
    ]
    x = as_input(np.stack([scenes.render(scene) for scene in drawn]))
    with torch.inference_mode():
        return {"right": float((classifier.model(x).argmax(1) == labels).float().mean())}


def network(truth: str, architecture: str, seed: int, weights: Path, side: int) -> Classifier:
    """A network as it was trained, always the same object; of seed 0 where there is none of this
    seed."""
    known = (
        truth in ("boxes", "photos") or not (weights / f"{truth}-{architecture}-{seed}.pt").exists()
    )
    return _network(truth, architecture, 0 if known else seed, weights, side)


@cache
def _network(truth: str, architecture: str, seed: int, weights: Path, side: int) -> Classifier:
    if truth in ("boxes", "photos"):
        return classifier_of(architecture, weights, side)
    model = small(architecture, CLASSES[truth])
    model.load_state_dict(
        torch.load(weights / f"{truth}-{architecture}-{seed}.pt", weights_only=True)
    )
    return Classifier(model.eval().requires_grad_(False), look(), None, architecture)


# Photos


def filled(box: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """A box as truth values ``(H, W)``."""
    x0, y0, x1, y1 = (round(place) for place in box)
    found = torch.zeros(x.shape[2:], dtype=torch.bool)
    found[y0:y1, x0:x1] = True
    return found


def boxes(classifier: Classifier, folder: Path, known: Container[str] = ()) -> Iterator[Subject]:
    """Photos that the model gets right and whose box leaves something beside it, in a shuffled
    order."""
    for photo in boxed_photos.photos(folder, classifier, sys.maxsize):
        if Path(photo.name).stem not in known:
            yield Subject(Path(photo.name).stem, photo.x, photo.target, filled(photo.box, photo.x))


def planted(classifier: Classifier, folder: Path, known: Container[str] = ()) -> Iterator[Subject]:
    """Photos with one mark and two decoys, and in turn with two marks and one decoy, that the
    network finds."""
    photos, _, _ = planted_evidence.loaded(folder, "val", look(), 500)
    for number in count():
        if f"planted-{number}" in known:
            continue
        marks = [number % MARKS, (number + 1) % MARKS][: 1 + number % 2]
        generator = torch.Generator().manual_seed(5000 + number)
        photo = photos[number * 37 % len(photos)]
        scene = planted_evidence.planted(photo, marks, 3 - len(marks), look(), generator)
        target = planted_evidence.CLASSES + marks[0]
        with torch.inference_mode():
            found = float(classifier.model(scene.x[None]).softmax(1)[0, target])
        if found > 0.6 / len(marks):
            yield Subject(f"planted-{number}", scene.x[None], target, scene.marks[marks[0]])


def overlap(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Of all squares of a map ``(H, W)`` as large as a mark, that with the largest sum: its overlap
    with it (IoU)."""
    side = round(float(mask.sum()) ** 0.5)
    sums = F.avg_pool2d(values.double()[None, None], side, 1)[0, 0]
    top, left = divmod(int(sums.argmax()), sums.shape[1])
    shared = float(mask[top : top + side, left : left + side].sum())
    return shared / (2 * side * side - shared)


def wider(found: Mapping[str, Any]) -> torch.Tensor:
    """The masks of the parts, one pixel wider on all sides ``(5, H, W)``. What is hidden has
    none."""
    empty = np.zeros((scenes.SIDE, scenes.SIDE), bool)
    each = torch.from_numpy(np.stack([found.get(name, empty) for name in scenes.PARTS])).float()
    return F.max_pool2d(each[None], 3, 1, 1)[0] > 0


def parts(
    classifier: Classifier, folder: Path | None = None, known: Container[str] = ()
) -> Iterator[Subject]:
    """Creatures that the network gets right, and what each part is worth: measured by removing
    every set of them."""
    names = scenes.PARTS
    for number in count():
        if f"scene-{number}" in known:
            continue
        label = number % scenes.CLASSES
        scene = scenes.draw(label, FIRST_SCENE + number)
        every = [
            scene.without(*(p for i, p in enumerate(names) if not kept >> i & 1))
            for kept in range(ALL + 1)
        ]
        x = as_input(np.stack([scenes.render(each) for each in every]))
        with torch.inference_mode():
            logits = classifier.model(x).double()
        if int(logits[ALL].argmax()) != label:
            continue
        scores = logits[: ALL + 1, label].tolist()
        worth = {"shapley": shapley(scores).tolist(), "removal": drops(scores).tolist()}
        where = wider(scenes.masks(scene))
        yield Subject(
            f"scene-{number}", x[ALL : ALL + 1], label, where.any(0), where.float(), worth
        )


def folder_photos(
    classifier: Classifier, folder: Path, known: Container[str] = ()
) -> Iterator[Subject]:
    """Photos of ImageNet's classes at full size that the model gets right, in a shuffled order,
    without masks.

    A class is a folder, named by its number or by its WordNet id if there are all thousand; or a
    file's first word.
    """
    wnids = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith("n")
    )
    files = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png")
    )
    for number in np.random.default_rng(0).permutation(len(files)).tolist():
        file = files[number]
        if file.stem in known:
            continue
        named = file.name.split("_")[0] if file.parent == folder else file.parent.name
        target = wnids.index(named) if named in wnids and len(wnids) == 1000 else int(named)
        with Image.open(file) as opened:
            x = classifier.preprocess(opened.convert("RGB"))[None]
        with torch.inference_mode():
            right = int(classifier.model(x).argmax()) == target
        if right:
            yield Subject(file.stem, x, target, torch.zeros(x.shape[2:], dtype=torch.bool))


SOURCES = {"boxes": boxes, "planted": planted, "parts": parts, "photos": folder_photos}
