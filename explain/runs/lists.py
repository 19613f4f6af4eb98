"""Lists of photos in files: CSV, tab-separated, JSON and JSON lines, with labels and boxes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from explain.errors import ExplainError, RunError, did_you_mean
from explain.runs.items import as_boxes, as_label
from explain.runs.sources import Content, Entry, Source, must_exist, stamp, text

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
