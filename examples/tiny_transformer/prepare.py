"""Compute once what the training of the small transformer needs at every step, and keep it in
files.

    python examples/tiny_transformer/prepare.py path/to/tiny-imagenet-200 work/ [--both-teachers]

The stem is that of the small model `tiny`, and stays as it is, so that its feature maps of the
training images are computed once, and kept as bytes of their square roots, with a scale for each
channel. The teacher is `tiny` too: its logits for each training image are kept. With
``--both-teachers``, EfficientNet-Lite0 teaches as well, by its logits for the 200 classes. Files
that are there already are not computed again. It takes about 10 minutes of one core, 15 with both
teachers, and 1.7 GB of disk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn

from explain.models import CenterCrop, Classifier, load
from explain.models.bundled import IMAGENET
from explain.models.small_networks import SmallTransformer

sys.path.append(str(Path(__file__).resolve().parents[1] / "bundled"))

from data import SIDE, classes, decode, training_files, words

# the square that they see, and the side of its picture
TEACHERS = {"tiny": (56, 64), "efficientnet-lite0": (64, 128)}
BATCH = 128


def stem_of_tiny(model: SmallTransformer) -> None:
    """Copy the first convolutions of the small model."""
    own = model.state_dict()
    given = load("tiny").model.state_dict()
    model.load_state_dict({name: given.get(name, tensor) for name, tensor in own.items()})


def imagenet_indices(folder: Path) -> list[int]:
    """Return which of ImageNet's 1,000 classes each of the 200 is, found by the words of WordNet.

    Classes of the same words (crane, maillot) are told apart by the order, which is that of the
    WordNet ids.
    """
    known = [set(line.split(", ")) for line in IMAGENET.read_text("utf-8").splitlines()]
    said = words(folder)
    wanted = {wnid: set(said[wnid].split(", ")) for wnid in sorted(classes(folder))}
    choices = {
        wnid: [i for i, has in enumerate(known) if need <= has] for wnid, need in wanted.items()
    }
    found: dict[str, int] = {}
    lowest = -1
    ordered = sorted(wanted)
    for place, wnid in enumerate(ordered):
        sure = next(
            (choices[later][0] for later in ordered[place + 1 :] if len(choices[later]) == 1),
            len(known),
        )
        fitting = [i for i in choices[wnid] if lowest < i < sure]
        if len(fitting) != 1:
            raise SystemExit(
                f"{wnid} {said[wnid]!r} must be one class of ImageNet, got {choices[wnid]}"
            )
        lowest = found[wnid] = fitting[0]
    return [found[wnid] for wnid in classes(folder)]


def as_input(
    pixels: np.ndarray, seen: CenterCrop, square: int = SIDE, side: int = SIDE
) -> torch.Tensor:
    edge = (SIDE - square) // 2
    pixels = pixels[:, edge : edge + square, edge : edge + square]
    if side != square:
        pixels = np.stack([cv2.resize(image, (side, side)) for image in pixels])
    x = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float().div_(255)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (seen.mean, seen.std))
    return ((x - mean) / std).contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: torch.Tensor = model(x)
    return out.float()


def teach(
    classifier: Classifier, pixels: np.ndarray, view: tuple[int, int], chosen: list[int] | None
) -> np.ndarray:
    """Return a teacher's logits ``(N, 200)``."""
    seen = classifier.preprocess
    assert isinstance(seen, CenterCrop)
    model = classifier.model.to(memory_format=torch.channels_last)
    found = np.empty((len(pixels), 200), np.float16)
    for start in range(0, len(pixels), BATCH):
        logits = run(model, as_input(pixels[start : start + BATCH], seen, *view))
        found[start : start + BATCH] = (logits if chosen is None else logits[:, chosen]).numpy()
    return found


class Stem(nn.Module):
    """The stem alone, as a network."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = SmallTransformer().eval()
        stem_of_tiny(self.whole)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.features(x)


def write_features(pixels: np.ndarray, folder: Path) -> None:
    """Write ``features.npy`` ``(N, 64, C)`` as bytes, and ``scale.npy`` ``(C,)``."""
    stem = Stem()
    seen = load("tiny").preprocess
    assert isinstance(seen, CenterCrop)
    some = run(stem, as_input(pixels[:: max(1, len(pixels) // 1000)], seen))
    scale = some.permute(1, 0, 2, 3).flatten(1).quantile(0.9995, dim=1)
    np.save(folder / "scale.npy", scale.numpy())
    partial = folder / "features.part"
    kept = np.lib.format.open_memmap(
        partial, "w+", np.uint8, (len(pixels), (SIDE // 8) ** 2, len(scale))
    )
    for start in range(0, len(pixels), BATCH):
        maps = run(stem, as_input(pixels[start : start + BATCH], seen)).flatten(2).transpose(1, 2)
        kept[start : start + BATCH] = (
            (maps / scale).clamp(0, 1).sqrt().mul(255).round().byte().numpy()
        )
        if start % (100 * BATCH) == 0:
            print(f"features: {start} of {len(pixels)}", flush=True)
    kept.flush()
    partial.replace(folder / "features.npy")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="the unpacked data set, with train/, val/, wnids.txt and words.txt",
    )
    parser.add_argument("output", type=Path, help="a folder for the files")
    parser.add_argument(
        "--both-teachers", action="store_true", help="EfficientNet-Lite0 teaches too"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    pixels, labels = decode(training_files(options.folder))
    np.save(options.output / "labels.npy", labels)
    if not (options.output / "features.npy").exists():
        write_features(pixels, options.output)
    for name, view in TEACHERS.items():
        if name != "tiny" and not options.both_teachers:
            continue
        path = options.output / f"{name}.npy"
        if not path.exists():
            logits = teach(
                load(name),
                pixels,
                view,
                None if name == "tiny" else imagenet_indices(options.folder),
            )
            np.save(path, logits)
        right = (np.load(path).argmax(1) == labels).mean()
        print(f"{name} is right about {right:.1%} of the training images", flush=True)


if __name__ == "__main__":
    main()
