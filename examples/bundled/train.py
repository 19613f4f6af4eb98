"""Train the network that is shipped with the package, on Tiny-ImageNet, on a CPU or a GPU.

    python examples/bundled/train.py path/to/tiny-imagenet-200 checkpoint.pt

It goes on from ``checkpoint.pt`` if that is there. `export.py` makes the shipped file from the
checkpoint.

Recipe: random resized crops (35-100 % of the area) and flips at a resolution that grows from 32 to
64 pixels, label smoothing 0.1, bfloat16 autocast, channels-last. The inner convolutions are trained
with Muon (K. Jordan and others, 2024): momentum whose update is made orthogonal by a Newton-Schulz
iteration, on filters kept at a fixed norm. The stem, the biases and the head are trained by SGD
with Nesterov momentum. The learning rate rises for a tenth of the steps and then falls linearly to
zero.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from data import SIDE, decode, training_files, validation_files
from muon import orthogonal
from torch import nn

from explain.models.small_networks import SmallResNet

STAGES = ((5, 32), (6, 40), (5, 48), (4, 64))  # epochs, pixels
BATCH = 256
MUON_RATE = 0.03
SGD_RATE = 0.3
WARM_UP = 0.1
MEAN = (0.480, 0.448, 0.398)
STD = (0.277, 0.269, 0.282)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates, for convolutions that a normalisation follows (their scale
    has no effect)."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                update = orthogonal(
                    parameter.grad.add(velocity, alpha=group["momentum"]).flatten(1)
                )
                parameter.mul_(len(parameter) ** 0.5 / parameter.norm())
                parameter.add_(update.reshape(parameter.shape), alpha=-group["lr"])


def initialise(model: nn.Module) -> None:
    """Kaiming's scale for convolutions; every block starts as its shortcut."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if name.endswith("bn3"):
            nn.init.zeros_(module.weight)


def optimizers(model: SmallResNet) -> list[torch.optim.Optimizer]:
    inner = [p for name, p in model.named_parameters() if p.ndim == 4 and name != "conv1.weight"]
    decayed = [model.conv1.weight, model.fc.weight]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": plain, "weight_decay": 0.0}]
    found = [
        Muon(inner, MUON_RATE),
        torch.optim.SGD(groups, lr=SGD_RATE, momentum=0.9, nesterov=True),
    ]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def random_crop(image: np.ndarray, pixels: int, random: np.random.Generator) -> np.ndarray:
    """Cut out 35-100 % of the area at an aspect ratio of 3:4 to 4:3, flip it half of the time, and
    resize it."""
    width = height = SIDE
    for _ in range(10):
        area = SIDE * SIDE * random.uniform(0.35, 1)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        tried = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if max(tried) <= SIDE:
            width, height = tried
            break
    top = random.integers(0, SIDE + 1 - height)
    left = random.integers(0, SIDE + 1 - width)
    cut = image[top : top + height, left : left + width]
    if random.random() < 0.5:
        cut = cut[:, ::-1]
    how = cv2.INTER_AREA if width > pixels else cv2.INTER_LINEAR
    return cv2.resize(cut, (pixels, pixels), interpolation=how)


def as_input(batch: np.ndarray, device: torch.device) -> torch.Tensor:
    x = torch.from_numpy(batch).to(device).permute(0, 3, 1, 2).float().div_(255)
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return ((x - mean) / std).contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
def accuracy(
    model: nn.Module, pixels: np.ndarray, labels: np.ndarray, device: torch.device
) -> float:
    model.eval()
    right = 0
    for start in range(0, len(pixels), 500):
        with torch.autocast(device.type, torch.bfloat16):
            found = model(as_input(pixels[start : start + 500], device)).argmax(1).cpu().numpy()
        right += int((found == labels[start : start + 500]).sum())
    model.train()
    return right / len(pixels)


def train(folder: Path, checkpoint: Path, device: torch.device) -> None:
    pixels, labels = decode(training_files(folder))
    held_out = decode(validation_files(folder))
    torch.manual_seed(0)
    model = SmallResNet()
    initialise(model)
    model.to(device, memory_format=torch.channels_last)
    solvers = optimizers(model)
    plan = [side for epochs, side in STAGES for _ in range(epochs)]
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(saved["model"])
        for solver, state in zip(solvers, saved["solvers"], strict=True):
            solver.load_state_dict(state)
        first = saved["epochs"]
    per_epoch = len(pixels) // BATCH
    total = per_epoch * len(plan)
    for epoch in range(first, len(plan)):
        started = time.perf_counter()
        losses = 0.0
        random = np.random.default_rng(epoch)
        order = random.permutation(len(pixels))
        for i in range(per_epoch):
            done = (epoch * per_epoch + i) / total
            for group in (group for solver in solvers for group in solver.param_groups):
                group["lr"] = group["peak"] * min(
                    max(done, 1e-3) / WARM_UP, (1 - done) / (1 - WARM_UP)
                )
            chosen = order[i * BATCH : (i + 1) * BATCH]
            x = as_input(
                np.stack([random_crop(pixels[j], plan[epoch], random) for j in chosen]), device
            )
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(
                logits.float(), torch.from_numpy(labels[chosen]).to(device), label_smoothing=0.1
            )
            model.zero_grad()
            loss.backward()
            for solver in solvers:
                solver.step()
            losses += loss.item()
        saved = {
            "model": model.state_dict(),
            "solvers": [s.state_dict() for s in solvers],
            "epochs": epoch + 1,
        }
        partial = checkpoint.with_suffix(".part")
        torch.save(saved, partial)
        partial.replace(checkpoint)
        print(
            f"epoch {epoch + 1}/{len(plan)} at {plan[epoch]} px: loss {losses / per_epoch:.3f}, "
            f"validation {accuracy(model, *held_out, device):.2%} at {SIDE} px, "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="the unpacked data set, with train/, val/, wnids.txt and words.txt",
    )
    parser.add_argument("checkpoint", type=Path, help="the file to write, and to go on from")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    train(arguments.folder, arguments.checkpoint, arguments.device)
