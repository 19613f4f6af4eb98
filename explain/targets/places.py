"""A place on the image as text: the second cup, the person at a point, what is in a box."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from explain._utils.errors import TargetError
from explain.data.images import Box
from explain.targets.base import Labels, Target
from explain.targets.detections import Detections
from explain.targets.labels import find_category
from explain.targets.layouts import Size, find_layout
from explain.targets.regions import Segmentation

_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_BOX = re.compile(rf"(?:(.+)\s)?box\s{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}")
_POINT = re.compile(rf"(.*)@{_NUMBER},{_NUMBER}")
_INDEX = re.compile(r"(.+)@(\d+)")


@dataclass(frozen=True)
class Place(Target):
    """What a model detects or segments at a place; the model's output says which of both it does.

    Args:
        label: the class, as an index or in words; None takes any.
        index: which of the detections, 0 is the best.
        point: the one at this point ``(x, y)``.
        box: the one in this box ``(x0, y0, x1, y1)``; of a segmenter, the class within it.
    """

    label: int | str | None = None
    index: int = 0
    point: tuple[float, float] | None = None
    box: tuple[float, float, float, float] | None = None
    size: Size | None = field(default=None, repr=False, compare=False)
    called: str = field(default="", repr=False, compare=False)
    categories: Labels = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        if self.called:
            return self.called
        label = "" if self.label is None else str(self.label)
        if self.box is not None:
            return f"{label} box {','.join(f'{edge:g}' for edge in self.box)}".strip()
        where = self.index + 1 if self.point is None else ",".join(f"{edge:g}" for edge in self.point)
        return f"{label}@{where}"

    def settled(self, output: Any, count: int) -> Target:
        if find_layout(output, count, self.size) is not None:
            how: Any = {"size": self.size, "categories": self.categories}
            return Detections(self.label, self.box, self.index, self.point, **how).settled(output, count)
        if self.size is None or (self.box is None and self.point is None):
            raise TargetError(f"target {self.name} must have a model that returns boxes; use Segmentation for maps")
        height, width = self.size[-2:]
        if self.point is not None:
            point = self.point[0] / width, self.point[1] / height
            return Segmentation(self.label, point=point).settled(output, count)
        left, top, right, bottom = (round(edge) for edge in self.box or ())
        mask = torch.zeros(height, width, dtype=torch.bool)
        mask[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = True
        return Segmentation(self.label, mask).settled(output, count)

    def labelled(self, categories: Labels) -> "Place":
        return replace(self, label=find_category(self.label, categories), categories=categories)

    def sized(self, size: Size) -> "Place":
        return replace(self, size=size)

    def on_photo(self, seen: Box, size: Size) -> "Place":
        """Return a place in pixels of a photo in those of an input of ``size``, which shows a part of it."""
        scales, starts = (size[-1] / seen.width, size[-2] / seen.height) * 2, (seen.left, seen.top) * 2

        def moved(place: Any) -> Any:
            return place and tuple((at - b) * s for at, b, s in zip(place, starts, scales, strict=False))

        return replace(self, point=moved(self.point), box=moved(self.box), size=size, called=self.name)


def as_place(text: str) -> Place | None:
    """Read a place; None for a text that is none.

    >>> as_place("cup@2").index, as_place("person@320,200").point, as_place("box 120,40,300,380").label
    (1, (320.0, 200.0), None)
    """
    if found := _BOX.fullmatch(text):
        return Place(_label(found[1]), box=(float(found[2]), float(found[3]), float(found[4]), float(found[5])))
    if found := _POINT.fullmatch(text):
        return Place(_label(found[1]), point=(float(found[2]), float(found[3])))
    if (found := _INDEX.fullmatch(text)) and int(found[2]) > 0:
        return Place(_label(found[1]), int(found[2]) - 1)
    return None


def _label(text: str | None) -> int | str | None:
    text = (text or "").strip()
    return int(text) if text.isdigit() else text or None
