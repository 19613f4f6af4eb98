"""Draw why this box is a tie, why this region is a person, and what one neuron sees: targets that
are no class.

    python examples/targets.py [folder]

The detector NanoDet and the segmenter of MediaPipe come with the package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from PIL import Image

import explain
from explain import ExplainError
from explain.hooks import FeatureExtractor
from explain.methods.base import title_of
from explain.models import Classifier, load
from explain.render.sheets import Tile, table

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def neuron(bundled: Classifier, photo: Image.Image, layer: str) -> Image.Image:
    """The neuron of a layer that is most active on a photo, and the pixels that it depends on.

    A network that ends at the layer has the neuron among its outputs; the target is its place
    there.
    """
    features = FeatureExtractor(bundled.model, layer, graph=True)
    explainer = explain.Explainer(features, preprocess=bundled.preprocess)
    with torch.no_grad():
        maps = features(explainer.as_input(photo))[layer][0]
    channel, row, column = (int(i) for i in torch.unravel_index(maps.argmax(), maps.shape))
    explanation = explainer(photo, ["saliency", "guidedbackprop"], targets=[(channel, row, column)])
    seen = Tile(photo, f"neuron {channel, row, column} of {layer}")
    maps = [Tile(explanation.overlay(method), title_of(method)) for method in explanation.methods]
    return table([[seen, *maps]], tile=400)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    methods = ["layercam", "smoothgrad"]
    segmented = explain.Explainer("person-segmenter")(ASSETS / "astronaut.png", methods)
    segmented.sheet().save(folder / "segmentation.jpg", quality=88)
    print(f"a region and its maps written to {folder / 'segmentation.jpg'}")
    detected = explain.Explainer("nanodet")(ASSETS / "grace_hopper.jpg", methods, top_k=2)
    detected.sheet().save(folder / "detection.jpg", quality=88)
    print(f"boxes and their maps written to {folder / 'detection.jpg'}")
    neuron(load(), Image.open(ASSETS / "chelsea.png"), "features.7").save(
        folder / "neuron.jpg", quality=88
    )
    print(f"a neuron and what it sees written to {folder / 'neuron.jpg'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=ASSETS / "gallery",
        help="where they go (assets/gallery)",
    )
    try:
        main(parser.parse_args().folder)
    except (ExplainError, OSError) as error:
        sys.exit(f"targets.py: {error}")
