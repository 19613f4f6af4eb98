"""Writing a run: one SQLite file, one writer at a time, each photo with all its results or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from explain._utils.errors import RunError, raised
from explain.methods import Method
from explain.runs.manifest import described_method, must_agree
from explain.runs.preparing import Failed
from explain.runs.schema import (
    APPLICATION,
    FORMAT,
    METHOD,
    PHOTO,
    RESULT,
    TABLES,
    TRIGGERS,
    Packed,
    content_digest,
    digest,
)
from explain.runs.sources import Entry, text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PATIENCE = 30.0  # seconds to wait for a program that has locked the file
STAMP = PHOTO.index("stamp")


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


@dataclass(frozen=True)
class PhotoRecord:
    """A photo that was explained: the columns of ``photos`` in their order, its results, and notes about it."""

    photo: tuple[Any, ...]
    results: tuple[MapRecord, ...]
    notes: tuple[str, ...] = ()


def method_row(method: Method) -> tuple[Any, ...]:
    """Return the columns of ``methods``."""
    plain = described_method(method)
    return method.name, plain["class"], json.dumps(plain["options"]), method.style, method.paper


class Store:
    """The file of a run, opened for writing; made if it is not there.

    Args:
        file: where it is.
        manifest: what fixes the run; that of a run that is there already must be the same.
        compare: refuse a run with another manifest.

    Raises:
        RunError: the file is no run, was begun with other options, or cannot be written.
    """

    def __init__(self, file: Path, manifest: Mapping[str, Any], *, compare: bool = True) -> None:
        self.file = file
        with self._translated():
            self._db = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            with self._translated():
                self._open(manifest, compare)
        except BaseException:  # an interrupt too must not leave the file open
            self._db.close()
            raise

    def _open(self, manifest: Mapping[str, Any], compare: bool) -> None:
        exists = self._is_run()
        if exists and self._db.execute("SELECT count(*) FROM photos").fetchone()[0]:
            if compare:
                rows = self._db.execute("SELECT key, value FROM manifest")
                must_agree({key: json.loads(value) for key, value in rows}, manifest, text(self.file))
        else:
            self._create(manifest, [] if exists else [*TABLES.split(";\n"), *TRIGGERS])
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute("DELETE FROM manifest WHERE key = 'ended'")

    def _create(self, manifest: Mapping[str, Any], tables: Sequence[str]) -> None:
        """Make the tables; a run that has them, but no photo yet, begins once more."""
        with self._transaction():
            for statement in tables:
                self._db.execute(statement)
            for table in ("manifest", "methods", "failures", "notes"):
                self._db.execute(f"DELETE FROM {table}")
            self._db.execute(f"PRAGMA application_id = {APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {FORMAT}")
            for key, value in manifest.items():
                self._enter_in_manifest(key, value)

    def _is_run(self) -> bool:
        """Whether the file holds a run; an empty one does not.

        Raises:
            RunError: it holds something else, or was written by another version.
        """
        try:
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            application = self._db.execute("PRAGMA application_id").fetchone()[0]
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            raise RunError(f"output {text(self.file)!r} must be a run or a new file, got something else; choose "
                           "another") from None  # fmt: skip
        if tables and application != APPLICATION:
            raise RunError(f"output {text(self.file)!r} must be a run or a new file, got another database; choose "
                           "another")  # fmt: skip
        if tables and version != FORMAT:
            remedy = "update this package" if version > FORMAT else "give another output: it can be read, not continued"
            raise RunError(f"run {text(self.file)!r} must have format {FORMAT}, got {version}; {remedy}")
        return bool(tables)

    def enter_methods(self, methods: Iterable[Method]) -> None:
        """Write which methods the run has, as soon as they are known."""
        self.enter_method_rows(map(method_row, methods))

    def enter_method_rows(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Write methods by their columns, see `method_row`."""
        insert = _insert("methods", (*METHOD, "digest")).replace("INSERT", "INSERT OR IGNORE")
        with self._transaction():
            self._db.executemany(insert, [(*row, digest(*row)) for row in rows])

    def write(self, found: Sequence[PhotoRecord | Failed]) -> None:
        """Write photos with all their results at once: all of them are there afterwards, or none.

        A photo that was there is replaced, and is a failure no more if it was one. One whose file is the same as
        before, but could not be read this time, keeps its results.
        """
        with self._transaction():
            for each in found:
                if isinstance(each, Failed):
                    self._db.execute("DELETE FROM photos WHERE name = ? AND stamp IS NOT ?", (each.name, each.stamp))
                    row = (each.name, each.path, each.reason)
                    self._db.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", row)
                else:
                    self._write_photo(each)

    def _write_photo(self, record: PhotoRecord) -> None:
        for table in ("photos", "failures"):
            self._db.execute(f"DELETE FROM {table} WHERE name = ?", (record.photo[0],))
        of_photo = digest(*record.photo[:STAMP], *record.photo[STAMP + 1 :])
        photo = self._db.execute(_insert("photos", (*PHOTO, "digest")), (*record.photo, of_photo)).lastrowid
        for result in record.results:
            row = (
                result.method, result.target, result.index, result.score, result.probability, result.layer,
                result.delta, result.runs, result.error, json.dumps(result.map.shape), result.map.scale,
                content_digest(result.map.content),
            )  # fmt: skip
            metrics = sorted(result.metrics.items())
            of_result = digest(of_photo, *row, *chain(*metrics))
            insert = _insert("results", (*RESULT, "photo", "map", "digest"))
            number = self._db.execute(insert, (*row, photo, result.map.content, of_result)).lastrowid
            self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", [(number, *metric) for metric in metrics])
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
        self._db.execute("INSERT OR REPLACE INTO manifest VALUES (?, ?, ?)", (*row, digest(*row)))

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
            raise RunError(
                f"output {text(self.file)!r} cannot be written ({error}); make room or end the program that uses it: "
                "the same command goes on where it stopped"
            ) from error


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let no other run write a file while the block lasts, in this process or another.

    The lock ends with the process that holds it, however it ends. It is on a file beside the run, since SQLite has
    locks of its own on the run.

    Raises:
        RunError: another run writes the file.
    """
    name = os.path.realpath(file)
    with _guard:
        if name in _ours:
            raise _in_use(file)
        _ours.add(name)
    try:
        lock = Path(f"{name}-lock")
        descriptor = _acquired(lock, file)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()  # while it is still locked: nobody else can have locked this very file
            os.close(descriptor)
    finally:
        with _guard:
            _ours.discard(name)


_ours: set[str] = set()
_guard = threading.Lock()


def _acquired(lock: Path, file: Path) -> int:
    """Lock a file that still has this name afterwards: another run may have removed it meanwhile."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(f"output {text(file)!r} cannot be written: {error.strerror}; choose another file") from None
        try:
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise _in_use(file) from None
        except OSError:  # a network drive without locks
            return descriptor
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(lock), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _in_use(file: Path) -> RunError:
    return RunError(f"output {text(file)!r} is being written by another run; wait for it, or choose another file")


MAX_WAITING = 4  # batches that wait to be written: their maps have to fit into memory


class Writer:
    """Does what it is given in that order, in a thread of its own.

    What goes wrong is raised by the next `put`, or by `close`; nothing more is done after it.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._error: RunError | None = None
        self._thread = threading.Thread(target=self._serve, name="explain-writing", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Have something done; wait if too much is waiting already.

        Raises:
            RunError: something before could not be written.
        """
        self._check()
        self._queue.put(work)

    def close(self) -> None:
        """Wait until all is done.

        Raises:
            RunError: something could not be written.
        """
        if self._thread.is_alive():
            self._queue.put(None)
        self._thread.join()
        self._check()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._error is None:  # afterwards nothing is written, but whoever puts something does not wait forever
                try:
                    work()
                except RunError as error:
                    self._error = error
                except Exception as error:
                    self._error = RunError(f"results must be written, but that {raised(error)}; report this")
                    self._error.__cause__ = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
