"""A run in a folder of Parquet files, which several machines write, and the SQLite file that it is read from."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from explain._utils.errors import RunError, raised, warn
from explain.methods import Method
from explain.runs.exporting import arrow_modules, schema_of, with_map
from explain.runs.reading import Row, StoredRun, row_of
from explain.runs.schema import PHOTO, content_digest, pack
from explain.runs.sources import Entry, text
from explain.runs.store import MapRecord, PhotoRecord, Store, method_row

MANIFEST, REMARKS, INDEX, BEGUN, ENDING = "_manifest.json", "_remarks.json", "_run.sqlite", "_begun-", ".parquet"
"""Other files than Parquet begin with an underline: programs that read a folder of Parquet files skip them."""
TOGETHER = 2  # attempts at a piece as a whole: a machine may be lost without any photo's fault


class Storage:
    """A folder: a path, or an address that fsspec knows, such as ``s3://bucket/maps`` or ``memory://maps``.

    It can be sent to other machines. A file in it appears complete or not at all.

    Args:
        address: the path or the address.
        make: make the folder if there is none.

    Raises:
        RunError: there is a file of this name, fsspec does not know the address, or it lacks a package for it.
    """

    def __init__(self, address: str | os.PathLike[str], *, make: bool = True) -> None:
        self.name = os.fspath(address)
        if "://" not in self.name:
            self.name = os.path.realpath(self.name)
        with self._translated():
            fsspec = importlib.import_module("fsspec")  # here, as it takes a while
            self._files, self.path = fsspec.core.url_to_fs(self.name)
            self.is_local = "file" in self._files.protocol
            if self._files.isfile(self.path):
                raise RunError(f"output {text(address)!r} must be a folder, got a file; choose another name")
            if make:
                self._files.makedirs(self.path, exist_ok=True)

    def stamps(self) -> dict[str, str]:
        """The names of the files in their order, each with a text that changes with its content."""
        with self._translated():
            self._files.invalidate_cache(self.path)
            found = self._files.ls(self.path, detail=True) if self._files.isdir(self.path) else []
        versions = ("ETag", "etag", "LastModified", "updated", "mtime", "created")
        stamps: dict[str, str] = {}
        for about in sorted(found, key=lambda about: str(about["name"])):
            name = os.path.basename(about["name"])
            if about["type"] == "file" and not name.startswith("."):
                stamps[name] = f"{about['size']} {next((about[key] for key in versions if key in about), '')}"
        return stamps

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""
        with self._translated():
            try:
                return bytes(self._files.cat_file(f"{self.path}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or put another in its place."""
        with self._translated():
            if not self.is_local:
                self._files.pipe_file(f"{self.path}/{name}", content)  # storages show a file when it is whole
                return
            part = f"{self.path}/.explain-{secrets.token_hex(8)}.part"
            try:
                self._files.pipe_file(part, content)
                os.replace(part, f"{self.path}/{name}")
            finally:
                with suppress(OSError):
                    os.unlink(part)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._translated(), suppress(FileNotFoundError):
            self._files.rm_file(f"{self.path}/{name}")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of the file system into ours."""
        try:
            yield
        except (OSError, ValueError, ImportError) as error:
            if isinstance(error, RunError):
                raise
            reason = getattr(error, "strerror", None) or raised(error)
            raise RunError(f"output {text(self.name)!r} cannot be used: {reason}; choose another folder, or make "
                           "room and start once more") from error  # fmt: skip


@dataclass
class Attempt:
    """One attempt at a piece of a run, after ``before`` others that came to no end.

    After `TOGETHER` of them, the photos are to be explained ``alone``, one after the other; ``ended`` has those during
    which the process died then.
    """

    folder: Storage
    file: str
    before: int
    ended: list[str]

    @property
    def alone(self) -> bool:
        return self.before >= TOGETHER

    def begin(self, photo: str | None = None) -> None:
        """Note for the next attempt that the piece is begun, or this photo of it alone."""
        content = {"attempts": self.before + 1, "ended": self.ended, "now": photo}
        self.folder.write(self.file, json.dumps(content).encode())


@contextmanager
def attempt(folder: Storage, entries: Sequence[Entry]) -> Iterator[Attempt]:
    """An attempt at a piece; its file goes when the block ends, but not when the process dies."""
    file = f"{BEGUN}{_key([entry.name for entry in entries])}.json"
    before = json.loads(folder.read(file) or b'{"attempts": 0, "ended": [], "now": null}')
    found = Attempt(folder, file, before["attempts"], [*before["ended"], *filter(None, [before["now"]])])
    found.begin()
    try:
        yield found
    except Exception:  # not an interrupt: it may be the end of the process
        folder.remove(file)
        raise
    folder.remove(file)


def write_part(
    folder: Storage, records: Sequence[PhotoRecord], methods: Sequence[Method], metrics: Sequence[str]
) -> None:
    """Write photos with all their results into one Parquet file, in the columns of `export`.

    The metadata of its schema has, under ``explain``, the other columns of a run, and under ``digest`` the digest of
    that text. The file is named by the photos: when they are explained again, as the first machine was lost before it
    could report, the file replaces the first one.
    """
    if not records:
        return
    arrow, parquet = arrow_modules()
    photos = [
        {**vars(record), "results": [
            {**vars(result), "map": [result.map.shape, content_digest(result.map.content)]} for result in record.results
        ]}
        for record in records
    ]  # fmt: skip
    others = json.dumps({"methods": list(map(method_row, methods)), "photos": photos})
    metadata = {"explain": others, "digest": str(content_digest(others.encode()))}
    rows = [with_map(row, metrics) for record in records for row in _rows(record)]
    buffer = io.BytesIO()
    table = arrow.Table.from_pylist(rows, schema_of(arrow, metrics).with_metadata(metadata))
    parquet.write_table(table, buffer, compression="zstd")
    folder.write(f"part-{_key([record.photo[0] for record in records])}{ENDING}", buffer.getvalue())


def _key(names: Sequence[str]) -> str:
    """A name for a piece, by its photos."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]


def _rows(record: PhotoRecord) -> Iterator[Row]:
    """The results of a photo, as they would be read from the file of a run."""
    photo = {name.strip('"'): value for name, value in zip(PHOTO, record.photo, strict=True)}
    for result in record.results:
        columns = {
            **photo, "prediction_probability": photo["probability"], **vars(result), "target_class": result.index,
            "shape": json.dumps(result.map.shape), "scale": result.map.scale, "map": result.map.content,
            "options": "{}",
        }  # fmt: skip
        yield row_of(_without_nan(columns), _without_nan(result.metrics))


def _without_nan(columns: Mapping[str, Any]) -> dict[str, Any]:
    """None in place of NaN, as SQLite stores it."""
    return {name: None if isinstance(each, float) and math.isnan(each) else each for name, each in columns.items()}


def read_part(folder: Storage, file: str) -> tuple[list[tuple[Any, ...]], list[PhotoRecord]]:
    """Read a file of `write_part`: the rows of ``methods``, and the photos.

    Raises:
        RunError: it is damaged, or was written by an earlier version or another program.
    """
    arrow, parquet = arrow_modules()
    try:
        table = parquet.read_table(io.BytesIO(folder.read(file) or b""))
        others = table.schema.metadata[b"explain"]
        if int(table.schema.metadata[b"digest"]) != content_digest(others):
            raise ValueError("its metadata has changed since it was written")
        maps = (np.asarray(each.values.to_numpy()) for each in table["map"])
        content = json.loads(others)
        photos = [
            PhotoRecord(
                tuple(photo["photo"]), tuple(_map_record(each, next(maps)) for each in photo["results"]),
                tuple(photo["notes"]),
            )
            for photo in content["photos"]
        ]  # fmt: skip
    except (OSError, KeyError, TypeError, ValueError, StopIteration, RuntimeError, arrow.ArrowException) as error:
        raise RunError(f"file {text(file)!r} of run {text(folder.name)!r} must be Parquet that this version wrote, but "
                       f"cannot be read ({error}); remove it, and the same run explains its photos again"
                       ) from None  # fmt: skip
    return [tuple(row) for row in content["methods"]], photos


def _map_record(columns: dict[str, Any], values: np.ndarray[Any, Any]) -> MapRecord:
    shape, expected = columns["map"]
    with np.errstate(all="ignore"):  # of a damaged map, which the digest shows
        packed = pack(values.reshape(shape))
    if content_digest(packed.content) != expected:
        raise ValueError("a map has changed since it was written")
    return MapRecord(**{**columns, "map": packed})


class Index(Store):
    """The SQLite file of a folder, opened for writing. It lists the Parquet files that it has, with their stamps."""

    def __init__(self, file: Path, manifest: Mapping[str, Any], stamp: str) -> None:
        super().__init__(file, manifest, compare=False)
        try:
            with self._transaction():
                self._db.execute("CREATE TABLE IF NOT EXISTS parts (file TEXT PRIMARY KEY, stamp TEXT, photos TEXT)")
                self._db.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, '[]')", (MANIFEST, stamp))
        except BaseException:  # an interrupt too must not leave the file open
            self.close()
            raise

    def remove(self, file: str) -> None:
        """Remove a part with its photos."""
        names = "SELECT value FROM json_each((SELECT photos FROM parts WHERE file = ?))"
        with self._transaction():
            self._db.execute(f"DELETE FROM photos WHERE name IN ({names})", (file,))
            self._db.execute("DELETE FROM parts WHERE file = ?", (file,))

    def add(self, folder: Storage, file: str, stamp: str) -> None:
        """Enter a part with its photos at once, in place of those that it held before.

        Raises:
            RunError: it cannot be read, or another part has one of its photos.
        """
        methods, photos = read_part(folder, file)
        names = json.dumps([each.photo[0] for each in photos])
        with self._transaction():
            self.remove(file)
            query = "SELECT name FROM photos WHERE name IN (SELECT value FROM json_each(?))"
            twice = self._db.execute(query, (names,)).fetchone()
            if twice is not None:
                raise RunError(f"folder {text(folder.name)!r} must have each photo in one file, but {twice[0]!r} is in "
                               f"two, of which one is {file!r}; remove one of them")  # fmt: skip
            self.enter_method_rows(methods)
            self.write(photos)
            self._db.execute("INSERT INTO parts VALUES (?, ?, ?)", (file, stamp, names))

    def remark(self, stamp: str | None, remarks: Mapping[str, Any]) -> None:
        """Enter failures, notes, and whether all photos were explained."""
        with self._transaction():
            self._db.execute("DELETE FROM failures")
            failures = remarks.get("failures", {}).items()
            self._db.executemany("INSERT INTO failures VALUES (?, NULL, ?)", failures)
            notes = [(note,) for note in remarks.get("notes", [])]
            self._db.executemany("INSERT OR IGNORE INTO notes VALUES (?)", notes)
            if remarks.get("ended"):
                self.end(remarks["ended"])
            if stamp is not None:
                self._db.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, '[]')", (REMARKS, stamp))


def indexed(folder: Storage) -> tuple[Path, int]:
    """Enter the new files of a folder into its SQLite file; return its path, and the number of new Parquet files.

    It is ``_run.sqlite`` in the folder, or a file in ``~/.cache/explain`` where the folder cannot be written or is an
    address. Nothing is written where nothing has changed. The file can be removed at any time: it is made again.

    Raises:
        RunError: the folder holds no run, or cannot be read.
    """
    manifest = folder.read(MANIFEST)
    if manifest is None:
        raise RunError(f"run {text(folder.name)!r} must be the file of a run or a folder with a {MANIFEST}, but there "
                       "is none; check the path")  # fmt: skip
    file = Path(folder.path, INDEX)
    if not folder.is_local or not os.access(folder.path, os.W_OK):
        name = hashlib.sha256(folder.name.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "explain", f"{name}.sqlite")
    stamps = folder.stamps().items()
    now = {name: stamp for name, stamp in stamps if name.endswith(ENDING) or name in (MANIFEST, REMARKS)}
    before: dict[str, str] = {}
    if file.exists():
        with suppress(RunError):  # a damaged one is made again
            before = dict(StoredRun(file).query("SELECT file, stamp FROM parts"))
    if before == now:
        return file, 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if before.get(MANIFEST) != now[MANIFEST]:
            before = {}
            for ending in ("", "-wal", "-shm"):
                Path(f"{file}{ending}").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"run {text(folder.name)!r} cannot be read, since its index {text(file)!r} cannot be written: "
                       f"{error.strerror}; make room") from None  # fmt: skip
    new = [name for name, stamp in now.items() if name.endswith(ENDING) and before.get(name) != stamp]
    with closing(Index(file, json.loads(manifest), now[MANIFEST])) as index:
        for name in before.keys() - now.keys():
            index.remove(name)
        for name in new:
            index.add(folder, name, now[name])
        index.remark(now.get(REMARKS), json.loads(folder.read(REMARKS) or b"{}"))
    return file, len(new)


def index_of(address: str | os.PathLike[str]) -> Path:
    """Return the SQLite file of a folder, brought up to date; a warning says if it was not.

    Raises:
        RunError: there is no run.
    """
    file, count = indexed(Storage(address, make=False))
    if count:
        warn(f"run {text(address)!r}: {count} new Parquet files were entered into {text(file)!r}, from which it is "
             "read")  # fmt: skip
    return file
