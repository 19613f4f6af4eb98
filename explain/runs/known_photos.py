"""Which photos a run has already: those with the same content, label and boxes. A name alone says nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from explain._utils.errors import RunError
from explain.models.classifier import class_label
from explain.runs.preparing import Prepared
from explain.runs.sources import Corners, Entry, Label, Source


@dataclass(eq=False)
class Labels:
    """Finds the class of the model for a label of the source.

    A number is the class of the model with this number, unless the source has names for its classes that are labels of
    the model: then the name decides. A text is a label of the model if it is written the same, apart from capitals,
    dashes and underlines, or is one of the words of a label that are separated by commas. Anything else stays as it
    is, without a class: nothing is guessed.

    >>> labels = Labels(["tench, Tinca tinca", "goldfish"], classes=["goldfish", "tench"])
    >>> labels.of(0), labels.of("tinca_tinca"), labels.of("shark")
    ((1, 'goldfish'), (0, 'tench, Tinca tinca'), (None, 'shark'))
    """

    categories: Sequence[str] | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._known: dict[str, int | None] = {}
        for exact in (False, True):  # a complete label counts more than a part of one
            own: dict[str, int | None] = {}
            for index, category in enumerate(self.categories or ()):
                for word in [category] if exact else category.split(","):
                    own[_plain(word)] = None if _plain(word) in own else index
            self._known.update(own)
        self._by_name = any(self._known.get(_plain(name)) is not None for name in self.classes or ())

    def of(self, label: Label) -> tuple[int | None, str | None]:
        """Return the class of the model that a label of the source means, and the label as text."""
        if label is None:
            return None, None
        if isinstance(label, str):
            index = self._known.get(_plain(label))
            return index, label if index is None else class_label(self.categories, index)
        if self._by_name and self.classes is not None and 0 <= label < len(self.classes):
            return self.of(self.classes[label])
        if label < 0 or (self.categories is not None and label >= len(self.categories)):
            return None, str(label)
        return label, class_label(self.categories, label)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()


class KnownPhoto(NamedTuple):
    """The columns of ``photos`` that identify a photo; ``boxes`` as JSON."""

    stamp: str | None
    sha256: str
    width: int
    height: int
    label: str | None
    label_class: int | None
    boxes: str | None


@dataclass(frozen=True)
class KnownPhotos:
    """The photos that a run has by name, to compare with those of a source.

    Where the stamp of a file is the same, the file need not be read. Everything else is read and compared by its
    pixels.
    """

    source: Source
    labels: Labels
    known: Mapping[str, KnownPhoto]

    def has_file(self, entry: Entry) -> bool:
        """Whether the run has a photo, judging by the stamp of its file."""
        before = self.known.get(entry.name)
        if before is None or entry.stamp is None or not self.source.by_file or before.stamp != entry.stamp:
            return False
        return self._same_about(before, entry.label, entry.boxes)

    def has(self, photo: Prepared) -> bool:
        """Whether the run has a photo that was read.

        Raises:
            RunError: it has other pixels than before, although its file has not changed, or it has none: the source is
                another one.
        """
        entry = photo.entry
        before = self.known.get(entry.name)
        if before is None:
            return False
        same = (photo.sha256, *photo.size) == (before.sha256, before.width, before.height)
        if not same and (entry.stamp is None or entry.stamp == before.stamp):
            raise RunError(
                f"photo {entry.name!r} must be the one that the run was begun with, but has other pixels; give the "
                "same photos in the same order, or another output"
            )
        return same and self._same_about(before, photo.label, photo.boxes)

    def _same_about(self, before: KnownPhoto, label: Label, boxes: tuple[Corners, ...]) -> bool:
        index, name = self.labels.of(label)
        return (before.label, before.label_class, before.boxes) == (name, index, boxes_as_text(boxes))


def boxes_as_text(boxes: tuple[Corners, ...]) -> str | None:
    """Return boxes as they are stored.

    >>> boxes_as_text(((0.0, 1.0, 2.0, 3.0),)), boxes_as_text(())
    ('[[0.0, 1.0, 2.0, 3.0]]', None)
    """
    return json.dumps(boxes) if boxes else None
