"""A folder of Parquet files that several machines write, and the SQLite file that such a run is
read from."""

import hashlib
import importlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from explain._utils.errors import RunError, raised, warn
from explain.data.files import replacing
from explain.methods import Method
from explain.runs.exporting import arrow_modules, arrow_schema, with_map
from explain.store.reading import StoredRun, columns_of_row, row_of
from explain.store.sources import path_text
from explain.store.writing import (
    PhotoRecord,
    Store,
    content_digest,
    method_row,
    packed,
    shape_and_placement,
)

# Other files than Parquet begin with an underline: programs that read a folder of Parquet files
# skip them.
DESCRIPTION = "_run.json"
INDEX_NAME = "_run.sqlite"
ENDING = ".parquet"
VERSIONS = ("ETag", "etag", "LastModified", "updated", "mtime", "created")
"""What file systems call that which changes with the content of a file."""


class Storage:
    """A folder, by its path or an address that fsspec knows ("s3://bucket/maps"), made if ``make``.
    It can be sent to other machines; a file in it appears complete or not at all.
    """

    def __init__(self, address: str | os.PathLike[str], *, make: bool = True) -> None:
        """Find the file system of a path or address (``s3://...``), and make the folder if
        ``make``. ``path`` is the folder within it, ``name`` the whole address.
        """
        self.name = os.fspath(address)
        if "://" not in self.name:
            self.name = os.path.realpath(self.name)
        with self._errors_as_run_errors():
            fsspec = importlib.import_module("fsspec")  # here, as it takes a while
            self._files, self.path = fsspec.core.url_to_fs(self.name)
            self.is_local = "file" in self._files.protocol
            if self._files.isfile(self.path):
                raise RunError(
                    f"output {path_text(address)!r} must be a folder, got a file; choose another "
                    "name"
                )
            if make:
                self._files.makedirs(self.path, exist_ok=True)

    def stamps(self) -> dict[str, str]:
        """The files of the folder by name, in alphabetical order, each with a text (its size and
        version) that changes with its content. Empty without a folder."""
        with self._errors_as_run_errors():
            self._files.invalidate_cache(self.path)  # other machines add files meanwhile
            listed = self._files.ls(self.path, detail=True) if self._files.isdir(self.path) else []
        stamps = {}
        for file_info in listed:
            if file_info["type"] == "file":
                version = next((file_info[key] for key in VERSIONS if key in file_info), "")
                name = os.path.basename(file_info["name"])
                stamps[name] = f"{file_info['size']} {version}"
        return dict(sorted(stamps.items()))

    def read(self, name: str) -> bytes | None:
        """The content of a file by its name in the folder; None if it is not there."""
        with self._errors_as_run_errors(), suppress(FileNotFoundError):
            return bytes(self._files.cat_file(f"{self.path}/{name}"))
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace one of the same name; readers see the old content or the new
        one, never a part."""
        with self._errors_as_run_errors():
            if not self.is_local:
                # storages show a file when it is whole
                self._files.pipe_file(f"{self.path}/{name}", content)
                return
            with replacing(Path(self.path, name)) as part:
                self._files.pipe_file(str(part), content)

    @contextmanager
    def _errors_as_run_errors(self) -> Iterator[None]:
        """Turn an error of the file system, or a missing package for its kind of address, into a
        `RunError`."""
        try:
            yield
        except (OSError, ValueError, ImportError) as error:
            if isinstance(error, RunError):
                raise
            reason = getattr(error, "strerror", None) or raised(error)
            raise RunError(
                f"output {path_text(self.name)!r} cannot be used: {reason}; mend it or choose "
                "another"
            ) from error


def write_part(
    folder: Storage,
    records: Sequence[PhotoRecord],
    metrics: Sequence[str],
    methods: Iterable[Method],
) -> str:
    """Write a piece's records into a Parquet file named by its photos, so that a second try
    replaces the first; all columns but the maps are in the schema's metadata, with a digest.
    """
    arrow, parquet = arrow_modules()
    rows = []
    photos = []
    for record in records:
        results = []
        for result in record.results:
            rows.append(with_map(row_of(columns_of_row(record.photo, result)), metrics))
            results.append({**result, "map": None})  # the map is in the table of Parquet
        photos.append({"photo": record.photo, "results": results, "notes": record.notes})
    content = json.dumps({"methods": list(map(method_row, methods)), "photos": photos})
    metadata = {"explain": content, "digest": str(content_digest(content.encode()))}
    schema = arrow_schema(arrow, metrics).with_metadata(metadata)
    buffer = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows, schema), buffer, compression="zstd")
    names = "\n".join(record.name for record in records)
    file = f"part-{hashlib.sha256(names.encode()).hexdigest()[:24]}{ENDING}"
    folder.write(file, buffer.getvalue())
    return file


def read_part(folder: Storage, file: str) -> tuple[list[dict[str, Any]], list[PhotoRecord]]:
    """Read a file of `write_part`: the rows of ``methods``, and the records of its photos, as the
    SQLite file takes them.
    """
    arrow, parquet = arrow_modules()
    part = folder.read(file)
    if part is None:
        raise RunError(
            f"output {path_text(folder.name)!r} must be a folder that all machines share, but "
            "photos were written elsewhere; choose one on a shared drive or in a storage"
        )
    try:
        table = parquet.read_table(io.BytesIO(part))
        content_text = table.schema.metadata[b"explain"]
        if int(table.schema.metadata[b"digest"]) != content_digest(content_text):
            raise ValueError("its metadata has changed since it was written")
        maps = iter(table["map"])  # in the order of all photos' results
        content = json.loads(content_text)
        photos = []
        for photo in content["photos"]:
            results = tuple(_with_map(result, next(maps)) for result in photo["results"])
            photos.append(PhotoRecord(photo["photo"], results, tuple(photo["notes"])))
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        StopIteration,
        RuntimeError,
        arrow.ArrowException,
    ) as error:
        raise RunError(
            f"file {path_text(file)!r} of run {path_text(folder.name)!r} cannot be read ({error}); "
            "remove it, and the same run explains its photos again"
        ) from None
    return content["methods"], photos


def _with_map(result: dict[str, Any], values: Any) -> dict[str, Any]:
    """The columns of ``results`` for one map, from the metadata and its cell ``values``. Raises
    ValueError where the map does not fit the digest in the metadata.
    """
    with np.errstate(all="ignore"):  # of a damaged map, which the digest shows
        shape, placement = shape_and_placement(result)
        columns = packed(np.asarray(values.values.to_numpy()).reshape(shape), placement)
    if columns["content"] != result["content"]:
        raise ValueError("a map has changed since it was written")
    return result | columns


def describe(folder: Storage, store: Store, names: Iterable[str]) -> None:
    """Write a run's manifest and failures (`DESCRIPTION`) beside its Parquet files, and note in the
    SQLite file that ``names`` are imported, with stamps to compare.
    """
    run = StoredRun(store.file)
    failures = list(run.query("SELECT name, path, reason FROM failures"))
    description = {"manifest": run.manifest, "failures": failures}
    folder.write(DESCRIPTION, json.dumps(description, ensure_ascii=False, indent=1).encode())
    stamps = folder.stamps()  # with that of the description that has just been written
    with store.transaction():
        for name in (*names, DESCRIPTION):
            store.insert("parts", {"file": name, "stamp": stamps[name]})


def index_file(folder: Storage) -> Path:
    """The SQLite file that a folder of Parquet files is read through, if it exists or not:
    ``_run.sqlite``, or in ``~/.cache/explain`` for addresses and folders that cannot be written.
    """
    if folder.is_local and os.access(folder.path, os.W_OK):
        return Path(folder.path, INDEX_NAME)
    name = hashlib.sha256(folder.name.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "explain", f"{name}.sqlite")


def imported(folder: Storage) -> tuple[Path, int]:
    """Bring a folder's SQLite file up to date with its Parquet files; returns its path and how many
    were imported. It is made again if it is gone, or an imported file changed.
    """
    description = _description(folder)
    # the SQLite file has ended once it has all photos, which is found out below
    ended = description["manifest"].pop("ended", None)
    stamps = {
        name: stamp
        for name, stamp in folder.stamps().items()
        if name.endswith(ENDING) or name == DESCRIPTION
    }
    file = index_file(folder)
    imported_stamps = _stamps_in(file)
    usable_parts = {name: stamp for name, stamp in imported_stamps.items() if name != DESCRIPTION}
    if not usable_parts.items() <= stamps.items():  # one was changed or removed: all begins again
        usable_parts = {}
    new_parts = stamps.keys() - usable_parts.keys() - {DESCRIPTION}
    if imported_stamps != stamps:
        if not usable_parts:
            _remove(file)
        # nothing is explained here, so that it may be a run that cannot be continued
        with closing(Store(file, description["manifest"], compare=False)) as store:
            for name in sorted(new_parts):
                methods, photos = read_part(folder, name)
                store.enter_methods(methods)
                store.write(photos)
            with store.transaction():
                for name, path, reason in description["failures"]:
                    store.insert("failures", {"name": name, "path": path, "reason": reason})
                for name, stamp in stamps.items():
                    store.insert("parts", {"file": name, "stamp": stamp})
            if ended and StoredRun(file).photos >= ended["photos"]:
                store.end(ended["when"])
    count = StoredRun(file).photos
    if ended and count < ended["photos"]:
        warn(
            f"run {path_text(folder.name)!r} must have all its files, but "
            f"{ended['photos'] - count} "
            f"of {ended['photos']} photos are missing; copy them, or run it again"
        )
    return file, len(new_parts)


def _description(folder: Storage) -> dict[str, Any]:
    """Read the description of a run in a folder: its ``manifest``, and its ``failures`` as rows of
    name, path and reason.
    """
    content = folder.read(DESCRIPTION)
    if content is None:
        raise RunError(
            f"run {path_text(folder.name)!r} must be a file, or a folder with a {DESCRIPTION}, but "
            "there is none"
        )
    try:
        description = json.loads(content)
        return {
            "manifest": dict(description["manifest"]),
            "failures": list(description["failures"]),
        }
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RunError(
            f"file {DESCRIPTION!r} of run {path_text(folder.name)!r} is damaged; copy it again, or "
            "give another folder"
        ) from None


def _remove(file: Path) -> None:
    """Remove an SQLite file with the files that SQLite has beside it, so that it is made again;
    make its folder if there is none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for ending in ("", "-wal", "-shm"):
            Path(f"{file}{ending}").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"index {path_text(file)!r} of a run cannot be written: {error.strerror}; make room"
        ) from None


def _stamps_in(file: Path) -> dict[str, str]:
    """The stamps of the files that were imported into an SQLite file, by their names; empty where
    there is no such file, or it is damaged."""
    if file.exists():
        with suppress(RunError):
            return dict(StoredRun(file).query("SELECT file, stamp FROM parts"))
    return {}


def index_of(address: str | os.PathLike[str]) -> Path:
    """Return the SQLite file of a folder or address of Parquet files, brought up to date; warns
    with its path if files were imported. Raises `RunError` if there is no run.
    """
    file, count = imported(Storage(address, make=False))
    if count:
        warn(
            f"run {path_text(address)!r}: {count} new Parquet files were imported into "
            f"{path_text(file)!r}"
        )
    return file
