"""The file of a run: its tables, a map as it is stored, the digests of rows (see docs/runs.md); and
writing it.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from explain._utils.errors import RunError
from explain._utils.resources import packaged_text
from explain.data import files
from explain.layers.placement import Placement
from explain.methods import Method
from explain.store.manifest import described_method, must_agree
from explain.store.sources import Entry, Failed, path_text

FORMAT = 2
"""The version of the tables."""
APPLICATION = 0x4578706C  # SQLite's application_id of a run's file: "Expl"
PATIENCE = 30.0  # seconds to wait for a program that has locked the file

TABLES = packaged_text("explain.store", "tables.sql").split(";\n")
"""The statements that make them."""

ORDERS = {
    "source": "p.id",
    "worst": "p.label_class IS NULL, p.label_probability, p.probability, p.id",
    "best": "p.label_class IS NULL, p.label_probability DESC, p.probability DESC, p.id",
}
"""Orders of photos: of the source; by the probability of the label where it is known, else of the
prediction, the lowest or the highest first."""

_OF_PHOTOS = """
name path sha256 width height label label_class label_probability prediction prediction_class
probability left top right bottom input_height input_width boxes labels probabilities detections
"""
_OF_RESULTS = (
    "method target class score probability layer delta runs error metrics shape scale content"
)
DIGESTED = {
    "manifest": ["key", "value"],
    "methods": ["name", "class", "options", "style", "paper"],
    "photos": _OF_PHOTOS.split(),
    "results": _OF_RESULTS.split(),
}
"""Of each table, the columns in the order in which their digest is made; of a result, the photo's
name comes first."""


def check_format(version: int, file: str | os.PathLike[str]) -> None:
    """Refuse a run whose tables have another version than `FORMAT`."""
    if version != FORMAT:
        raise RunError(
            f"run {path_text(file)!r} must have format {FORMAT}, got {version}; update this "
            "package, or explain its photos again into another file"
        )


def quoted(columns: Iterable[str]) -> str:
    """Return names of columns in quotes, separated by commas, for SQL: some of them are
    keywords."""
    return ", ".join(f'"{name}"' for name in columns)


def packed(values: np.ndarray[Any, Any], placement: Placement | None = None) -> dict[str, Any]:
    """Return a map as columns ``shape`` (with ``placement``), ``scale`` (its largest magnitude),
    ``content`` (a digest) and ``map``, in little-endian float16."""
    # to within 2**-11 of each value, small values 2**-25
    halves, scale = files.halved(np.asarray(values, np.float32))
    content = halves.astype("<f2").tobytes()
    return {
        "shape": json.dumps(
            halves.shape
            if placement is None
            else {"shape": halves.shape, "places": placement.described}
        ),
        "scale": float(scale),
        "content": content_digest(content),
        "map": content,
    }


def unpacked(columns: Mapping[str, Any]) -> torch.Tensor:
    """Return the map, float32, from the columns of ``results`` that `packed` made."""
    shape, _ = shape_and_placement(columns)
    halves = np.frombuffer(columns["map"], "<f2").reshape(shape)
    return torch.from_numpy(files.restored(halves, np.float32(columns["scale"])))


def shape_and_placement(columns: Mapping[str, Any]) -> tuple[list[int], Placement | None]:
    """The shape of a map of ``results``, and where its cells look, if that is stored: the column
    ``shape`` is a list, or ``{"shape": list, "places": ...}``."""
    described = json.loads(columns["shape"])
    if isinstance(described, list):
        return described, None
    return described["shape"], Placement.restored(described["places"])


def digest_of_cells(cells: Iterable[Any]) -> int:
    """Return a digest of cells, a signed integer of 64 bits, the same before writing and after
    reading. A change of it would make stored runs count as damaged."""
    # SQLite has no NaN and no negative zero
    kept = [_kept(cell) for cell in cells]
    return content_digest(repr(kept).encode("utf-8", "surrogatepass"))


def content_digest(content: bytes) -> int:
    """Return the first 8 bytes of BLAKE2b as a signed integer, which SQLite holds. Stored runs have
    these digests."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


def _kept(value: Any) -> Any:
    """A cell as SQLite gives it back, so that its digest is the same: None for NaN, and 0.0 for
    -0.0."""
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else value + 0.0


@dataclass(frozen=True)
class PhotoRecord:
    """A photo that was explained: its columns of ``photos``, those of its ``results``, and notes
    about it."""

    photo: Mapping[str, Any]
    results: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    added: bool = False
    """Whether these results join those that are stored of this very photo."""

    @property
    def name(self) -> str:
        """The name of the photo, by which the run finds it again."""
        return str(self.photo["name"])


def method_row(method: Method) -> dict[str, Any]:
    """Return a method as a row of the table ``methods``; its options are JSON, of which
    `explain.insight` makes the method again."""
    plain = described_method(method)
    return {
        "name": method.name,
        "class": plain["class"],
        "options": json.dumps(plain["options"]),
        "style": method.style,
        "paper": method.paper,
    }


class Store:
    """The file of a run, opened for writing; made if it is not there. Unless ``compare`` is false,
    the ``manifest`` must be that of the run; ``more`` allows further methods and metrics."""

    def __init__(
        self, file: Path, manifest: Mapping[str, Any], *, more: bool = True, compare: bool = True
    ) -> None:
        """Open or make the file, compare its manifest, and remove the mark of a finished run, which
        `end` sets again. The caller holds the lock of `locked_run`."""
        self.file = file
        with self.translated():
            # without an isolation level, only `transaction` begins transactions
            self.db = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None)
        try:
            with self.translated():
                is_new = self._begin(manifest)
                if compare and not is_new:
                    rows = self.db.execute("SELECT key, value FROM manifest")
                    stored = {key: json.loads(value) for key, value in rows}
                    must_agree(stored, manifest, path_text(file), more=more)
                # Others can read meanwhile, and a loss of power costs the last photos at most. With
                # its keys, a photo that is deleted takes its results along.
                for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
                    self.db.execute(f"PRAGMA {setting}")
                self.db.execute("DELETE FROM manifest WHERE key = 'ended'")
        except BaseException:  # an interrupt too must not leave the file open
            self.db.close()
            raise

    def _begin(self, manifest: Mapping[str, Any]) -> bool:
        """Make the tables and write the manifest, unless the file holds photos already; return
        whether it did. A run without photos is begun again.
        """
        exists = self._is_run()
        if exists and self._number("SELECT count(*) FROM photos"):
            return False
        with self.transaction():
            for statement in [] if exists else TABLES:
                self.db.execute(statement)
            for table in ("manifest", "methods", "failures", "notes"):
                self.db.execute(f"DELETE FROM {table}")
            self.db.execute(f"PRAGMA application_id = {APPLICATION}")
            self.db.execute(f"PRAGMA user_version = {FORMAT}")
            self.enter_in_manifest(manifest)
        return True

    def _is_run(self) -> bool:
        """Whether the file holds the tables of a run; a new or empty file does not, and one with
        something else is refused."""
        # of a file that is no database at all: it has something, and not the mark of a run
        application = 0
        tables = 1
        try:
            tables = self._number("SELECT count(*) FROM sqlite_master")
            application = self._number("PRAGMA application_id")
        except sqlite3.OperationalError:  # such as a locked file, which may be a run
            raise
        except sqlite3.DatabaseError:
            pass
        if not tables:
            return False
        if application != APPLICATION:
            raise RunError(
                f"output {path_text(self.file)!r} must be a run or a new file; choose another"
            )
        check_format(self._number("PRAGMA user_version"), self.file)
        return True

    def enter_in_manifest(self, values: Mapping[str, Any]) -> None:
        """Write properties of the run into the table ``manifest``, as JSON; those that are there
        already are replaced."""
        with self.transaction():
            for key, value in values.items():
                self.insert(
                    "manifest", {"key": key, "value": json.dumps(value, ensure_ascii=False)}
                )

    def enter_methods(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the methods of the run, as rows of `method_row`; those that are there already stay
        as they are.
        """
        with self.transaction():
            for row in rows:
                self.insert("methods", row, conflict="IGNORE")

    def write(self, answers: Sequence[PhotoRecord | Failed]) -> None:
        """Write a batch of photos with all results, and failures, in one transaction; a photo there
        is replaced, unless it fails now and its file has the same stamp.
        """
        with self.transaction():
            for answer in answers:
                if isinstance(answer, PhotoRecord):
                    self._write_photo(answer)
                else:
                    name_and_stamp = (answer.name, answer.stamp)
                    self.db.execute(
                        "DELETE FROM photos WHERE name = ? AND stamp IS NOT ?", name_and_stamp
                    )
                    self.insert(
                        "failures",
                        {"name": answer.name, "path": answer.path, "reason": answer.reason},
                    )

    def _write_photo(self, record: PhotoRecord) -> None:
        """Write a photo with its results and notes, in a transaction, in place of what is stored;
        with ``record.added``, only the results of the record's methods are replaced.
        """
        self.db.execute("DELETE FROM failures WHERE name = ?", (record.name,))
        if record.added:
            number = self._number("SELECT id FROM photos WHERE name = ?", record.name)
            # maps that are explained again for a further metric would be there twice
            for method in {result["method"] for result in record.results}:
                self.db.execute(
                    "DELETE FROM results WHERE photo = ? AND method = ?", (number, method)
                )
        else:
            self.db.execute("DELETE FROM photos WHERE name = ?", (record.name,))
            number = self.insert("photos", record.photo)
        for result in record.results:
            self.insert("results", {"photo": number, **result}, record.name)
        for note in record.notes:
            self.insert("notes", {"note": note})

    def confirm(self, entries: Iterable[Entry]) -> None:
        """Note for photos that were read again, and have the pixels that are stored, the stamps
        that their files have now: the next call need not read them."""
        with self.transaction():
            for entry in entries:
                self.db.execute(
                    "UPDATE photos SET stamp = ? WHERE name = ?", (entry.stamp, entry.name)
                )
                self.db.execute("DELETE FROM failures WHERE name = ?", (entry.name,))

    def end(self, when: str, names: Collection[str] | None = None) -> None:
        """Note in the manifest the time ``when`` the run went through all photos, and its rows, by
        which readers notice missing ones. Failures of photos not in ``names`` are removed.
        """
        with self.transaction():
            failures = [name for (name,) in self.db.execute("SELECT name FROM failures")]
            gone = [(name,) for name in failures if names is not None and name not in names]
            self.db.executemany("DELETE FROM failures WHERE name = ?", gone)
            counts = {
                table: self._number(f"SELECT count(*) FROM {table}")
                for table in ("photos", "results")
            }
            self.enter_in_manifest({"ended": {"when": when, **counts}})

    def close(self) -> None:
        """Close the file; SQLite removes its own files beside it."""
        self.db.close()

    def _number(self, statement: str, *values: Any) -> int:
        """The whole number that a query returns in the first cell of its first row."""
        return int(self.db.execute(statement, values).fetchone()[0])

    def insert(
        self, table: str, row: Mapping[str, Any], *owner: str, conflict: str = "REPLACE"
    ) -> int:
        """Insert a row, in place of one with the same key unless ``conflict="IGNORE"``; returns the
        id of the row that was inserted last. Tables in `DIGESTED` get a digest, with ``owner`` so
        that photos cannot be exchanged."""
        if table in DIGESTED:
            cells = [*owner, *(row[name] for name in DIGESTED[table])]
            row = {**row, "digest": digest_of_cells(cells)}
        places = ", ".join("?" * len(row))
        statement = f"INSERT OR {conflict} INTO {table} ({quoted(row)}) VALUES ({places})"
        return int(self.db.execute(statement, tuple(row.values())).lastrowid or 0)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements of a block together, or none if it raises; a block inside another
        one is a part of that one's transaction."""
        if self.db.in_transaction:
            yield
            return
        with self.translated():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:  # an interrupt too must not leave half a transaction
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn an error of SQLite inside a block into a `RunError`, which says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(
                f"output {path_text(self.file)!r} cannot be written ({error}); make room or end "
                "the program that uses it: the same command goes on where it stopped"
            ) from error


@contextmanager
def locked_run(file: Path) -> Iterator[None]:
    """Keep other runs from writing a file (whose folder is made) while the block lasts; ends with
    the process. Refused for a file of two names: SQLite writes a journal for each.
    """
    from filelock import FileLock, Timeout  # here, since reading needs no lock

    names = file.stat().st_nlink if os.path.isfile(file) else 1
    if names > 1:
        raise RunError(
            f"output {path_text(file)!r} must have one name, got {names} hard links; make a copy "
            "of it"
        )
    lock = FileLock(f"{os.path.realpath(file)}-lock", timeout=0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunError(
            f"output {path_text(file)!r} is being written by another run; wait for it"
        ) from None
    except OSError as error:
        raise RunError(
            f"output {path_text(file)!r} cannot be written: {error.strerror}; choose another file"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # while it is still locked: nobody else can have locked this very file
            os.unlink(lock.lock_file)
        lock.release()
