"""The file of a run: its tables, a map as it is stored, the digests of rows (see docs/runs.md); and writing it.

There is one writer at a time, and each photo is written with all its results or not at all.
"""

import contextlib
import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from explain._utils.errors import RunError
from explain.data import files
from explain.methods import Method
from explain.store.manifest import described_method, must_agree
from explain.store.sources import Entry, Failed, text

FORMAT = 3
"""The version of the tables."""
APPLICATION = 0x4578706C  # by which a file is known as a run: "Expl"

TABLES = (resources.files("explain.store") / "tables.sql").read_text("utf-8").split(";\n")
"""The statements that make them."""

ORDERS = {
    "source": "p.id",
    "worst": "p.label_class IS NULL, p.label_probability, p.probability, p.id",
    "best": "p.label_class IS NULL, p.label_probability DESC, p.probability DESC, p.id",
}
"""Orders of photos: of the source; by the probability of the label where it is known, else of the prediction, the
lowest or the highest first."""

PHOTO = (
    "name", "path", "stamp", "sha256", "width", "height", "label", "label_class", "label_probability", "prediction",
    "prediction_class", "probability", "left", "top", "right", "bottom", "input_height", "input_width", "boxes",
    "labels",
)  # fmt: skip
RESULT = (
    "method", "target", "class", "score", "probability", "layer", "delta", "runs", "error", "shape", "scale", "content",
)  # fmt: skip
METHOD = ("name", "class", "options", "style", "paper")
"""Columns in the order in which their digests are made."""


def check_format(version: int, file: str | os.PathLike[str]) -> None:
    """Refuse a run whose tables are those of another version.

    Raises:
        RunError: they are.
    """
    if version != FORMAT:
        remedy = "update this package" if version > FORMAT else "explain its photos again into another file"
        raise RunError(f"run {text(file)!r} must have format {FORMAT}, got {version}; {remedy}")


def quoted(columns: Iterable[str]) -> str:
    """Return columns as SQL has them; some of their names are words of SQL.

    >>> quoted(["left", "top"])
    '"left", "top"'
    """
    return ", ".join(f'"{name}"' for name in columns)


COUNTED = ("photos", "results")
"""Tables whose rows are counted in the tally."""


@dataclass(frozen=True)
class Packed:
    """A map of any shape as float16, little-endian, row after row; its values are these numbers times ``scale``.

    The scale is the largest magnitude of the map (1 where all is zero), so that this value is kept to float32, and no
    other is off by more than ``2**-11`` of itself; those below ``2**-14`` of the largest, by no more than ``2**-25`` of
    the largest.
    """

    content: bytes
    shape: tuple[int, ...]
    scale: float


def pack(values: np.ndarray[Any, Any]) -> Packed:
    """Store the values of one image.

    >>> pack(np.array([[0.0, 3.0]], np.float32))
    Packed(content=b'\\x00\\x00\\x00<', shape=(1, 2), scale=3.0)
    """
    parts, scale = files.halved(np.asarray(values, np.float32))
    return Packed(parts.astype("<f2").tobytes(), tuple(parts.shape), float(scale))


def unpack(content: bytes, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Read what `pack` has stored: float32.

    >>> unpack(b"\\x00\\x00\\x00<", (1, 2), 3.0)
    tensor([[0., 3.]])
    """
    return torch.from_numpy(files.restored(np.frombuffer(content, "<f2").reshape(shape), np.float32(scale)))


def digest(*cells: Any) -> int:
    """Return a digest of some cells: the same before they are written and after they are read.

    SQLite keeps no NaN, no negative zero, and a whole number in a column of floats as a float.

    >>> digest("a", 1, -0.0, float("nan")) == digest("a", 1.0, 0.0, None), digest("a", 1) == digest("a1")
    (True, False)
    """
    return content_digest(repr([_cell(cell) for cell in cells]).encode("utf-8", "surrogatepass"))


def content_digest(content: bytes) -> int:
    """Return a digest of bytes as an integer of SQLite.

    >>> content_digest(b"a map")
    2074911400714055296
    """
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return content_digest(value)
    if isinstance(value, int):
        return int(value) if abs(value) > 2**53 else float(value)  # digests and the like, which no float holds
    return None if math.isnan(value) else float(value) + 0.0


PATIENCE = 30.0  # seconds to wait for a program that has locked the file


@dataclass(frozen=True)
class MapRecord:
    """The result of one method for one target of a photo: the columns of ``results``, and metrics by name."""

    method: str
    target: str
    index: int | None
    score: float
    probability: float | None
    layer: str | None
    map: Packed = field(repr=False)
    delta: float | None = None
    runs: int | None = None
    error: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of ``results``, among others."""
        stored = {"shape": json.dumps(self.map.shape), "scale": self.map.scale, "map": self.map.content}
        return {**vars(self), **stored, "class": self.index, "content": content_digest(self.map.content)}


@dataclass(frozen=True)
class PhotoRecord:
    """A photo that was explained: the columns of ``photos`` in their order, its results, and notes about it."""

    photo: tuple[Any, ...]
    results: tuple[MapRecord, ...]
    notes: tuple[str, ...] = ()
    added: bool = False
    """Whether these results join those that are stored of this very photo."""

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of ``photos`` by name."""
        return dict(zip(PHOTO, self.photo, strict=True))


def method_row(method: Method) -> tuple[Any, ...]:
    """Return the columns of ``methods``."""
    plain = described_method(method)
    return method.name, plain["class"], json.dumps(plain["options"]), method.style, method.paper


class Store:
    """The file of a run, opened for writing; made if it is not there.

    Args:
        file: where it is.
        manifest: what fixes the run; that of a run that is there already must be the same, but for methods and metrics
            that are added.
        compare: refuse a run with another manifest.

    Raises:
        RunError: the file is no run, was begun with other options, or cannot be written.
    """

    def __init__(self, file: Path, manifest: Mapping[str, Any], *, compare: bool = True) -> None:
        self.file = file
        with self._translated():
            self._db = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None)
        try:
            with self._translated():
                self._open(manifest, compare)
        except BaseException:  # an interrupt too must not leave the file open
            self._db.close()
            raise

    def _open(self, manifest: Mapping[str, Any], compare: bool) -> None:
        exists = self._is_run()
        if not exists or not self._db.execute("SELECT count(*) FROM photos").fetchone()[0]:
            with self._transaction():  # a run that has tables, but no photo yet, begins once more
                for statement in [] if exists else TABLES:
                    self._db.execute(statement)
                for table in ("manifest", "methods", "failures", "notes"):
                    self._db.execute(f"DELETE FROM {table}")
                self._db.execute(f"PRAGMA application_id = {APPLICATION}")
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
                for key, value in manifest.items():
                    self._enter_in_manifest(key, value)
        elif compare:
            rows = self._db.execute("SELECT key, value FROM manifest")
            must_agree({key: json.loads(value) for key, value in rows}, manifest, text(self.file), more=True)
        for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute("DELETE FROM manifest WHERE key = 'ended'")

    def _is_run(self) -> bool:
        """Whether the file holds a run; an empty one does not.

        Raises:
            RunError: it holds something else, or was written by another version.
        """
        try:
            ask = ("SELECT count(*) FROM sqlite_master", "PRAGMA application_id", "PRAGMA user_version")
            tables, application, version = (self._db.execute(each).fetchone()[0] for each in ask)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            tables, application, version = 1, 0, 0
        if tables and application != APPLICATION:
            raise RunError(f"output {text(self.file)!r} must be a run or a new file; choose another")
        if tables:
            check_format(version, self.file)
        return bool(tables)

    def enter_methods(self, rows: Iterable[tuple[Any, ...]], manifest: Mapping[str, Any] | None = None) -> None:
        """Write which methods the run has, by their columns (see `method_row`), as soon as they are known.

        Those and the metrics of the ``manifest`` replace what the run was begun with.
        """
        with self._transaction():
            for key in {"methods", "metrics"} & (manifest or {}).keys():
                self._enter_in_manifest(key, (manifest or {})[key])
            for row in rows:
                columns = dict(zip(METHOD, row, strict=True))
                self._insert("methods", {**columns, "digest": digest(*row)}, "OR IGNORE")

    def write(self, found: Sequence[PhotoRecord | Failed]) -> None:
        """Write photos with all their results at once: all of them are there afterwards, or none.

        A photo that was there is replaced, and is a failure no more if it was one. One whose file is the same as
        before, but could not be read this time, keeps its results.
        """
        with self._transaction():
            for each in found:
                if isinstance(each, Failed):
                    self._db.execute("DELETE FROM photos WHERE name = ? AND stamp IS NOT ?", (each.name, each.stamp))
                    failure = {"name": each.name, "path": each.path, "reason": each.reason}
                    self._insert("failures", failure, "OR REPLACE")
                else:
                    self._write_photo(each)

    def _write_photo(self, record: PhotoRecord) -> None:
        name = record.photo[0]
        for table in ("failures",) if record.added else ("photos", "failures"):
            self._db.execute(f"DELETE FROM {table} WHERE name = ?", (name,))
        if record.added:
            number, of_photo = self._db.execute("SELECT id, digest FROM photos WHERE name = ?", (name,)).fetchone()
            again = {(number, result.method) for result in record.results}  # those that lacked a metric
            self._db.executemany("DELETE FROM results WHERE photo = ? AND method = ?", again)
        else:
            of_photo = digest(*(value for column, value in record.columns.items() if column != "stamp"))
            number = self._insert("photos", {**record.columns, "digest": of_photo})
        for result in record.results:
            columns = {name: value for name, value in result.columns.items() if name in (*RESULT, "map")}
            metrics = sorted(result.metrics.items())
            of_result = digest(of_photo, *(columns[name] for name in RESULT), *chain(*metrics))
            row = self._insert("results", {**columns, "photo": number, "digest": of_result})
            self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", [(row, *metric) for metric in metrics])
        self._db.executemany("INSERT OR IGNORE INTO notes VALUES (?)", [(note,) for note in record.notes])

    def confirm(self, entries: Iterable[Entry]) -> None:
        """Note that photos were read again and are those of the file, by their stamps as they are now."""
        with self._transaction():
            for entry in entries:
                self._db.execute("UPDATE photos SET stamp = ? WHERE name = ?", (entry.stamp, entry.name))
                self._db.execute("DELETE FROM failures WHERE name = ?", (entry.name,))

    def forget_failures(self, but: Collection[str]) -> None:
        """Remove failures of photos that the source has no more; ``but`` has the names of those that it has."""
        with self._transaction():
            names = self._db.execute("SELECT name FROM failures").fetchall()
            self._db.executemany("DELETE FROM failures WHERE name = ?", [row for row in names if row[0] not in but])

    def end(self, when: str) -> None:
        """Note that the run went through all photos."""
        with self._transaction():
            self._enter_in_manifest("ended", when)

    def close(self) -> None:
        """Close the file; the files of SQLite beside it are removed."""
        self._db.close()

    def _enter_in_manifest(self, key: str, value: Any) -> None:
        row = key, json.dumps(value, ensure_ascii=False)
        self._insert("manifest", {"key": key, "value": row[1], "digest": digest(*row)}, "OR REPLACE")

    def _insert(self, table: str, row: Mapping[str, Any], conflict: str = "") -> int:
        """Enter a row; return its number."""
        statement = f"INSERT {conflict} INTO {table} ({quoted(row)}) VALUES ({', '.join('?' * len(row))})"
        return int(self._db.execute(statement, tuple(row.values())).lastrowid or 0)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Do all of a block or none of it; inside another such block, it is a part of that."""
        if self._db.in_transaction:
            yield
            return
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:  # an interrupt too must not leave half a transaction
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of SQLite into ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(f"output {text(self.file)!r} cannot be written ({error}); make room or end the program that "
                           "uses it: the same command goes on where it stopped") from error  # fmt: skip


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let no other run write a file while the block lasts, in this process or another.

    The lock ends with the process that holds it and its workers, however they end. It is on a file beside the run,
    since SQLite has locks of its own on the run.

    Raises:
        RunError: another run writes the file, or it has two names: SQLite writes a journal for each, and a run that was
            interrupted under one is damaged under the other.
    """
    with contextlib.suppress(OSError):
        names = os.stat(file).st_nlink
        if file.is_file() and names > 1:
            raise RunError(f"output {text(file)!r} must have one name, got {names} hard links; make a copy of it")
    lock = Path(f"{os.path.realpath(file)}-lock")
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(f"output {text(file)!r} cannot be written: {error.strerror}; choose another file") from None
        if not files.lock(descriptor):
            os.close(descriptor)
            raise RunError(f"output {text(file)!r} is being written by another run; wait for it")
        with contextlib.suppress(FileNotFoundError):  # another run may have removed it meanwhile
            if os.path.samestat(os.stat(lock), os.fstat(descriptor)):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # while it is still locked: nobody else can have locked this very file
        files.unlock(descriptor)
