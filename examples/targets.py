"""Draw why these pixels are a cat, why this box is a cup, and what one neuron sees: targets that are no class.

    python examples/targets.py [folder]

Trained segmenters and detectors are large downloads. Two stand-ins take their places here, both made of the default
classifier and none of them trained for the task: `Segmenter` asks it for its classes at every place of the last feature
map, and `Detector` in windows of that map. They return what torchvision's models return, and are asked in the same way.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn
from torchvision.ops import batched_nms

import explain
from explain import ExplainError
from explain.data.images import Box
from explain.hooks import FeatureExtractor
from explain.models import CenterCrop, Classifier, load
from explain.render.sheets import Tile, table
from explain.targets import Detection, Segmentation, find_label

ASSETS = Path(__file__).resolve().parents[1] / "assets"
STRIDE = 32
ORANGE, WHITE = (255, 140, 0), (255, 255, 255)


class Trunk(nn.Sequential):
    """The default network up to its last feature map, which has 1/32 of the input's size."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        for name, module in network.named_children():
            if name not in ("avgpool", "classifier"):
                self.add_module(name, module)


class Segmenter(nn.Module):
    """Takes ``(N, 3, H, W)``, gives a score for each class at each pixel: ``{"out": (N, K, H, W)}``."""

    def __init__(self, network: nn.Module, around: int = 3) -> None:
        super().__init__()
        self.trunk, self.fc, self.around = Trunk(network), network.classifier, around

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        maps = F.avg_pool2d(self.trunk(x), self.around, 1, self.around // 2, count_include_pad=False)
        scores = self.fc(maps.movedim(1, -1)).movedim(-1, 1)
        return {"out": F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)}


class Detector(nn.Module):
    """Takes images ``(3, H, W)``, gives for each a dictionary of boxes ``(Q, 4)``, labels and scores, best first."""

    def __init__(self, network: nn.Module, temperature: float, threshold: float = 0.3, overlap: float = 0.1) -> None:
        super().__init__()
        self.trunk, self.fc = Trunk(network), network.classifier
        self.temperature, self.threshold, self.overlap = temperature, threshold, overlap
        self.windows = [(h, w) for h in (5, 6, 7) for w in (5, 6, 7, 8, 9) if 0.6 < h / w < 1.7]

    def forward(self, images: list[torch.Tensor] | torch.Tensor) -> list[dict[str, torch.Tensor]]:
        boxes, logits = [], []
        maps = self.trunk(torch.stack(list(images)))
        for height, width in self.windows:
            if height > maps.shape[-2] or width > maps.shape[-1]:
                continue
            means = F.avg_pool2d(maps, (height, width), 1)
            y, x = torch.meshgrid(*(torch.arange(n, device=maps.device) for n in means.shape[-2:]), indexing="ij")
            boxes.append(STRIDE * torch.stack([x, y, x + width, y + height], -1).flatten(0, 1))
            logits.append(self.fc(means.flatten(2).mT))
        return [self.suppressed(torch.cat(boxes).to(maps), each) for each in torch.cat(logits, 1)]

    def suppressed(self, boxes: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        scores, labels = (logits / self.temperature).softmax(1).max(1)
        sure = (scores > self.threshold).nonzero()[:, 0]
        kept = sure[batched_nms(boxes[sure], scores[sure].detach(), torch.zeros_like(sure), self.overlap)]
        return {"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept]}


@dataclass(frozen=True)
class Whole:
    """The whole photo at a height in pixels, normalised like the classifier's own crops."""

    like: CenterCrop
    height: int

    def size(self, photo: tuple[int, int]) -> tuple[int, int]:
        """Width and height of the model's input."""
        return round(photo[0] * self.height / photo[1] / STRIDE) * STRIDE, self.height

    def box(self, size: tuple[int, int]) -> Box:
        return Box(0, 0, *size)

    def __call__(self, photo: Image.Image) -> torch.Tensor:
        small = photo.convert("RGB").resize(self.size(photo.size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.like.mean, self.like.std))
        return (pixels - mean) / std


def side_by_side(*photos: Image.Image, height: int = 400) -> Image.Image:
    """One photo of several, so that there is more than one thing to be found in it."""
    scaled = [photo.convert("RGB").resize((round(photo.width * height / photo.height), height)) for photo in photos]
    canvas = Image.new("RGB", (sum(photo.width for photo in scaled), height))
    left = 0
    for photo in scaled:
        canvas.paste(photo, (left, 0))
        left += photo.width
    return canvas


def outlined(photo: Image.Image, mask: torch.Tensor) -> Image.Image:
    """Darken what is outside of a mask ``(H, W)``."""
    inside = Image.fromarray(mask.numpy().astype(np.uint8) * 255).resize(photo.size, Image.Resampling.BILINEAR)
    return Image.composite(photo, photo.point([round(v * 0.35) for v in range(256)] * 3), inside)


def boxed(photo: Image.Image, box: list[float], size: tuple[int, int], words: str = "") -> Image.Image:
    """Draw a box, given in pixels of an input of ``size`` (width, height), on a photo."""
    drawn, scale = photo.copy(), (photo.width / size[0], photo.height / size[1])
    left, top, right, bottom = (edge * scale[i % 2] for i, edge in enumerate(box))
    draw = ImageDraw.Draw(drawn)
    draw.rectangle((left, top, right - 1, bottom - 1), outline=ORANGE, width=5)
    if words:
        place = (left + 10, top + 6)
        draw.rectangle(draw.textbbox(place, words, font_size=28), fill=ORANGE)
        draw.text(place, words, WHITE, font_size=28)
    return drawn


def segmentation(bundled: Classifier, photo: Image.Image, labels: list[str], method: str, layer: str) -> Image.Image:
    """A row for each class: where it is predicted, and what speaks for it there."""
    preprocess = Whole(bundled.preprocess, 320)
    explainer = explain.Explainer(Segmenter(bundled.model), bundled.categories, preprocess)
    maps = explainer.model(preprocess(photo)[None])["out"][0].detach()
    rows = []
    for label in labels:
        mask = maps.argmax(0) == find_label(label, bundled.categories)
        explanation = explainer(photo, method, Segmentation(label), layer=layer)
        where = Tile(outlined(photo, mask), f"where {label!r} is predicted")
        rows.append([where, Tile(explanation.overlay(), f"{method}, mean logit in this region")])
    return table(rows, tile=500)


def detection(bundled: Classifier, photo: Image.Image, method: str, layer: str, count: int = 2) -> Image.Image:
    """A row for each of the best boxes: the box, and what speaks for its score."""
    preprocess = Whole(bundled.preprocess, 256)
    explainer = explain.Explainer(Detector(bundled.model, bundled.temperature), bundled.categories, preprocess)
    found = explainer.model(preprocess(photo)[None])[0]
    rows = []
    for box, label, score in zip(*(found[key][:count].tolist() for key in ("boxes", "labels", "scores")), strict=True):
        words = f"{bundled.label(label)} {score:.2f}"
        explanation = explainer(photo, method, Detection(label, box), layer=layer)
        size = preprocess.size(photo.size)
        found_at = Tile(boxed(photo, box, size, words), "a detection")
        rows.append([found_at, Tile(boxed(explanation.overlay(), box, size), f"{method}, score of this box")])
    return table(rows, tile=500)


def neuron(bundled: Classifier, photo: Image.Image, layer: str) -> Image.Image:
    """The neuron of a layer that answers most to a photo, and the pixels that it answers to.

    A network that ends at the layer has the neuron among its outputs; the target is its place there.
    """
    features = FeatureExtractor(bundled.model, layer, graph=True)
    explainer = explain.Explainer(features, preprocess=bundled.preprocess)
    with torch.no_grad():
        maps = features(explainer.as_input(photo))[layer][0]
    channel, row, column = (int(i) for i in torch.unravel_index(maps.argmax(), maps.shape))
    explanation = explainer(photo, ["saliency", "guidedbackprop"], targets=[(channel, row, column)])
    seen = Tile(photo, f"neuron {channel, row, column} of {layer}")
    return table([[seen, *(Tile(explanation.overlay(method), method) for method in explanation.methods)]], tile=400)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bundled = load()
    photo = side_by_side(*(Image.open(ASSETS / name) for name in ("coffee.png", "chelsea.png")))
    drawn = segmentation(bundled, photo, ["espresso", "Egyptian cat"], "layercam", "trunk.features.7")
    drawn.save(folder / "segmentation.jpg", quality=88)
    print(f"regions and what speaks for them written to {folder / 'segmentation.jpg'}")
    detection(bundled, photo, "layercam", "trunk.features.7").save(folder / "detection.jpg", quality=88)
    print(f"boxes and what speaks for them written to {folder / 'detection.jpg'}")
    neuron(bundled, Image.open(ASSETS / "chelsea.png"), "features.7").save(folder / "neuron.jpg", quality=88)
    print(f"a neuron and what it sees written to {folder / 'neuron.jpg'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ASSETS / "gallery", help="where they go (assets/gallery)"
    )
    try:
        main(parser.parse_args().folder)
    except (ExplainError, OSError) as error:
        sys.exit(f"targets.py: {error}")
