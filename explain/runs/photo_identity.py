"""Which photos a run has already: those with the same content, label and boxes. A name alone says nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from explain._utils.errors import RunError
from explain.runs.labels import Labels
from explain.runs.preparing import Prepared
from explain.runs.schema import PHOTO
from explain.runs.sources import Corners, Entry, Label, Source


class Known(NamedTuple):
    """What a run has noted of a photo; ``boxes`` as JSON."""

    stamp: str | None
    sha256: str
    width: int
    height: int
    label: str | None
    label_class: int | None
    boxes: str | None

    @classmethod
    def of(cls, photo: Sequence[Any]) -> Known:
        """What is noted of a photo, out of the columns of ``photos``."""
        return cls(*(photo[PHOTO.index(name)] for name in cls._fields))


@dataclass(frozen=True)
class Comparing:
    """Compares the photos of a source with those that a run has, by their names.

    Where the stamp of a file is the same, the file need not be read. Everything else is read and compared by its
    pixels.
    """

    source: Source
    labels: Labels
    known: Mapping[str, Known]

    def has_file(self, entry: Entry) -> bool:
        """Whether a photo is there, as far as its file's stamp can say it."""
        before = self.known.get(entry.name)
        if before is None or entry.stamp is None or not self.source.by_file or before.stamp != entry.stamp:
            return False
        return self._same_about(before, entry.label, entry.boxes)

    def has(self, photo: Prepared) -> bool:
        """Whether a photo that was read is there.

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

    def _same_about(self, before: Known, label: Label, boxes: tuple[Corners, ...]) -> bool:
        index, name = self.labels.of(label)
        return (before.label, before.label_class, before.boxes) == (name, index, boxes_as_text(boxes))


def boxes_as_text(boxes: tuple[Corners, ...]) -> str | None:
    """Return boxes as they are stored.

    >>> boxes_as_text(((0.0, 1.0, 2.0, 3.0),)), boxes_as_text(())
    ('[[0.0, 1.0, 2.0, 3.0]]', None)
    """
    return json.dumps(boxes) if boxes else None
