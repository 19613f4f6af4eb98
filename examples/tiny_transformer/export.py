"""Turn a checkpoint of `train.py` into the file that is shipped: half precision, labels,
preprocessing, temperature.

    cd examples/tiny_transformer
    python export.py path/to/tiny-imagenet-200 checkpoint.pt
    ../../explain/models/tiny_transformer.pt

It prints the file's sha256, which `explain/models/tiny_transformer.py` must name.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import torch
from prepare import SIDE

from explain.models import CenterCrop, Classifier, load
from explain.models.small_networks import SmallTransformer

sys.path.append(str(Path(__file__).resolve().parents[1] / "bundled"))

from data import validation_files
from measures import fit_temperature, logits_of

ARCHITECTURE = {
    "classes": 200,
    "side": SIDE,
    "stem": (32, 128, 256),
    "width": 128,
    "heads": 4,
    "depth": 5,
}


def whole_network(checkpoint: Path) -> SmallTransformer:
    """Return the trained network, its projection taking the feature maps as the stem gives them."""
    saved = torch.load(checkpoint, weights_only=True, map_location="cpu")
    model = SmallTransformer(**ARCHITECTURE)
    model.load_state_dict(saved["model"])
    with torch.no_grad():  # the training sees each channel with mean 0 and deviation 1
        weight = model.conv_proj.weight[:, :, 0, 0] / saved["deviation"]
        model.conv_proj.bias.sub_(weight @ saved["mean"])
        model.conv_proj.weight.copy_(weight[:, :, None, None])
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    state = {
        k: t.half() if t.is_floating_point() else t
        for k, t in whole_network(options.checkpoint).state_dict().items()
    }
    model = SmallTransformer(**ARCHITECTURE)
    model.load_state_dict(
        {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
    )
    like = load("tiny")
    assert isinstance(like.preprocess, CenterCrop)
    preprocess = CenterCrop(SIDE, 1.0, like.preprocess.mean, like.preprocess.std)
    classifier = Classifier(model.eval(), preprocess, like.categories)
    files = validation_files(options.folder)[::2]
    logits = logits_of(classifier, [path for path, _ in files])
    temperature = fit_temperature(logits, torch.tensor([label for _, label in files]))
    content = {
        "architecture": ARCHITECTURE,
        "state_dict": {name: tensor.contiguous() for name, tensor in state.items()},
        "categories": list(like.categories or ()),
        "preprocess": {"side": SIDE, "crop": 1.0, "mean": preprocess.mean, "std": preprocess.std},
        "temperature": temperature,
    }
    torch.save(content, options.output)
    digest = hashlib.sha256(options.output.read_bytes()).hexdigest()
    print(
        f"{options.output}: {options.output.stat().st_size / 1e6:.2f} MB, temperature "
        f"{temperature:.3f}"
    )
    print(f"sha256 {digest}")


if __name__ == "__main__":
    main()
