"""The labels of ImageNet's classes, and the other words that people have for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from explain.targets import Categories

IMAGENET = Path(__file__).with_name("imagenet.txt")


@cache
def imagenet_labels() -> Categories:
    """Return the labels of the 1,000 classes of ImageNet: readable, distinct, and with their synonyms from WordNet.

    >>> imagenet_labels()[281], imagenet_labels().synonyms[281]
    ('tabby cat', ('tabby',))
    """
    words = [line.split(", ") for line in IMAGENET.read_text("utf-8").splitlines()]
    return Categories([first for first, *_ in words], [others for _, *others in words])
