"""From what a source says about a photo's class to a class of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from explain.models.classifier import class_label
from explain.runs.sources import Label


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of a model, and what a source calls its classes.

    A number is the class of the model with this number, unless the source has names for its classes that are labels of
    the model: then the name decides. A text is a label of the model if it is written the same, apart from capitals,
    dashes and underlines, or is one of the words of a label that are separated by commas. Anything else is kept as it
    is, without a class: nothing is guessed.

    >>> labels = Labels(["tench, Tinca tinca", "goldfish"], classes=["goldfish", "tench"])
    >>> labels.of(0), labels.of("tinca_tinca"), labels.of("shark")
    ((1, 'goldfish'), (0, 'tench, Tinca tinca'), (None, 'shark'))
    """

    categories: Sequence[str] | None = None
    classes: Sequence[str] | None = None
    _known: dict[str, int | None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for exact in (False, True):  # what is a whole label counts more than what is a part of one
            own: dict[str, int | None] = {}
            for index, category in enumerate(self.categories or ()):
                for word in [category] if exact else category.split(","):
                    own[_plain(word)] = None if _plain(word) in own else index
            self._known.update(own)

    def of(self, label: Label) -> tuple[int | None, str | None]:
        """Return the class of the model that a label of the source means, and the label as text."""
        if label is None:
            return None, None
        if isinstance(label, str):
            index = self._known.get(_plain(label))
            return index, label if index is None else class_label(self.categories, index)
        if self._named and self.classes is not None and 0 <= label < len(self.classes):
            return self.of(self.classes[label])
        many = len(self.categories) if self.categories is not None else None
        if label < 0 or (many is not None and label >= many):
            return None, str(label)
        return label, class_label(self.categories, label)

    @cached_property
    def _named(self) -> bool:
        """Whether the source's own names of classes are labels of the model."""
        return any(self._known.get(_plain(name)) is not None for name in self.classes or ())


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()
