"""A detected box as the target: which box it is, how it is found again in perturbed images, and
what of it counts; and a place on the image as text: the second cup, the person at a point, what is
in a box."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch

from explain._utils.errors import TargetError, image_name, short_repr, warn
from explain.data.boxes import Box
from explain.targets.base import (
    CheckedTarget,
    Labels,
    Picked,
    Target,
    check_one_per_image,
)
from explain.targets.detector_outputs import Boxes, Decode, Size, find_layout, read
from explain.targets.labels import class_label, find_category, from_start
from explain.targets.regions import Segmentation

Part: TypeAlias = Literal[
    "score", "logit", "existence", "left", "top", "right", "bottom", "overlap"
]
SIDES = ("left", "top", "right", "bottom")
LISTED = 5  # detections that messages name
NEAR = 0.9
"""Boxes that overlap a place by at least this share of what the nearest does are the same box: the
one with the best score counts."""

InPhoto: TypeAlias = Callable[[int, Sequence[float]], Sequence[float]]
"""From the number of an image in a batch and a box in pixels of its input, to the box in those of
the photo."""
_in_photo: ContextVar[InPhoto | None] = ContextVar("in_photo", default=None)


@contextmanager
def showing(in_photo: InPhoto) -> Iterator[None]:
    """Within this block, messages about detections give boxes in pixels of the photos, by the
    function ``in_photo``."""
    token = _in_photo.set(in_photo)
    try:
        yield
    finally:
        _in_photo.reset(token)


class NotDetectedError(TargetError):
    """One of the original images has no such detection."""


@dataclass(frozen=True, eq=False)
class Detections(CheckedTarget):
    """One detected box, or all of them together: its class score, one of its sides, its overlap
    with a box, or that there is anything.

    The box is chosen on the original images. In perturbed images, the same box is the one that
    overlaps it best among those that may have its label. Where none overlaps it enough, the score,
    the existence and the overlap are 0; the others are those of the nearest box.

    What the model returns may be the result of non-maximum suppression or come before it, in any of
    the layouts of ``explain.targets.detector_outputs.LAYOUTS``; that of the resolved target says
    which it was.

    Args:
        label: the class, as an index from 0 or in words, or a tuple with an index for each image;
            None takes any.
        box: ``(x0, y0, x1, y1)`` in pixels of the model's input, or ``(N, 4)`` with one for each
            image: the box of the model that overlaps it best is explained, even if it is no
            detection (why is nothing found here?).
        index: which detection with this label: 0 is the best. With a box, which of those that
            coincide with it. "all" is the sum over those above the threshold, or the best if none
            is, each found again by itself.
        point: the detections around this point ``(x, y)``, instead of a box.
        decode: the name of a layout, where the model's output may be several; or a function of the
            output that gives scores ``(N, cells, K)`` and boxes ``(N, cells, 4)``.
        of: what of the box is explained. "score" is the probability of its class and "logit" the
            number before; a "left", "top", "right" or "bottom" side is its coordinate; "overlap" is
            the intersection over union with ``box``; "existence" says that there is anything.
        overlap: the least intersection over union for two boxes to be the same, from 0 to 1.
        threshold: the score from which on a box before non-maximum suppression is a detection, and
            from which on "all" counts it after suppression too.
        size: height and width of the model's input, for layouts with boxes in shares of it;
            `explain.attribute` knows.
        categories: the labels of the classes, for messages.

    Raises:
        TargetError: a box that is not valid, or a part, layout, share or number that there is not.

    >>> found = {
    ...     "boxes": torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4]]),
    ...     "labels": torch.tensor([1, 2]),
    ... }
    >>> output = [{**found, "scores": torch.tensor([0.9, 0.8])}]
    >>> Detections().pick(output, 1)[0], Detections(box=(5, 0, 8, 4)).pick(output, 1)[0]
    (tensor([0.9000]), tensor([0.8000]))
    >>> Detections(2).resolved(output, 1).layout, Detections(2, of="left").pick(output, 1)[0]
    ('results', tensor([4.]))
    """

    label: int | str | tuple[int, ...] | None = None
    box: torch.Tensor | Sequence[float] | None = None
    index: int | Literal["all"] = 0
    point: tuple[float, float] | None = None
    decode: Decode | str | None = None
    of: Part = "score"
    overlap: float = 0.5
    threshold: float = 0.35
    size: Size | None = field(default=None, repr=False, compare=False)
    categories: Labels = field(default=None, repr=False, compare=False)

    minimums = {"overlap": 0, "index": 0}
    maximums = {"overlap": 1}
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check the options of a detection as the target, and convert ``box`` to a tensor."""
        super().__post_init__()
        if self.box is None:
            return
        if self.index == "all":
            raise TargetError("index must be a number with box=, got 'all'; leave one out")
        box = torch.as_tensor(self.box).detach().float()
        if box.ndim not in (1, 2) or box.shape[-1] != 4 or not (box[..., :2] < box[..., 2:]).all():
            raise TargetError(
                "box must be x0 y0 x1 y1 with x0 < x1 and y0 < y1, or a tensor (N, 4), got "
                f"{self.box!r:.60}; left and top come first"
            )
        object.__setattr__(self, "box", box)

    @property
    def name(self) -> str:
        """The target in messages and captions, and in results and records: "cat detection 2", "left
        of best detection"."""
        what = "detection" if self.label is None else f"{self.label} detection"
        if self.of != "score":
            what = f"{self.of} of {what}"
        if self.index == "all":
            what = f"all {what}s" if self.of == "score" else f"{what}s together"
        if self.point is not None:
            return f"{what} around {self.point[0]:g} {self.point[1]:g}"
        if self.index == "all":
            return what
        number = f" {self.index + 1}" if self.index else ""
        if self.box is None:
            return f"{what}{number}" if number else f"best {what}"
        box = torch.as_tensor(self.box)
        where = " ".join(f"{edge:g}" for edge in box.tolist()) if box.ndim == 1 else "boxes"
        return f"{what}{number} at {where}"

    @property
    def gives_probability(self) -> bool:
        return self.of in ("score", "existence") and self.index != "all"

    def resolved(self, output: Any, count: int) -> Target:
        """Choose the box of each image, on the output for the images as they are; return it as a
        `Detected`.

        Raises:
            TargetError: an image has no such box. NotDetectedError if it is no detection.
        """
        boxes = read(output, count, self.size, self.decode, self.name)
        if boxes.doubt and self.decode is None:
            warn(boxes.doubt)
        return self._counted(boxes)._resolved(boxes, count)

    def _resolved(self, boxes: Boxes, count: int) -> Target:
        """As `resolved`, on the ``boxes`` in the output."""
        if isinstance(self.label, tuple):
            check_one_per_image("label", len(self.label), count)
        wanted: Any = [None] * count
        if self.box is not None:
            wanted = torch.as_tensor(self.box)
            wanted = wanted.expand(count, 4) if wanted.ndim == 1 else wanted
            check_one_per_image("box", len(wanted), count)
        images = []
        resolved_labels = []
        resolved_boxes = []
        ranks = []
        for image in range(count):
            corners = boxes.boxes[image].detach()
            for cell, label in self._find(boxes, image, wanted[image]):
                scores = boxes.scores[image][:, label].detach()
                # of boxes that coincide, it is found again by its rank
                candidates, _ = coinciding(scores, corners, corners[cell])
                images.append(image)
                resolved_labels.append(label)
                resolved_boxes.append(corners[cell])
                ranks.append(candidates.tolist().index(cell))
        found_boxes = torch.stack(resolved_boxes)
        return Detected(
            self.name,
            images=tuple(images),
            labels=tuple(resolved_labels),
            boxes=found_boxes,
            ranks=tuple(ranks),
            compared=found_boxes if self.box is None else wanted.to(found_boxes),
            overlap=self.overlap,
            of=self.of,
            layout=boxes.layout,
            decode=self.decode,
            size=self.size,
        )

    def labelled(self, categories: Labels) -> "Detections":
        return replace(self, label=find_category(self.label, categories), categories=categories)

    def for_input_size(self, size: Size) -> "Detections":
        return self if self.size is not None else replace(self, size=size)

    def detected(self, output: Any, count: int, image: int) -> list[tuple[int, int]]:
        """Return the detections with this target's label in one image, best first: pairs of
        position among the output's boxes and class."""
        boxes = read(output, count, self.size, self.decode, self.name)
        target = self._counted(boxes)
        return target._detected(boxes, image, target._label(image))

    def _counted(self, boxes: Boxes) -> "Detections":
        """The target with classes that count from the last one as indices from 0 on."""
        # boxes after suppression do not say how many classes there are
        classes = boxes.scores[0].shape[1] if boxes.dense else len(self.categories or ())
        return replace(self, label=from_start(self.label, classes))

    def _label(self, image: int) -> int | None:
        """The class index that the target asks for in one image; None for any class."""
        label = self.label[image] if isinstance(self.label, tuple) else self.label
        index: int | None = find_category(label, None)
        return index

    def _detected(self, boxes: Boxes, image: int, label: int | None) -> list[tuple[int, int]]:
        """The detections with a class (None for any) in one image, best first: (position, class);
        kept in ``boxes.detections`` for other targets."""
        # after suppression, all that is listed counts as detected
        threshold = self.threshold if boxes.dense else -torch.inf
        key = image, label, threshold
        if key not in boxes.detections:
            scores = _of_label(boxes.scores[image].detach(), label)
            corners = boxes.boxes[image].detach()
            boxes.detections[key] = suppressed(scores, corners, threshold, boxes.dense)
        return boxes.detections[key]

    def _find(self, boxes: Boxes, image: int, wanted: torch.Tensor | None) -> list[tuple[int, int]]:
        """The positions among ``boxes`` and classes of the target's boxes in one image: the best
        overlap with ``wanted``, else the detection with the target's number, or all.
        """
        label = self._label(image)
        if wanted is not None:
            return [self._nearest(boxes, image, label, wanted)]
        corners = boxes.boxes[image]
        candidates = [
            (cell, category)
            for cell, category in self._detected(boxes, image, label)
            if self._is_around_point(corners[cell])
        ]
        if self.index == "all":
            scores = boxes.scores[image].detach()
            # after suppression, what is listed may lie below the threshold
            above = [pair for pair in candidates if scores[pair] > self.threshold]
            chosen = above or candidates[:1]
        else:
            chosen = candidates[self.index : self.index + 1]
        if chosen:
            return chosen
        raise NotDetectedError(
            f"target {self.name} must be detected in {_photo(image)}, got {len(candidates)} of "
            f"them; {self._remedy(boxes, image)}"
        )

    def _is_around_point(self, corners: torch.Tensor) -> bool:
        """Whether a box ``(4,)`` is around the target's point; any is without one."""
        if self.point is None:
            return True
        x, y = self.point
        left, top, right, bottom = corners.tolist()
        return bool(left <= x <= right and top <= y <= bottom)

    def _remedy(self, boxes: Boxes, image: int) -> str:
        """The end of an error message: what is detected in an image instead, and a place that can
        be asked for."""
        corners = boxes.boxes[image].detach()
        detected = self._detected(boxes, image, None)[:LISTED]
        words = [self._words(corners[cell], category, image) for cell, category in detected]
        advice = f"take what is: {', '.join(words)}" if words else "nothing is detected"
        return f"{advice}; or, for what opposes it, a place such as 'box 120,40,300,380'"

    def _words(self, corners: torch.Tensor, label: int, image: int) -> str:
        """A detection as a user would type it, "cup box 120,40,300,380": in pixels of the photo
        where they are known and the target is in them, else of the model's input."""
        edges: Sequence[float] = corners.tolist()
        in_photo = _in_photo.get()
        has_place = self.box is not None or self.point is not None
        # a caller's box or point is in the model's input, unless it was typed as a place on a photo
        if in_photo is not None and (isinstance(self, Place) or not has_place):
            edges = in_photo(image, edges)
        label_words = class_label(self.categories, label).removeprefix("class ")
        return f"{label_words} box {','.join(str(round(edge)) for edge in edges)}"

    def _nearest(
        self, boxes: Boxes, image: int, label: int | None, wanted: torch.Tensor
    ) -> tuple[int, int]:
        """Find the box of one image that overlaps the wanted one best: its position among
        ``boxes``, and its class.
        """
        scores = boxes.scores[image].detach()
        corners = boxes.boxes[image].detach()
        hindrance = "it gives none"
        if scores.numel():
            assert self.index != "all"  # with a box it is refused
            # boxes that coincide are told apart by their score for the label, or by their best one
            cell, overlap_share = matching_box(
                _of_label(scores, label).amax(1), corners, wanted, rank=self.index
            )
            category = int(scores[cell].argmax()) if label is None else label
            if overlap_share >= self.overlap:
                return cell, category
            words = self._words(corners[cell], category, image)
            overlap = max(overlap_share, 0.0)  # below 0 without any
            hindrance = f"the nearest, {words}, overlaps it by {overlap:.2f}; give that"
        raise TargetError(
            f"target {self.name} must overlap a box that the model gives for {_photo(image)} by "
            f"{self.overlap:g} or more, but {hindrance}"
        )


@dataclass(frozen=True, eq=False)
class Detected(Target):
    """Resolved `Detections`: ``labels`` and ``boxes`` ``(B, 4)`` to find again in ``images``; an
    image's score is their sum. ``ranks`` tells coinciding boxes apart, 0 for the best score."""

    name: str
    images: tuple[int, ...]
    labels: tuple[int, ...]
    boxes: torch.Tensor
    ranks: tuple[int, ...]
    # ``(B, 4)``, the boxes that "overlap" is measured with
    compared: torch.Tensor
    overlap: float
    of: Part
    layout: str
    decode: Decode | str | None
    size: Size | None

    __repr__ = short_repr

    def pick(self, output: Any, count: int) -> Picked:
        """The score of each image's boxes, found again in this output: ``(count,)``."""
        boxes = self._read(output, count)
        values: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for number, image in enumerate(self.images):
            value = self._value(boxes, number)
            values[image].append(_nothing(boxes.scores[image]) if value is None else value)
        return torch.stack([torch.stack(of_image).sum() for of_image in values]), None

    def class_scores(self, output: Any, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The scores ``(count, K)`` of all classes in each image's box, and the classes that are
        explained; None where boxes have one label each, or an image has several boxes."""
        boxes = self._read(output, count)
        # after suppression, each box has one label
        if not boxes.dense or self.of not in ("score", "logit") or len(self.images) > count:
            return None
        of_images = []
        for image in range(count):
            cell, _ = self._matched(boxes, image)
            of_images.append(boxes.scores[image][cell].detach())
        scores = torch.stack(of_images)
        if scores.isinf().any():  # labels that a box does not have
            return None
        return scores, torch.tensor(self.labels, device=scores.device)

    def of_classes(self, classes: tuple[int, ...]) -> "Detected":
        """The target for other classes (one for each image) of the same boxes."""
        return replace(self, labels=classes)

    def likeness(self, output: Any, count: int) -> torch.Tensor:
        """Return overlap times score of the most similar box, ``(count,)``, 0 without a box, summed
        over targets: D-RISE (Petsiuk et al., 2021), where labels agree (1) or not (0)."""
        boxes = self._read(output, count)
        best = self.boxes.new_zeros(count)
        for number, image in enumerate(self.images):
            scores = boxes.scores[image]
            if scores.numel():
                label_scores = _of_label(scores, self.labels[number]).amax(1).float()
                similarity = overlaps(boxes.boxes[image], self.boxes[number]) * label_scores
                # 0 times minus infinity is NaN
                best[image] += torch.where(label_scores > -torch.inf, similarity, 0.0).max()
        return best

    def rows(self, images: torch.Tensor) -> "Detected":
        """The detection target for a batch whose samples are perturbed copies of the given images:
        their labels, boxes and ranks."""
        numbers: list[int] = []
        samples: list[int] = []
        for sample, image in enumerate(images.tolist()):
            of_image = [number for number, other in enumerate(self.images) if other == image]
            numbers += of_image
            samples += [sample] * len(of_image)
        return replace(
            self,
            images=tuple(samples),
            labels=tuple(self.labels[number] for number in numbers),
            boxes=self.boxes[numbers],
            compared=self.compared[numbers],
            ranks=tuple(self.ranks[number] for number in numbers),
        )

    def _read(self, output: Any, count: int) -> Boxes:
        """The boxes in a detector's output, in the layout that the target was resolved on."""
        return read(output, count, self.size, self.decode or self.layout, self.name)

    def _matched(self, boxes: Boxes, number: int) -> tuple[int, float]:
        """Find one of this target's boxes again in its image: its position among ``boxes``, and its
        overlap with the resolved box (below 0 if there is none)."""
        image = self.images[number]
        scores = boxes.scores[image][:, self.labels[number]].detach()
        corners = boxes.boxes[image].detach()
        return matching_box(scores, corners, self.boxes[number], rank=self.ranks[number])

    def _value(self, boxes: Boxes, number: int) -> torch.Tensor | None:
        """The score, logit, side, overlap or existence of one of the detected boxes, with a graph;
        None where the box is not found again: then the score is 0.
        """
        image = self.images[number]
        scores = boxes.scores[image]
        corners = boxes.boxes[image]
        label = self.labels[number]
        if not len(corners) or label >= scores.shape[1]:
            return None
        cell, overlap_share = self._matched(boxes, number)
        if overlap_share < 0:
            return None
        # sides and logits are those of the nearest box, however little that overlaps
        if self.of in SIDES:
            return corners[cell, SIDES.index(self.of)]
        if self.of == "logit":
            if boxes.logits is None:
                raise TargetError(
                    f"of must be 'score' where a model returns no logits ({boxes.layout}), got "
                    "'logit'"
                )
            return boxes.logits[image][cell, label]
        if overlap_share < self.overlap:
            return None
        if self.of == "overlap":
            return overlaps(corners[cell][None], self.compared[number])[0]
        if self.of == "existence":
            return scores[cell].amax() if boxes.existence is None else boxes.existence[image][cell]
        return scores[cell, label]


def _photo(image: int) -> str:
    """The name of an image of a batch in messages: "photo 'cat.jpg'" inside an `Explainer`, else
    its number."""
    name = image_name(image)
    return f"photo {name}" if name == str(image) else f"photo {name!r}"


def _nothing(scores: torch.Tensor) -> torch.Tensor:
    """A score of 0 for a box that is not found, connected to the graph so that gradients are 0
    too."""
    return 0 * torch.where(scores == -torch.inf, 0.0, scores).sum()


def _of_label(scores: torch.Tensor, label: int | None) -> torch.Tensor:
    """Detection scores ``(Q, K)`` with minus infinity for all classes but ``label``; as they are
    for None."""
    if label is None:
        return scores
    is_other = torch.arange(scores.shape[1], device=scores.device) != label
    return scores.masked_fill(is_other, -torch.inf)


def matching_box(
    scores: torch.Tensor, boxes: torch.Tensor, box: torch.Tensor, rank: int = 0
) -> tuple[int, float]:
    """Which of ``boxes`` ``(Q, 4)`` is ``box``, and their IoU (below 0 without overlap): the best
    overlap; among nearly equal overlaps the best score, or the one of ``rank``.
    """
    cells, overlap_shares = coinciding(scores, boxes, box, rank + 1)
    if len(cells) <= rank:
        return int(cells[-1]), -1.0
    return int(cells[rank]), float(overlap_shares[rank])


def coinciding(
    scores: torch.Tensor, boxes: torch.Tensor, box: torch.Tensor, least: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The boxes ``(Q, 4)`` that overlap ``box`` nearly as much as the best (`NEAR`), and the next
    up to ``least``, by score, with their IoU: -1 for boxes with a score of minus infinity.
    """
    overlap_shares = torch.where(scores > -torch.inf, overlaps(boxes, box), -1.0)
    largest_shares = overlap_shares.topk(min(least, len(overlap_shares))).values
    best = largest_shares[0]
    # nine tenths of -1 are more than -1
    near_best = NEAR * best if best > 0 else best
    # at least the first `least`, and all others that are nearly as good as the best
    near = (overlap_shares >= min(largest_shares[-1], near_best)).nonzero()[:, 0]
    cells = near[scores[near].sort(descending=True, stable=True).indices]
    return cells, overlap_shares[cells]


def suppressed(
    scores: torch.Tensor,
    boxes: torch.Tensor,
    threshold: float,
    dense: bool = True,
    iou: float = 0.6,
    most: int = 1000,
) -> list[tuple[int, int]]:
    """Return (position, class) of the ``most`` best scores ``(Q, K)`` above the threshold, best
    first; if ``dense``, only those of ``boxes`` ``(Q, 4)`` that non-maximum suppression keeps."""
    from torchvision.ops import batched_nms

    is_candidate = scores > threshold
    if int(is_candidate.sum()) > most:  # sorting all of them would take longer than the model
        is_candidate &= scores >= scores.flatten().topk(most).values[-1]
    cells, labels = is_candidate.nonzero(as_tuple=True)
    order = scores[cells, labels].sort(descending=True, stable=True).indices[:most]
    cells = cells[order]
    labels = labels[order]
    if dense and len(cells):
        # it keeps classes apart by the largest edge, which must be finite and above zero
        corners = boxes[cells].float().nan_to_num(nan=0, posinf=0, neginf=0)
        corners = corners - corners.min()
        kept = batched_nms(corners, scores[cells, labels].float(), labels, iou)
        cells = cells[kept]
        labels = labels[kept]
    return list(zip(cells.tolist(), labels.tolist(), strict=True))


def overlaps(boxes: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union ``(Q,)`` of ``boxes`` ``(Q, 4)`` with one box ``(4,)``; 1
    for equal boxes without an area."""
    boxes = boxes.float()
    box = box.to(boxes.device).float()
    sides = torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])
    intersections = sides.clamp(min=0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    union = areas + (box[2:] - box[:2]).prod() - intersections
    is_same = (areas.detach() <= 0) & (boxes == box).all(1)  # equal boxes without an area
    # nothing is divided by 0
    shares = intersections / union.clamp(min=torch.finfo(union.dtype).tiny)
    return torch.where(is_same, 1.0, shares)


_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_BOX = re.compile(rf"(?:(.+)\s)?box\s{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}")
_POINT = re.compile(rf"(.*)@{_NUMBER},{_NUMBER}")
_INDEX = re.compile(r"(.+)@(\d+)")


@dataclass(frozen=True, eq=False)
class Place(Detections):
    """What a model finds at a place that the text ``called`` names: a detector's box, or a
    segmenter's class at the ``point`` or within the ``box``."""

    called: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        return self.called

    def resolved(self, output: Any, count: int) -> Target:
        """Choose what the place means in each image: a box of a detector, or the class at the place
        of a segmenter.
        """
        if find_layout(output, count, self.size) is not None:
            return super().resolved(output, count)
        # of maps, the model's input gives the place, and "cup@2" has none
        if self.size is None or (self.box is None and self.point is None):
            raise TargetError(
                f"target {self.name} must have a model that returns boxes; use Segmentation for "
                "maps"
            )
        height, width = self.size[-2:]
        if self.point is not None:
            point = (self.point[0] / width, self.point[1] / height)
            return Segmentation(self.label, point=point).resolved(output, count)
        left, top, right, bottom = torch.as_tensor(self.box).round().clamp(min=0).int().tolist()
        mask = torch.zeros(height, width, dtype=torch.bool)
        mask[top:bottom, left:right] = True
        return Segmentation(self.label, mask).resolved(output, count)

    def on_photo(self, seen: Box, size: Size) -> "Place":
        """Return this place, given in pixels of a photo, in pixels of the model's input of
        ``size``. ``seen`` is the part of the photo that the input shows.
        """
        places: dict[str, Any] = {"point": self.point, "box": self.box}
        for name, place in places.items():
            if place is not None:
                places[name] = seen.to_input([*map(float, place)], size)
        return replace(self, **places, size=size)


def as_place(text: str) -> Place | None:
    """Read a place such as "cup@2", "person@320,200" or "box 120,40,300,380"; None for any other
    text."""
    # the first group of each pattern is the label
    if match := _BOX.fullmatch(text):
        return Place(
            _label(match[1]), box=[float(edge) for edge in match.groups()[1:]], called=text
        )
    if match := _POINT.fullmatch(text):
        return Place(_label(match[1]), point=(float(match[2]), float(match[3])), called=text)
    if (match := _INDEX.fullmatch(text)) and int(match[2]) > 0:
        return Place(_label(match[1]), index=int(match[2]) - 1, called=text)
    return None


def _label(text: str | None) -> int | str | None:
    """The label before a typed place ("bird" of "bird box 1,2,3,4"): an int for a class index, None
    without one."""
    text = (text or "").strip()
    return int(text) if text.isdecimal() else text or None
