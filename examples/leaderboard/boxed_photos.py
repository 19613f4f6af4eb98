"""Photos of Tiny-ImageNet with a box around the object, as a model sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import explain
from explain.models import Classifier, load

LARGEST_BOX = 0.75  # of what the model sees


@dataclass(frozen=True)
class Photo:
    """A photo as a model sees it: ``x`` ``(1, C, H, W)``, its class, and its object's box in the
    input's pixels."""

    name: str
    x: torch.Tensor
    target: int
    box: tuple[float, float, float, float]
    probability: float

    @property
    def share(self) -> float:
        """The box's share of the photo."""
        return share_of(self.box, self.x)


def share_of(box: Sequence[float], x: torch.Tensor) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) / (x.shape[2] * x.shape[3])


def annotations(folder: Path) -> list[tuple[str, str, tuple[int, int, int, int]]]:
    """Each validation photo's name, class and box, x1 and y1 exclusive."""
    rows = [
        line.split("\t")
        for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()
    ]
    return [
        (name, wnid, (int(x0), int(y0), int(x1) + 1, int(y1) + 1))
        for name, wnid, x0, y0, x1, y1 in rows
    ]


def classes_of(folder: Path, classifier: Classifier) -> dict[str, int]:
    """The class index of each WordNet id: the small models have them in the order of the data set,
    others by label."""
    wnids = (folder / "wnids.txt").read_text().split()
    labels = list(load("tiny").categories or ())
    own = list(classifier.categories or ())
    return {
        wnid: own.index(label) for wnid, label in zip(wnids, labels, strict=True) if label in own
    }


def within(box: Sequence[float], seen: Any, x: torch.Tensor) -> tuple[float, float, float, float]:
    """A photo's box in the pixels of the input that shows a part of it, cut off at its edges."""
    across = x.shape[3] / seen.width
    down = x.shape[2] / seen.height
    found = [
        (place - (seen.left, seen.top)[i % 2]) * (across, down)[i % 2]
        for i, place in enumerate(box)
    ]
    ends = (x.shape[3], x.shape[2])
    x0, y0, x1, y1 = (min(max(place, 0.0), ends[i % 2]) for i, place in enumerate(found))
    return x0, y0, x1, y1


def photos(folder: Path, classifier: Classifier, most: int) -> Iterator[Photo]:
    """Photos that the model gets right and whose box leaves something beside it, in a shuffled
    order."""
    rows = annotations(folder)
    index = classes_of(folder, classifier)
    found = 0
    for number in np.random.default_rng(0).permutation(len(rows)).tolist():
        name, wnid, box = rows[number]
        if found == most:
            return
        if wnid not in index:
            continue
        with Image.open(folder / "val" / "images" / name) as opened:
            image = opened.convert("RGB")
        x = classifier.preprocess(image)[None]
        inside = within(box, explain.data.boxes.locate(classifier.preprocess, image.size), x)
        if not 0 < share_of(inside, x) <= LARGEST_BOX or round(inside[0]) == round(inside[2]):
            continue
        with torch.inference_mode():
            probabilities = classifier.probabilities(classifier.model(x))[0]
        if int(probabilities.argmax()) == index[wnid]:
            found += 1
            yield Photo(name, x, index[wnid], inside, float(probabilities.max()))
