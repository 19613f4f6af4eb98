"""Labels of photos as classes of a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from explain.store.sources import Label, each_label
from explain.targets.labels import class_label


@dataclass(eq=False)
class Labels:
    """Finds the class of the model for a label of the source.

    A number is the class of the model with this number, unless the source has names for its classes
    that are labels of the model: then the name decides. A text is a label of the model if it is
    written the same, apart from capitals, dashes and underlines, or is one of the words of a label
    that are separated by commas. Anything else stays as it is, without a class: nothing is guessed.

    >>> labels = Labels(["tench, Tinca tinca", "goldfish"], classes=["goldfish", "tench"])
    >>> labels.of(0), labels.of("tinca_tinca"), labels.of("shark")
    ([(1, 'goldfish')], [(0, 'tench, Tinca tinca')], [(None, 'shark')])
    """

    categories: Sequence[str] | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._known: dict[str, int | None] = {}
        for exact in (False, True):  # a complete label counts more than a part of one
            classes_of_words: dict[str, int | None] = {}
            for index, category in enumerate(self.categories or ()):
                for word in [category] if exact else category.split(","):
                    classes_of_words[_plain(word)] = (
                        None if _plain(word) in classes_of_words else index
                    )
            self._known.update(classes_of_words)
        self._by_name = any(
            self._known.get(_plain(name)) is not None for name in self.classes or ()
        )

    def of(self, label: Label) -> list[tuple[int | None, str]]:
        """Return the class of the model and the text of each label that is true of a photo; none
        where none is known.

        A list with as many zeros and ones as there are classes says of each class whether it is
        true.
        """
        labels = each_label(label)
        names = self.categories if self.classes is None else self.classes
        if (
            len(labels) > 1
            and names is not None
            and len(labels) == len(names)
            and set(labels) <= {0, 1}
        ):
            labels = tuple(number for number, is_true in enumerate(labels) if is_true)
        return [self._of_one(one) for one in dict.fromkeys(labels)]

    def first_class(self, label: Label) -> int | None:
        """Return the first class of the model that a photo with this label has."""
        return next((index for index, _ in self.of(label) if index is not None), None)

    def _of_one(self, label: str | int) -> tuple[int | None, str]:
        if isinstance(label, str):
            index = self._known.get(_plain(label))
            return index, label if index is None else class_label(self.categories, index)
        if self._by_name and self.classes is not None and 0 <= label < len(self.classes):
            return self._of_one(self.classes[label])
        if label < 0 or (self.categories is not None and label >= len(self.categories)):
            return None, str(label)
        return label, class_label(self.categories, label)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()
