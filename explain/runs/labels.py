"""Labels of photos as classes of a model."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from explain._utils.spelling import close_to
from explain.store.sources import Label, ObjectBox, Uncertain, labels_in
from explain.targets.labels import class_label

ClassLabel: TypeAlias = tuple[int | None, str] | tuple[int | None, str, str]
"""The class of the model, None where it has none, and the text of a label that is true; "uncertain"
follows where that is not known."""
UNCERTAIN = "uncertain"


@dataclass(eq=False)
class Labels:
    """Finds the class of the model for a label of the source, by its number or its text. Where
    nothing fits, the label stays as it is, without a class: nothing is guessed."""

    # texts fit whatever their capitals, dashes and underlines, also one of the words between a
    # label's commas; several words with commas are several labels
    categories: Sequence[str] | None = None
    # the source's names of its classes; if these are the model's labels, numbers go by them
    classes: Sequence[str] | None = None
    by_label: bool = False
    """Whether mistakes are counted for each label."""

    def __post_init__(self) -> None:
        """Index the model's labels by their words (`_plain`): a whole label before a part between
        commas, None for a word of several. ``_by_name``: numbers go by the source's names.
        """
        self._class_of_word: dict[str, int | None] = {}  # None where it means several
        self._notes: dict[str, str] = {}
        for whole_label in (False, True):  # a complete label counts more than a part of one
            classes_of_words: dict[str, int | None] = {}
            for index, category in enumerate(self.categories or ()):
                for word in [category] if whole_label else category.split(","):
                    plain = _plain(word)
                    classes_of_words[plain] = None if plain in classes_of_words else index
            self._class_of_word.update(classes_of_words)
        self._by_name = any(
            self._class_of_word.get(_plain(name)) is not None for name in self.classes or ()
        )

    def of(self, label: Label) -> list[ClassLabel] | None:
        """Each true label of a photo as class and text; None if unknown, empty if none is true. Of
        zeros and ones for all classes, -1 is uncertain; of one class, 0 is no.
        """
        if label is None:
            return None
        labels = labels_in(label)
        names = self.categories if self.classes is None else self.classes
        # of a single class, a 1 says yes and is no number of a class
        if names is not None and len(names) == 1 and labels in ((0,), (1,)):
            return [self._of_one(0)] if labels == (1,) else []
        # without names to count, a repeated number or -1 shows that these are no classes
        is_vector = len(set(labels)) < len(labels) or -1 in labels
        fits = is_vector if names is None else len(labels) == len(names)
        if len(labels) > 1 and fits and set(labels) <= {0, 1, -1}:
            numbers = [number for number, is_true in enumerate(labels) if is_true == 1]
            doubtful = [number for number, is_true in enumerate(labels) if is_true == -1]
            classes = [self._of_one(number) for number in numbers]
            # class and text, which the mark follows
            return classes + [(*self._of_one(number)[:2], UNCERTAIN) for number in doubtful]
        return [self._of_one(one) for one in dict.fromkeys(self._split(labels))]

    def _split(self, labels: Iterable[str | int]) -> Iterator[str | int]:
        """Split texts with commas into several labels, where the whole text is no label of the
        model and every part is one; all other labels stay as they are."""
        for label in labels:
            parts = label.split(",") if isinstance(label, str) else [label]
            has_class = self._of_one(label)[0] is not None
            if len(parts) == 1 or has_class or any(self._of_one(part)[0] is None for part in parts):
                yield label
            else:
                yield from parts

    def first_class(self, label: Label) -> int | None:
        """Return the model's class of the first true label that has one; None without any."""
        labels = true_labels(self.of(label))
        return next((index for index, _ in labels if index is not None), None)

    def of_boxes(self, boxes: Iterable[ObjectBox]) -> list[Any]:
        """Return boxes with their labels in the model's words, where it has the label; boxes of
        several classes are compared with targets by these."""
        return [(*box[:4], *(self._of_one(label)[1] for label in box[4:])) for box in boxes]

    def notes(self, label: Label) -> list[str]:
        """Return a warning for each true label of a photo that is none of the model's; none where
        the model has no labels. The run stores them as notes."""
        if self.categories is None:
            return []
        return [self._note(name) for index, name in true_labels(self.of(label)) if index is None]

    def _note(self, name: str) -> str:
        """The warning about a label that is none of the model's, with the nearest label that it
        has. Cached, since many photos share a label and the search takes a while."""
        if name not in self._notes:
            close = close_to(name, [*(self.categories or ())], 1)
            remedy = f"; did you mean {close[0]!r}?" if close else ""
            counts = "it counts neither as right nor as wrong"
            if self.by_label:
                counts += ", and mistakes by label count the photo by its other labels"
            self._notes[name] = f"label {name!r} is none of the model's: {counts}{remedy}"
        return self._notes[name]

    def _of_one(self, label: str | int) -> ClassLabel:
        """Return the model's class of one label of the source (None if it has none) and its text;
        "uncertain" follows if the source is not sure."""
        if isinstance(label, Uncertain):
            return (*self._of_one(str(label))[:2], UNCERTAIN)
        if isinstance(label, str):
            index = self._class_of_word.get(_plain(label))
            return index, label if index is None else class_label(self.categories, index)
        # the source counts its classes in its own order
        if self._by_name and self.classes is not None and 0 <= label < len(self.classes):
            return self._of_one(self.classes[label])
        if label < 0 or (self.categories is not None and label >= len(self.categories)):
            return None, str(label)
        return label, class_label(self.categories, label)


def true_labels(labels: Iterable[Sequence[Any]] | None) -> list[tuple[int | None, str]]:
    """Return the labels of `Labels.of` that are true, as class and text, without those that are
    uncertain."""
    return [(label[0], label[1]) for label in labels or () if len(label) == 2]


def _plain(name: str) -> str:
    """A label as it is compared: in lower case, with a single blank for each run of dashes,
    underlines and blanks."""
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()
