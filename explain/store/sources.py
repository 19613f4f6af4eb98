"""Sources of photos: their names come first, their pixels later. Folders, lists in Python, and data
sets."""

import hashlib
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ImageError, RunError, shown
from explain.data.bands import bytes_of
from explain.data.boxes import Box, Corners
from explain.data.opening import photos_in
from explain.data.scans import slice_names, split_slice

Label: TypeAlias = str | int | tuple[str | int, ...] | None
"""A class by its name or number, several of them where several are true of a photo, or None where
none is known. An empty tuple says that none is true."""
ObjectBox: TypeAlias = Corners | tuple[float, float, float, float, str]
"""The edges of a box, and the label of what is in it where photos have boxes of several classes."""


class Uncertain(str):
    """A label of which the source does not know whether it is true, as -1 of CheXpert."""


@dataclass(frozen=True)
class Entry:
    """A photo before it is read: its name, and what is known about it.

    ``where`` is for the source to find it. ``stamp`` changes when its file does; None where there
    is no file. ``boxes`` are those of the object: x0 y0 x1 y1 in pixels of the photo, x1 and y1
    exclusive, and perhaps a label. ``problem`` says why a part of the source cannot be read, such
    as a folder without permission: such an entry becomes a failure of the run.
    """

    name: str
    where: Any = None
    path: str | None = None
    stamp: str | None = None
    label: Label = None
    boxes: tuple[ObjectBox, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Content:
    """The content of an entry: a photo, or a float tensor ``(C, H, W)`` that is the model's input
    already."""

    image: Any
    label: Label = None
    boxes: tuple[ObjectBox, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A photo that could not be explained, and why; ``general`` is an error that may not be its
    fault. ``stamp`` is its entry's, and results of the same file are kept."""

    name: str
    reason: str
    path: str | None = None
    general: Exception | None = field(default=None, repr=False, compare=False)
    stamp: str | None = field(default=None, repr=False, compare=False)


class Source(ABC):
    """Photos with names, in an order that stays the same. A source is one class: it lists entries,
    and reads one of them. Reading may happen in a worker process, which has its own copy of the
    source.
    """

    kind: ClassVar[str]
    classes: Sequence[str] | None = None
    """The names of the classes in the source, where its labels are numbers."""
    by_file: ClassVar[bool] = True
    """Whether a photo is the same while the stamp of its entry is; otherwise it is read to be
    compared."""

    def __str__(self) -> str:
        """What messages call the source: its folder, or else its kind."""
        return str(getattr(self, "folder", self.kind))

    files_are_photos = False
    """Whether a file is one photo, also if there are several slices in it."""

    def names_in(self, file: str) -> list[str]:
        """The paths of the photos in a file: its own, or one for each slice of a scan."""
        return [file] if self.files_are_photos else slice_names(file)

    @property
    def count(self) -> int | None:
        """The number of entries, or None where it is not known, as for an iterator. Used for
        progress, and to refuse an empty source."""
        return None

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Give the photos in their order, with what is known without reading their pixels. Names
        may repeat here; `entries_of` makes them different."""
        ...

    def read(self, entry: Entry) -> Content:
        """Return the content of an entry, whose pixels are read here. The default gives the file at
        ``where``; subclasses override that.
        """
        return Content(Path(entry.where))

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the source is, in plain values of JSON: the manifest of a run keeps them, and a run
        that is continued must have the same."""


def entries_of(source: Source) -> Iterator[Entry]:
    """Give the entries of a source with different names: a second "a.png" becomes "a.png (2)". Runs
    list photos by these names, so the source must keep its order."""
    name_counts: dict[str, int] = {}
    for entry in source.entries():
        name = entry.name
        while name in name_counts:
            name_counts[entry.name] += 1
            name = f"{entry.name} ({name_counts[entry.name]})"
        name_counts[name] = 1
        yield entry if name == entry.name else replace(entry, name=name)


class Folder(Source):
    """The photos in a folder and the folders inside it, by path, without hidden ones. Where all lie
    in at least two folders inside, the folder's name is the label.
    """

    kind = "folder"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Resolve the path, with symbolic links: it is the identity of the source."""
        self.folder = os.path.realpath(folder)

    @cached_property
    def _survey(self) -> tuple[int, bool]:
        """How many photos there are (slices of a scan count), and whether folder names are labels:
        all photos lie in at least two folders inside. Lists all folders, once.
        """
        folders: Counter[str] = Counter()
        for name, problem in photos_in(self.folder):
            if problem is None:
                top_folder = os.path.dirname(name).split(os.sep)[0]
                folders[top_folder] += len(self.names_in(os.path.join(self.folder, name)))
        return folders.total(), "" not in folders and len(folders) > 1

    @property
    def count(self) -> int:
        """The number of photos in the folder and in those inside it."""
        count, _ = self._survey
        return count

    def entries(self) -> Iterator[Entry]:
        """The photos by path; a folder that cannot be read becomes an entry with a problem. Names
        have "/" between their parts on every system, since runs keep them.
        """
        _, labelled = self._survey
        for name, problem in photos_in(self.folder):
            if problem is not None:
                yield Entry(path_text(name or self.folder), problem=f"folder {problem}")
                continue
            label = path_text(name.split(os.sep, 1)[0]) if labelled else None
            file = os.path.join(self.folder, name)
            # of a scan "scan.dcm slice 1", "scan.dcm slice 2", ...
            for photo in self.names_in(file):
                relative_path = name.replace(os.sep, "/") + photo.removeprefix(file)
                yield Entry(
                    path_text(relative_path),
                    where=photo,
                    path=path_text(photo),
                    stamp=stamp_of(photo),
                    label=label,
                )

    def identity(self) -> dict[str, Any]:
        """The kind of the source and the folder's path."""
        return {"kind": self.kind, "path": path_text(self.folder)}


def stamp_of(path: str | os.PathLike[str]) -> str | None:
    """A text that changes whenever a file does: its size and the times of content and inode, as
    programs can set only that of the content. None without a file.
    """
    try:
        status = os.stat(split_slice(os.fspath(path))[0])
    except (OSError, ValueError):
        return None
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def digest_of_photo(photo: Image.Image | torch.Tensor) -> str:
    """Return the SHA-256 of the pixels of an upright photo, or of the values of a tensor that is an
    input already, as runs store it."""
    if isinstance(photo, torch.Tensor):
        values = photo.detach().cpu().contiguous()
        return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    return hashlib.sha256(bytes_of(photo)).hexdigest()


def path_text(name: str | os.PathLike[str]) -> str:
    """Return a file's name as text that a database can store, with bytes that are not valid UTF-8
    as escapes. `path_of` turns this around."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def path_of(stored: str) -> str:
    """Return the path that can be opened from the stored text of `path_text`: its escapes become
    bytes again, unless a file is called like the text."""
    if os.path.lexists(stored) or "\\x" not in stored:
        return stored
    # `path_text` escapes only bytes from 0x80 on
    path_bytes = re.sub(
        rb"\\x([89a-f][0-9a-f])", lambda byte: bytes.fromhex(byte[1].decode()), stored.encode()
    )
    return os.fsdecode(path_bytes)


IMAGES = (
    "path",
    "image",
    "img",
    "file",
    "filename",
    "filepath",
    "photo",
    "picture",
    "imagepath",
    "imagefile",
    "imagename",
    "imageindex",
    "pixelvalues",
    "x",
)
LABELS = (
    "label",
    "labels",
    "class",
    "classes",
    "category",
    "categories",
    "finelabel",
    "target",
    "y",
    "finding",
    "findings",
    "findinglabels",
)
"""The keys of images and labels, as `plain_key` gives them."""
EDGES = ("x0", "y0", "x1", "y1")


def plain_key(key: Any) -> str:
    """Return the name of a column as `IMAGES` and `LABELS` have it: in lower case, without blanks,
    dashes and underlines."""
    return re.sub(r"[\s_-]+", "", str(key)).lower()


def content_of(item: Any, image: str | None = None, label: str | None = None) -> Content:
    """Return image, label and boxes of a data set's item: an image, a pair with its label, or a
    dictionary (``boxes``, maybe JSON, or ``x0`` ... ``y1``). Empty cells are missing."""
    if isinstance(item, Mapping):
        cells = {
            key: value
            for key, value in item.items()
            if value is not None and not (isinstance(value, str) and not value.strip())
        }
        usual = {plain_key(key): value for key, value in cells.items()}
        # of the column that is named, or else (``image`` is None) the first of the usual ones
        photo = cells.get(image, _first(usual, IMAGES))
        if photo is None:
            raise ImageError(
                f"item must have an image under one of {', '.join(IMAGES)}, got "
                f"{', '.join(map(str, item))}"
            )
        boxes = usual.get("boxes", ())
        if isinstance(boxes, str):
            boxes = json.loads(boxes)
        if usual.keys() & EDGES and not len(boxes):  # an array has no truth, but a length
            boxes = [usual.get(edge) for edge in EDGES]
        return Content(
            as_image(photo), as_label(cells.get(label, _first(usual, LABELS))), as_boxes(boxes)
        )
    # a list of numbers is no pair of a photo and its label
    if isinstance(item, (tuple, list)) and item and not isinstance(item[0], (int, float)):
        return Content(as_image(item[0]), as_label(item[1] if len(item) > 1 else None))
    return Content(as_image(item))


def _first(cells: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The cell of the first of these names that ``cells`` has, None if it has none; names come by
    precedence, as in `IMAGES`."""
    return next((cells[name] for name in names if name in cells), None)


def as_image(value: Any) -> Any:
    """A data set's image as `explain.data.images.load_image` takes it, or a float tensor; integers
    ``(C, H, W)`` become arrays, an undecoded dictionary its bytes or path.
    """
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        channels_last = value.permute(1, 2, 0) if value.ndim == 3 else value
        return channels_last.contiguous().cpu().numpy()
    return value.get("bytes") or value.get("path") if isinstance(value, Mapping) else value


MAX_LABEL_BITS = 63  # of a class number: SQLite holds signed integers of 64 bits


def as_label(value: Any) -> Label:
    """Return a source's label as text, whole number, or tuple of several; None for none. Zeros and
    ones stay a tuple, where NaN becomes -1 (uncertain)."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return _as_one_label(value)
    # in a list of zeros and ones, NaN is what is not known
    items = [-1 if isinstance(item, float) and math.isnan(item) else item for item in value]
    labels = tuple(label for item in items if (label := _as_one_label(item)) is not None)
    if value and not labels:  # what is in the list says nothing, unlike an empty list: none is true
        return None
    return labels[0] if len(labels) == 1 else labels


def _as_one_label(value: Any) -> str | int | None:
    """Return a single label as text that can be stored or as a whole number; None for what is
    neither. A number that is too large for SQLite, or is not whole, becomes text.
    """
    if isinstance(value, Uncertain):
        return value
    if isinstance(value, str):
        # a lone surrogate cannot be stored as UTF-8
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() < MAX_LABEL_BITS else shown(value)
    return f"{value:.6g}" if isinstance(value, float) and not math.isnan(value) else None


def labels_in(label: Label) -> tuple[str | int, ...]:
    """Return a label as a tuple of labels: none, one or several."""
    if label is None:
        return ()
    return label if isinstance(label, tuple) else (label,)


def as_boxes(value: Any) -> tuple[ObjectBox, ...]:
    """Return a source's boxes as tuples: x0 y0 x1 y1 in pixels of the photo, x1 and y1 exclusive,
    and perhaps a label. A single box counts as a list of one; None as none."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.tolist()
    if value is None or (isinstance(value, Sequence) and not value):
        return ()
    rows = value if isinstance(value, Sequence) and isinstance(value[0], (list, tuple)) else [value]
    boxes = []
    for row in rows:
        # behind the edges; an empty row, refused below, has no last cell
        has_label = isinstance(row, (list, tuple)) and row and isinstance(row[-1], str)
        label = row[4:] if has_label else ()
        try:
            edges = [float(edge) for edge in row[: len(row) - len(label)]]
        except (TypeError, ValueError, OverflowError):
            edges = []
        ordered = len(edges) == 4 and edges[0] < edges[2] and edges[1] < edges[3]
        if not (ordered and np.isfinite(edges).all()):
            raise ImageError(
                f"boxes must be x0 y0 x1 y1 with x0 < x1 and y0 < y1, got {shown(value)}; mend them"
            )
        boxes.append((*edges, *label))
    return tuple(boxes)


def boxes_of_class(boxes: Iterable[Sequence[Any]], target: str) -> list[Corners]:
    """Return the boxes that count for a target: those with its label, and those without a label."""
    label = re.split("@| box ", target)[0]  # of a detection: "dog@2", "dog box 1,2,3,4"
    return [(x0, y0, x1, y1) for x0, y0, x1, y1, *of in boxes if not of or of == [label]]


def labels_as_text(labels: Sequence[tuple[Any, ...]] | None) -> str | None:
    """Return a photo's labels as JSON: pairs of class (None if unknown) and text, perhaps
    "uncertain" as a third. A continued run compares this text with the stored one."""
    return None if labels is None else json.dumps(labels, ensure_ascii=False)


def true_label_names(labels: str | None) -> list[str]:
    """Return the texts of the labels that are true of a photo, from `labels_as_text`."""
    return [name for _, name, *doubt in json.loads(labels or "[]") if not doubt]


def boxes_as_text(boxes: Sequence[ObjectBox]) -> str | None:
    """Return boxes as JSON, or None where there are none. A continued run compares this text with
    the stored one."""
    return json.dumps(boxes, ensure_ascii=False) if boxes else None


def boxes_on_input(boxes: Iterable[Corners], seen: Box, size: Sequence[int]) -> list[Corners]:
    """Return boxes in pixels of an input of ``size`` (height, width) that shows the part ``seen``
    of the photo, clipped to it; those without a whole pixel are left out."""
    height, width = size
    clipped = []
    for box in boxes:
        edges = np.clip(seen.to_input(box, size), 0, (width, height, width, height))
        left, top, right, bottom = edges.tolist()
        if round(left) < round(right) and round(top) < round(bottom):
            clipped.append((left, top, right, bottom))
    return clipped


@dataclass(frozen=True)
class Columns:
    """The columns of a data set that hold the image and the label, and what it calls the
    classes."""

    image: str | None = None
    label: str | None = None
    classes: list[str] | None = None

    @classmethod
    def of(cls, features: Mapping[str, Any]) -> "Columns":
        """Return the first columns with images and with class labels of a data set of Hugging Face,
        by its ``features``.
        """
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        images = [name for name, kind in kinds.items() if kind == "Image"]
        labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
        if not images:
            raise RunError(
                f"source must have a column with images, got {', '.join(features)}; cast one to an "
                "Image"
            )
        if not labels:
            return cls(images[0])
        return cls(images[0], labels[0], classes=list(features[labels[0]].names))


class Photos(Source):
    """Photos in a list or iterator: what `explain.data.images.load_image` takes, alone, as a pair
    ``(photo, label)``, or a dictionary (keys ``columns``, where they are not the usual ones).
    """

    kind = "photos"

    def __init__(self, photos: Iterable[Any], columns: Columns | None = None) -> None:
        """Keep the photos as they are: nothing is read yet."""
        self.photos = photos
        self.columns = columns or Columns()
        self.classes = self.columns.classes

    @property
    def count(self) -> int | None:
        """The number of photos in a sequence; None for an iterator."""
        return len(self.photos) if isinstance(self.photos, Sequence) else None

    def entries(self) -> Iterator[Entry]:
        """The photos of the list, "photo 0", "photo 1", ... without a file name; ``where`` is the
        number in a sequence, or the item of an iterator, which can be taken only once.
        """
        for place, item in enumerate(self.photos):
            photo, *rest = item if isinstance(item, tuple) and item else (item,)
            where = item if self.count is None else place
            if isinstance(photo, (str, os.PathLike)):
                yield Entry(
                    path_text(photo),
                    where=where,
                    path=path_text(Path(photo)),
                    stamp=stamp_of(photo),
                    label=as_label(rest[0]) if rest else None,
                )
            # An opened picture may have been changed since: it has no stamp, and is read each time,
            # with its label.
            else:
                path = ""
                if isinstance(photo, Image.Image):
                    path = path_text(str(getattr(photo, "filename", "") or ""))
                yield Entry(path or f"photo {place}", where=where, path=path or None)

    def read(self, entry: Entry) -> Content:
        """The photo and the label of an entry, from the sequence or from the entry itself."""
        photos: Any = self.photos
        item = photos[entry.where] if self.count is not None else entry.where
        return content_of(item, self.columns.image, self.columns.label)

    def identity(self) -> dict[str, Any]:
        """Only the kind: nothing is known of a list in Python. Photos of a continued run are
        compared one by one."""
        return {"kind": self.kind}


class DataSet(Source):
    """The items of a data set with ``len(items)`` and ``items[i]``, named by their files if known,
    else by number; float tensors go to the model as they are."""

    kind = "data set"
    by_file = False  # it may transform what is in its files

    def __init__(self, items: Any) -> None:
        """Find the data set behind subsets, the columns of one of Hugging Face, and the names of
        the classes, of which several names of one class are joined by commas."""
        self.items = items
        self.inner, _ = innermost_dataset(items, place=0)  # the same for each item
        self.is_hugging_face = hasattr(items, "features") and hasattr(items, "column_names")
        self.columns = Columns.of(dict(items.features or {})) if self.is_hugging_face else Columns()
        self.classes = self.columns.classes
        class_names = getattr(self.inner, "classes", None)
        if (
            not self.classes
            and isinstance(class_names, (list, tuple, np.ndarray))
            and len(class_names)
        ):
            # ImageNet of torchvision has several names for each class.
            names = (name if isinstance(name, (tuple, list)) else [name] for name in class_names)
            self.classes = [", ".join(map(str, name)) for name in names]

    @property
    def count(self) -> int:
        """The number of items."""
        return len(self.items)

    def entries(self) -> Iterator[Entry]:
        """The items by number, without labels until they are read. A name is the innermost data
        set's file, or "item" and the number there, so that subsets name items alike.
        """
        files = getattr(self.inner, "samples", None) or getattr(self.inner, "imgs", None)
        for place in range(self.count):
            _, number = innermost_dataset(self.items, place)
            try:
                path = files[number]  # type: ignore[index]
            except (TypeError, IndexError, KeyError):  # it has no list of its files
                path = None
            # torchvision lists pairs of path and class
            path = path[0] if isinstance(path, (tuple, list)) and path else path
            if isinstance(path, (str, os.PathLike)):
                yield Entry(
                    path_text(path), where=place, path=path_text(path), stamp=stamp_of(path)
                )
            else:
                yield Entry(f"item {number}", where=place)

    def read(self, entry: Entry) -> Content:
        """Get an item of the data set by its number, and return its image, label and boxes."""
        return content_of(self.items[entry.where], self.columns.image, self.columns.label)

    def identity(self) -> dict[str, Any]:
        """The type of the innermost data set, its root folder if it has one, the number of items,
        and the fingerprint that Hugging Face gives its content."""
        root = getattr(self.inner, "root", None)
        kind = f"{type(self.inner).__module__}.{type(self.inner).__qualname__}"
        properties: dict[str, Any] = {"kind": self.kind, "type": kind, "length": self.count}
        if self.is_hugging_face:
            properties["fingerprint"] = getattr(self.items, "_fingerprint", None)
        if root is not None:
            properties["root"] = path_text(os.path.realpath(root))
        return properties


def innermost_dataset(items: Any, place: int) -> tuple[Any, int]:
    """Follow subsets to the data set that they were taken from; return it with the number that the
    item ``place`` has there."""
    while hasattr(items, "dataset") and hasattr(items, "indices"):
        place = int(items.indices[place]) if len(items.indices) else 0
        items = items.dataset
    return items, place
