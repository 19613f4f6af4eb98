"""Measure the default model on photos of ImageNet: accuracy, how sure it is of itself, time to
load, and the crops.

    python examples/efficientnet_lite0/evaluate.py FOLDER [--crops]

The photos' names begin with the index of their class (0-999) and an underscore. Everything goes
through the package's own reading and preprocessing of images.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from explain.data.images import load_image
from explain.data.opening import EXTENSIONS
from explain.models import Classifier, WholePhoto, load
from explain.models.bundled import NAME
from explain.models.preprocessing import cropped


@torch.inference_mode()
def logits_of(classifier: Classifier, paths: list[Path]) -> torch.Tensor:
    """Return the logits ``(N, K)`` of photos, which may have inputs of different sizes."""
    return torch.cat(
        [classifier.model(classifier.preprocess(load_image(path))[None]) for path in paths]
    )


def measured(logits: torch.Tensor, labels: torch.Tensor) -> str:
    """Return top-1 and top-5 accuracy and the mean confidence, in words."""
    right = logits.topk(5, dim=1).indices == labels[:, None]
    first = right[:, 0].float().mean().item()
    five = right.any(1).float().mean().item()
    error = math.sqrt(first * (1 - first) / len(labels))
    sure = logits.softmax(1).amax(1).mean().item()
    return f"top-1 {first:.1%} (± {error:.1%}), top-5 {five:.1%}, mean confidence {sure:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the photos, named INDEX_....jpg")
    parser.add_argument(
        "--crops", action="store_true", help="also the other parts of the photos (some minutes)"
    )
    options = parser.parse_args()
    paths = sorted(path for path in options.folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if not paths:
        parser.error(f"{options.folder} holds no images")
    labels = torch.tensor([int(path.name.split("_")[0]) for path in paths])
    started = time.perf_counter()
    classifier = load(NAME)
    print(f"loaded in {time.perf_counter() - started:.2f} s; {len(paths)} photos")
    whole = cropped(classifier.preprocess, "whole", classifier.model)
    assert isinstance(whole, WholePhoto)
    views = {"center": classifier.preprocess, "whole": whole, "padded": replace(whole, pad=True)}
    for name, view in views.items() if options.crops else [("center", classifier.preprocess)]:
        print(
            f"{name:<7} {measured(logits_of(replace(classifier, preprocess=view), paths), labels)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
