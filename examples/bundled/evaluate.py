"""Measure the small model "tiny": accuracy, calibration, time to load, and which input serves
photos best.

    python examples/bundled/evaluate.py path/to/tiny-imagenet-200 [--views]

Everything goes through the package's own reading and preprocessing of images. Calibration is
measured on the half of the validation images that `export.py` did not fit the temperature on.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from data import validation_files
from measures import calibration_error, logits_of, top

from explain.models import CenterCrop, Classifier, load
from explain.models.bundled import FILE, load_tiny

PHOTOS = Path(__file__).resolve().parents[2] / "assets"
EXPECTED = {  # what is on the photos, of the labels that the model has
    "chelsea.png": ("tabby cat", "Egyptian cat"),
    "coffee.png": ("espresso",),
    "rocket.jpg": ("missile",),
    "grace_hopper.jpg": ("military uniform",),
}


def seconds_to_load() -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        load_tiny()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def compare_views(classifier: Classifier, paths: list[Path], labels: torch.Tensor) -> None:
    """Print how input sizes and crops serve every fourth validation image and the full-size
    photos."""
    paths = paths[::4]
    labels = labels[::4]
    print("\nside  crop   validation top-1   photos: probability of what is on them")
    for side in (64, 72, 80, 96, 128):
        for crop in (0.875, 1.0):
            assert isinstance(classifier.preprocess, CenterCrop)
            seen = replace(
                classifier, preprocess=replace(classifier.preprocess, side=side, crop=crop)
            )
            accuracy = top(logits_of(seen, paths), labels, 1)
            shares = []
            for name, expected in EXPECTED.items():
                probabilities = seen.probabilities(logits_of(seen, [PHOTOS / name]))[0]
                share = sum(
                    probabilities[list(seen.categories or ()).index(label)].item()
                    for label in expected
                )
                shares.append(f"{Path(name).stem} {share:.2f}")
            print(f"{side:4}  {crop:5}  {accuracy:16.2%}   {', '.join(shares)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument(
        "--views", action="store_true", help="also compare input sizes and crops (some minutes)"
    )
    options = parser.parse_args()
    classifier = load("tiny")
    files = validation_files(options.folder)
    paths = [path for path, _ in files]
    labels = torch.tensor([label for _, label in files])
    logits = logits_of(classifier, paths)
    held_out = slice(1, None, 2)
    print(
        f"file           {FILE.stat().st_size / 1e6:.2f} MB, loaded in {seconds_to_load():.3f} s "
        "(median of 7)"
    )
    print(f"input          {classifier.preprocess}")
    print(f"top-1          {top(logits, labels, 1):.2%} of {len(files)} validation images")
    print(f"top-5          {top(logits, labels, 5):.2%}")
    for name, probabilities in (
        ("plain", logits.softmax(1)),
        ("calibrated", classifier.probabilities(logits)),
    ):
        error = calibration_error(probabilities[held_out], labels[held_out])
        print(f"{name:<14} expected calibration error {error:.2%} on the half that was not fitted")
    if options.views:
        compare_views(classifier, paths, labels)


if __name__ == "__main__":
    main()
