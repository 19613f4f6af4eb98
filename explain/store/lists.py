"""Lists of photos in files, WebDataset shards, and `source_of`, which makes a source of a path or
data set."""

import csv
import glob
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from explain._utils.errors import ExplainError, ImageError, RunError, shown
from explain.data.opening import EXTENSIONS
from explain.store.sources import (
    Columns,
    Content,
    DataSet,
    Entry,
    Folder,
    Photos,
    Source,
    as_label,
    content_of,
    each_label,
    stamp,
    text,
)

ENDINGS = (".csv", ".tsv", ".json", ".jsonl")


class PhotoList(Source):
    """The photos that a file lists, each with a label and boxes where the list has them.

    A list has a column, or a key, ``path``, and perhaps ``label`` (a label of the model, or the
    number of a class) and a box: ``x0``, ``y0``, ``x1``, ``y1`` in pixels of the photo, x1 and y1
    exclusive; or ``boxes`` as JSON. A photo with several boxes may have a line for each. Paths are
    looked up from the folder of the list.

    Args:
        file: ``.csv``, ``.tsv``, ``.json`` (objects or paths in a list) or ``.jsonl`` (an object on
            each line).

    Raises:
        RunError: the file cannot be read, or is no such list.
    """

    kind = "list"

    def __init__(self, file: str | os.PathLike[str]) -> None:
        _check_exists(file, "a list of photos")
        self.file = Path(os.path.realpath(file))

    @property
    def count(self) -> int:
        return len(self._listed)

    def entries(self) -> Iterator[Entry]:
        for entry in self._listed.values():
            yield replace(entry, stamp=stamp(entry.where))

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": text(self.file)}

    @cached_property
    def _listed(self) -> dict[str, Entry]:
        """The photos by name; several lines about one photo are joined."""
        entries: dict[str, Entry] = {}
        for number, row in enumerate(self._rows(), 1):
            try:
                entry = self._entry(row)
                earlier = entries.get(entry.name, entry)
                labels = dict.fromkeys((*each_label(earlier.label), *each_label(entry.label)))
                boxes = dict.fromkeys((*earlier.boxes, *entry.boxes))
                entries[entry.name] = replace(
                    earlier, label=as_label(list(labels)), boxes=tuple(boxes)
                )
            except (ExplainError, ValueError, RecursionError) as error:  # of JSON among the boxes
                raise RunError(f"source {str(self.file)!r}, photo {number}: {error}") from None
        return entries

    def _entry(self, row: Any) -> Entry:
        if not isinstance(row, (str, Mapping)):
            raise RunError(
                f'must be an object or a path, got {type(row).__name__}; write it as {{"path": '
                f"...}}"
            )
        content = content_of({"path": row} if isinstance(row, str) else row)
        name = str(content.image)
        label = content.label
        if isinstance(label, str):  # a table has text only: a whole number is the number of a class
            label = label.strip()
            label = int(label) if label.isdecimal() else label
        path = self.file.parent / name
        return Entry(text(name), str(path), text(path), None, as_label(label), content.boxes)

    def _rows(self) -> list[Any]:
        ending = self.file.suffix.lower()
        try:
            content = self.file.read_text("utf-8-sig")
            if ending == ".json":
                rows = json.loads(content)
            elif ending == ".jsonl":
                rows = [json.loads(line) for line in content.splitlines() if line.strip()]
            else:
                rows = list(
                    csv.DictReader(
                        content.splitlines(), delimiter="\t" if ending == ".tsv" else ","
                    )
                )
        except (OSError, ValueError, csv.Error, RecursionError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:100]
            raise RunError(
                f"source {str(self.file)!r} cannot be read as a list ({reason}); save it again"
            ) from None
        if not isinstance(rows, list):
            raise RunError(
                f"source {str(self.file)!r} must hold a JSON list, got {type(rows).__name__}; make "
                "one"
            )
        return rows


SHARD_LABELS = ("cls", "txt", "json")
MAX_LABEL_BYTES = 1_000_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Shards(Source):
    """The photos in WebDataset shards.

    The members of one photo stand together, as ``000001.jpg`` and ``000001.cls``. A label is read
    from ``.cls`` (the number of a class), ``.txt`` (its label) or ``.json`` (``label`` and
    ``boxes``). Photos are read where they lie in the tar file, by several workers at once.

    Args:
        shards: tar files that are not compressed.

    Raises:
        RunError: one of them does not exist.
    """

    kind = "shards"

    def __init__(self, shards: Sequence[str | os.PathLike[str]]) -> None:
        self.shards = [os.path.realpath(shard) for shard in shards]
        self._top = (
            os.path.commonpath([os.path.dirname(shard) for shard in self.shards])
            if self.shards
            else ""
        )
        for shard in self.shards:
            _check_exists(shard, "a tar file")

    @cached_property
    def count(self) -> int:
        """How many photos there are: the headers of all members are read for it."""
        return sum(entry.problem is None for entry in self.entries())

    def entries(self) -> Iterator[Entry]:
        for shard in self.shards:
            changed = stamp(shard)
            name = text(os.path.relpath(shard, self._top))
            try:
                with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                    for key, members in groupby(_members(tar), key=lambda member: member[0]):
                        files = {kind: content for _, kind, content in members}
                        if "picture" in files:
                            entry = Entry(
                                text(f"{name}/{key}"),
                                (shard, *files["picture"]),
                                text(shard),
                                changed,
                            )
                            yield _labelled(entry, files)
                    file.seek(tar.offset)
                    # tarfile just stops at a damaged header
                    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                        raise tarfile.ReadError(f"bad header at byte {tar.offset}")
            except (OSError, tarfile.TarError) as error:
                reason = (
                    " ".join(str(getattr(error, "strerror", None) or error).split())[:80]
                    or type(error).__name__
                )
                yield Entry(
                    name,
                    problem=(
                        f"shard {name!r} is damaged or no plain tar file ({reason}); pack it again"
                    ),
                )

    def read(self, entry: Entry) -> Content:
        shard, start, size = entry.where
        with open(shard, "rb") as file:
            file.seek(start)
            content = file.read(size)
        if len(content) < size:
            raise ImageError(f"image {entry.name!r} ends early in its shard; pack it again")
        return Content(content)

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "paths": [text(shard) for shard in self.shards]}


def shard_names(pattern: str) -> list[str] | None:
    """Return the shards that a name with a range or with wildcards stands for, or None for any
    other name.

    >>> shard_names("train-{008..010}.tar")
    ['train-008.tar', 'train-009.tar', 'train-010.tar']
    """
    numbered = _RANGE.search(pattern)
    if numbered is None:
        return (
            sorted(glob.glob(pattern))
            if glob.has_magic(pattern) and pattern.endswith(".tar")
            else None
        )
    names: list[str] = []
    for number in range(int(numbered[1]), int(numbered[2]) + 1):
        name = (
            f"{pattern[: numbered.start()]}{number:0{len(numbered[1])}}{pattern[numbered.end() :]}"
        )
        names += shard_names(name) or [name]
    return names


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, Any]]:
    """The files of a shard: the name of the photo, the kind, and the place of a picture or the
    content of a label."""
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
        folder, file = os.path.split(member.name)
        if not member.isreg() or file.startswith("."):
            continue
        stem, _, ending = file.partition(".")
        key = os.path.join(folder, stem)
        ending = ending.lower()
        if f".{ending}" in EXTENSIONS:
            yield key, "picture", (member.offset_data, member.size)
        elif ending in SHARD_LABELS and member.size <= MAX_LABEL_BYTES:
            content = tar.extractfile(member)
            yield key, ending, b"" if content is None else content.read()


def _labelled(entry: Entry, files: Mapping[str, Any]) -> Entry:
    """The entry with its label and boxes, or with a problem if they cannot be read."""
    try:
        listed = json.loads(files["json"]) if "json" in files else {}
        content = content_of(
            {**listed, "path": entry.name} if isinstance(listed, dict) else entry.name
        )
        label = content.label
        if "cls" in files:
            label = as_label(int(files["cls"].decode("ascii").strip()))
        elif "txt" in files:
            label = files["txt"].decode("utf-8").strip()
        return replace(entry, label=label, boxes=content.boxes)
    except (ValueError, ExplainError, RecursionError) as error:
        return Entry(
            entry.name,
            problem=f"label of {entry.name!r} cannot be read ({error}); pack the shard again",
        )


def _check_exists(path: str | os.PathLike[str], kind: str) -> None:
    if not os.path.isfile(path):
        raise RunError(
            f"source {text(path)!r} must be {kind}, but there is no such file; check the path"
        )


def source_of(source: Any) -> Source:
    """Return the source for a path, a data set or a list of photos.

    Args:
        given: a folder of photos, of class folders or of shards; a list of photos in a file
            (``.csv``, ``.tsv``, ``.json``, ``.jsonl``); a shard (``.tar``), a range of shards
            ("train-{000..009}.tar") or a pattern; a photo; a data set of PyTorch or Hugging Face; a
            list or iterator of photos; or a `Source`.

    Raises:
        RunError: it is none of these, or does not exist.

    >>> source_of([b"one photo", b"another"]).count
    2
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _of_name(source)
    if isinstance(source, Mapping):
        raise RunError(
            f"source must be one split of a data set, got several: {', '.join(map(str, source))}; "
            "choose one"
        )
    if (
        hasattr(source, "features")
        and hasattr(source, "column_names")
        and not hasattr(source, "__len__")
    ):
        # it only streams
        return Photos(source, Columns.of(source.features) if source.features else None)
    by_number = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if by_number and not isinstance(source, (bytes, list, tuple)):
        return DataSet(source)
    if isinstance(source, Iterable) and not isinstance(source, bytes):
        return Photos(source)
    raise RunError(
        f"source must be a folder, a list of photos or a data set, got {shown(source)}; see "
        "explain.run"
    )


def _of_name(name: str | os.PathLike[str]) -> Source:
    path = os.fspath(name)
    if os.path.isdir(path):
        shards = sorted(
            file for file in Path(path).iterdir() if file.suffix == ".tar" and file.is_file()
        )
        folder = Folder(path)
        return Shards(shards) if shards and not folder.count else folder
    shard_files = None if os.path.exists(path) else shard_names(path)
    if shard_files:
        return Shards(shard_files)
    if shard_files is not None:
        raise RunError(
            f"source {text(path)!r} must be a pattern that some files fit, but none does; check it"
        )
    ending = os.path.splitext(path)[1].lower()
    if ending == ".tar":
        return Shards([path])
    if ending in ENDINGS:
        return PhotoList(path)
    _check_exists(path, "a folder, a list, a shard or a photo")
    if ending in EXTENSIONS:
        return Photos([path])
    choices = ", ".join([*ENDINGS, ".tar"])
    got = ending or "a file without ending"
    raise RunError(
        f"source {text(path)!r} must be a folder, a photo or one of {choices}, got {got}; name one "
        "of these"
    )
