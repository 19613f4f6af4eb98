"""Train the plain network of subjects.py on Tiny-ImageNet: an architecture for which no setting was
ever chosen.

    python examples/leaderboard/plain.py path/to/tiny-imagenet-200 WEIGHTS.pt [--epochs 2.5]

It learns from the labels and from the outputs of the small network that comes along. After 2.5
epochs, about 20 minutes on one busy core, it is right on 35 % of the validation photos.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import explain
from explain.models import load

sys.path.append(str(Path(__file__).resolve().parents[1] / "bundled"))

from data import decode, training_files, validation_files
from subjects import plain

# as of the small network
MEAN = (0.480, 0.448, 0.398)
STD = (0.277, 0.269, 0.282)
BATCH = 64
RATE = 3e-3
SHIFT = 6


def explainer(weights: Path) -> explain.Explainer:
    """The trained network, with the preparation and the names of the small one that comes along."""
    tiny = load("tiny")
    model = plain(200)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return explain.Explainer(model.eval(), tiny.categories, tiny.preprocess)


def as_input(pixels: np.ndarray, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Pixels ``(N, 64, 64, 3)`` as the input of the small network."""
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - mean) / std


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--epochs", type=float, default=2.5)
    options = parser.parse_args(arguments)
    teacher = load("tiny")
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    pixels, labels = decode(training_files(options.folder))
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = plain(200)
    steps = int(options.epochs * len(pixels) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.02)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.15)
    started = time.perf_counter()
    for step in range(steps):
        chosen = random.integers(len(pixels), size=BATCH)
        down, across = random.integers(-SHIFT, SHIFT + 1, 2)
        photos = np.roll(pixels[chosen], (down, across), (1, 2))
        x = as_input(photos[:, :, ::-1].copy() if random.random() < 0.5 else photos, mean, std)
        with torch.no_grad():
            wanted = (teacher.model(x) / 2).softmax(1)
        logits = model(x)
        soft = F.kl_div((logits / 2).log_softmax(1), wanted, reduction="batchmean") * 4
        loss = soft + 0.3 * F.cross_entropy(logits, torch.from_numpy(labels[chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plan.step()
        if step % 200 == 0:
            print(
                f"step {step}/{steps}: loss {loss.item():.3f}, "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
    model.eval()
    pixels, labels = decode(validation_files(options.folder))
    with torch.inference_mode():
        found = torch.cat(
            [
                model(as_input(pixels[i : i + 250], mean, std)).argmax(1)
                for i in range(0, len(pixels), 250)
            ]
        )
    print(f"right on {(found.numpy() == labels).mean():.1%} of the validation photos")
    torch.save(model.state_dict(), options.weights)


if __name__ == "__main__":
    main()
