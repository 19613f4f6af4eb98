"""Compute what the image tower says of each photo of Tiny-ImageNet, once, and keep it in files.

    python examples/tiny_clip/prepare.py path/to/tiny-imagenet-200 work/

The image tower is the shipped `tiny-transformer` without its head, and stays as it is: the training
of the text tower needs nothing of a photo but its 128 normalised channels. A quarter of the
training photos, 125 of each class, is enough. Takes about 5 minutes of one core, and 10 MB of disk.
Files that are there are not computed again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from explain.models import CenterCrop, load

sys.path.append(str(Path(__file__).resolve().parents[1] / "bundled"))

from data import decode, training_files, validation_files

BATCH = 250


@torch.inference_mode()
def image_features(pixels: np.ndarray) -> np.ndarray:
    """Return what the last normalisation says of each photo's class token: ``(N, 128)``."""
    classifier = load("tiny-transformer")
    seen = classifier.preprocess
    model = classifier.model.to(memory_format=torch.channels_last)
    assert isinstance(seen, CenterCrop)
    model.head = nn.Identity()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (seen.mean, seen.std))
    found = np.empty((len(pixels), 128), np.float16)
    for start in range(0, len(pixels), BATCH):
        x = torch.from_numpy(pixels[start : start + BATCH]).permute(0, 3, 1, 2).float() / 255
        found[start : start + BATCH] = model(
            ((x - mean) / std).to(memory_format=torch.channels_last)
        ).numpy()
        if start % (10 * BATCH) == 0:
            print(f"{start} of {len(pixels)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("output", type=Path, help="a folder for the files")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, files in (
        ("validation", validation_files(options.folder)),
        ("training", training_files(options.folder)[::4]),
    ):
        if (options.output / f"{name}.npz").exists():
            continue
        pixels, labels = decode(files)
        np.savez(options.output / f"{name}.npz", features=image_features(pixels), labels=labels)


if __name__ == "__main__":
    main()
