"""Data sets of PyTorch and of Hugging Face, and lists of photos in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain.errors import RunError
from explain.runs.items import as_label, content_of
from explain.runs.sources import Content, Entry, Source, stamp, text


@dataclass(frozen=True)
class Columns:
    """The columns of a data set that hold the image and the label, and what it calls the classes."""

    image: str | None = None
    label: str | None = None
    classes: list[str] | None = None

    @classmethod
    def of(cls, features: Mapping[str, Any]) -> Columns:
        """Find the columns by their features, as data sets of Hugging Face have them.

        Raises:
            RunError: none holds images.
        """
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        images = [name for name, kind in kinds.items() if kind == "Image"]
        labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
        if not images:
            raise RunError(f"source must have a column with images, got {', '.join(features)}; cast one to an Image")
        label = labels[0] if labels else None
        return cls(images[0], label, None if label is None else list(features[label].names))


class Photos(Source):
    """Photos in a list, or in anything that gives one after the other: paths, pictures, or pairs with a label.

    Args:
        photos: what `explain.images.load_image` takes, each alone, as a pair ``(photo, label)`` or in a dictionary.
        columns: the keys of dictionaries, where they are not the usual ones.
    """

    kind = "photos"

    def __init__(self, photos: Iterable[Any], columns: Columns | None = None) -> None:
        self.photos = photos
        self.columns = columns or Columns()
        self.classes = self.columns.classes

    @property
    def count(self) -> int | None:
        return len(self.photos) if isinstance(self.photos, Sequence) else None

    def entries(self) -> Iterator[Entry]:
        for place, item in enumerate(self.photos):
            name, path = _named(item, f"photo {place}")
            photo, *rest = item if isinstance(item, tuple) and item else (item,)
            in_file = isinstance(photo, (str, os.PathLike))  # an opened picture may have been changed since
            known, label = (stamp(photo), as_label(rest[0]) if rest else None) if in_file else (None, None)
            yield Entry(name, place if self.count is not None else item, path, known, label)

    def read(self, entry: Entry) -> Content:
        photos: Any = self.photos
        item = photos[entry.where] if self.count is not None else entry.where
        return content_of(item, self.columns.image, self.columns.label)

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind}


class DataSet(Source):
    """The items of a data set that has a length and gives an item by its number: an image, perhaps with a label.

    Items are named by their files where the data set knows them, as torchvision's `ImageFolder` does, and otherwise by
    their numbers. A float tensor is given to the model as it is; an image is preprocessed first.

    Args:
        items: ``len(items)`` and ``items[i]``, as ``torch.utils.data.Dataset`` has them.
    """

    kind = "data set"
    by_file = False  # it may transform what is in its files

    def __init__(self, items: Any) -> None:
        self.items = items
        self.inner, _ = innermost(items, 0)
        self.classes = _class_names(getattr(self.inner, "classes", None))

    @property
    def count(self) -> int:
        return len(self.items)

    def entries(self) -> Iterator[Entry]:
        files = getattr(self.inner, "samples", None) or getattr(self.inner, "imgs", None)
        for place in range(self.count):
            _, number = innermost(self.items, place)
            path = _path_at(files, number)
            name = f"item {number}" if path is None else text(path)
            known = None if path is None else stamp(path)
            yield Entry(name, place, None if path is None else text(path), known)

    def read(self, entry: Entry) -> Content:
        return content_of(self.items[entry.where])

    def identity(self) -> dict[str, Any]:
        root = getattr(self.inner, "root", None)
        kind = f"{type(self.inner).__module__}.{type(self.inner).__qualname__}"
        about = {"kind": self.kind, "type": kind, "length": self.count}
        return about if root is None else {**about, "root": text(os.path.realpath(root))}


class HuggingFace(DataSet):
    """A data set of Hugging Face: the columns with an image and with a label are found by their features.

    Args:
        items: a ``datasets.Dataset``; one that only streams is taken by `Photos`.

    Raises:
        RunError: it has several splits, or no column with images.
    """

    kind = "data set"

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.columns = Columns.of(dict(items.features or {}))
        self.classes = self.columns.classes

    def read(self, entry: Entry) -> Content:
        return content_of(self.items[entry.where], self.columns.image, self.columns.label)

    def identity(self) -> dict[str, Any]:
        found = getattr(self.items, "_fingerprint", None)
        return {**super().identity(), "fingerprint": found}


def innermost(items: Any, place: int) -> tuple[Any, int]:
    """Follow subsets of a data set to the data set that they were taken from.

    >>> from torch.utils.data import Subset
    >>> innermost(Subset(Subset(["a", "b", "c"], [2, 1]), [1]), 0)
    (['a', 'b', 'c'], 1)
    """
    while hasattr(items, "dataset") and hasattr(items, "indices"):
        place = int(items.indices[place]) if len(items.indices) else 0
        items = items.dataset
    return items, place


def _named(item: Any, otherwise: str) -> tuple[str, str | None]:
    """The name of a photo, and its path."""
    if isinstance(item, tuple) and item:
        item = item[0]
    if isinstance(item, (str, os.PathLike)):
        return text(item), text(Path(item))
    path = str(getattr(item, "filename", "") or "") if isinstance(item, Image.Image) else ""
    return (text(path), text(path)) if path else (otherwise, None)


def _path_at(files: Any, number: int) -> str | None:
    """The path at a place of a data set's own list, which holds paths or pairs of a path and a class."""
    try:
        item = files[number]
    except (TypeError, IndexError, KeyError):
        return None
    item = item[0] if isinstance(item, (tuple, list)) and item else item
    return os.fspath(item) if isinstance(item, (str, os.PathLike)) else None


def _class_names(found: Any) -> list[str] | None:
    """What a data set calls its classes; ImageNet's of torchvision has several names for each."""
    if not isinstance(found, (list, tuple, np.ndarray)) or not len(found):
        return None
    return [", ".join(map(str, name)) if isinstance(name, (tuple, list)) else str(name) for name in found]
