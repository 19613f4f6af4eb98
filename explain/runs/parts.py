"""A folder of Parquet files that several machines write, and the SQLite file that such a run is read from."""

import hashlib
import importlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from explain._utils.errors import RunError, raised, warn
from explain.data.files import replacing
from explain.methods import Method
from explain.runs.exporting import arrow_modules, schema_of, with_map
from explain.store.reading import StoredRun, row_of
from explain.store.sources import text
from explain.store.writing import MapRecord, PhotoRecord, Store, content_digest, method_row, pack

# Other files than Parquet begin with an underline: programs that read a folder of Parquet files skip them.
MANIFEST = "_manifest.json"
REMARKS = "_remarks.json"
INDEX = "_run.sqlite"
ENDING = ".parquet"


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
        files = {os.path.basename(about["name"]): about for about in found if about["type"] == "file"}
        return {
            name: f"{about['size']} {next((about[key] for key in versions if key in about), '')}"
            for name, about in sorted(files.items())
            if not name.startswith(".")
        }

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""
        with self._translated(), suppress(FileNotFoundError):
            return bytes(self._files.cat_file(f"{self.path}/{name}"))
        return None

    def read_object(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file; None if it is not there.

        Raises:
            RunError: it holds something else.
        """
        content = self.read(name)
        if content is None:
            return None
        with suppress(ValueError, RecursionError):
            found = json.loads(content)
            if isinstance(found, dict):
                return found
        raise RunError(f"file {text(name)!r} of run {text(self.name)!r} must hold a JSON object, but is damaged; "
                       "copy it again, or give another folder")  # fmt: skip

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or put another in its place."""
        with self._translated():
            if not self.is_local:
                self._files.pipe_file(f"{self.path}/{name}", content)  # storages show a file when it is whole
                return
            with replacing(Path(self.path, name)) as part:
                self._files.pipe_file(str(part), content)

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
            raise RunError(f"output {text(self.name)!r} cannot be used: {reason}; mend it or choose another") from error


def key_of(names: Sequence[str]) -> str:
    """A name for a piece, by its photos."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]


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
    rows = []
    photos = []
    for record in records:
        results = []
        for result in record.results:
            rows.append(with_map(row_of(record.photo, result.columns), metrics))
            results.append({**vars(result), "map": [result.map.shape, content_digest(result.map.content)]})
        photos.append({"photo": dict(record.photo), "results": results, "notes": record.notes})
    others = json.dumps({"methods": [method_row(method) for method in methods], "photos": photos})
    metadata = {"explain": others, "digest": str(content_digest(others.encode()))}
    schema = schema_of(arrow, metrics).with_metadata(metadata)
    buffer = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows, schema), buffer, compression="zstd")
    folder.write(f"part-{key_of([record.name for record in records])}{ENDING}", buffer.getvalue())


def read_part(folder: Storage, file: str) -> tuple[list[dict[str, Any]], list[PhotoRecord]]:
    """Read a file of `write_part`: the rows of ``methods``, and the photos.

    Raises:
        RunError: it is damaged, or was written by another program.
    """
    arrow, parquet = arrow_modules()
    try:
        table = parquet.read_table(io.BytesIO(folder.read(file) or b""))
        others = table.schema.metadata[b"explain"]
        if int(table.schema.metadata[b"digest"]) != content_digest(others):
            raise ValueError("its metadata has changed since it was written")
        maps = (np.asarray(values.values.to_numpy()) for values in table["map"])
        content = json.loads(others)
        photos = []
        for photo in content["photos"]:
            results = tuple(_map_record(columns, next(maps)) for columns in photo["results"])
            photos.append(PhotoRecord(photo["photo"], results, tuple(photo["notes"])))
    except (OSError, KeyError, TypeError, ValueError, StopIteration, RuntimeError, arrow.ArrowException) as error:
        remedy = "remove it, and the same run explains its photos again"
        raise RunError(f"file {text(file)!r} of run {text(folder.name)!r} cannot be read ({error}); {remedy}") from None
    return content["methods"], photos


def _map_record(columns: dict[str, Any], values: np.ndarray[Any, Any]) -> MapRecord:
    shape, expected = columns["map"]
    with np.errstate(all="ignore"):  # of a damaged map, which the digest shows
        packed = pack(values.reshape(shape))
    if content_digest(packed.content) != expected:
        raise ValueError("a map has changed since it was written")
    return MapRecord(**{**columns, "map": packed})


class Index(Store):
    """The SQLite file of a folder, opened for writing. It lists the files that it has, with their stamps."""

    def add(self, folder: Storage, file: str, stamp: str) -> None:
        """Enter a part with its photos.

        Raises:
            RunError: it cannot be read, or another part has one of its photos.
        """
        methods, photos = read_part(folder, file)
        with self._transaction():
            for photo in photos:
                if self._number("SELECT count(*) FROM photos WHERE name = ?", photo.name):
                    raise RunError(f"photo {photo.name!r} is in two files of the run, one of them {file!r}; remove one")
            self.enter_methods(methods)
            self.write(photos)
            self.list_file(file, stamp)

    def list_file(self, file: str, stamp: str) -> None:
        """Note that the file is entered."""
        with self._transaction():
            self._db.execute("CREATE TABLE IF NOT EXISTS parts (file TEXT PRIMARY KEY, stamp TEXT)")
            self._insert("parts", {"file": file, "stamp": stamp}, "OR REPLACE")

    def remark(self, remarks: Mapping[str, Any]) -> None:
        """Enter failures, notes, and whether all photos were explained."""
        with self._transaction():
            self._db.execute("DELETE FROM failures")
            for name, reason in remarks.get("failures", {}).items():
                self._insert("failures", {"name": name, "reason": reason})
            for note in remarks.get("notes", ()):
                self._insert("notes", {"note": note}, "OR IGNORE")
            if remarks.get("ended"):
                self.end(remarks["ended"])


def indexed(folder: Storage) -> tuple[Path, int]:
    """Enter the new files of a folder into its SQLite file; return its path, and the number of new Parquet files.

    It is ``_run.sqlite`` in the folder, or a file in ``~/.cache/explain`` where the folder cannot be written or is an
    address. Nothing is written where nothing has changed. The file can be removed at any time: it is made again, as it
    is where a file that it has was changed or removed.

    Raises:
        RunError: the folder holds no run, or cannot be read.
    """
    manifest = folder.read_object(MANIFEST)
    if manifest is None:
        raise RunError(f"run {text(folder.name)!r} must be a file, or a folder with a {MANIFEST}, but there is none")
    stamps = {
        name: stamp for name, stamp in folder.stamps().items() if name.endswith(ENDING) or name in (MANIFEST, REMARKS)
    }
    remarks = _remarks(folder, stamps)
    file = _index_file(folder)
    before = _listed(file)
    if before == stamps:
        return file, 0
    before.pop(REMARKS, None)
    if not before.items() <= stamps.items():
        before = {}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for ending in () if before else ("", "-wal", "-shm"):
            Path(f"{file}{ending}").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"index {text(file)!r} of a run cannot be written: {error.strerror}; make room") from None
    new = [name for name in stamps if name.endswith(ENDING) and name not in before]
    with closing(Index(file, manifest, compare=False)) as index:
        index.list_file(MANIFEST, stamps[MANIFEST])
        for name in new:
            index.add(folder, name, stamps[name])
        index.remark(remarks)
        if REMARKS in stamps:
            index.list_file(REMARKS, stamps[REMARKS])
    return file, len(new)


def _remarks(folder: Storage, stamps: Mapping[str, str]) -> dict[str, Any]:
    """What the run says of itself; it is not complete if files of it are missing."""
    remarks = folder.read_object(REMARKS) or {}
    files = remarks.get("files", ())
    missing = [name for name in files if name not in stamps]
    if not missing:
        return remarks
    count = f"{len(missing)} of {len(files)} files"
    warn(
        f"run {text(folder.name)!r} must have all its files, but {count} are missing, such as {text(missing[0])!r}; "
        "copy them, or run again to explain their photos"
    )
    return {**remarks, "ended": None}


def _index_file(folder: Storage) -> Path:
    if folder.is_local and os.access(folder.path, os.W_OK):
        return Path(folder.path, INDEX)
    name = hashlib.sha256(folder.name.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "explain", f"{name}.sqlite")


def _listed(file: Path) -> dict[str, str]:
    """The files that an index has; none where there is no index, or a damaged one."""
    if file.exists():
        with suppress(RunError):
            return dict(StoredRun(file).query("SELECT file, stamp FROM parts"))
    return {}


def index_of(address: str | os.PathLike[str]) -> Path:
    """Return the SQLite file of a folder, brought up to date; a warning says if it was not.

    Raises:
        RunError: there is no run.
    """
    file, count = indexed(Storage(address, make=False))
    if count:
        warn(f"run {text(address)!r}: {count} new Parquet files were entered into its index {text(file)!r}")
    return file
