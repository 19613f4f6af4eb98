"""Targets that lie somewhere in the image: a class within a region, and the score of a detected box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import TargetError, in_short
from explain.targets.base import Labels, Picked, Target, check_class, described, find_tensor
from explain.targets.resolve import find_category


@dataclass(frozen=True, eq=False)
class Segmentation(Target):
    """The mean logit of a class over a region, for a model that gives class maps ``(N, K, H, W)``.

    The output may be the maps or hold them as "out" or "logits", as torchvision's and Hugging Face's do.

    Args:
        category: the class: its index or label.
        mask: the region, true or nonzero inside: ``(H, W)``, or ``(N, H, W)`` with one for each image, over the
            model's whole input and at any resolution. None is where the model predicts the class in the images as they
            are (for a single map, where its logit is positive); methods that alter the images keep to that region.

    Raises:
        TargetError: a mask of another shape, or one with nothing in it.

    >>> maps = torch.tensor([[[[1.0, 2.0]], [[5.0, 0.0]]]])  # one image, two classes, two pixels
    >>> Segmentation(1).pick({"out": maps}, 1)[0], Segmentation(1, torch.tensor([[1, 1]])).pick(maps, 1)[0]
    (tensor([5.]), tensor([2.5000]))
    """

    category: int | str
    mask: torch.Tensor | None = None

    __repr__ = in_short

    def __post_init__(self) -> None:
        if self.mask is None:
            return
        mask = torch.as_tensor(self.mask).detach().bool()
        if mask.ndim not in (2, 3):
            raise TargetError(f"mask must have the shape (H, W) or (N, H, W), got {tuple(mask.shape)}")
        if not mask.flatten(-2).any(-1).all():
            raise TargetError(
                "mask must be true somewhere for each image, got an empty one; leave it out for the region that the "
                "model predicts"
            )
        object.__setattr__(self, "mask", mask)

    @property
    def name(self) -> str:
        return f"{self.category} {'where predicted' if self.mask is None else 'in the mask'}"

    def pick(self, output: Any, count: int) -> Picked:
        if self.mask is None:
            return self.settled(output, count).pick(output, count)
        maps = self._maps(output, count)
        weights = _resized(self.mask.to(maps.device).expand(count, *self.mask.shape[-2:]), maps)
        own = maps[:, int(self.category)].to(weights)
        return (own * weights).sum((1, 2)) / weights.sum((1, 2)), None

    def settled(self, output: Any, count: int) -> Segmentation:
        if self.mask is not None:
            return self
        maps = self._maps(output, count).detach()
        predicted = maps.argmax(1) if maps.shape[1] > 1 else (maps[:, 0] <= 0).long()
        mask = predicted == int(self.category)
        empty = (~mask.flatten(1).any(1)).nonzero().flatten().tolist()
        if empty:
            there, pixels = torch.unique(predicted[empty[0]], return_counts=True)
            seen = there[pixels.argsort(descending=True)].tolist()[:5]
            others = f", or one of the classes predicted there ({', '.join(map(str, seen))})"
            raise TargetError(
                f"class {self.category} must be predicted somewhere in each image, but is not in image {empty[0]}; "
                f"give a mask{others if maps.shape[1] > 1 else ''}"
            )
        return replace(self, mask=mask)

    def rows(self, images: torch.Tensor) -> Segmentation:
        if self.mask is None or self.mask.ndim == 2:
            return self
        return replace(self, mask=self.mask[images.to(self.mask.device)])

    def labelled(self, categories: Labels) -> Segmentation:
        return replace(self, category=find_category(self.category, categories))

    def _maps(self, output: Any, count: int) -> torch.Tensor:
        maps: torch.Tensor | None = find_tensor(output, count, (4,), ("out", "logits"))
        if maps is None:
            raise TargetError(
                f"target {self.name} must be asked of a model that returns class maps ({count}, K, H, W), got "
                f"{described(output)}; give a class index, or pass a callable as target"
            )
        check_class(int(find_category(self.category, None)), maps.shape[1])
        if self.mask is not None and self.mask.ndim == 3 and len(self.mask) != count:
            raise TargetError(
                f"mask must hold one region for each of the {count} images, got {len(self.mask)}; give a single one "
                "(H, W) to use it for all"
            )
        return maps


def _resized(mask: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """The share of each cell of the maps ``(N, K, H, W)`` that a mask covers: ``(N, H, W)``."""
    (rows, columns), (height, width) = mask.shape[-2:], maps.shape[-2:]
    if abs(rows * width - columns * height) > max(rows * width / height, columns * height / width):
        raise TargetError(
            f"mask must cover the model's whole input, whose maps are {height} x {width} (height x width), got "
            f"{rows} x {columns}; give it in the shape of the input, without its width and height swapped"
        )
    weights = mask.to(torch.promote_types(maps.dtype, torch.float32))  # half precision cannot count the pixels
    return weights if (rows, columns) == (height, width) else F.adaptive_avg_pool2d(weights, (height, width))


@dataclass(frozen=True, eq=False)
class Detection(Target):
    """The score of a detected box, for a model that returns "boxes", "labels" and "scores" for each image.

    The box is chosen on the original images. In altered images, the score is that of the box that overlaps it best,
    among those of the same label that overlap it enough; without any, it is 0.

    Args:
        category: the label of the box, as an index or in words; None takes any.
        box: ``(x1, y1, x2, y2)`` in pixels of the model's input, or ``(N, 4)`` with one for each image: the detection
            that overlaps it best is explained. None takes the one with the highest score.
        overlap: the least intersection over union for two boxes to be the same, from 0 to 1.

    Raises:
        TargetError: a box that is not valid, or an overlap outside of [0, 1].

    >>> found = {"boxes": torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4]]), "labels": torch.tensor([1, 2])}
    >>> output = [{**found, "scores": torch.tensor([0.9, 0.8])}]
    >>> Detection().pick(output, 1)[0], Detection(box=(5, 0, 8, 4)).pick(output, 1)[0]
    (tensor([0.9000]), tensor([0.8000]))
    """

    category: int | str | None = None
    box: torch.Tensor | Sequence[float] | None = None
    overlap: float = 0.5

    __repr__ = in_short

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise TargetError(f"overlap must be a share from 0 to 1, got {self.overlap}; 0.5 is usual")
        if self.box is None:
            return
        box = torch.as_tensor(self.box).detach().float()
        if box.ndim not in (1, 2) or box.shape[-1] != 4 or not (box[..., :2] < box[..., 2:]).all():
            raise TargetError(
                f"box must be (x1, y1, x2, y2) with x1 < x2 and y1 < y2, or (N, 4) of them, got {self.box!r}"
            )
        object.__setattr__(self, "box", box)

    @property
    def name(self) -> str:
        what = "detection" if self.category is None else f"{self.category} detection"
        if self.box is None:
            return f"best {what}"
        near = torch.as_tensor(self.box)
        return f"{what} at {' '.join(f'{edge:g}' for edge in near.tolist())}" if near.ndim == 1 else f"{what} at boxes"

    def pick(self, output: Any, count: int) -> Picked:
        return self.settled(output, count).pick(output, count)

    def settled(self, output: Any, count: int) -> Detected:
        found = find_detections(output, count, self.name)
        if self.box is None:
            wanted: list[torch.Tensor | None] = [None] * count
        else:
            near = torch.as_tensor(self.box)
            wanted = list(near) if near.ndim == 2 else [near] * count
        if len(wanted) != count:
            raise TargetError(
                f"box must hold one box for each of the {count} images, got {len(wanted)}; give a single one to use "
                "it for all"
            )
        best = [self._find(boxes, labels, scores, wanted[i], i) for i, (boxes, labels, scores) in enumerate(found)]
        labels = torch.stack([found[i][1][k] for i, k in enumerate(best)])
        boxes = torch.stack([found[i][0][k] for i, k in enumerate(best)])
        return Detected(self.name, labels, boxes, self.overlap)

    def labelled(self, categories: Labels) -> Detection:
        return self if self.category is None else replace(self, category=find_category(self.category, categories))

    def _find(
        self, boxes: torch.Tensor, labels: torch.Tensor, scores: torch.Tensor, wanted: torch.Tensor | None, image: int
    ) -> int:
        """The position of the detection that is meant in one image."""
        category = None if self.category is None else int(find_category(self.category, None))
        right = torch.ones_like(labels, dtype=torch.bool) if category is None else labels == category
        if not right.any():
            there = ", ".join(map(str, torch.unique(labels).tolist()[:8])) or "none at all"
            raise TargetError(
                f"target {self.name} must be detected in the unaltered image {image}, but is not; ask for one of the "
                f"labels found there ({there}), or lower the model's score threshold"
            )
        if wanted is None:
            return int(torch.where(right, scores.detach(), -torch.inf).argmax())
        shared = torch.where(right, overlaps(boxes, wanted), -1.0)
        best = (shared == shared.max()).nonzero()[:, 0]
        if shared.max() < self.overlap:
            nearest = ", ".join(f"{edge:.0f}" for edge in boxes[best[0]].tolist())
            raise TargetError(
                f"target {self.name} must overlap a detection of image {image} by {self.overlap:g}, but the nearest, "
                f"({nearest}), does so by {float(shared.max()):.2f}; give this box, or a lower overlap"
            )
        return int(best[scores.detach()[best].argmax()])


@dataclass(frozen=True, eq=False)
class Detected(Target):
    """A detection that has been settled: for each image, the label ``(N,)`` and box ``(N, 4)`` to look for again."""

    name: str
    labels: torch.Tensor
    boxes: torch.Tensor
    overlap: float

    def pick(self, output: Any, count: int) -> Picked:
        found = find_detections(output, count, self.name)
        # Where nothing is detected, the score is 0, and still part of the graph.
        nothing = 0 * torch.stack([scores.sum() for _, _, scores in found]).sum()
        picked = []
        for i, (boxes, labels, scores) in enumerate(found):
            shared = torch.where(labels == self.labels[i], overlaps(boxes, self.boxes[i]), -1.0)
            there = len(shared) > 0 and bool(shared.max() >= self.overlap)
            picked.append(scores[shared.argmax()] if there else nothing)
        return torch.stack(picked), None

    def likeness(self, output: Any, count: int) -> torch.Tensor:
        """How much the best detection in each image is like this one ``(count,)``.

        Of a detection with the same label, the overlap times the score; 0 where there is none. (In Petsiuk et al.,
        2021, the cosine of the class distributions takes part; with a label for each box, that is 1 or 0.)
        """
        best = []
        for i, (boxes, labels, scores) in enumerate(find_detections(output, count, self.name)):
            alike = torch.where(labels == self.labels[i], overlaps(boxes, self.boxes[i]) * scores.float(), 0.0)
            best.append(alike.max() if len(alike) else self.boxes.new_zeros(()))
        return torch.stack(best)

    def rows(self, images: torch.Tensor) -> Detected:
        images = images.to(self.labels.device)
        return replace(self, labels=self.labels[images], boxes=self.boxes[images])


def find_detections(output: Any, count: int, name: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the boxes ``(Q, 4)``, detached, the labels ``(Q,)`` and the scores ``(Q,)`` of each image."""
    images = [output] if isinstance(output, Mapping) and count == 1 else output
    keys = ("boxes", "labels", "scores")
    found = []
    for each in images if isinstance(images, (list, tuple)) else ():
        given = (each.get(key) if isinstance(each, Mapping) else getattr(each, key, None) for key in keys)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        if len(tensors) == 3 and len({len(tensor) for tensor in tensors}) == 1:
            found.append((tensors[0].detach(), tensors[1], tensors[2]))
    if len(found) != count or len(images) != count:
        raise TargetError(
            f"target {name} must be asked of a detector that returns boxes, labels and scores for each of the {count} "
            f"images, got {described(output)}; give a class index, or pass a callable as target"
        )
    return found


def overlaps(boxes: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of each of ``boxes`` ``(Q, 4)`` with one box ``(4,)``.

    >>> overlaps(torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2]]), torch.tensor([0.0, 0, 2, 2]))
    tensor([1.0000, 0.3333])
    """
    boxes, box = boxes.float(), box.to(boxes.device).float()
    sides = (torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])).clamp(min=0)
    shared, areas = sides.prod(1), (boxes[:, 2:] - boxes[:, :2]).prod(1)
    union = areas + (box[2:] - box[:2]).prod() - shared
    same = (boxes == box).all(1)  # also where a box has no area
    return torch.where(same, 1.0, shared / union.clamp(min=torch.finfo(union.dtype).tiny))
