"""Four small networks that learn a rule of marks.py, each in seconds; trained ones are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from marks import batch
from torch import nn

from explain.models.small_networks import (
    ConvNormActivation,
    MBConv,
    SmallResNet,
    SmallTransformer,
)

ARCHITECTURES = ("plain", "residual", "mobile", "transformer")
RATES = {"plain": 3e-3, "residual": 4e-3, "mobile": 5e-3, "transformer": 2e-3}
STEPS = {"plain": 80, "residual": 80, "mobile": 100, "transformer": 120}
BATCH = 48
CHECKED = 200  # new images that say whether training goes on
ENOUGH = 0.95


@dataclass(frozen=True)
class Training:
    """How long a network is trained: on how many images, for how many steps at first, and how often
    again, each time twice as long, until it tells new images apart."""

    images: int = 2400
    steps: int | None = None
    repetitions: int = 4


TRAINING = Training()


def plain(side: int) -> nn.Sequential:
    """Five convolutions with max pooling between them, and two linear layers; no shortcut."""
    layers: list[nn.Module] = []
    inputs = 3
    for number, outputs in enumerate((12, 24, 24, 32, 48)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU())
        if number in (0, 2) or (number == 3 and side == 64):
            layers.append(nn.MaxPool2d(2))
        inputs = outputs
    layers.append(nn.AdaptiveAvgPool2d(2))
    layers.append(nn.Flatten())
    layers.append(nn.Linear(4 * inputs, 48))
    layers.append(nn.ReLU())
    layers.append(nn.Linear(48, 2))
    return nn.Sequential(*layers)


def mobile(side: int) -> nn.Sequential:
    """Inverted residual blocks with depthwise convolutions, as in EfficientNet-Lite."""
    return nn.Sequential(
        ConvNormActivation(3, 16, 3, 2),
        MBConv(16, 16, 3, 3, 2 if side == 64 else 1),
        MBConv(16, 24, 4, 3, 2),
        MBConv(24, 24, 4, 3, 1),
        MBConv(24, 32, 4, 3, 1),
        ConvNormActivation(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


def untrained(architecture: str, side: int) -> nn.Module:
    """A network for images of so many pixels; the last feature map has 8 x 8 positions, and the
    transformer a token for each 8 x 8 pixels."""
    if architecture == "plain":
        return plain(side)
    if architecture == "mobile":
        return mobile(side)
    if architecture == "residual" and side == 64:
        return SmallResNet(2, 16, (32, 48, 64), (1, 1, 2))
    if architecture == "residual":
        return SmallResNet(2, 16, (32, 64), (1, 3))
    return SmallTransformer(2, side, (12, 32, 48), 48, 4, 3)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that a network tells apart."""
    with torch.inference_mode():
        right = model(images).argmax(1) == labels
    return right.float().mean().item()


def fit(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int, rate: float
) -> None:
    """AdamW with a rate that rises for a fifth of the steps and then falls to zero."""
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.02)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.2)
    for _ in range(steps):
        rows = torch.randint(0, len(images), (BATCH,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        plan.step()
    model.eval()


def trained(
    kind: str, architecture: str, side: int, seed: int, training: Training = TRAINING
) -> nn.Module:
    """A network that learned a rule."""
    torch.manual_seed(seed)
    model = untrained(architecture, side)
    images, labels = batch(kind, side, "train", training.images, 1000 + seed)
    checked = batch(kind, side, "train", min(CHECKED, training.images), 2000 + seed)
    steps = training.steps or STEPS[architecture]
    for repetition in range(training.repetitions):
        fit(model, images, labels, steps * 2**repetition, RATES[architecture])
        if accuracy(model, *checked) >= ENOUGH:
            break
    return model.eval().requires_grad_(False)


def network(
    kind: str,
    architecture: str,
    side: int,
    seed: int,
    folder: Path,
    training: Training = TRAINING,
) -> nn.Module:
    """A network as it is kept in a folder; it is trained if it is not there."""
    file = folder / f"{kind}-{architecture}-{side}-{seed}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(trained(kind, architecture, side, seed, training).state_dict(), file)
    model = untrained(architecture, side)
    model.load_state_dict(torch.load(file, weights_only=True))
    return model.eval().requires_grad_(False)
