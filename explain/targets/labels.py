"""Labels of classes, and the class that a typed label stands for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

from explain._utils.errors import TargetError, either
from explain._utils.spelling import did_you_mean


class Categories(tuple[str, ...]):
    """The labels of the classes in order.

    ``synonyms`` has other words for each class, by which it is found too. ``absent`` has words that no label stands
    for, even though they are a part of one, such as "house" in "house finch".

    >>> birds = Categories(["crane (bird)", "rooster"], [["crane"], ["cock", "cockerel"]])
    >>> birds[1], birds.synonyms[1]
    ('rooster', ('cock', 'cockerel'))
    """

    synonyms: tuple[tuple[str, ...], ...]
    absent: tuple[str, ...]

    def __new__(
        cls, labels: Iterable[str], synonyms: Iterable[Iterable[str]] = (), absent: Iterable[str] = ()
    ) -> Categories:
        found = super().__new__(cls, labels)
        found.synonyms = tuple(tuple(words) for words in synonyms)
        found.absent = tuple(absent)
        return found


def find_label(label: str, categories: Sequence[str] | None) -> int:
    """Return the class that a label names.

    The first of these that fits: the label itself, in upper or lower case; another word for the class, where the labels
    are `Categories` with synonyms; the last words of a label or of a synonym ("cat" in "tabby cat"); other words of a
    label in a row. Each is tried as it is, and then without regard to singular and plural.

    Raises:
        TargetError: no label, or more than one, fits; the message suggests.

    >>> find_label("Retrievers", ["tabby cat", "golden retriever"])
    1
    """
    if categories is None:
        raise TargetError(
            f"target {label!r} is a label, but the labels are not known; "
            f"{either('pass categories=', 'give --labels')}, or give the class index"
        )
    wanted, folded = _words(label), [_words(category) for category in categories]
    exact = [i for i, category in enumerate(categories) if _folded(category) == _folded(label)]
    if len(exact) > 1:
        raise TargetError(
            f"target {label!r} is the label of classes {', '.join(map(str, exact))}; give the class index"
        )
    own = [[words] for words in folded]
    others = [
        [_words(word) for word in words]
        for words in (categories.synonyms if isinstance(categories, Categories) else ())
    ]
    found = exact
    for fits, names in ((_whole, own), (_whole, others), (_ends, own), (_ends, others), (_within, own)):
        if not found and fits is _ends:
            _refuse_absent(label, categories)
        for plain in (True, False):
            found = found or [i for i, known in enumerate(names) if any(fits(wanted, words, plain) for words in known)]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(repr(categories[i]) for i in found[:6]) + f" and {len(found) - 6} more" * (len(found) > 6)
        raise TargetError(f"target {label!r} fits {len(found)} labels: {several}; name one of them")
    raise TargetError(f"target {label!r} is not a label of this model; {_suggestion(label, categories, others)}")


def _refuse_absent(label: str, categories: Sequence[str]) -> None:
    absent = categories.absent if isinstance(categories, Categories) else ()
    if any(_whole(_words(label), _words(word), False) for word in absent):
        raise TargetError(f"target {label!r} is not a label of this model, which has no class for it; name another")


def _folded(label: str) -> str:
    return " ".join(label.casefold().replace("_", " ").replace(",", " ").split())


@lru_cache(maxsize=8192)
def _words(label: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[-_,()]", " ", label.casefold()).split())


def _whole(wanted: tuple[str, ...], words: tuple[str, ...], plain: bool) -> bool:
    """Whether words are the same; unless they are compared as they are, singular and plural make no difference."""
    if plain or not len(wanted) == len(words) > 0:
        return len(wanted) > 0 and wanted == words
    return all(_forms(a) & _forms(b) for a, b in zip(wanted, words, strict=True))


def _ends(wanted: tuple[str, ...], words: tuple[str, ...], plain: bool) -> bool:
    """Whether words are the last ones of others, which in English say what kind of thing it is."""
    return _whole(wanted, words[max(len(words) - len(wanted), 0) :], plain)


def _within(wanted: tuple[str, ...], words: tuple[str, ...], plain: bool) -> bool:
    """Whether words are a part of others, in a row."""
    count = len(wanted)
    return any(_whole(wanted, words[i : i + count], plain) for i in range(len(words) - count + 1))


@cache
def _forms(word: str) -> frozenset[str]:
    """Return a word with what its singular might be, by the usual endings of English."""
    endings = {"s": "", "es": "", "ies": "y", "ves": "f"}
    cut = {word[: -len(end)] + to for end, to in endings.items() if word.endswith(end) and len(word) > len(end) + 1}
    return frozenset({word, PLURALS.get(word, word), *cut})


def _suggestion(label: str, categories: Sequence[str], others: Sequence[Sequence[tuple[str, ...]]]) -> str:
    """Suggest labels with a word that begins like what was typed, those with a similar synonym, or similar ones."""
    part = " ".join(_words(label))
    inside = [name for name in categories if len(part) > 2 and f" {part}" in f" {' '.join(_words(name))}"]
    if inside:
        return f"did you mean {' or '.join(repr(name) for name in inside[:3])}?"
    known = {" ".join(words): categories[i] for i, names in enumerate(others) for words in names}
    spelt = difflib.get_close_matches(part, [*known, *(name.casefold() for name in categories)], n=1, cutoff=0.8)
    if spelt and spelt[0] in known:
        return f"did you mean {known[spelt[0]]!r}?"
    return did_you_mean(label, categories)


PLURALS = {
    **{"mice": "mouse", "geese": "goose", "wolves": "wolf", "knives": "knife", "oxen": "ox"},
    **{"men": "man", "women": "woman", "children": "child"},
}
