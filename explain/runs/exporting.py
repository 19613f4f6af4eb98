"""A run in other files: one table (Parquet, CSV, JSON lines), or a folder of Parquet files that several machines
write, and the SQLite file that it is read from."""

import csv
import hashlib
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from explain._utils.errors import RunError, either, optional, raised, warn
from explain.data.files import as_cell, replacing
from explain.methods import Method
from explain.store.reading import Row, StoredRun, row_of
from explain.store.sources import text
from explain.store.writing import MapRecord, PhotoRecord, Store, content_digest, method_row, pack

OF_ROW = {
    "name": "string", "method": "string", "target": "string", "target_class": "int64", "score": "float64",
    "probability": "float64", "label": "string", "label_class": "int64", "label_probability": "float64",
    "prediction": "string", "prediction_class": "int64", "prediction_probability": "float64", "correct": "bool",
    "layer": "string", "delta": "float64", "runs": "int64", "error": "float64", "path": "string", "sha256": "string",
}  # fmt: skip
"""Columns that are attributes of a row, with their types in Arrow."""
OF_PHOTO = {
    "width": "int64", "height": "int64", "left": "float64", "top": "float64", "right": "float64", "bottom": "float64",
    "input_height": "int64", "input_width": "int64",
}  # fmt: skip
VALUES_AT_ONCE = 4_000_000  # values of maps in memory
ROWS_AT_ONCE = 1024


def export(run: StoredRun, file: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write the rows of a run into one file: ``.parquet`` with the maps (extra ``parquet``), ``.csv`` or ``.jsonl``.

    The file appears complete or not at all. In Parquet, ``map`` is a list of float32, row after row, and ``map_shape``
    its shape; the manifest is among the metadata of the schema, under ``explain``. Each metric is a column.

    Args:
        run: the run.
        file: where to write; its ending chooses the format.
        overwrite: replace a file that exists.

    Returns:
        How many rows were written.

    Raises:
        RunError: the file exists, cannot be written or has another ending, or pyarrow is not installed.
    """
    path = Path(file)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise RunError(f"file must end in one of {', '.join(_WRITERS)}, got {text(path.name)!r}; choose one of them")
    if os.path.lexists(path) and not overwrite:
        leave = either("pass overwrite=True", "overwrite it with --force")
        raise RunError(f"file {text(path)!r} exists already; choose another, or {leave}")
    metrics = [name for (name,) in run.query("SELECT DISTINCT metric FROM metrics ORDER BY metric")]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            return writer(run, metrics, part)
    except OSError as error:
        raise RunError(f"file {text(path)!r} cannot be written: {error.strerror or error}; choose another") from None


def plain(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a row, but for its map."""
    found = {name: getattr(row, name) for name in OF_ROW}
    found["layer"] = ", ".join(row.layer) if isinstance(row.layer, tuple) else row.layer
    box = row.box
    found |= zip(OF_PHOTO, (*row.size, box.left, box.top, box.right, box.bottom, *row.input_size), strict=True)
    found["boxes"] = [list(box) for box in row.boxes]
    found["labels"] = list(row.labels)
    return found | {metric: row.metrics.get(metric) for metric in metrics}


def with_map(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """Return all columns of a row."""
    return {**plain(row, metrics), "map_shape": list(row.values.shape), "map": row.values.flatten().numpy()}


def schema_of(arrow: Any, metrics: Sequence[str]) -> Any:
    """Return the schema of a table in Arrow."""
    kinds = {name: arrow.type_for_alias(kind) for name, kind in (OF_ROW | OF_PHOTO).items()}
    kinds["boxes"] = arrow.list_(arrow.list_(arrow.float64()))
    kinds["labels"] = arrow.list_(arrow.string())
    kinds |= dict.fromkeys(metrics, arrow.float64())
    return arrow.schema({**kinds, "map_shape": arrow.list_(arrow.int32()), "map": arrow.list_(arrow.float32())})


def arrow_modules() -> tuple[Any, Any]:
    """Return ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        RunError: they are not installed.
    """
    arrow, parquet = (optional(name, "for Parquet", "parquet", RunError) for name in ("pyarrow", "pyarrow.parquet"))
    return arrow, parquet


def _to_text(run: StoredRun, metrics: Sequence[str], path: Path, as_csv: bool) -> int:
    with path.open("w", encoding="utf-8", newline="" if as_csv else None) as file:
        table = csv.DictWriter(file, [*OF_ROW, *OF_PHOTO, "boxes", "labels", *metrics], lineterminator="\n")
        if as_csv:
            table.writeheader()
        count = 0
        for count, row in enumerate(run.rows(), 1):  # noqa: B007
            columns = plain(row, metrics)
            if as_csv:
                lists = {
                    "boxes": json.dumps(columns["boxes"]) if row.boxes else None,
                    "labels": json.dumps(columns["labels"], ensure_ascii=False) if row.labels else None,
                }
                table.writerow({name: as_cell(value) for name, value in {**columns, **lists}.items()})
            else:
                file.write(json.dumps(columns, ensure_ascii=False) + "\n")
    return count


def _to_parquet(run: StoredRun, metrics: Sequence[str], path: Path) -> int:
    arrow, parquet = arrow_modules()
    schema = schema_of(arrow, metrics).with_metadata({"explain": json.dumps(run.manifest)})
    count, rows = 0, run.rows()
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in rows:  # as many rows at once as fit into memory, however large their maps are
            size = max(1, min(ROWS_AT_ONCE, VALUES_AT_ONCE // max(1, first.values.numel())))
            together = [with_map(row, metrics) for row in (first, *islice(rows, size - 1))]
            writer.write_table(arrow.Table.from_pylist(together, schema))
            count += len(together)
    return count


_WRITERS: dict[str, Callable[[StoredRun, Sequence[str], Path], int]] = {
    ".parquet": _to_parquet, ".csv": partial(_to_text, as_csv=True), ".jsonl": partial(_to_text, as_csv=False),
}  # fmt: skip


MANIFEST, REMARKS, INDEX, ENDING = "_manifest.json", "_remarks.json", "_run.sqlite", ".parquet"
"""Other files than Parquet begin with an underline: programs that read a folder of Parquet files skip them."""


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

    def about(result: MapRecord) -> dict[str, Any]:
        return {**vars(result), "map": [result.map.shape, content_digest(result.map.content)]}

    photos = [{**vars(record), "results": list(map(about, record.results))} for record in records]
    others = json.dumps({"methods": list(map(method_row, methods)), "photos": photos})
    metadata = {"explain": others, "digest": str(content_digest(others.encode()))}
    pairs = [(_stored(record.columns), each) for record in records for each in record.results]
    rows = [with_map(row_of(of, _stored(each.columns), _stored(each.metrics)), metrics) for of, each in pairs]
    buffer = io.BytesIO()
    table = arrow.Table.from_pylist(rows, schema_of(arrow, metrics).with_metadata(metadata))
    parquet.write_table(table, buffer, compression="zstd")
    folder.write(f"part-{key_of([record.photo[0] for record in records])}{ENDING}", buffer.getvalue())


def key_of(names: Sequence[str]) -> str:
    """A name for a piece, by its photos."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]


def _stored(columns: Mapping[str, Any]) -> dict[str, Any]:
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
        photos = []
        for photo in content["photos"]:
            results = tuple(_map_record(each, next(maps)) for each in photo["results"])
            photos.append(PhotoRecord(tuple(photo["photo"]), results, tuple(photo["notes"])))
    except (OSError, KeyError, TypeError, ValueError, StopIteration, RuntimeError, arrow.ArrowException) as error:
        remedy = "remove it, and the same run explains its photos again"
        raise RunError(f"file {text(file)!r} of run {text(folder.name)!r} cannot be read ({error}); {remedy}") from None
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

    def begin(self, stamp: str) -> None:
        """Make the list, with the stamp of the manifest."""
        with self._transaction():
            self._db.execute("CREATE TABLE IF NOT EXISTS parts (file TEXT PRIMARY KEY, stamp TEXT, photos TEXT)")
            self._list(MANIFEST, stamp)

    def _list(self, file: str, stamp: str, names: str = "[]") -> None:
        self._insert("parts", {"file": file, "stamp": stamp, "photos": names}, "OR REPLACE")

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
                raise RunError(f"photo {twice[0]!r} is in two files of the run, one of them {file!r}; remove one")
            self.enter_methods(methods)
            self.write(photos)
            self._list(file, stamp, names)

    def remark(self, stamp: str | None, remarks: Mapping[str, Any]) -> None:
        """Enter failures, notes, and whether all photos were explained."""
        with self._transaction():
            self._db.execute("DELETE FROM failures")
            self._db.executemany("INSERT INTO failures VALUES (?, NULL, ?)", remarks.get("failures", {}).items())
            notes = ([note] for note in remarks.get("notes", []))
            self._db.executemany("INSERT OR IGNORE INTO notes VALUES (?)", notes)
            if remarks.get("ended"):
                self.end(remarks["ended"])
            if stamp is not None:
                self._list(REMARKS, stamp)


def indexed(folder: Storage) -> tuple[Path, int]:
    """Enter the new files of a folder into its SQLite file; return its path, and the number of new Parquet files.

    It is ``_run.sqlite`` in the folder, or a file in ``~/.cache/explain`` where the folder cannot be written or is an
    address. Nothing is written where nothing has changed. The file can be removed at any time: it is made again.

    Raises:
        RunError: the folder holds no run, or cannot be read.
    """
    manifest = folder.read_object(MANIFEST)
    if manifest is None:
        raise RunError(f"run {text(folder.name)!r} must be a file, or a folder with a {MANIFEST}, but there is none")
    file = Path(folder.path, INDEX)
    if not folder.is_local or not os.access(folder.path, os.W_OK):
        name = hashlib.sha256(folder.name.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "explain", f"{name}.sqlite")
    stamps = folder.stamps().items()
    now = {name: stamp for name, stamp in stamps if name.endswith(ENDING) or name in (MANIFEST, REMARKS)}
    remarks = folder.read_object(REMARKS) or {}
    missing = [name for name in remarks.get("files", ()) if name not in now]
    if missing:
        count = f"{len(missing)} of {len(remarks['files'])} files"
        warn(f"run {text(folder.name)!r} must have all its files, but {count} are missing, such as "
             f"{text(missing[0])!r}; copy them, or run again to explain their photos")  # fmt: skip
        remarks = {**remarks, "ended": None}
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
        raise RunError(f"index {text(file)!r} of a run cannot be written: {error.strerror}; make room") from None
    new = [name for name, stamp in now.items() if name.endswith(ENDING) and before.get(name) != stamp]
    with closing(Index(file, manifest, compare=False)) as index:
        index.begin(now[MANIFEST])
        for name in before.keys() - now.keys():
            index.remove(name)
        for name in new:
            index.add(folder, name, now[name])
        index.remark(now.get(REMARKS), remarks)
    return file, len(new)


def index_of(address: str | os.PathLike[str]) -> Path:
    """Return the SQLite file of a folder, brought up to date; a warning says if it was not.

    Raises:
        RunError: there is no run.
    """
    file, count = indexed(Storage(address, make=False))
    if count:
        warn(f"run {text(address)!r}: {count} new Parquet files were entered into its index {text(file)!r}")
    return file
