"""The labels of ImageNet's classes, and other words for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from explain.targets.labels import Categories

IMAGENET = Path(__file__).with_name("imagenet.txt")
KINDS = Path(__file__).with_name("imagenet_kinds.txt")


@cache
def imagenet_labels() -> Categories:
    """Return the labels of the 1,000 classes of ImageNet: readable, distinct, and with other words for them.

    These are the synonyms of WordNet, and everyday words for kinds of things: "dog" stands for 118 classes.

    >>> imagenet_labels()[281], imagenet_labels().synonyms[281][:2]
    ('tabby cat', ('tabby', 'cat'))
    """
    words = [line.split(", ") for line in IMAGENET.read_text("utf-8").splitlines()]
    absent = []
    for line in KINDS.read_text("utf-8").splitlines():
        kinds, _, classes = line.partition(": ")
        if classes == "none":
            absent += kinds.split(", ")
        for index in _numbers(classes) if classes != "none" else ():
            words[index] += kinds.split(", ")
    return Categories([first for first, *_ in words], [others for _, *others in words], absent)


def _numbers(ranges: str) -> Iterable[int]:
    """The numbers that a text such as ``"7-9, 12"`` stands for."""
    for part in ranges.split(", "):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def with_synonyms(labels: Iterable[str]) -> Categories:
    """Give labels the other words that ImageNet's labels of the same names have.

    >>> with_synonyms(["tabby cat", "gizmo"]).synonyms[1]
    ()
    """
    labels = list(labels)
    known = dict(zip(map(str.casefold, imagenet_labels()), imagenet_labels().synonyms, strict=True))
    return Categories(labels, [known.get(label.casefold(), ()) for label in labels], imagenet_labels().absent)
