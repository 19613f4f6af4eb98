"""
Segmentation and detection
==========================

For a model that predicts a class for every pixel, or a list of boxes, the target is a
region or a box.
"""

# %%
# Trained segmenters and detectors are large downloads. This tutorial builds two
# substitutes from the default model. They were not trained for the task, but they
# return what torchvision's models return. The first applies the classifier at every
# position of the last feature map, and returns ``{"out": (N, K, H, W)}``.

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import explain
from explain.targets import Detection, Segmentation

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

default = explain.Explainer(crop="whole")


class Segmenter(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = network.features, network.classifier

    def maps(self, x: torch.Tensor) -> torch.Tensor:
        features = F.avg_pool2d(self.features(x), 3, 1, 1, count_include_pad=False)
        return self.classifier(features.movedim(1, -1)).movedim(-1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": F.interpolate(self.maps(x), size=x.shape[-2:], mode="bilinear")}


segmenter = Segmenter(default.model).eval()

# %%
# A photo with two objects:

cup, cat = (
    Image.open(f"{assets}/{name}.png").convert("RGB").resize((224, 224))
    for name in ("coffee", "chelsea")
)
photo = Image.new("RGB", (448, 224))
photo.paste(cup)
photo.paste(cat, (224, 0))
x = torch.cat([default.preprocess(half)[None] for half in (cup, cat)], dim=3)
predicted = segmenter(x)["out"].argmax(1)[0]
largest = predicted.flatten().bincount().argsort(descending=True)[:3]
print("the largest regions:", [default.categories[i] for i in largest])

# %%
# ``Segmentation("espresso")`` is the mean score of this class over the region where
# the model predicts it, or over a mask of your own. The map shows what this prediction
# depends on.

from explain.render import overlay
from explain.render.sheets import Tile, table


def shown(model: nn.Module, target: object) -> Image.Image:
    a = explain.attribute(
        model,
        x,
        "hirescam",
        target=target,
        layer="features.8",
        categories=default.categories,
    )
    return overlay(photo, a.heatmap[0])


right = torch.zeros(x.shape[-2:], dtype=torch.bool)
right[:, 224:] = True
targets = {
    "espresso, where it is predicted": Segmentation("espresso"),
    "Egyptian cat, on the right": Segmentation(285, right),
}
table([[Tile(shown(segmenter, target)) for target in targets.values()]], list(targets))

# %%
# The second substitute is a detector. It scores windows of the same maps, and returns
# for each image a dictionary of boxes, labels and scores, best first.


class Detector(Segmenter):
    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        windows = F.avg_pool2d(self.maps(images), 6, 1).softmax(1)
        scores, labels = windows.max(1)
        found = []
        for score, label in zip(scores, labels, strict=True):
            order = score.flatten().argsort(descending=True)[:5]
            down, across = 32 * (order // score.shape[1]), 32 * (order % score.shape[1])
            boxes = torch.stack([across, down, across + 192, down + 192], 1).float()
            found.append(
                {
                    "boxes": boxes,
                    "labels": label.flatten()[order],
                    "scores": score.flatten()[order],
                }
            )
        return found


detector = Detector(default.model).eval()
with torch.no_grad():
    best = {name: values[0] for name, values in detector(x)[0].items()}
print(
    default.categories[best["labels"]], f"{best['scores']:.0%}", best["boxes"].tolist()
)

# %%
# ``Detection()`` is the score of the best box, and ``Detection(label, box)`` the score
# of another box. The map of the best box:

from PIL import ImageDraw

picture = shown(detector, Detection())
ImageDraw.Draw(picture).rectangle(
    best["boxes"].tolist(), outline=(255, 140, 0), width=3
)
picture
