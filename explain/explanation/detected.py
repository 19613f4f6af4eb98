"""Which box or region of a photo each target is, what it is called, and what else was detected."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from explain._utils.errors import muted
from explain.data.boxes import Box
from explain.data.inputs import InputsLike, as_inputs
from explain.engine.output_kinds import reading
from explain.hooks import preserve
from explain.targets import ClassTarget, Detections, Segmentation, Target, TopClass
from explain.targets.detections import Detected, Place
from explain.targets.detector_outputs import find_layout, reading_once
from explain.targets.labels import Category, class_label
from explain.targets.outputs import Activation, Prediction


@dataclass(frozen=True)
class Located:
    """What a detector or segmenter finds on one photo, and, for each target in the order asked,
    what the target is there."""

    detections: tuple[Prediction, ...]
    """All boxes, best first."""
    names: tuple[str, ...]
    """What each target is called: "cup@2"."""
    boxes: tuple[Prediction | None, ...]
    """The box of each target; None for a region."""
    targets: tuple[Target, ...]
    """The box or region of each target as a target, with which another call explains the same."""


def located(
    model: nn.Module,
    x: InputsLike,
    targets: Sequence[Target],
    seen: Sequence[Box],
    categories: Sequence[str] | None,
    activation: Activation | None = None,
) -> list[Located]:
    """What a model without class scores finds in each input, and which box or region each target
    is; boxes in pixels of the part ``seen`` of the photo. Runs once, without gradients.
    """
    inputs = as_inputs(x)
    size = tuple(inputs.x.shape[2:])
    count = len(inputs)
    # for each input, best first: (number of the box in the output, category)
    hits: list[Any] = [[] for _ in range(count)]
    with (
        preserve.untouched(model),
        torch.no_grad(),
        reading_once(),
        reading(model, inputs, activation),
    ):
        output = inputs.call(model)
        layout = find_layout(output, count, size)
        resolved_targets = [_resolved(target, output, count, size) for target in targets]
        scores = [_scores(target, output, count) for target in resolved_targets]
        if layout is not None:
            hits = [Detections(size=size).detected(output, count, image) for image in range(count)]
    results = []
    for image, seen_part in enumerate(seen):
        detections: list[Prediction] = []
        names_of_hits = detection_names(
            [class_label(categories, category) for _, category in hits[image]]
        )
        for name, (number, category) in zip(names_of_hits, hits[image], strict=True):
            assert layout is not None  # else there are no hits
            box = seen_part.to_photo(layout.boxes[image][number].tolist(), size)
            score = float(layout.scores[image][number, category])
            detections.append(Prediction(name, score, category, box))
        names: list[str] = []
        boxes: list[Prediction | None] = []
        repeatable_targets: list[Target] = []
        for target, resolved, box_scores in zip(targets, resolved_targets, scores, strict=True):
            prediction = None
            if box_scores is not None and isinstance(resolved, Detected):
                of_image = resolved.rows(torch.tensor([image]))
                if len(of_image.boxes) > 1:
                    name, repeatable = _together(target, of_image, categories)
                else:
                    score = float(box_scores[image])
                    prediction, repeatable = _box(
                        of_image, score, size, detections, seen_part, categories
                    )
                    name = prediction.label
            else:
                name, repeatable = _region(target, resolved, image, categories)
            names.append(name)
            boxes.append(prediction)
            repeatable_targets.append(repeatable)
        results.append(
            Located(
                tuple(detections), tuple(names), tuple(boxes), targets=tuple(repeatable_targets)
            )
        )
    return results


def _resolved(target: Target, output: Any, count: int, size: tuple[int, ...]) -> Target:
    """A target with its boxes chosen in each of ``count`` inputs of ``size`` (height, width): for a
    detector, a class is all its boxes; for a segmenter, its region.
    """
    if isinstance(target, (ClassTarget, TopClass)):
        if find_layout(output, count, size) is None:
            with muted():  # the attribution has said which class it is
                return target.resolved(output, count)
        if isinstance(target, TopClass):
            target = Detections(index=target.rank)
        else:
            target = Detections(target.index, index="all", categories=target.categories)
    return target.for_input_size(size).resolved(output, count)


def _scores(target: Target, output: Any, count: int) -> torch.Tensor | None:
    """Return the scores ``(N,)`` in the model's output of the boxes that a resolved target means;
    None if it means no boxes."""
    return (
        replace(target, of="score").pick(output, count)[0] if isinstance(target, Detected) else None
    )


def _region(
    target: Target, resolved: Target, image: int, categories: Sequence[str] | None
) -> tuple[str, Target]:
    """The name of a target that is no box, on input number ``image``, and the target that explains
    the same again: for a class of a segmenter, the region where it sees that class.
    """
    is_class = isinstance(target, (ClassTarget, TopClass))
    if not is_class or not isinstance(resolved, Segmentation):
        return target.name, resolved if isinstance(target, Place) else target
    assert isinstance(resolved.category, tuple)
    index = resolved.category[image]
    region = Segmentation(Category(index, class_label(categories, index)))
    return region.name, region


def _together(
    target: Target, resolved: Detected, categories: Sequence[str] | None
) -> tuple[str, Target]:
    """The name of a target that is several boxes of one input, and the target that explains the
    same again: for a class, all its boxes."""
    if not isinstance(target, ClassTarget):
        return target.name, target
    category = resolved.labels[0]
    label = class_label(categories, category)
    decode = resolved.decode or resolved.layout
    return label, Detections(Category(category, label), index="all", decode=decode)


def _box(
    resolved: Detected,
    score: float,
    size: tuple[int, ...],
    detections: Sequence[Prediction],
    seen_part: Box,
    categories: Sequence[str] | None,
) -> tuple[Prediction, Target]:
    """The detection that a target means on one input, its name ("cup@2", else by its
    edges) and box in pixels of the photo, and the target that explains the same again.
    """
    category = resolved.labels[0]
    label = class_label(categories, category)
    corners = resolved.boxes[0]
    box = seen_part.to_photo(corners.tolist(), size)
    rank = resolved.ranks[0]
    names = [item.label for item in detections if item.category == category and item.box == box]
    name = f"{label} box {','.join(str(round(edge)) for edge in box)}"
    if names:  # of several detections with one box, best first, the rank says which
        name = names[min(rank, len(names) - 1)]
    if resolved.of != "score":
        name = f"{resolved.of} of {name}"
    repeatable = Detections(
        Category(category, label),
        box=tuple(corners.tolist()),
        index=rank,
        decode=resolved.decode or resolved.layout,
        of=resolved.of,
        overlap=resolved.overlap,
    )
    return Prediction(name, score, category, box), repeatable


def detection_names(labels: Sequence[str]) -> list[str]:
    """Return the labels as they can be typed for one detection each: "cup@1" and "cup@2" where
    there are two of a label."""
    names = []
    for position, label in enumerate(labels):
        number = labels[: position + 1].count(label)
        names.append(label if labels.count(label) == 1 else f"{label}@{number}")
    return names
