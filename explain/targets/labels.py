"""Labels of classes, and the class that a typed label stands for."""

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Self

from explain._utils.errors import TargetError, python_or_command
from explain._utils.spelling import did_you_mean


class Categories(tuple[str, ...]):
    """The labels of the classes in order, with ``synonyms`` of each. Words in ``absent`` stand for
    no label, although a label has them, as "house" in "house finch"."""

    synonyms: tuple[tuple[str, ...], ...]
    absent: tuple[str, ...]

    def __new__(
        cls,
        labels: Iterable[str],
        synonyms: Iterable[Iterable[str]] = (),
        absent: Iterable[str] = (),
    ) -> Self:
        """Make a tuple of labels, with their synonyms and words that no label stands for."""
        categories = super().__new__(cls, labels)
        categories.synonyms = tuple(map(tuple, synonyms))
        categories.absent = tuple(absent)
        return categories


class Category(int):
    """A class index that is an int, remembers its label and is shown by it."""

    label: str

    def __new__(cls, index: int, label: str) -> "Category":
        """Make a class index that is an int and remembers its label."""
        category = super().__new__(cls, index)
        category.label = label
        return category

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # for copies and pickles
        return int(self), self.label

    def __str__(self) -> str:
        return self.label


def class_label(categories: Sequence[str] | None, index: int) -> str:
    """Return the label of a class, or "class 3" where ``categories`` has none."""
    if categories is not None and index < len(categories):
        return categories[index]
    return f"class {index}"


def find_label(label: str, categories: Sequence[str] | None) -> int:
    """Return the index of the class that a typed label means, singular or plural: by the label
    itself, then a synonym, their last words ("cat" in "tabby cat"), then any words in a row."""
    if categories is None:
        how = python_or_command("pass categories=", "give --labels")
        raise TargetError(
            f"target {label!r} is a label, but the labels are not known; {how}, or give the class "
            "index"
        )
    exact = [i for i, category in enumerate(categories) if _folded(category) == _folded(label)]
    if len(exact) > 1:
        raise TargetError(
            f"target {label!r} is the label of classes {', '.join(map(str, exact))}; give a class "
            "index"
        )
    if exact:
        return exact[0]
    fitting = _fitting(label, categories)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        several = ", ".join(repr(categories[i]) for i in fitting[:6])
        raise TargetError(
            f"target {label!r} fits {len(fitting)} labels, such as {several}; name one of them"
        )
    raise TargetError(
        f"target {label!r} is not a label of this model; {_suggestion(label, categories)}"
    )


def _fitting(label: str, categories: Sequence[str]) -> list[int]:
    """The indices of the classes that a typed label fits in the first way of `find_label` that fits
    any; the order makes "cat" find a class called so before "tabby cat".
    """
    wanted = _words(label)
    names = [[category] for category in categories]
    synonyms = getattr(categories, "synonyms", ())
    absent = [_words(name) for name in getattr(categories, "absent", ())]
    is_absent = any(_fits(wanted, words, "whole", is_exact=False) for words in absent)
    ways = (("whole", names), ("whole", synonyms), ("end", names), ("end", synonyms))
    for where, names_of_classes in (*ways, ("inside", names)):
        # labels that have the word among others mean something else, as "house finch" does
        if where == "end" and is_absent:
            raise TargetError(
                f"target {label!r} is not a label of this model, which has no class for it; name "
                "another"
            )
        for is_exact in (True, False):
            fitting = []
            for index, names_of_class in enumerate(names_of_classes):
                if any(_fits(wanted, _words(name), where, is_exact) for name in names_of_class):
                    fitting.append(index)
            if fitting:
                return fitting
    return []


def from_start(index: Any, count: int) -> Any:
    """Return an index (or a tuple of them) counted from the start where it is negative, as Python's
    are; what lies outside of ``count`` items, or is no index, stays as it is."""
    if isinstance(index, tuple):
        return tuple(from_start(item, count) for item in index)
    counts_from_end = isinstance(index, int) and -count <= index < 0
    return index + count if counts_from_end else index


def find_category(category: Any, categories: Sequence[str] | None) -> Any:
    """Return the index of a class that may be named by its label; an index or None stays as it is.
    The result for a label is a `Category`, which remembers the label.
    """
    if not isinstance(category, str):
        return category
    index = find_label(category, categories)
    return Category(index, categories[index] if categories else category)


def _folded(label: str) -> str:
    """A label in lower case, without underscores, commas and double spaces, to compare labels."""
    return " ".join(label.casefold().replace("_", " ").replace(",", " ").split())


@lru_cache(maxsize=8192)
def _words(label: str) -> tuple[str, ...]:
    """The words of a label in lower case, without hyphens, commas and brackets."""
    return tuple(re.sub(r"[-_,()]", " ", label.casefold()).split())


def _fits(wanted: tuple[str, ...], words: tuple[str, ...], where: str, is_exact: bool) -> bool:
    """Whether ``wanted`` words are the "whole" of a label's ``words``, their "end" (in English,
    what kind of thing it is) or "inside", as ``where`` says; plurals differ only if ``is_exact``.
    """
    extra_words = len(words) - len(wanted)
    if not wanted or extra_words < 0 or (where == "whole" and extra_words > 0):
        return False

    def same(a: str, b: str) -> bool:
        """Whether two words are equal, or may be forms of one word."""
        return a == b if is_exact else not _forms(a).isdisjoint(_forms(b))

    first_start = 0 if where == "inside" else extra_words
    # words behind the last wanted one are not compared
    return any(
        all(map(same, wanted, words[start:])) for start in range(first_start, extra_words + 1)
    )


@cache
def _forms(word: str) -> frozenset[str]:
    """A word, and what its singular might be, by the usual endings of English."""
    endings = {"s": "", "es": "", "ies": "y", "ves": "f"}
    singulars = {
        word[: -len(ending)] + singular_ending
        for ending, singular_ending in endings.items()
        if word.endswith(ending) and len(word) > len(ending) + 1
    }
    return frozenset({word, PLURALS.get(word, word), *singulars})


def _suggestion(label: str, categories: Sequence[str]) -> str:
    """The end of an error message, "did you mean 'tabby cat'?": labels with a word that begins like
    what was typed; else the label with a similar synonym, or similar labels.
    """
    typed = " ".join(_words(label))
    suggestions = []
    if len(typed) >= 3:  # a space stands before each word, the first one too
        suggestions = [name for name in categories if f" {typed}" in f" {' '.join(_words(name))}"]
    if not suggestions:
        labels: dict[str, str] = {}
        synonyms_of_labels = getattr(categories, "synonyms", ())
        for name, synonyms in zip(categories, synonyms_of_labels, strict=False):
            labels |= {" ".join(_words(synonym)): name for synonym in synonyms}
        close_synonyms = difflib.get_close_matches(typed, labels, n=1, cutoff=0.8)
        suggestions = [labels[word] for word in close_synonyms]
    if not suggestions:
        return did_you_mean(label, categories)
    return f"did you mean {' or '.join(map(repr, suggestions[:3]))}?"


PLURALS = {
    "mice": "mouse",
    "geese": "goose",
    "wolves": "wolf",
    "knives": "knife",
    "oxen": "ox",
    "men": "man",
    "women": "woman",
    "children": "child",
}
