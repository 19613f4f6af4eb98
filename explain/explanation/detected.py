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
    """What was found on one photo; and for each target what it is called, the box that it is, and the box or region as
    a target, which explains the same again."""

    detections: tuple[Prediction, ...]
    names: tuple[str, ...]
    boxes: tuple[Prediction | None, ...]
    targets: tuple[Target, ...]


def located(
    model: nn.Module, x: torch.Tensor, targets: Sequence[Target], seen: Sequence[Box],
    categories: Sequence[str] | None, activation: Activation | None = None,
) -> list[Located]:  # fmt: skip
    """Run a model that gives no class scores once more, and say of each input what its targets are in the photo.

    ``seen`` is the part of each photo that its input shows.
    """
    size, count = tuple(x.shape[2:]), len(x)
    inputs = Inputs((x,))
    with (
        preserve.untouched(model),
        torch.no_grad(),
        reading_once(),
        reading(model, inputs, activation),
    ):
        output = inputs.call(model)
        every, found = find_layout(output, count, size), []
        settled = [_settled(target, output, count, size) for target in targets]
        scores = [replace(s, of="score").pick(output, count)[0] if isinstance(s, Detected) else None for s in settled]
        hits = [Detections(size=size).detected(output, count, i) if every is not None else [] for i in range(count)]
    for i, part in enumerate(seen):
        detections, labels = list[Prediction](), list[str]()
        for q, k in hits[i]:
            assert every is not None
            labels.append(class_label(categories, k))
            box = _on_photo(every.boxes[i][q], part, size)
            detections.append(Prediction(_numbered(labels), float(every.scores[i][q, k]), k, box))
        chosen = [
            _which(target, own, score, i, size, detections, part, categories)
            for target, own, score in zip(targets, settled, scores, strict=True)
        ]
        names, places, concrete = zip(*chosen, strict=True)
        found.append(Located(tuple(detections), names, places, concrete))
    return found


def _settled(target: Target, output: Any, count: int, size: tuple[int, ...]) -> Target:
    """A target with its choices made; a class of a segmenter stays as it is."""
    if isinstance(target, (ClassTarget, TopClass)):
        if find_layout(output, count, size) is None:
            return target
        target = Detections(index=target.rank) if isinstance(target, TopClass) else Detections(target.index)
    return target.sized(size).settled(output, count)


def _which(
    target: Target, settled: Target, score: torch.Tensor | None, i: int, size: tuple[int, ...],
    detections: Sequence[Prediction], part: Box, categories: Sequence[str] | None,
) -> tuple[str, Prediction | None, Target]:  # fmt: skip
    """The name, the box, and the target again of what a target is on one photo."""
    if isinstance(settled, (ClassTarget, TopClass)):
        own = settled.index if isinstance(settled, ClassTarget) else None
        label = (own[i] if isinstance(own, tuple) else own) or 0
        concrete = Segmentation(Category(label, class_label(categories, label)))
        return concrete.name, None, concrete
    if not isinstance(settled, Detected) or score is None:
        return target.name, None, settled if isinstance(target, Place) else target
    label, near = settled.labels[i], settled.boxes[i]
    word, box = class_label(categories, label), _on_photo(near, part, size)
    same = [each.label for each in detections if each.category == label and each.box == box]
    rank = 0 if settled.ranks is None else settled.ranks[i]
    name = same[min(rank, len(same) - 1)] if same else f"{word} box {','.join(f'{edge:.0f}' for edge in box)}"
    concrete_box = Detections(
        Category(label, word), tuple(near.tolist()), rank, decode=settled.decode or settled.layout, of=settled.of,
        overlap=settled.overlap,
    )  # fmt: skip
    name = name if settled.of == "score" else f"{settled.of} of {name}"
    return name, Prediction(name, float(score[i]), label, box), concrete_box


def _numbered(labels: Sequence[str]) -> str:
    """The last label as a target that means this detection: "cup", and "cup@2" for the second.

    >>> _numbered(["cup"]), _numbered(["cup", "tie"]), _numbered(["cup", "tie", "cup"])
    ('cup', 'tie', 'cup@2')
    """
    count = labels.count(labels[-1])
    return labels[-1] if count == 1 else f"{labels[-1]}@{count}"


def _on_photo(box: torch.Tensor, part: Box, size: tuple[int, ...]) -> tuple[float, float, float, float]:
    """A box in pixels of the input in those of the photo."""
    (left, top, right, bottom), across, down = box.tolist(), part.width / size[-1], part.height / size[-2]
    return part.left + left * across, part.top + top * down, part.left + right * across, part.top + bottom * down
