"""Train the small transformer on what `prepare.py` computed, on a CPU.

    python examples/tiny_transformer/train.py path/to/tiny-imagenet-200 work/ checkpoint.pt

It goes on from ``checkpoint.pt`` if that is there. `export.py` makes the shipped file from the
checkpoint.

Recipe: the stem stays as it is, and the transformer learns from its feature maps. The wanted output
is a mean of the class and of the teachers' probabilities. While the rate is constant, each image
keeps a quarter of its tokens, drawn at random, which takes a quarter of the time; in the last
``--decay`` steps the rate falls linearly to zero, with half of the tokens and in the end with all.
Up to there a longer training is the same, so that it can go on from such a checkpoint with more
``--steps``. The matrices inside the blocks are trained with Muon (K. Jordan and others, 2024),
everything else with Adam.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from prepare import Stem, as_input, run, stem_of_tiny
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from explain.models import load
from explain.models.small_networks import SmallTransformer

sys.path.append(str(Path(__file__).resolve().parents[1] / "bundled"))

from data import decode, validation_files
from muon import orthogonal

BATCH = 256
TOKENS = 64
MUON_RATE = 0.02
ADAM_RATE = 2e-3
WARM_UP = 100
# of the wanted output, where they teach; the rest is the class's
SHARES = {"tiny": 0.35, "efficientnet-lite0": 0.25}
SAVED_EVERY = 50
MEASURED_EVERY = 250


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates, for matrices; those that hold several are cut into
    squares."""

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                update = parameter.grad.add(velocity, alpha=group["momentum"])
                rows, columns = update.shape
                # query, key and value
                pieces = update.split(columns) if rows == 3 * columns else (update,)
                made = torch.cat(
                    [orthogonal(piece, 5) * max(1, len(piece) / columns) ** 0.5 for piece in pieces]
                )
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(made, alpha=-group["lr"])


def optimizers(model: SmallTransformer) -> list[torch.optim.Optimizer]:
    inner = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inner}
    outer = [p for p in learned(model) if id(p) not in chosen]
    groups = [
        {"params": [p for p in outer if p.ndim in (2, 4)], "weight_decay": 0.05},
        {"params": [p for p in outer if p.ndim not in (2, 4)], "weight_decay": 0.0},
    ]
    found = [Muon(inner, MUON_RATE), torch.optim.AdamW(groups, lr=ADAM_RATE, betas=(0.9, 0.98))]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def learned(model: SmallTransformer) -> list[nn.Parameter]:
    """Return the parameters behind the stem."""
    stem = ("conv1.", "bn1.", "layer1.", "layer2.")
    return [p for name, p in model.named_parameters() if not name.startswith(stem)]


def initialise(model: SmallTransformer) -> None:
    """Small normal weights; every block starts as its shortcut."""
    for block in model.layers:
        for matrix in (block.self_attention.in_proj_weight, block.mlp[0].weight):
            nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
        for matrix in (block.self_attention.out_proj.weight, block.mlp[2].weight):
            nn.init.zeros_(matrix)
        for bias in (block.self_attention.in_proj_bias, block.self_attention.out_proj.bias):
            nn.init.zeros_(bias)
    nn.init.normal_(model.class_token, std=0.02)
    nn.init.zeros_(model.head.weight)


class Features:
    """The stem's feature maps as the transformer is trained on them: each channel with mean 0 and
    deviation 1."""

    def __init__(self, folder: Path) -> None:
        self.kept = np.load(folder / "features.npy", mmap_mode="r")
        self.scale = torch.from_numpy(np.load(folder / "scale.npy"))
        some = self.plain(self.kept[:: max(1, len(self.kept) // 1000)]).flatten(0, 1)
        self.mean, self.deviation = some.mean(0), some.std(0)

    def plain(self, kept: np.ndarray) -> torch.Tensor:
        """Undo the square roots and the scale."""
        return torch.from_numpy(np.array(kept)).float().div_(255).square_().mul_(self.scale)

    def normal(self, maps: torch.Tensor) -> torch.Tensor:
        return (maps - self.mean) / self.deviation

    def batch(self, chosen: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """Return some images' maps ``(N, T, C)`` at ``places`` ``(N, T)``."""
        return self.normal(self.plain(self.kept[chosen[:, None], places]))


def logits_of(
    model: SmallTransformer, maps: torch.Tensor, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logits from normal maps ``(N, T, C)`` of some tokens, at ``places`` ``(N, T)``, or
    of all."""
    tokens = F.linear(maps, model.conv_proj.weight[:, :, 0, 0], model.conv_proj.bias)
    where = model.pos_embedding[0, 1:]
    tokens = tokens + (where if places is None else where[places])
    first = (model.class_token + model.pos_embedding[:, :1]).expand(len(maps), -1, -1)
    out: torch.Tensor = model.head(model.ln(model.layers(torch.cat([first, tokens], dim=1)))[:, 0])
    return out


def wanted(folder: Path, labels: np.ndarray) -> torch.Tensor:
    """Return the probabilities ``(N, 200)`` to learn."""
    found = torch.zeros(len(labels), 200)
    left = 1.0
    for name, share in SHARES.items():
        if (folder / f"{name}.npy").exists():
            found += share * torch.from_numpy(np.load(folder / f"{name}.npy")).float().softmax(1)
            left -= share
    found[torch.arange(len(labels)), torch.from_numpy(labels)] += left
    return found.half()


@torch.inference_mode()
def accuracy(model: SmallTransformer, maps: torch.Tensor, labels: torch.Tensor) -> float:
    right = 0
    for start in range(0, len(maps), 250):
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model, maps[start : start + 250])
        right += int((logits.argmax(1) == labels[start : start + 250]).sum())
    return right / len(maps)


def held_out(folder: Path, features: Features, every: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maps and labels of every fifth validation image."""
    pixels, labels = decode(validation_files(folder)[::every])
    stem = Stem()
    seen = load("tiny").preprocess
    maps = [
        run(stem, as_input(pixels[i : i + 250], seen)).flatten(2).transpose(1, 2)
        for i in range(0, len(pixels), 250)
    ]
    return features.normal(torch.cat(maps)), torch.from_numpy(labels)


def rate(step: int, steps: int, decay: int) -> float:
    """Return the share of the highest rate: rising, constant, falling to zero."""
    return min(1.0, (step + 1) / WARM_UP, (steps - step) / decay)


def kept(step: int, steps: int, decay: int) -> int:
    """Return how many tokens of an image a step sees: a quarter, half while the rate falls, all in
    the end."""
    left = (steps - step) / decay
    return TOKENS // 4 if left > 1 else TOKENS // 2 if left > 0.2 else TOKENS


def train(folder: Path, work: Path, checkpoint: Path, steps: int, decay: int) -> None:
    labels = np.load(work / "labels.npy")
    features = Features(work)
    targets = wanted(work, labels)
    measured = held_out(folder, features)
    torch.manual_seed(0)
    model = SmallTransformer()
    stem_of_tiny(model)
    initialise(model)
    solvers = optimizers(model)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for solver, state in zip(solvers, saved["solvers"], strict=True):
            solver.load_state_dict(state)
        first = saved["steps"]
    per_epoch = len(labels) // BATCH
    started = time.perf_counter()
    losses = []
    for step in range(first, steps):
        for group in (group for solver in solvers for group in solver.param_groups):
            group["lr"] = group["peak"] * rate(step, steps, decay)
        epoch, place = divmod(step, per_epoch)
        chosen = np.random.default_rng(epoch).permutation(len(labels))[
            place * BATCH : (place + 1) * BATCH
        ]
        random = np.random.default_rng((1, step))
        tokens = kept(step, steps, decay)
        places = random.permuted(np.tile(np.arange(TOKENS), (BATCH, 1)), axis=1)[:, :tokens]
        maps = features.batch(chosen, places)
        # twice as fast for few tokens
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            logits = logits_of(model, maps, torch.from_numpy(places))
        loss = F.cross_entropy(logits.float(), targets[chosen].float())
        model.zero_grad()
        loss.backward()
        for solver in solvers:
            solver.step()
        losses.append(loss.item())
        if (step + 1) % SAVED_EVERY == 0 or step + 1 == steps:
            save(model, solvers, step + 1, features, checkpoint)
            said = f"step {step + 1}/{steps}: loss {np.mean(losses):.3f}, {tokens} tokens, "
            said += f"{len(losses) * BATCH / (time.perf_counter() - started):.0f} images/s"
            started = time.perf_counter()
            losses = []
            if (step + 1) % MEASURED_EVERY == 0 or step + 1 == steps:
                said += f", {accuracy(model, *measured):.2%} of every fifth validation image"
            print(said, flush=True)


def save(
    model: SmallTransformer,
    solvers: list[torch.optim.Optimizer],
    steps: int,
    features: Features,
    checkpoint: Path,
) -> None:
    """Write a checkpoint that appears complete or not at all, with what `export.py` needs."""
    saved = {
        "model": model.state_dict(),
        "solvers": [solver.state_dict() for solver in solvers],
        "steps": steps,
    }
    saved |= {"mean": features.mean, "deviation": features.deviation}
    partial = checkpoint.with_suffix(".part")
    torch.save(saved, partial)
    partial.replace(checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("work", type=Path, help="the folder that prepare.py wrote to")
    parser.add_argument("checkpoint", type=Path, help="the file to write, and to go on from")
    parser.add_argument(
        "--steps", type=int, default=3000, help="all steps, of 256 images each (default: 3000)"
    )
    parser.add_argument(
        "--decay", type=int, default=600, help="how many of them the rate falls in (default: 600)"
    )
    arguments = parser.parse_args()
    train(arguments.folder, arguments.work, arguments.checkpoint, arguments.steps, arguments.decay)
