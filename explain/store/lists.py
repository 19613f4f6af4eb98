"""Lists of photos in files, WebDataset shards, and `source_of`, which makes a source of a path or
data set."""

import ast
import csv
import glob
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from explain._utils.errors import ExplainError, ImageError, RunError, reason_of, shown, warn
from explain.data.opening import EXTENSIONS, SCANS, ending_of
from explain.data.scans import slice_names
from explain.store.sources import (
    EDGES,
    IMAGES,
    LABELS,
    Columns,
    Content,
    DataSet,
    Entry,
    Folder,
    Label,
    Photos,
    Source,
    Uncertain,
    as_label,
    content_of,
    labels_in,
    path_text,
    plain_key,
    stamp_of,
)

ENDINGS = (".csv", ".tsv", ".json", ".jsonl")


class PhotoList(Source):
    """The photos that a ``.csv``, ``.tsv``, ``.json`` or ``.jsonl`` file lists, or annotations as
    COCO has them; paths begin in its folder. A `RunError` for another file."""

    kind = "list"

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Refuse a file that does not exist; it is read when it is first needed."""
        _check_exists(file, "a list of photos")
        # Columns are ``path``, ``label`` (a label, or the number of a class; several between | or
        # ;), and x0 y0 x1 y1 in pixels (x1 and y1 exclusive) or ``boxes`` as JSON. In place of
        # ``label``, each class may have a column: 1 true, 0 or empty false, -1 uncertain. A photo
        # may have several lines.
        self.file = Path(os.path.realpath(file))

    @property
    def count(self) -> int:
        """The number of photos that the list has."""
        return len(self._listed)

    def entries(self) -> Iterator[Entry]:
        """The listed photos with the stamps of their files, as they are now."""
        for entry in self._listed.values():
            yield replace(entry, stamp=stamp_of(entry.where))

    def identity(self) -> dict[str, Any]:
        """The kind of the source and the path of the list."""
        return {"kind": self.kind, "path": path_text(self.file)}

    @cached_property
    def _listed(self) -> dict[str, Entry]:
        """The entries by the names of photos, in the list's order, lines about one photo joined.
        Warns of columns left over where there is no label: one may be meant.
        """
        entries: dict[str, Entry] = {}
        rows = self._rows()
        classes = class_columns(rows)
        for line, row in enumerate(rows, 1):
            try:
                entry = self._entry(row, classes)
            except (ExplainError, ValueError, RecursionError) as error:  # of JSON among the boxes
                raise RunError(f"source {str(self.file)!r}, photo {line}: {error}") from None
            earlier = entries.get(entry.name)
            entries[entry.name] = entry if earlier is None else _joined(earlier, entry)
        # the columns, by the first row
        keys = {plain_key(key): key for row in rows[:1] if isinstance(row, Mapping) for key in row}
        unread_columns = [str(keys[key]) for key in keys.keys() - {*IMAGES, *EDGES, "boxes"}]
        if unread_columns and not classes and not keys.keys() & {*LABELS}:
            warn(
                f"source {str(self.file)!r} has no labels: its columns "
                f"{', '.join(sorted(unread_columns))} "
                "are not read; call one of them label, or give each class a column with 0 and 1"
            )
        return entries

    def _entry(self, row: Any, classes: Sequence[str]) -> Entry:
        """The entry of one row, an object or a path; its name is the path as listed, looked up from
        the list's folder. ``classes`` are columns of single classes. No stamp yet.
        """
        if not isinstance(row, (str, Mapping)):
            raise RunError(
                f'must be an object or a path, got {type(row).__name__}; write it as {{"path": '
                f"...}}"
            )
        content = content_of({"path": row} if isinstance(row, str) else row)
        name = str(content.image)
        label = content.label
        if isinstance(label, str):
            label = _labels_in(label)
        elif classes and isinstance(row, Mapping):
            # all cells are in `_TRUTHS`, as `class_columns` has seen
            truths = {column: _TRUTHS[str(row.get(column) or "").strip()] for column in classes}
            true = [column.strip() for column in classes if truths[column] == 1]
            doubtful = [Uncertain(column.strip()) for column in classes if truths[column] == -1]
            label = as_label([*true, *doubtful])
        path = self.file.parent / name
        boxes = tuple(dict.fromkeys(content.boxes))
        return Entry(
            path_text(name), where=str(path), path=path_text(path), label=label, boxes=boxes
        )

    def content(self) -> Any:
        """Parse the file by its ending: rows of CSV as dictionaries of texts, or the values of
        JSON.
        """
        ending = self.file.suffix.lower()
        try:
            content = self.file.read_text("utf-8-sig")
            if ending == ".json":
                return json.loads(content)
            if ending == ".jsonl":
                return [json.loads(line) for line in content.splitlines() if line.strip()]
            lines = content.splitlines()
            delimiter = "\t" if ending == ".tsv" else ","
            if ";" in "".join(lines[:1]) and delimiter not in lines[0]:  # as Excel writes it
                delimiter = ";"
            return list(csv.DictReader(lines, delimiter=delimiter))
        except (OSError, ValueError, csv.Error, RecursionError) as error:
            raise RunError(
                f"source {str(self.file)!r} cannot be read as a list ({reason_of(error)}); save it "
                "again"
            ) from None

    def _rows(self) -> list[Any]:
        """The rows of the list, paths or mappings that `content_of` reads; annotations in COCO's
        format become a row for each photo."""
        rows = self.content()
        if isinstance(rows, dict) and "images" in rows:
            try:
                return coco_rows(rows)
            except (LookupError, TypeError, ValueError) as error:
                raise RunError(
                    f"source {str(self.file)!r} must hold annotations as COCO has them, but "
                    f"{type(error).__name__}: {error}; write them again"
                ) from None
        if not isinstance(rows, list):
            raise RunError(
                f"source {str(self.file)!r} must hold a JSON list, or annotations as COCO has "
                f"them, got {type(rows).__name__}; make one"
            )
        return rows


def _joined(earlier: Entry, later: Entry) -> Entry:
    """Join the entries of two lines of a list about the same photo: it has the labels and boxes of
    both, each once."""
    label = earlier.label
    if later.label not in (None, label):
        label = as_label(list(dict.fromkeys((*labels_in(label), *labels_in(later.label)))))
    boxes = dict.fromkeys((*earlier.boxes, *later.boxes))
    return replace(earlier, label=label, boxes=tuple(boxes))


_TRUTHS = {"": 0, "0": 0, "0.0": 0, "False": 0, "1": 1, "1.0": 1, "True": 1, "-1": -1, "-1.0": -1}
"""What is written for a class that is true of a photo, for one that is not, and where that is
uncertain."""


def class_columns(rows: Sequence[Any]) -> list[str]:
    """Return the columns that say of a class whether it is true: all cells are in `_TRUTHS`, not
    all empty. Warns of fractions beside them."""
    mappings = [row for row in rows if isinstance(row, Mapping)]
    keys = {column: plain_key(column) for row in mappings for column in row}
    # a column of labels counts instead
    if not {*keys.values()}.isdisjoint(LABELS):
        return []
    classes = []
    fractions = {}  # columns with a number between 0 and 1, such as probabilities: may be a mistake
    for column, key in keys.items():
        if key in (*IMAGES, *EDGES, "boxes"):
            continue
        values = (row[column] for row in mappings if column in row)
        cells = dict.fromkeys("" if value is None else str(value).strip() for value in values)
        not_a_truth = next((cell for cell in cells if cell not in _TRUTHS), None)
        if not_a_truth is None and any(cells):
            classes.append(column)
        elif not_a_truth is not None and re.fullmatch(r"0?\.\d+", not_a_truth):
            fractions[column] = not_a_truth
    if classes and fractions:
        fraction_column, cell = next(iter(fractions.items()))
        warn(
            f"column {fraction_column!r} must have 0 or 1, or -1 where that is uncertain, to be a "
            f"label as {classes[0]!r} is, got {cell!r}; it is not read"
        )
    return classes


def _labels_in(cell: str) -> Label:
    """Split a cell of a table, which has text only, into labels: by "|" and ";", or as a list in
    Python's notation, which pandas writes. A part with digits only is the number of a class."""
    parts: Iterable[Any] = dict.fromkeys(map(str.strip, re.split(r"[|;]", cell)))
    if cell.strip().startswith("["):  # as pandas writes a list, perhaps with 0 or 1 for each class
        with suppress(ValueError, SyntaxError):
            parts = ast.literal_eval(cell.strip())
    words = [str(part).strip() for part in parts]
    return as_label([int(word) if word.isdecimal() else word for word in words if word])


def coco_rows(annotations: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn annotations in COCO's format into a list's entries, one for each photo: path, names of
    its categories, and boxes x0 y0 x1 y1 with the names of theirs."""
    names = {category["id"]: str(category["name"]) for category in annotations["categories"]}
    rows: dict[Any, dict[str, Any]] = {
        image["id"]: {"path": str(image["file_name"]), "label": [], "boxes": []}
        for image in annotations["images"]
    }
    for annotation in annotations.get("annotations", ()):
        row = rows[annotation["image_id"]]
        name = names[annotation["category_id"]]
        if name not in row["label"]:
            row["label"].append(name)
        left, top, width, height = annotation.get("bbox") or (0, 0, 0, 0)
        if width > 0 and height > 0:  # COCO itself has some boxes without an area
            row["boxes"].append([left, top, left + width, top + height, name])
    return list(rows.values())


@dataclass(frozen=True)
class CocoIds:
    """The numbers that annotations as COCO has them give to photos, and to categories by their
    names in lower case."""

    photos: "PathIndex"
    categories: dict[str, Any]


def coco_ids(file: str | os.PathLike[str]) -> CocoIds | None:
    """Read the numbers that annotations in COCO's format give to photos and categories; None of a
    list in another format.
    """
    content = PhotoList(file).content()
    if not isinstance(content, dict):
        return None
    try:
        photos = {str(image["file_name"]): image["id"] for image in content["images"]}
        categories = {str(one["name"]).casefold(): one["id"] for one in content["categories"]}
    except (LookupError, TypeError):
        return None
    return CocoIds(PathIndex(photos), categories)


class PathIndex:
    """Finds what belongs to a path among paths that may begin elsewhere: ``val/1.jpg`` is
    ``photos/val/1.jpg``, and not ``photos/train/1.jpg``."""

    def __init__(self, of_paths: Mapping[str, Any]) -> None:
        """Index the values of ``of_paths`` by whole path, and by each end of a path: an end that
        several paths share has None."""
        self.by_path: dict[str, Any] = {}
        self._by_end: dict[str, Any] = {}
        for path, value in of_paths.items():
            ends = _ends(path)
            self.by_path["/".join(ends[:1])] = value  # the longest end is the whole path
            for end in ends:
                self._by_end[end] = None if end in self._by_end else value

    def find(self, path: str, name: str | None = None) -> Any:
        """The value of the longest end of ``path`` that is a whole indexed path; else of the only
        one that ends in the last part of ``name`` (default: ``path``); else None.
        """
        for end in _ends(path):
            if end in self.by_path:
                return self.by_path[end]
        return self._by_end.get("/".join(_ends(path if name is None else name)[:1]))


def _ends(path: str) -> list[str]:
    """Return the ends of a path, the longest first, without "." and with "/" between the parts."""
    parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".")]
    return ["/".join(parts[start:]) for start in range(len(parts))]


class AnnotatedSource(Source):
    """The photos of a source with the labels and boxes of a list, found by `PathIndex`: those of
    ``1.jpg`` are not taken for one of several photos of this name."""

    kind = "annotated"

    def __init__(self, source: Source, file: str | os.PathLike[str]) -> None:
        """Read the list, and count in ``_claims`` how many photos of the source each path fits: of
        several, only the one of the same name gets its labels. Streams are not counted.
        """
        self.source = source
        self.list = PhotoList(file)
        self.by_file = source.by_file  # type: ignore[misc]  # as of the source
        self._index = PathIndex({entry.name: entry for entry in self.list.entries()})
        self._claims: Counter[str] = Counter()
        photos = [] if source.count is None else list(source.entries())
        for photo in photos:
            listed = self._listed(photo)
            if listed is not None:
                self._claims[listed.name] += 1
        if photos and not self._claims:
            raise RunError(
                f"boxes {path_text(file)!r} must list the photos of the source, such as "
                f"{photos[0].name!r}, got {next(iter(self._index.by_path), 'none')!r}; give the "
                "list of these photos"
            )

    @property
    def count(self) -> int | None:
        """The number of photos of the inner source."""
        return self.source.count

    def entries(self) -> Iterator[Entry]:
        """The entries of the source with label and boxes of the list; those that it does not have
        get none."""
        for entry in self.source.entries():
            listed = self._listed(entry) or Entry("")
            yield replace(entry, label=listed.label, boxes=listed.boxes)

    def read(self, entry: Entry) -> Content:
        """Read the photo from the inner source, without the label that it has there: that of the
        list counts, and is in the entry."""
        return Content(self.source.read(entry).image)

    def identity(self) -> dict[str, Any]:
        """The identity of the inner source and the path of the list."""
        return {**self.source.identity(), "boxes": path_text(self.list.file)}

    def _listed(self, entry: Entry) -> Entry | None:
        """Find the list's entry for a photo of the source; None where no path fits, or where one
        path fits several photos and is not the name of this one."""
        listed: Entry | None = self._index.find(entry.path or entry.name, entry.name)
        if listed is not None and self._claims[listed.name] > 1 and listed.name != entry.name:
            return None
        return listed


SHARD_LABELS = ("cls", "txt", "json")
MAX_LABEL_BYTES = 1_000_000


class Shards(Source):
    """Photos in WebDataset shards: plain tar files, where ``000001.jpg`` has its label in
    ``000001.cls`` (number), ``.txt`` or ``.json`` (with ``boxes``). Workers may read at once."""

    kind = "shards"

    def __init__(self, shards: Sequence[str | os.PathLike[str]]) -> None:
        """Resolve the paths of the shards, which must exist; ``_top`` is their common folder, from
        which names of photos begin."""
        self.shards = [os.path.realpath(shard) for shard in shards]
        self._top = os.path.commonpath([os.path.dirname(shard) for shard in self.shards])
        for shard in self.shards:
            _check_exists(shard, "a tar file")

    @cached_property
    def count(self) -> int:
        """How many photos there are: the headers of all members are read for it."""
        return sum(entry.problem is None for entry in self.entries())

    def entries(self) -> Iterator[Entry]:
        """The photos of all shards in order, with labels; ``where`` is the shard with the picture's
        start and size in bytes, a damaged one ends in an entry with a problem.
        """
        for shard in self.shards:
            shard_stamp = stamp_of(shard)
            name = path_text(os.path.relpath(shard, self._top))
            try:
                with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                    # the files of one photo are neighbours, and share their key
                    for key, members in groupby(_members(tar), key=lambda member: member[0]):
                        files = {kind: content for _, kind, content in members}
                        if "picture" in files:
                            entry = Entry(
                                path_text(f"{name}/{key}"),
                                where=(shard, *files["picture"]),
                                path=path_text(shard),
                                stamp=shard_stamp,
                            )
                            yield _labelled(entry, files)
                    file.seek(tar.offset)
                    # tarfile just stops at a damaged header
                    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                        raise tarfile.ReadError(f"bad header at byte {tar.offset}")
            except (OSError, tarfile.TarError) as error:
                problem = (
                    f"shard {name!r} is damaged or no plain tar file ({reason_of(error)}); pack it "
                    "again"
                )
                yield Entry(name, problem=problem)

    def read(self, entry: Entry) -> Content:
        """Read the bytes of a picture from its place in the tar file; several processes may do so
        at once."""
        shard, start, size = entry.where
        with open(shard, "rb") as file:
            file.seek(start)
            content = file.read(size)
        if len(content) < size:
            raise ImageError(f"image {entry.name!r} ends early in its shard; pack it again")
        return Content(content)

    def identity(self) -> dict[str, Any]:
        """The kind of the source and the paths of its shards."""
        return {"kind": self.kind, "paths": [path_text(shard) for shard in self.shards]}


def shard_names(pattern: str) -> list[str] | None:
    """Return the shards' paths for a range such as "train-{008..010}.tar" (which need not exist) or
    wildcards (maybe none); None for any other name."""
    numbered = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if numbered is None:
        is_pattern = glob.has_magic(pattern) and pattern.endswith(".tar")
        return sorted(glob.glob(pattern)) if is_pattern else None
    first, last = numbered.groups()
    names: list[str] = []
    for number in range(int(first), int(last) + 1):
        name = pattern.replace(numbered[0], f"{number:0{len(first)}}", 1)
        names += shard_names(name) or [name]  # there may be a second range in it
    return names


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, Any]]:
    """A shard's pictures and labels in order: the photo's key (its path without ending), "picture"
    or the label's ending, and the picture's (start, size) in bytes or the label's bytes.
    """
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
        folder, file = os.path.split(member.name)
        if not member.isreg() or file.startswith("."):
            continue
        stem, _, ending = file.partition(".")  # at the first dot, as WebDataset does
        key = os.path.join(folder, stem)
        ending = ending.lower()
        if f".{ending}" in EXTENSIONS:
            yield key, "picture", (member.offset_data, member.size)
        elif ending in SHARD_LABELS and member.size <= MAX_LABEL_BYTES:
            content = tar.extractfile(member)
            yield key, ending, b"" if content is None else content.read()


def _labelled(entry: Entry, files: Mapping[str, Any]) -> Entry:
    """The entry of a photo in a shard with label (``.cls`` before ``.txt`` before ``.json``) and
    boxes, or a problem if they cannot be read; ``files`` as in `_members`.
    """
    try:
        json_content = json.loads(files["json"]) if "json" in files else {}
        content = content_of(
            {**json_content, "path": entry.name} if isinstance(json_content, dict) else entry.name
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
    """Refuse a source at whose path there is no file; ``kind`` says in the message what it should
    be."""
    if not os.path.isfile(path):
        raise RunError(
            f"source {path_text(path)!r} must be {kind}, but there is no such file; check the path"
        )


def source_of(source: Any, boxes: str | os.PathLike[str] | None = None) -> Source:
    """Return the source for a folder, list, shard, range ("train-{000..009}.tar"), pattern, photo,
    data set, iterable or `Source`, with the ``boxes`` of a list or of COCO."""
    if boxes is not None:
        return AnnotatedSource(source_of(source), boxes)
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
        # a data set of Hugging Face that only streams
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
    """The source for a name that the user gave: a folder (of shards if it has no photos), a pattern
    or range of shards, a list, or a photo."""
    path = os.fspath(name)
    if os.path.isdir(path):
        shards = sorted(
            file for file in Path(path).iterdir() if file.suffix == ".tar" and file.is_file()
        )
        folder = Folder(path)
        return Shards(shards) if shards and not folder.count else folder
    # None of a name that is no pattern, an empty list of a pattern without files
    shard_files = None if os.path.exists(path) else shard_names(path)
    if shard_files:
        return Shards(shard_files)
    if shard_files is not None:
        raise RunError(
            f"source {path_text(path)!r} must be a pattern that some files fit, but none does; "
            "check it"
        )
    ending = ending_of(path)
    if ending == ".tar":
        return Shards([path])
    if ending in ENDINGS:
        return PhotoList(path)
    _check_exists(path, "a folder, a list, a shard or a photo")
    if ending in EXTENSIONS | SCANS:
        return Photos(slice_names(path))
    choices = ", ".join([*ENDINGS, ".tar"])
    got = ending or "a file without ending"
    raise RunError(
        f"source {path_text(path)!r} must be a folder, a photo or one of {choices}, got {got}; "
        "name one of these"
    )
