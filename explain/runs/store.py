"""A run as it is written: one SQLite file, in which a photo is there with all its results or not at all."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from explain._utils.errors import RunError
from explain.methods import Method
from explain.runs.digests import content_digest, digest
from explain.runs.manifest import described_method, must_agree
from explain.runs.preparing import Failed
from explain.runs.schema import APPLICATION, FORMAT, METHOD, PHOTO, RESULT, TABLES, TRIGGERS, Packed
from explain.runs.sources import Entry, text

PATIENCE = 30.0  # seconds to wait for a program that has locked the file
STAMP = PHOTO.index("stamp")


@dataclass(frozen=True)
class MapRecord:
    """What one method says about one target of a photo: the columns of ``results``, and metrics by name."""

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


@dataclass(frozen=True)
class PhotoRecord:
    """A photo that was explained: the columns of ``photos`` in their order, its results, and notes about it."""

    photo: tuple[Any, ...]
    results: tuple[MapRecord, ...]
    notes: tuple[str, ...] = ()


def method_row(method: Method) -> tuple[Any, ...]:
    """The columns of ``methods``."""
    about = described_method(method)
    return method.name, about["class"], json.dumps(about["options"]), method.style, method.paper


class Store:
    """The file of a run, opened for writing; made if it is not there.

    Args:
        file: where it is.
        manifest: what the run is; that of a run that is there already must be the same.
        compare: refuse a run with another manifest.

    Raises:
        RunError: the file is no run, was begun with other options, or cannot be written.
    """

    def __init__(self, file: Path, manifest: Mapping[str, Any], *, compare: bool = True) -> None:
        self.file, self._compare = file, compare
        with self._translated():
            self._db = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            with self._translated():
                self._begin(manifest)
        except BaseException:  # an interrupt too must not leave the file open
            self._db.close()
            raise

    def _begin(self, manifest: Mapping[str, Any]) -> None:
        there = self._is_run()
        if there and self._db.execute("SELECT count(*) FROM photos").fetchone()[0]:
            before = {key: json.loads(value) for key, value in self._db.execute("SELECT key, value FROM manifest")}
            if self._compare:
                must_agree(before, manifest, text(self.file))
        else:
            self._make(manifest, there=there)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute("DELETE FROM manifest WHERE key = 'ended'")

    def _make(self, manifest: Mapping[str, Any], *, there: bool) -> None:
        """Make the tables; a run that is there, but holds no photo yet, begins once more."""
        with self._transaction():
            for statement in [] if there else [*TABLES.split(";\n"), *TRIGGERS]:
                self._db.execute(statement)
            for table in ("manifest", "methods", "failures", "notes"):
                self._db.execute(f"DELETE FROM {table}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {FORMAT}")
            for key, value in manifest.items():
                self._note(key, value)

    def _is_run(self) -> bool:
        """Whether the file holds a run; an empty one does not.

        Raises:
            RunError: it holds something else, or was written by a later version.
        """
        try:
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            application = self._db.execute("PRAGMA application_id").fetchone()[0]
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise RunError(f"output {text(self.file)!r} must be a run or a new file, got something else; choose "
                           "another") from None  # fmt: skip
        if tables and application != APPLICATION:
            raise RunError(f"output {text(self.file)!r} must be a run or a new file, got another database; choose "
                           "another")  # fmt: skip
        if tables and version != FORMAT:
            remedy = "update this package" if version > FORMAT else "give another output: it can be read, not continued"
            raise RunError(f"run {text(self.file)!r} must have format {FORMAT}, got {version}; {remedy}")
        return bool(tables)

    def confirm(self, entries: Iterable[Entry]) -> None:
        """Note that photos were read again and found to be those that are there, by their stamps as they are now."""
        with self._translated(), self._transaction():
            for entry in entries:
                self._db.execute("UPDATE photos SET stamp = ? WHERE name = ?", (entry.stamp, entry.name))
                self._db.execute("DELETE FROM failures WHERE name = ?", (entry.name,))

    def enter_methods(self, methods: Iterable[Method]) -> None:
        """Write which methods there are, as soon as they are known."""
        rows = list(map(method_row, methods))
        with self._translated(), self._transaction():
            self._enter_methods(rows)

    def _enter_methods(self, rows: Iterable[tuple[Any, ...]]) -> None:
        insert = _insert("methods", (*METHOD, "digest")).replace("INSERT", "INSERT OR IGNORE")
        self._db.executemany(insert, [(*row, digest(*row)) for row in rows])

    def write(self, found: Sequence[PhotoRecord | Failed]) -> None:
        """Write photos with all their results at once: all of them are there afterwards, or none.

        A photo that was there is replaced, and is a failure no more if it was one. One whose file is the same as
        before, but could not be read this time, keeps its results.
        """
        with self._translated(), self._transaction():
            self._enter(found)

    def _enter(self, found: Sequence[PhotoRecord | Failed]) -> None:
        for each in found:
            if isinstance(each, Failed):
                self._db.execute("DELETE FROM photos WHERE name = ? AND stamp IS NOT ?", (each.name, each.stamp))
                row = (each.name, each.path, each.reason)
                self._db.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", row)
            else:
                self._write(each)

    def _write(self, answer: PhotoRecord) -> None:
        name = answer.photo[0]
        for table in ("photos", "failures"):
            self._db.execute(f"DELETE FROM {table} WHERE name = ?", (name,))
        of_photo = digest(*answer.photo[:STAMP], *answer.photo[STAMP + 1 :])
        photo = self._db.execute(_insert("photos", (*PHOTO, "digest")), (*answer.photo, of_photo)).lastrowid
        for result in answer.results:
            row = (
                result.method, result.target, result.index, result.score, result.probability, result.layer,
                result.delta, result.runs, result.error, json.dumps(result.map.shape), result.map.scale,
                content_digest(result.map.content),
            )  # fmt: skip
            metrics = sorted(result.metrics.items())
            of_result = digest(of_photo, *row, *chain(*metrics))
            whole = (*row, photo, result.map.content, of_result)
            number = self._db.execute(_insert("results", (*RESULT, "photo", "map", "digest")), whole).lastrowid
            self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", [(number, *metric) for metric in metrics])
        self._db.executemany("INSERT OR IGNORE INTO notes VALUES (?)", [(note,) for note in answer.notes])

    def forget_failures(self, but: Collection[str]) -> None:
        """Take failures of photos back that are no more in the source; ``but`` has the names of those that are."""
        with self._translated():
            names = [name for (name,) in self._db.execute("SELECT name FROM failures") if name not in but]
            with self._transaction():
                self._db.executemany("DELETE FROM failures WHERE name = ?", [(name,) for name in names])

    def end(self, when: str) -> None:
        """Note that all photos have been looked at."""
        with self._translated(), self._transaction():
            self._note("ended", when)

    def _note(self, key: str, value: Any) -> None:
        row = key, json.dumps(value, ensure_ascii=False)
        self._db.execute("INSERT OR REPLACE INTO manifest VALUES (?, ?, ?)", (*row, digest(*row)))

    def close(self) -> None:
        """Close the file; what lies beside it while it is written goes away."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
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
            raise RunError(
                f"output {text(self.file)!r} cannot be written ({error}); make room or end the program that uses it: "
                "the same command goes on where it stopped"
            ) from error


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
