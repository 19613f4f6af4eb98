"""Where the photos of a run come from: their names first; their pixels later, and perhaps in another process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from explain._utils.errors import RunError
from explain.data.images import EXTENSIONS

Label: TypeAlias = str | int | None
Corners: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True)
class Entry:
    """A photo before it is read: its name, and what is known about it.

    ``where`` is what the source needs to find it. ``stamp`` changes when its file does; None where there is no file.
    ``boxes`` say where the object is: x0 y0 x1 y1 in pixels of the photo, x1 and y1 exclusive.
    """

    name: str
    where: Any = None
    path: str | None = None
    stamp: str | None = None
    label: Label = None
    boxes: tuple[Corners, ...] = ()


@dataclass(frozen=True)
class Trouble:
    """A part of a source that cannot be read, such as a folder without permission."""

    name: str
    reason: str


@dataclass(frozen=True)
class Content:
    """What a source has for an entry: a photo, or a float tensor ``(C, H, W)`` that is the model's input already."""

    image: Any
    label: Label = None
    boxes: tuple[Corners, ...] = ()


class Source(ABC):
    """Photos with names, in an order that stays the same.

    A source is one class: it lists entries, and reads one of them. Reading may happen in a worker process, which has
    its own copy of the source.
    """

    kind: ClassVar[str]
    classes: Sequence[str] | None = None
    """What the source calls the classes, where its labels are numbers."""
    by_file: ClassVar[bool] = True
    """Whether a photo is the same while the stamp of its entry is; otherwise it is read to be compared."""

    @property
    def count(self) -> int | None:
        """How many entries there are, where that is known."""
        return None

    @abstractmethod
    def entries(self) -> Iterator[Entry | Trouble]: ...

    @abstractmethod
    def read(self, entry: Entry) -> Content: ...

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Which source it is, in plain values: a run that is continued must have the same."""


def entries_of(source: Source) -> Iterator[Entry | Trouble]:
    """Return the entries of a source by names that are all different: of two "a.png", the second is "a.png (2)".

    >>> from explain.runs.datasets import Photos
    >>> [entry.name for entry in entries_of(Photos(["a.png", "a.png", "b.png"]))]
    ['a.png', 'a.png (2)', 'b.png']
    """
    taken: dict[str, int] = {}
    for entry in source.entries():
        name = entry.name
        while name in taken:
            taken[entry.name] += 1
            name = f"{entry.name} ({taken[entry.name]})"
        taken[name] = 1
        yield entry if name == entry.name else replace(entry, name=name)


class Folder(Source):
    """The photos in a folder and in the folders inside it, in the order of their paths; hidden ones are left out.

    Where all photos lie in at least two folders inside, the name of that folder is the label of a photo.

    Args:
        folder: where they are.
    """

    kind = "folder"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.realpath(folder)

    @cached_property
    def _survey(self) -> tuple[int, bool]:
        """How many photos there are, and whether their folders are labels."""
        tops: set[str] = set()
        count = 0
        for found in self._files():
            if not isinstance(found, Trouble):
                count += 1
                tops.add(found.split(os.sep, 1)[0] if os.sep in found else "")
        return count, "" not in tops and len(tops) > 1

    @property
    def count(self) -> int:
        return self._survey[0]

    def entries(self) -> Iterator[Entry | Trouble]:
        labelled = self._survey[1]
        for found in self._files():
            if isinstance(found, Trouble):
                yield found
                continue
            path = os.path.join(self.folder, found)
            label = text(found.split(os.sep, 1)[0]) if labelled else None
            yield Entry(text(found.replace(os.sep, "/")), path, text(path), stamp(path), label)

    def read(self, entry: Entry) -> Content:
        return Content(Path(entry.where))

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": text(self.folder)}

    def _files(self, inside: str = "") -> Iterator[str | Trouble]:
        """The paths of the photos from the folder on, one after the other, so that there may be millions."""
        try:
            with os.scandir(os.path.join(self.folder, inside)) as found:
                items = sorted((item.name, item.is_dir(follow_symlinks=False)) for item in found)
        except OSError as error:
            yield Trouble(
                text(inside or self.folder), f"folder cannot be read: {error.strerror}; check its permissions"
            )
            return
        for name, is_folder in items:
            if name.startswith("."):
                continue
            path = os.path.join(inside, name)
            if is_folder:
                yield from self._files(path)
            elif os.path.splitext(name)[1].lower() in EXTENSIONS:
                yield path


def stamp(path: str | os.PathLike[str]) -> str | None:
    """Return the size of a file and when it was changed last, or None where there is no such file.

    Programs can set the time of a file's content, but not that of its inode, which any change sets.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def text(name: str | os.PathLike[str]) -> str:
    """Return a file's name as text that can be stored; bytes that are no text are shown as escapes.

    >>> text("caf\\udce9.jpg")
    'caf\\\\xe9.jpg'
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def must_exist(path: str | os.PathLike[str], what: str) -> None:
    """Refuse a file that is not there.

    Raises:
        RunError: it is not.
    """
    if not os.path.isfile(path):
        raise RunError(f"source {text(path)!r} must be {what}, but there is no such file; check the path")
