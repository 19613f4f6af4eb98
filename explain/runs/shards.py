"""WebDataset shards: plain tar files in which files of one photo have one name and different endings."""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from explain.errors import ExplainError, ImageError, RunError
from explain.images import EXTENSIONS
from explain.runs.items import as_boxes, as_label
from explain.runs.sources import Content, Entry, Source, Trouble, stamp, text

LABELS = ("cls", "txt", "json")
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
        elif ending in LABELS and member.size <= SMALL:
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
