"""Labels of classes, and the class that a typed label stands for."""

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Self

from explain._utils.errors import TargetError, either
from explain._utils.spelling import did_you_mean


class Categories(tuple[str, ...]):
    """The labels of the classes in order.

    ``synonyms`` has other words for each class, by which it is found too. ``absent`` has words that
    no label stands for, even though they are a part of one, such as "house" in "house finch".

    >>> birds = Categories(["crane (bird)", "rooster"], [["crane"], ["cock", "cockerel"]])
    >>> birds[1], birds.synonyms[1]
    ('rooster', ('cock', 'cockerel'))
    """

    synonyms: tuple[tuple[str, ...], ...]
    absent: tuple[str, ...]

    def __new__(
        cls,
        labels: Iterable[str],
        synonyms: Iterable[Iterable[str]] = (),
        absent: Iterable[str] = (),
    ) -> Self:
        found = super().__new__(cls, labels)
        found.synonyms, found.absent = tuple(map(tuple, synonyms)), tuple(absent)
        return found


class Category(int):
    """A class index that remembers its label, and is shown by it.

    >>> tabby = Category(66, "tabby cat")
    >>> tabby == 66, f"{tabby}"
    (True, 'tabby cat')
    """

    label: str

    def __new__(cls, index: int, label: str) -> "Category":
        made = super().__new__(cls, index)
        made.label = label
        return made

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # for copies and pickles
        return int(self), self.label

    def __str__(self) -> str:
        return self.label


def class_label(categories: Sequence[str] | None, index: int) -> str:
    """Return the label of a class, or a plain name where it has none.

    >>> class_label(["cat", "dog"], 1), class_label(None, 1)
    ('dog', 'class 1')
    """
    return (
        categories[index]
        if categories is not None and index < len(categories)
        else f"class {index}"
    )


def find_label(label: str, categories: Sequence[str] | None) -> int:
    """Return the class that a label names.

    The first of these that fits: the label itself, in upper or lower case; another word for the
    class, where the labels are `Categories` with synonyms; the last words of a label or of a
    synonym ("cat" in "tabby cat"); other words of a label in a row. Each is tried as it is, and
    then without regard to singular and plural.

    Raises:
        TargetError: no label, or more than one, fits; the message suggests.

    >>> find_label("Retrievers", ["tabby cat", "golden retriever"])
    1
    """
    if categories is None:
        how = either("pass categories=", "give --labels")
        raise TargetError(
            f"target {label!r} is a label, but the labels are not known; {how}, or give the class "
            "index"
        )
    wanted = _words(label)
    exact = [i for i, category in enumerate(categories) if _folded(category) == _folded(label)]
    if len(exact) > 1:
        raise TargetError(
            f"target {label!r} is the label of classes {', '.join(map(str, exact))}; give a class "
            "index"
        )
    own = [[_words(category)] for category in categories]
    known = categories if isinstance(categories, Categories) else Categories(categories)
    others = [[_words(word) for word in words] for words in known.synonyms]
    found = exact
    for where, names in (
        ("whole", own),
        ("whole", others),
        ("end", own),
        ("end", others),
        ("inside", own),
    ):
        if (
            not found
            and where == "end"
            and any(_fits(wanted, _words(word), "whole", False) for word in known.absent)
        ):
            raise TargetError(
                f"target {label!r} is not a label of this model, which has no class for it; name "
                "another"
            )
        for plain in (True, False):
            found = found or [
                i
                for i, each in enumerate(names)
                if any(_fits(wanted, w, where, plain) for w in each)
            ]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(
            repr(categories[i]) for i in found[:6]
        ) + f" and {len(found) - 6} more" * (len(found) > 6)
        raise TargetError(f"target {label!r} fits {len(found)} labels: {several}; name one of them")
    raise TargetError(
        f"target {label!r} is not a label of this model; {_suggestion(label, categories, others)}"
    )


def find_category(given: Any, categories: Sequence[str] | None) -> Any:
    """Return a class index, or None, as it is, and for a label its index."""
    if not isinstance(given, str):
        return given
    index = find_label(given, categories)
    return Category(index, given if categories is None else categories[index])


def _folded(label: str) -> str:
    return " ".join(label.casefold().replace("_", " ").replace(",", " ").split())


@lru_cache(maxsize=8192)
def _words(label: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[-_,()]", " ", label.casefold()).split())


def _fits(wanted: tuple[str, ...], words: tuple[str, ...], where: str, plain: bool) -> bool:
    """Whether words are the "whole" of others, their "end" (which in English says what kind of
    thing it is), or a part.

    Unless they are compared as they are, singular and plural make no difference.
    """
    spare = len(words) - len(wanted)
    starts = (
        range(spare + 1) if where == "inside" else [spare] if where == "end" or spare == 0 else []
    )
    return len(wanted) > 0 and any(
        all(
            a == b if plain else _forms(a) & _forms(b)
            for a, b in zip(wanted, words[start:], strict=False)
        )
        for start in starts
        if start >= 0
    )


@cache
def _forms(word: str) -> frozenset[str]:
    """Return a word with what its singular might be, by the usual endings of English."""
    endings = {"s": "", "es": "", "ies": "y", "ves": "f"}
    cut = {
        word[: -len(end)] + to
        for end, to in endings.items()
        if word.endswith(end) and len(word) > len(end) + 1
    }
    return frozenset({word, PLURALS.get(word, word), *cut})


def _suggestion(
    label: str, categories: Sequence[str], others: Sequence[Sequence[tuple[str, ...]]]
) -> str:
    """Suggest labels with a word that begins like what was typed, those with a similar synonym, or
    similar ones."""
    part = " ".join(_words(label))
    meant = [
        name for name in categories if len(part) > 2 and f" {part}" in f" {' '.join(_words(name))}"
    ]
    if not meant:
        labels = {
            " ".join(words): categories[i] for i, names in enumerate(others) for words in names
        }
        meant = [labels[word] for word in difflib.get_close_matches(part, labels, n=1, cutoff=0.8)]
    return (
        f"did you mean {' or '.join(map(repr, meant[:3]))}?"
        if meant
        else did_you_mean(label, categories)
    )


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
