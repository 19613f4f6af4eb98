"""Data sets of PyTorch and of Hugging Face, and lists of photos in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ImageError, RunError, shown
from explain.runs.sources import Content, Corners, Entry, Label, Source, stamp, text

IMAGES = ("image", "img", "photo", "picture", "pixel_values", "x")
LABELS = ("label", "labels", "class", "fine_label", "target", "y")


def content_of(item: Any, image: str | None = None, label: str | None = None) -> Content:
    """Return what an item holds: an image, a pair of an image and a label, or a dictionary with both.

    Args:
        item: what a data set or a list gives.
        image, label: the keys of a dictionary, where they are not the usual ones.

    Raises:
        ImageError: it has no image.

    >>> content_of((b"...", 3)).label
    3
    """
    if isinstance(item, Mapping):
        return _of_mapping(item, image, label)
    if isinstance(item, (tuple, list)) and item and not isinstance(item[0], (int, float)):
        return Content(as_image(item[0]), as_label(item[1] if len(item) > 1 else None))
    return Content(as_image(item))


def _of_mapping(item: Mapping[str, Any], image: str | None, label: str | None) -> Content:
    key = image or next((name for name in IMAGES if name in item), None)
    if key is None or item.get(key) is None:
        raise ImageError(f"item must have an image under one of {', '.join(IMAGES)}, got {', '.join(map(str, item))}")
    named = label or next((name for name in LABELS if name in item), None)
    return Content(as_image(item[key]), as_label(None if named is None else item[named]), as_boxes(item.get("boxes")))


def as_image(value: Any) -> Any:
    """Return an image as `explain.data.images.load_image` takes it, or a float tensor as it is.

    Tensors of bytes ``(C, H, W)`` become arrays, and what Hugging Face has of a file that is not decoded, its bytes.
    """
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return value.permute(1, 2, 0).contiguous().cpu().numpy() if value.ndim == 3 else value.cpu().numpy()
    if isinstance(value, Mapping):
        return value.get("bytes") or value.get("path")
    return value


def as_label(value: Any) -> Label:
    """Return a label as text or a whole number; None for anything else, such as several labels.

    >>> as_label(torch.tensor(3)), as_label("cat"), as_label([1, 2])
    (3, 'cat', None)
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.item() if value.size == 1 or getattr(value, "numel", lambda: 0)() == 1 else None
    if isinstance(value, str):
        return value
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def as_boxes(value: Any) -> tuple[Corners, ...]:
    """Return boxes: x0 y0 x1 y1 in pixels of the photo, ends exclusive; a single one too.

    Raises:
        ImageError: they are no such numbers.

    >>> as_boxes([1, 2, 3, 4])
    ((1.0, 2.0, 3.0, 4.0),)
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.tolist()
    if value is None or (isinstance(value, Sequence) and not value):
        return ()
    rows = value if isinstance(value, Sequence) and isinstance(value[0], (list, tuple)) else [value]
    try:
        found = [tuple(float(edge) for edge in row) for row in rows]
    except (TypeError, ValueError):
        found = [()]
    for row in found:
        if len(row) != 4 or not (np.isfinite(row).all() and row[0] < row[2] and row[1] < row[3]):
            raise ImageError(
                f"boxes must be x0 y0 x1 y1 with x0 < x1 and y0 < y1 in pixels, got {shown(value)}; mend it"
            )
    return tuple(found)  # type: ignore[arg-type]  # of four each, as was checked


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
        photos: what `explain.data.images.load_image` takes, each alone, as a pair ``(photo, label)`` or a dictionary.
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
