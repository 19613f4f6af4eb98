"""Which box or region of a photo each target is, what it is called, and what else was detected."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from explain.data.boxes import Box
from explain.data.inputs import Inputs
from explain.engine.ends import reading
from explain.hooks import preserve
from explain.targets import ClassTarget, Detections, Segmentation, Target, TopClass
from explain.targets.detections import Detected, Place
from explain.targets.detector_outputs import find_layout, reading_once
from explain.targets.labels import Category, class_label
from explain.targets.outputs import Activation, Prediction


@dataclass(frozen=True)
class Located:
    """What was found on one photo; and for each target what it is called, the box that it is, and
    the box or region as a target, which explains the same again."""

    detections: tuple[Prediction, ...]
    names: tuple[str, ...]
    boxes: tuple[Prediction | None, ...]
    targets: tuple[Target, ...]


def located(
    model: nn.Module,
    x: torch.Tensor,
    targets: Sequence[Target],
    seen: Sequence[Box],
    categories: Sequence[str] | None,
    activation: Activation | None = None,
) -> list[Located]:
    """Run a model that gives no class scores once more, and say of each input what its targets are
    in the photo.

    ``seen`` is the part of each photo that its input shows.
    """
    size = tuple(x.shape[2:])
    count = len(x)
    inputs = Inputs((x,))
    hits: list[Any] = [[] for _ in range(count)]
    with (
        preserve.untouched(model),
        torch.no_grad(),
        reading_once(),
        reading(model, inputs, activation),
    ):
        output = inputs.call(model)
        layout = find_layout(output, count, size)
        resolved = [_resolved(target, output, count, size) for target in targets]
        scores = [_scores(target, output, count) for target in resolved]
        if layout is not None:
            hits = [Detections(size=size).detected(output, count, image) for image in range(count)]
    results = []
    for image, part in enumerate(seen):
        detections: list[Prediction] = []
        labels: list[str] = []
        for query, category in hits[image]:
            assert layout is not None
            labels.append(class_label(categories, category))
            box = part.to_photo(layout.boxes[image][query].tolist(), size)
            score = float(layout.scores[image][query, category])
            detections.append(Prediction(_numbered(labels), score, category, box))
        names: list[str] = []
        boxes: list[Prediction | None] = []
        concrete: list[Target] = []
        for target, choice, of_images in zip(targets, resolved, scores, strict=True):
            prediction = None
            if of_images is not None and isinstance(choice, Detected):
                score = float(of_images[image])
                prediction, again = _box(choice, score, image, size, detections, part, categories)
                name = prediction.label
            else:
                name, again = _region(target, choice, image, categories)
            names.append(name)
            boxes.append(prediction)
            concrete.append(again)
        results.append(Located(tuple(detections), tuple(names), tuple(boxes), tuple(concrete)))
    return results


def _resolved(target: Target, output: Any, count: int, size: tuple[int, ...]) -> Target:
    """A target with its choices made; a class of a segmenter stays as it is."""
    if isinstance(target, (ClassTarget, TopClass)):
        if find_layout(output, count, size) is None:
            return target
        if isinstance(target, TopClass):
            target = Detections(index=target.rank)
        else:
            target = Detections(target.index)
    return target.for_input_size(size).resolved(output, count)


def _scores(target: Target, output: Any, count: int) -> torch.Tensor | None:
    """The scores ``(N,)`` of detections; None of other targets."""
    return (
        replace(target, of="score").pick(output, count)[0] if isinstance(target, Detected) else None
    )


def _region(
    target: Target, resolved: Target, image: int, categories: Sequence[str] | None
) -> tuple[str, Target]:
    """The name of a target that is no box, and the target that explains the same again."""
    if isinstance(resolved, TopClass):
        index: Any = 0
    elif isinstance(resolved, ClassTarget):
        index = resolved.index[image] if isinstance(resolved.index, tuple) else resolved.index
    else:
        return target.name, resolved if isinstance(target, Place) else target
    region = Segmentation(Category(index, class_label(categories, index)))
    return region.name, region


def _box(
    resolved: Detected,
    score: float,
    image: int,
    size: tuple[int, ...],
    detections: Sequence[Prediction],
    part: Box,
    categories: Sequence[str] | None,
) -> tuple[Prediction, Target]:
    """A detection on one photo, and the target that explains the same again."""
    category = resolved.labels[image]
    label = class_label(categories, category)
    corners = resolved.boxes[image]
    box = part.to_photo(corners.tolist(), size)
    rank = resolved.ranks[image]
    same = [item.label for item in detections if item.category == category and item.box == box]
    name = f"{label} box {','.join(f'{edge:.0f}' for edge in box)}"
    if same:
        name = same[min(rank, len(same) - 1)]
    if resolved.of != "score":
        name = f"{resolved.of} of {name}"
    again = Detections(
        Category(category, label),
        tuple(corners.tolist()),
        rank,
        decode=resolved.decode or resolved.layout,
        of=resolved.of,
        overlap=resolved.overlap,
    )
    return Prediction(name, score, category, box), again


def _numbered(labels: Sequence[str]) -> str:
    """The last label as a target that means this detection: "cup", and "cup@2" for the second.

    >>> _numbered(["cup"]), _numbered(["cup", "tie"]), _numbered(["cup", "tie", "cup"])
    ('cup', 'tie', 'cup@2')
    """
    count = labels.count(labels[-1])
    return labels[-1] if count == 1 else f"{labels[-1]}@{count}"
