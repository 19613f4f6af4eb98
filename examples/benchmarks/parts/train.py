"""Train the networks that measure.py explains, on rendered scenes or on covered photos.

    python examples/benchmarks/parts/train.py FOLDER [--models resnet transformer shortcut]
    [--small] python examples/benchmarks/parts/train.py FOLDER --models covered --photos
    path/to/tiny-imagenet-200

resnet, transformer   learn the class of whole creatures and of creatures with parts missing, so
                      that a removed part is nothing new to them. Where what is left fits several
                      classes, the wanted output is shared by them.
shortcut              a residual network whose training scenes have one kind of background for each
class covered               the small model that comes along, trained further on photos of which
half have one of 16 squares
                      covered with the mean colour

Each takes less than ten minutes on one busy core. Weights and what they reach on new scenes or
photos go to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scenes import CLASSES, KINDS, OBJECTS, PARTS, Scene, consistent, draw, render
from torch import nn

from explain.models import load
from explain.models.small_networks import SmallResNet, SmallTransformer

sys.path.append(str(Path(__file__).resolve().parents[2] / "bundled"))

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: SmallResNet(CLASSES, 16, (64, 128, 192), (1, 1, 1)),
    "transformer": lambda: SmallTransformer(CLASSES, 64, (16, 64, 64), 96, 4, 3),
    "shortcut": lambda: SmallResNet(CLASSES, 16, (64, 128, 192), (1, 1, 1)),
}
RATES = {"resnet": 4e-3, "transformer": 1.5e-3, "shortcut": 4e-3, "covered": 1.5e-4}
EPOCHS = {"resnet": 7, "transformer": 5, "shortcut": 4}
SCENES = {"resnet": 6000, "transformer": 6000, "shortcut": 2400}
PHOTOS = 8000
BATCH = 32
FIRST_NEW = 1_000_000
GRID = 4  # squares along each side of a photo


def as_input(pictures: np.ndarray[Any, Any]) -> torch.Tensor:
    """Pictures ``(N, 64, 64, 3)`` as inputs ``(N, 3, 64, 64)``: 0 is middle grey."""
    return (
        torch.from_numpy(np.asarray(pictures))
        .permute(0, 3, 1, 2)
        .float()
        .div_(255)
        .sub_(0.5)
        .div_(0.25)
    )


def background_of_class(label: int) -> int:
    """The kind of background that the shortcut gives to a class."""
    return label * 5 % KINDS


def training_scene(number: int, shortcut: bool) -> tuple[Scene, torch.Tensor]:
    """A scene, of which half have parts missing and a third have objects missing, and the wanted
    output."""
    random = np.random.default_rng([9, number])
    label = number % CLASSES
    scene = draw(label, number, background_of_class(label) if shortcut else None)
    if random.random() < 0.5:
        scene = scene.without(*random.permutation(PARTS)[: random.integers(1, len(PARTS) + 1)])
    if random.random() < 1 / 3:
        scene = scene.without(*random.permutation(OBJECTS)[: random.integers(1, len(OBJECTS) + 1)])
    fitting = [label] if shortcut else consistent(scene.parts)
    wanted = torch.zeros(CLASSES)
    wanted[fitting] = 1 / len(fitting)
    return scene, wanted


def fit(
    model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int, rate: float
) -> None:
    """AdamW with a rate that rises for a tenth of the steps and then falls to zero."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.02)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        x, wanted = next(batches)
        loss = F.cross_entropy(model(x), wanted, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        plan.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"  step {step} of {steps}: loss {loss.item():.3f}", flush=True)


def train_on_scenes(name: str, count: int, epochs: int) -> tuple[nn.Module, dict[str, float]]:
    torch.manual_seed(0)
    model = NETWORKS[name]()
    drawn = [training_scene(number, name == "shortcut") for number in range(count)]
    pictures = np.stack([render(scene) for scene, _ in drawn])
    wanted = torch.stack([each for _, each in drawn])

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = np.random.default_rng(0)
        while True:
            order = random.permutation(count)
            for start in range(0, count - BATCH + 1, BATCH):
                rows = order[start : start + BATCH]
                yield as_input(pictures[rows]), wanted[rows]

    fit(model.train(), batches(), epochs * (count // BATCH), RATES[name])
    return model.eval(), reached(model, 10 if count < 1000 else 320, name == "shortcut")


@torch.inference_mode()
def reached(model: nn.Module, count: int, shortcut: bool) -> dict[str, float]:
    """Shares of new scenes that the model gets right: whole ones, and with one part missing a class
    that fits."""

    def answers(scenes: list[Scene]) -> torch.Tensor:
        batches = [scenes[i : i + 100] for i in range(0, len(scenes), 100)]
        return torch.cat(
            [model(as_input(np.stack([render(s) for s in batch]))).argmax(1) for batch in batches]
        )

    random = np.random.default_rng(0)
    labels = [number % CLASSES for number in range(count)]
    whole = [
        draw(label, FIRST_NEW + n, background_of_class(label) if shortcut else None)
        for n, label in enumerate(labels)
    ]
    missing = [scene.without(str(random.choice(PARTS))) for scene in whole]
    other = [scene.before((int(random.integers(KINDS)), n)) for n, scene in enumerate(whole)]
    right = answers(whole) == torch.tensor(labels)
    fits = [
        int(found) in consistent(s.parts)
        for found, s in zip(answers(missing), missing, strict=True)
    ]
    kept = answers(other) == torch.tensor(labels)
    found = {"accuracy": right.float().mean().item(), "one part missing": float(np.mean(fits))}
    found["another background"] = kept.float().mean().item()
    return found


# Photos with a covered square


def cover(x: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Photos with one of 16 squares set to zero, which is the mean colour; -1 leaves a photo as it
    is."""
    side = x.shape[-1] // GRID
    found = x.clone()
    for row, square in enumerate(squares.tolist()):
        if square >= 0:
            top = square // GRID * side
            left = square % GRID * side
            found[row, :, top : top + side, left : left + side] = 0
    return found


def train_on_photos(folder: Path, count: int) -> tuple[nn.Module, dict[str, float]]:
    """The small model, trained further; normalisations keep their statistics, and the first layers
    stay as they are."""
    from data import decode, training_files, validation_files

    known = load("tiny")
    model = known.model
    look = known.preprocess
    files = training_files(folder)
    random = np.random.default_rng(0)
    pixels, labels = decode([files[i] for i in random.permutation(len(files))[:count]])
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (look.mean, look.std))

    def prepared(rows: np.ndarray[Any, Any]) -> torch.Tensor:
        return (torch.from_numpy(rows).permute(0, 3, 1, 2).float() / 255 - mean) / std

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, count - BATCH + 1, BATCH):
            x = prepared(pixels[start : start + BATCH])
            flipped = torch.from_numpy(random.random(len(x)) < 0.5)
            x = torch.where(flipped[:, None, None, None], x.flip(3), x)
            squares = random.integers(0, GRID * GRID, len(x))
            squares[random.random(len(x)) < 0.5] = -1
            yield (
                cover(x, torch.from_numpy(squares)),
                torch.from_numpy(labels[start : start + BATCH]),
            )

    held_out, answers = decode(validation_files(folder)[:: 5 if count >= PHOTOS else 200])

    @torch.inference_mode()
    def accuracy(covered: bool) -> float:
        right = 0
        random = np.random.default_rng(1)
        for start in range(0, len(held_out), 200):
            x = prepared(held_out[start : start + 200])
            squares = torch.from_numpy(random.integers(0, GRID * GRID, len(x)))
            found = model(cover(x, squares) if covered else x).argmax(1).numpy()
            right += int((found == answers[start : start + 200]).sum())
        return right / len(held_out)

    model.eval()
    found = {"accuracy before": accuracy(False), "covered, before": accuracy(True)}
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    fit(model, batches(), count // BATCH, RATES["covered"])
    return model, {**found, "accuracy": accuracy(False), "covered": accuracy(True)}


def trained(folder: Path, name: str) -> nn.Module:
    """A network that was trained before."""
    model = load("tiny").model if name == "covered" else NETWORKS[name]()
    model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    return model.eval().requires_grad_(False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where weights go")
    parser.add_argument(
        "--models", nargs="+", choices=[*NETWORKS, "covered"], default=list(NETWORKS)
    )
    parser.add_argument("--photos", type=Path, help="an unpacked Tiny-ImageNet, for covered")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args(arguments)
    if "covered" in options.models and options.photos is None:
        parser.error(
            "--photos must be an unpacked Tiny-ImageNet for the model covered, got none; give its "
            "folder"
        )
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        started = time.perf_counter()
        print(name, flush=True)
        if name == "covered":
            model, facts = train_on_photos(options.photos, BATCH if options.small else PHOTOS)
        else:
            model, facts = train_on_scenes(
                name, BATCH if options.small else SCENES[name], 1 if options.small else EPOCHS[name]
            )
        facts["minutes"] = (time.perf_counter() - started) / 60
        torch.save(model.state_dict(), options.folder / f"{name}.pt")
        facts = {key: round(value, 4) for key, value in facts.items()}
        (options.folder / f"{name}.json").write_text(json.dumps(facts) + "\n", "utf-8")
        print(f"  {', '.join(f'{key} {value:.3g}' for key, value in facts.items())}", flush=True)


if __name__ == "__main__":
    main()
