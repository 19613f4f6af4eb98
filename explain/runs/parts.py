"""A run in a folder of Parquet files, which several machines write, and the SQLite file that it is read from."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from explain._utils.errors import RunError, warn
from explain.methods import Method
from explain.runs.exporting import arrow_modules, schema_of, with_map
from explain.runs.reading import Row, Stored, row_of
from explain.runs.schema import PHOTO, pack
from explain.runs.sources import Entry, text
from explain.runs.storage import Storage
from explain.runs.store import MapRecord, PhotoRecord, Store, method_row

BEGUN = "_begun-"
TOGETHER = 2  # attempts at a piece as a whole: a machine may be lost without any photo's fault


def key_of(names: Sequence[str]) -> str:
    """Return a name for a piece, by the photos in it."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]


@dataclass
class Attempt:
    """One attempt at a piece.

    ``alone`` says that the photos are to be explained one after the other, since attempts at all together came to no
    end; ``ended`` has those during which the process died then.
    """

    place: Storage
    file: str
    before: int = 0
    ended: list[str] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return self.before >= TOGETHER

    def begin(self, photo: str | None = None) -> None:
        """Note that the piece is begun, or this photo of it alone: who comes after us has to know."""
        found = {"attempts": self.before + 1, "ended": self.ended, "now": photo}
        self.place.write(self.file, json.dumps(found).encode())


@contextmanager
def attempt(place: Storage, entries: Sequence[Entry]) -> Iterator[Attempt]:
    """An attempt at a piece; nothing is left of it when the block ends, but by the death of the process."""
    file = f"{BEGUN}{key_of([entry.name for entry in entries])}.json"
    content = place.read(file)
    found = Attempt(place, file)
    if content is not None:
        before = json.loads(content)
        found.before, found.ended = before["attempts"], [*before["ended"], *filter(None, [before["now"]])]
    found.begin()
    try:
        yield found
    except Exception:  # not an interrupt: it may be the end of the process, which is what the file is for
        place.remove(file)
        raise
    place.remove(file)


MANIFEST, REMARKS, INDEX, ENDING = "_manifest.json", "_remarks.json", "_run.sqlite", ".parquet"
"""What else is in the folder begins with an underline: programs that read a folder of Parquet files skip it."""


def write_part(
    place: Storage, answers: Sequence[PhotoRecord], methods: Sequence[Method], metrics: Sequence[str]
) -> None:
    """Write photos with all their results into one Parquet file, in the columns of `export`.

    The metadata of its schema has, under ``explain``, what these columns lack of the tables of a run. The file is named
    by the photos: when they are explained again, as the first machine was lost before it could report, the file takes
    the place of the first one.
    """
    if not answers:
        return
    arrow, parquet = arrow_modules()
    about = {
        "methods": [method_row(method) for method in methods],
        "photos": [
            {**vars(answer), "results": [{**vars(result), "map": result.map.shape} for result in answer.results]}
            for answer in answers
        ],
    }
    schema = schema_of(arrow, metrics).with_metadata({"explain": json.dumps(about)})
    rows = [with_map(row, metrics) for answer in answers for row in rows_of(answer)]
    buffer = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows, schema), buffer, compression="zstd")
    place.write(f"part-{key_of([answer.photo[0] for answer in answers])}{ENDING}", buffer.getvalue())


def rows_of(answer: PhotoRecord) -> Iterator[Row]:
    """The results of a photo, as they would be read from the file of a run."""
    photo = {name.strip('"'): value for name, value in zip(PHOTO, answer.photo, strict=True)}
    photo["prediction_probability"] = photo["probability"]
    for result in answer.results:
        columns = {
            "method": result.method, "target": result.target, "target_class": result.index, "score": result.score,
            "probability": result.probability, "layer": result.layer, "delta": result.delta, "runs": result.runs,
            "error": result.error, "shape": json.dumps(result.map.shape), "scale": result.map.scale,
            "map": result.map.content, "style": "heat", "options": "{}",  # the last two are no columns of a table
        }  # fmt: skip
        yield row_of(_without_nan({**photo, **columns}), _without_nan(result.metrics))


def _without_nan(columns: Mapping[str, Any]) -> dict[str, Any]:
    """None in place of NaN, as SQLite stores it."""
    return {name: None if isinstance(each, float) and math.isnan(each) else each for name, each in columns.items()}


def read_part(place: Storage, file: str) -> tuple[list[tuple[Any, ...]], list[PhotoRecord]]:
    """Read what `write_part` has written: the rows of ``methods``, and the photos.

    Raises:
        RunError: it is damaged, or has been written by an earlier version or another program.
    """
    arrow, parquet = arrow_modules()
    try:
        table = parquet.read_table(io.BytesIO(place.read(file) or b""))
        about = json.loads(table.schema.metadata[b"explain"])
        maps = (np.asarray(each.values.to_numpy()) for each in table["map"])
        photos = [
            PhotoRecord(
                tuple(each["photo"]),
                tuple(
                    MapRecord(**{**result, "map": pack(next(maps).reshape(result["map"]))})
                    for result in each["results"]
                ),
                tuple(each["notes"]),
            )
            for each in about["photos"]
        ]
        return [tuple(row) for row in about["methods"]], photos
    except (OSError, KeyError, TypeError, ValueError, StopIteration, RuntimeError, arrow.ArrowException) as error:
        raise RunError(f"file {text(file)!r} of run {text(place.name)!r} must be Parquet that this version wrote, but "
                       f"cannot be read ({error}); take it away, and the same run explains its photos again"
                       ) from None  # fmt: skip


class Index(Store):
    """The SQLite file of a folder, opened for writing; as `Store`. It notes which parts it has, by their stamps."""

    def __init__(self, file: Path, manifest: Mapping[str, Any], stamp: str) -> None:
        super().__init__(file, manifest, compare=False)
        try:
            with self._translated(), self._transaction():
                self._db.execute("CREATE TABLE IF NOT EXISTS parts (file TEXT PRIMARY KEY, stamp TEXT, photos TEXT)")
                self._db.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, '[]')", (MANIFEST, stamp))
        except BaseException:  # an interrupt too must not leave the file open
            self.close()
            raise

    def forget(self, file: str) -> None:
        """Remove a part, with its photos."""
        with self._translated(), self._transaction():
            self._forget(file)

    def _forget(self, file: str) -> None:
        names = "SELECT value FROM json_each((SELECT photos FROM parts WHERE file = ?))"
        self._db.execute(f"DELETE FROM photos WHERE name IN ({names})", (file,))
        self._db.execute("DELETE FROM parts WHERE file = ?", (file,))

    def add(self, place: Storage, file: str, stamp: str) -> None:
        """Enter a part with its photos at once, in place of what it held before.

        Raises:
            RunError: it cannot be read, or another part has one of its photos.
        """
        methods, photos = read_part(place, file)
        names = json.dumps([each.photo[0] for each in photos])
        with self._translated(), self._transaction():
            self._forget(file)
            there = "SELECT name FROM photos WHERE name IN (SELECT value FROM json_each(?))"
            twice = self._db.execute(there, (names,)).fetchone()
            if twice is not None:
                raise RunError(f"folder {text(place.name)!r} must have each photo in one file, but {twice[0]!r} is in "
                               f"two, of which one is {file!r}; take one of them out")  # fmt: skip
            self._enter_methods(methods)
            self._enter(photos)
            self._db.execute("INSERT INTO parts VALUES (?, ?, ?)", (file, stamp, names))

    def remark(self, stamp: str | None, remarks: Mapping[str, Any]) -> None:
        """Enter failures, notes, and whether all photos were explained."""
        with self._translated(), self._transaction():
            self._db.execute("DELETE FROM failures")
            rows = remarks.get("failures", {}).items()
            self._db.executemany("INSERT INTO failures VALUES (?, NULL, ?)", rows)
            self._db.executemany(
                "INSERT OR IGNORE INTO notes VALUES (?)", [(each,) for each in remarks.get("notes", [])]
            )
            if remarks.get("ended"):
                self._note("ended", remarks["ended"])
            if stamp is not None:
                self._db.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, '[]')", (REMARKS, stamp))


def indexed(place: Storage) -> tuple[Path, int]:
    """Enter what is new in a folder into its SQLite file; return where that is, and how many Parquet files were new.

    It is ``_run.sqlite`` in the folder, or a file in ``~/.cache/explain`` where the folder cannot be written or is an
    address. Nothing is written where nothing has changed. The file can be removed at any time: it is made again.

    Raises:
        RunError: the folder holds no run, or cannot be read.
    """
    content = place.read(MANIFEST)
    if content is None:
        raise RunError(f"run {text(place.name)!r} must be the file of a run or a folder with a {MANIFEST}, but there "
                       "is none; check the path")  # fmt: skip
    file = Path(place.path, INDEX)
    if not place.is_local or not os.access(place.path, os.W_OK):
        name = hashlib.sha256(place.name.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "explain", f"{name}.sqlite")
    now = {
        name: stamp for name, stamp in place.stamps().items() if name.endswith(ENDING) or name in (MANIFEST, REMARKS)
    }
    before: dict[str, str] = {}
    if file.exists():
        with suppress(RunError):  # a damaged one is made again
            before = dict(Stored(file).query("SELECT file, stamp FROM parts"))
    if before == now:
        return file, 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if before.get(MANIFEST) != now[MANIFEST]:
            before = {}
            for ending in ("", "-wal", "-shm"):
                Path(f"{file}{ending}").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"run {text(place.name)!r} cannot be read, since its index {text(file)!r} cannot be written: "
                       f"{error.strerror}; make room") from None  # fmt: skip
    new = [name for name, stamp in now.items() if name.endswith(ENDING) and before.get(name) != stamp]
    with closing(Index(file, json.loads(content), now[MANIFEST])) as index:
        for name in before.keys() - now.keys():
            index.forget(name)
        for name in new:
            index.add(place, name, now[name])
        index.remark(now.get(REMARKS), json.loads(place.read(REMARKS) or b"{}"))
    return file, len(new)


def file_of(run: str | os.PathLike[str]) -> Path:
    """Return the SQLite file of a run; that of a folder is brought up to date first, and a warning says so.

    Raises:
        RunError: there is no run.
    """
    if "://" not in os.fspath(run) and not os.path.isdir(run):
        return Path(run)
    file, count = indexed(Storage(run, make=False))
    if count:
        warn(f"run {text(run)!r}: {count} new Parquet files were entered into {text(file)!r}, from which it is read")
    return file
