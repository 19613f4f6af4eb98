"""Turn the weights of NanoDet-g and of MediaPipe's selfie segmenter into the files that are
shipped.

    python examples/bundled/convert_detectors.py FOLDER [--output explain/models]

FOLDER holds `nanodet-g/` and `person-segmenter/`, each with `weights.safetensors` (convolutions
`conv00`, `conv01`, ... in the order of the published graph) and `expected.safetensors` (an input
and the outputs that belong to it). The tensors get the names of the networks' state dicts, and stay
in half precision. NanoDet's first convolution takes RGB instead of BGR. It prints how far the
outputs are from the expected ones, and the sha256 that `explain/models/bundled.py` must name.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from explain.models.bundled import DETECTOR_FILE, SEGMENTER_FILE
from explain.models.nanodet import BINS, NanoDet
from explain.models.small_networks import PersonSegmenter

MODELS = Path(__file__).resolve().parents[2] / "explain" / "models"
# The published graph has the neck's convolutions where their inputs are ready, and the heads' side
# by side.
BACKBONE = (*range(11), *range(12, 18), *range(19, 27))
NECK = (11, 18, 27)
HEADS = (28, 30, 29, 32, 31, 33)


def renamed(
    model: nn.Module, published: dict[str, torch.Tensor], order: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The published tensors under the names of a model, whose convolutions come in this order."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)
    ]
    return {
        f"{name}.{kind}": published[f"conv{number:02d}.{kind}"]
        for name, number in zip(names, order, strict=True)
        for kind in ("weight", "bias")
    }


def write(model: nn.Module, state: dict[str, torch.Tensor], output: Path, notice: str) -> None:
    """Load a state dict into a model, and write it to a file, the same to the bit whenever it is
    done."""
    model.load_state_dict(state)
    save_file(state, output, {"notice": notice})  # several entries would come in any order
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB, sha256 {digest}")


@torch.no_grad()
def detector(folder: Path, output: Path) -> None:
    model = NanoDet().eval()
    state = renamed(model, load_file(folder / "weights.safetensors"), BACKBONE + NECK + HEADS)
    first = "backbone.stem.0.conv.weight"
    state[first] = state[first].flip(1).contiguous()
    write(
        model,
        state,
        output,
        "NanoDet-g by RangiLyu, Apache-2.0; converted: renamed, RGB instead of BGR",
    )
    expected = {name: t.float() for name, t in load_file(folder / "expected.safetensors").items()}
    levels = model.neck(model.backbone(expected["input"].flip(1)))
    outputs = [
        head(level).flatten(2).mT for head, level in zip(model.heads.values(), levels, strict=True)
    ]
    logits, boxes = torch.cat(outputs, 1).split([80, 4 * BINS], -1)
    for name, own in (("scores", logits.sigmoid()), ("box_logits", boxes)):
        print(
            f"  {name}: "
            f"{(own - torch.cat([expected[f'{name}_{i}'] for i in range(3)], 1)).abs().max():.5f} "
            "off"
        )


@torch.no_grad()
def segmenter(folder: Path, output: Path) -> None:
    model = PersonSegmenter().eval()
    state = renamed(model, load_file(folder / "weights.safetensors"), tuple(range(55)))
    write(
        model,
        state,
        output,
        "MediaPipe's selfie segmenter by Google, Apache-2.0; converted: renamed",
    )
    expected = {name: t.float() for name, t in load_file(folder / "expected.safetensors").items()}
    # the photo's 256 levels, of which half precision is too coarse
    x = (expected["input"] * 255).round() / 255
    print(f"  mask: {(model(x).sigmoid() - expected['mask']).abs().max():.5f} off")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--output", type=Path, default=MODELS, help="where they go (explain/models)"
    )
    options = parser.parse_args()
    detector(options.folder / "nanodet-g", options.output / DETECTOR_FILE.name)
    segmenter(options.folder / "person-segmenter", options.output / SEGMENTER_FILE.name)
