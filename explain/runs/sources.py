"""Sources of photos: their names come first, their pixels later, perhaps in another process. `Folder` is one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from explain.data.images import EXTENSIONS

Label: TypeAlias = str | int | None
Corners: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True)
class Entry:
    """A photo before it is read: its name, and what is known about it.

    ``where`` is for the source to find it. ``stamp`` changes when its file does; None where there is no file.
    ``boxes`` are those of the object: x0 y0 x1 y1 in pixels of the photo, x1 and y1 exclusive. ``problem`` says why a
    part of the source cannot be read, such as a folder without permission: such an entry becomes a failure of the run.
    """

    name: str
    where: Any = None
    path: str | None = None
    stamp: str | None = None
    label: Label = None
    boxes: tuple[Corners, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Content:
    """The content of an entry: a photo, or a float tensor ``(C, H, W)`` that is the model's input already."""

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
    """The names of the classes in the source, where its labels are numbers."""
    by_file: ClassVar[bool] = True
    """Whether a photo is the same while the stamp of its entry is; otherwise it is read to be compared."""

    @property
    def count(self) -> int | None:
        """How many entries there are, where that is known."""
        return None

    @abstractmethod
    def entries(self) -> Iterator[Entry]: ...

    @abstractmethod
    def read(self, entry: Entry) -> Content: ...

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Which source it is, in plain values: a run that is continued must have the same."""


def entries_of(source: Source) -> Iterator[Entry]:
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
        folders = Counter(os.path.dirname(name).split(os.sep)[0] for name, problem in self._files() if problem is None)
        return folders.total(), "" not in folders and len(folders) > 1

    @property
    def count(self) -> int:
        return self._survey[0]

    def entries(self) -> Iterator[Entry]:
        labelled = self._survey[1]
        for name, problem in self._files():
            if problem is not None:
                yield Entry(text(name or self.folder), problem=problem)
                continue
            path = os.path.join(self.folder, name)
            label = text(name.split(os.sep, 1)[0]) if labelled else None
            yield Entry(text(name.replace(os.sep, "/")), path, text(path), stamp(path), label)

    def read(self, entry: Entry) -> Content:
        return Content(Path(entry.where))

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": text(self.folder)}

    def _files(self, inside: str = "") -> Iterator[tuple[str, str | None]]:
        """The paths of photos, each with None, and of folders with a problem; one by one, as there may be millions."""
        try:
            with os.scandir(os.path.join(self.folder, inside)) as found:
                items = sorted((item.name, item.is_dir(follow_symlinks=False)) for item in found)
        except OSError as error:
            yield inside, f"folder cannot be read: {error.strerror}; check its permissions"
            return
        for name, is_folder in items:
            path = os.path.join(inside, name)
            if name.startswith("."):
                continue
            if is_folder:
                yield from self._files(path)
            elif os.path.splitext(name)[1].lower() in EXTENSIONS:
                yield path, None


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
