"""Lists of photos in files, WebDataset shards, and whatever else is given as a source."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from explain._utils.errors import ExplainError, ImageError, RunError, either, shown
from explain._utils.spelling import did_you_mean
from explain.data.images import EXTENSIONS
from explain.runs.datasets import Columns, DataSet, HuggingFace, Photos, as_boxes, as_label
from explain.runs.sources import Content, Entry, Folder, Source, Trouble, must_exist, stamp, text

PATHS = ("path", "image", "file", "filename", "photo")
LABELS = ("label", "class", "target")
EDGES = ("x0", "y0", "x1", "y1")
ENDINGS = (".csv", ".tsv", ".json", ".jsonl")


class PhotoList(Source):
    """The photos that a file lists, each with a label and boxes where the list has them.

    A list has a column, or a key, ``path``, and perhaps ``label`` (a label of the model, or the number of a class) and
    a box: ``x0``, ``y0``, ``x1``, ``y1`` in pixels of the photo, x1 and y1 exclusive; or ``boxes`` as JSON. A photo
    with several boxes may have a line for each. Paths are looked up from the folder of the list.

    Args:
        file: ``.csv``, ``.tsv``, ``.json`` (objects or paths in a list) or ``.jsonl`` (an object on each line).

    Raises:
        RunError: the file cannot be read, or is no such list.
    """

    kind = "list"

    def __init__(self, file: str | os.PathLike[str]) -> None:
        must_exist(file, "a list of photos")
        self.file = Path(os.path.realpath(file))

    @property
    def count(self) -> int:
        return len(self._found)

    def entries(self) -> Iterator[Entry]:
        for entry in self._found.values():
            yield replace(entry, stamp=stamp(entry.where))

    def read(self, entry: Entry) -> Content:
        return Content(Path(entry.where))

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": text(self.file)}

    @cached_property
    def _found(self) -> dict[str, Entry]:
        """The photos by name; several lines about one photo are joined."""
        found: dict[str, Entry] = {}
        for number, row in enumerate(self._rows(), 1):
            try:
                entry = self._entry(row)
                found[entry.name] = joined(found[entry.name], entry) if entry.name in found else entry
            except (ExplainError, ValueError) as error:  # of JSON among the boxes
                raise RunError(f"source {str(self.file)!r}, photo {number}: {error}") from None
        return found

    def _entry(self, row: Any) -> Entry:
        if isinstance(row, str):
            row = {"path": row}
        if not isinstance(row, Mapping):
            raise RunError(f'must be an object or a path, got {type(row).__name__}; write it as {{"path": ...}}')
        row = {str(key).strip().lower(): value for key, value in row.items() if key is not None}
        key = next((name for name in PATHS if row.get(name)), None)
        if key is None:
            raise RunError(f"must have a path, but has none; {did_you_mean('path', row)}, and path is needed")
        path = self.file.parent / str(row[key])
        label = next((row[name] for name in LABELS if row.get(name) not in (None, "")), None)
        return Entry(text(str(row[key])), str(path), text(path), None, _numbered(label), _boxes(row))

    def _rows(self) -> Iterator[Any]:
        try:
            whole = self.file.read_text("utf-8-sig")
            if self.file.suffix.lower() == ".json":
                found = json.loads(whole)
                if not isinstance(found, list):
                    raise RunError(
                        f"source {str(self.file)!r} must hold a JSON list, got {type(found).__name__}; put its photos "
                        "into one list"
                    )
                yield from found
            elif self.file.suffix.lower() == ".jsonl":
                yield from (json.loads(line) for line in whole.splitlines() if line.strip())
            else:
                delimiter = "\t" if self.file.suffix.lower() == ".tsv" else ","
                yield from csv.DictReader(whole.splitlines(), delimiter=delimiter)
        except RunError:  # which is a ValueError too
            raise
        except (OSError, ValueError, csv.Error, RecursionError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:100]
            raise RunError(f"source {str(self.file)!r} cannot be read as a list ({reason}); save it again") from None


def joined(one: Entry, other: Entry) -> Entry:
    """Return one entry with the boxes of two lines about the same photo.

    Raises:
        RunError: they give it different labels.
    """
    if None not in (one.label, other.label) and one.label != other.label:
        raise RunError(f"photo {one.name!r} must have one label, got {one.label!r} and {other.label!r}; keep one")
    boxes = dict.fromkeys((*one.boxes, *other.boxes))
    return replace(one, label=one.label if other.label is None else other.label, boxes=tuple(boxes))


def _numbered(label: Any) -> str | int | None:
    """A label; a whole number in a table, which has text only, is the number of a class."""
    if isinstance(label, str):
        label = label.strip()
        return int(label) if label.isdecimal() else label
    return as_label(label)


def _boxes(row: Mapping[str, Any]) -> Any:
    if row.get("boxes"):
        value = row["boxes"]
        return as_boxes(json.loads(value) if isinstance(value, str) else value)
    edges = [row.get(name) for name in EDGES]
    given = [edge for edge in edges if edge not in (None, "")]
    return as_boxes(edges) if given else ()


SHARD_LABELS = ("cls", "txt", "json")
SMALL = 1_000_000  # bytes of a label
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass
class _Sample:
    """The files of one photo in a shard: where its picture begins, and what the others say."""

    key: str
    picture: tuple[int, int] | None = None
    known: dict[str, Any] = field(default_factory=dict)


class Shards(Source):
    """The photos in WebDataset shards.

    The members of one photo stand together, as ``000001.jpg`` and ``000001.cls``. A label is read from ``.cls`` (the
    number of a class), ``.txt`` (its label) or ``.json`` (``label`` and ``boxes``). Photos are read where they lie in
    the tar file, by several workers at once.

    Args:
        shards: tar files that are not compressed.

    Raises:
        RunError: one of them does not exist.
    """

    kind = "shards"

    def __init__(self, shards: Sequence[str | os.PathLike[str]]) -> None:
        self.shards = [os.path.realpath(shard) for shard in shards]
        self._top = os.path.commonpath([os.path.dirname(shard) for shard in self.shards]) if self.shards else ""
        for shard in self.shards:
            if not os.path.isfile(shard):
                raise RunError(f"source {text(shard)!r} must be a tar file, but there is no such file; check the path")

    @cached_property
    def count(self) -> int:
        """How many photos there are: the headers of all members are read for it."""
        return sum(isinstance(entry, Entry) for entry in self.entries())

    def entries(self) -> Iterator[Entry | Trouble]:
        for shard in self.shards:
            changed = stamp(shard)
            name = text(os.path.relpath(shard, self._top))
            try:
                with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                    for sample in _samples(tar):
                        if sample.picture is not None:
                            yield _entry(f"{name}/{sample.key}", shard, sample, changed)
            except (OSError, tarfile.TarError) as error:
                yield Trouble(name, f"shard {name!r} is damaged or no plain tar file ({_reason(error)}); pack it again")

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
    """Return the shards that a name with a range or with wildcards stands for, or None for any other name.

    >>> shard_names("train-{008..010}.tar")
    ['train-008.tar', 'train-009.tar', 'train-010.tar']
    """
    found = _RANGE.search(pattern)
    if found:
        first, last = found[1], found[2]
        each = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        return [name for part in each for name in _spelt(f"{pattern[: found.start()]}{part}{pattern[found.end() :]}")]
    return sorted(glob.glob(pattern)) if glob.has_magic(pattern) and pattern.endswith(".tar") else None


def _spelt(name: str) -> list[str]:
    return shard_names(name) or [name]


def _samples(tar: tarfile.TarFile) -> Iterator[_Sample]:
    """The photos of a shard; members that follow each other with one name belong together."""
    current: _Sample | None = None
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
        folder, file = os.path.split(member.name)
        if not member.isreg() or file.startswith("."):
            continue
        stem, _, ending = file.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if current is None or current.key != key:
            if current is not None:
                yield current
            current = _Sample(key)
        ending = ending.lower()
        if f".{ending}" in EXTENSIONS:
            current.picture = (member.offset_data, member.size)
        elif ending in SHARD_LABELS and member.size <= SMALL:
            taken = tar.extractfile(member)
            current.known[ending] = b"" if taken is None else taken.read()
    if current is not None:
        yield current
    _must_end(tar)


def _must_end(tar: tarfile.TarFile) -> None:
    """Refuse a shard with something else than zeros after its last member, at which the reader of tar files just stops.

    Raises:
        TarError: a header is damaged.
    """
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"bad header at byte {tar.offset}")


def _entry(name: str, shard: str, sample: _Sample, changed: str | None) -> Entry | Trouble:
    assert sample.picture is not None
    entry = Entry(text(name), (shard, *sample.picture), text(shard), changed)
    try:
        return _labelled(entry, sample.known)
    except (ValueError, ExplainError) as error:
        return Trouble(entry.name, f"label of {entry.name!r} cannot be read ({error}); pack the shard again")


def _labelled(entry: Entry, known: dict[str, bytes]) -> Entry:
    if "cls" in known:
        entry = replace(entry, label=int(known["cls"].decode("ascii").strip()))
    elif "txt" in known:
        entry = replace(entry, label=known["txt"].decode("utf-8").strip())
    if "json" in known:
        about = json.loads(known["json"])
        if isinstance(about, dict):
            label = entry.label if entry.label is not None else as_label(about.get("label"))
            entry = replace(entry, label=label, boxes=as_boxes(about.get("boxes")))
    return entry


def _reason(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:80] or type(error).__name__


def source_of(given: Any) -> Source:
    """Return the source that something stands for.

    Args:
        given: a folder of photos, of class folders or of shards; a list of photos in a file (``.csv``, ``.tsv``,
            ``.json``, ``.jsonl``); a shard (``.tar``), a range of shards ("train-{000..009}.tar") or a pattern; a
            photo; a data set of PyTorch or Hugging Face; a list or iterator of photos; or a `Source`.

    Raises:
        RunError: it is none of these, or is not there.

    >>> source_of([b"one photo", b"another"]).count
    2
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, (str, os.PathLike)):
        return _of_name(given)
    if isinstance(given, Mapping):
        raise RunError(f"source must be one split of a data set, got several: {', '.join(map(str, given))}; choose one")
    if hasattr(given, "features") and hasattr(given, "column_names"):
        if hasattr(given, "__len__"):
            return HuggingFace(given)
        return Photos(given, Columns.of(given.features) if given.features else None)  # it only streams
    if isinstance(given, (list, tuple)):
        return Photos(given)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, bytes):
        return DataSet(given)
    if isinstance(given, Iterable) and not isinstance(given, bytes):
        return Photos(given)
    raise RunError(f"source must be a folder, a list of photos or a data set, got {shown(given)}; see explain.run")


def _of_name(name: str | os.PathLike[str]) -> Source:
    plain = os.fspath(name)
    if os.path.isdir(plain):
        shards = sorted(path for path in Path(plain).iterdir() if path.suffix == ".tar" and path.is_file())
        folder = Folder(plain)
        return Shards(shards) if shards and not folder.count else folder
    spelt = shard_names(plain)
    if spelt is not None and not os.path.exists(plain):
        if not spelt:
            raise RunError(f"source {text(plain)!r} must be a pattern that some files fit, but none does; check it")
        return Shards(spelt)
    ending = os.path.splitext(plain)[1].lower()
    if ending == ".tar":
        return Shards([plain])
    if ending in ENDINGS:
        return PhotoList(plain)
    must_exist(plain, "a folder, a list, a shard or a photo")
    if ending in EXTENSIONS:
        return Photos([plain])
    known = ", ".join([*ENDINGS, ".tar"])
    got = f"a file {ending}" if ending else "a file without ending"
    remedy = either("give explain.run a folder or a list", "name a folder or a list")
    raise RunError(f"source {text(plain)!r} must be a folder or one of {known}, got {got}; {remedy}")
