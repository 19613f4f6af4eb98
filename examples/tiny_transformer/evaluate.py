"""Measure the small transformer: accuracy and calibration on the validation images of
Tiny-ImageNet.

    python examples/tiny_transformer/evaluate.py path/to/tiny-imagenet-200 [--write]

Everything goes through the package's own reading and preprocessing of images. Calibration is
measured on the half of the validation images that `export.py` did not fit the temperature on. With
``--write``, the figures go to ``measured.json`` beside this script, which the tests compare with
the model card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from explain.models import load
from explain.models.bundled import TRANSFORMER, TRANSFORMER_FILE, TRANSFORMER_SHA256

sys.path.append(str(Path(__file__).resolve().parents[1] / "bundled"))

from data import validation_files
from measures import calibration_error, logits_of, top

WRITTEN = Path(__file__).with_name("measured.json")


def measure(folder: Path) -> dict[str, str]:
    """Return what was measured, in words."""
    started = time.perf_counter()
    classifier = load(TRANSFORMER)
    loaded = time.perf_counter() - started
    files = validation_files(folder)
    labels = torch.tensor([label for _, label in files])
    logits = logits_of(classifier, [path for path, _ in files])
    held_out = slice(1, None, 2)
    found = {
        "images": f"{len(files):,}",
        "top-1": f"{top(logits, labels, 1):.2%}",
        "top-5": f"{top(logits, labels, 5):.2%}",
    }
    for name, probabilities in (
        ("plain", logits.softmax(1)),
        ("calibrated", classifier.probabilities(logits)),
    ):
        found[f"calibration error, {name}"] = (
            f"{calibration_error(probabilities[held_out], labels[held_out]):.2%}"
        )
    count = sum(p.numel() for p in classifier.model.parameters())
    found |= {
        "parameters": f"{count / 1e6:.2f} million",
        "size": f"{TRANSFORMER_FILE.stat().st_size / 1e6:.2f} MB",
    }
    print(f"loaded in {loaded:.3f} s")
    return found | {"sha256": TRANSFORMER_SHA256}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("--write", action="store_true", help=f"also write {WRITTEN.name}")
    options = parser.parse_args()
    found = measure(options.folder)
    for name, value in found.items():
        print(f"{name:<31} {value}")
    if options.write:
        WRITTEN.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
