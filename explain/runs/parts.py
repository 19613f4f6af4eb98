"""A run in a folder of Parquet files, which several machines write at the same time."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from explain._utils.errors import RunError, printable
from explain.runs.exporting import arrow_modules, schema_of, with_map
from explain.runs.photo_identity import Known
from explain.runs.reading import Row, row_of
from explain.runs.schema import PHOTO
from explain.runs.sources import Entry, text
from explain.runs.storage import Storage
from explain.runs.store import PhotoRecord

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


MANIFEST, REMARKS, KNOWN, ENDING = "_manifest.json", "_remarks.json", "_photos-", ".parquet"
"""What else is in the folder begins with an underline, so that programs that read a folder of Parquet pass it by."""


class RunFolder:
    """A run that `run_on_ray` wrote: a folder of Parquet files, as it is now.

    Each file holds some photos with all their results, in the columns of `export`. Anything that reads a folder of
    Parquet files reads it. ``len(folder)`` is the number of rows: one for each photo, method and target.

    Args:
        folder: where it is: a path, or an address such as ``s3://bucket/maps``.

    Raises:
        RunError: there is no run, or it cannot be read.

    >>> RunFolder("none")
    Traceback (most recent call last):
    explain.RunError: run 'none' must be a folder with a _manifest.json, but there is none; check the path
    """

    def __init__(self, folder: str | os.PathLike[str] | Storage) -> None:
        shown = folder.name if isinstance(folder, Storage) else text(folder)
        if not isinstance(folder, Storage) and "://" not in shown and not os.path.isdir(folder):
            raise _missing(shown)  # rather than make it
        self.place = folder if isinstance(folder, Storage) else Storage(folder)
        content = self.place.read(MANIFEST)
        if content is None:
            raise _missing(shown)
        self.manifest: dict[str, Any] = json.loads(content)
        """What the run is: its source, model, weights, methods, targets, options and versions."""

    def __len__(self) -> int:
        return sum(self._names.values())

    def __repr__(self) -> str:
        state = "" if self.ended else ", not at its end"
        bad = f", {len(self.failures)} failed" if self.failures else ""
        methods = ", ".join(self.manifest["methods"])
        return printable(f"RunFolder({text(self.place.name)!r}: {self.photos} photos, {methods}{bad}{state})")

    @property
    def path(self) -> str:
        """Where it is."""
        return self.place.name

    @property
    def listing(self) -> str:
        """Where failures and notes are listed, with a place for one of these words."""
        return f"'{{}}' in {text(self.place.name)}/{REMARKS}"

    @property
    def photos(self) -> int:
        """How many photos have been explained."""
        return len(self._names)

    @property
    def failures(self) -> dict[str, str]:
        """Why photos could not be explained when the run was last continued, by their names."""
        return dict(self._remarks.get("failures", {}))

    @property
    def notes(self) -> list[str]:
        """Warnings about single photos, such as why a map is zero, from when the run was last continued."""
        return list(self._remarks.get("notes", []))

    @property
    def ended(self) -> bool:
        """Whether all photos have been looked at."""
        return bool(self._remarks.get("ended"))

    @cached_property
    def _names(self) -> dict[str, int]:
        return names_in(self.place)

    @cached_property
    def _remarks(self) -> dict[str, Any]:
        return dict(json.loads(self.place.read(REMARKS) or b"{}"))


def _missing(folder: str) -> RunError:
    return RunError(f"run {folder!r} must be a folder with a {MANIFEST}, but there is none; check the path")


def names_in(place: Storage) -> dict[str, int]:
    """The photos in a folder, each with the number of its rows.

    Raises:
        RunError: a file cannot be read, or a photo is in two of them.
    """
    rows: Counter[str] = Counter()
    for file in place.files(ENDING):
        found = Counter(_names_in(place, file))
        twice = next((name for name in found if name in rows), None)
        if twice is not None:
            raise RunError(f"folder {text(place.name)!r} must have each photo in one file, but {twice!r} is in two, of "
                           f"which one is {file!r}; take one of them out")  # fmt: skip
        rows.update(found)
    return dict(rows)


def known_in(place: Storage) -> dict[str, Known]:
    """What is noted of the photos in a folder, by which they are compared with those of a source.

    Raises:
        RunError: a file cannot be read, a photo is in two of them, or nothing is noted of one.
    """
    noted: dict[str, Known] = {}
    for file in place.files(".json"):
        if file.startswith(KNOWN):
            try:
                noted |= {name: Known(*each) for name, each in json.loads(place.read(file) or b"").items()}
            except (AttributeError, TypeError, ValueError):
                continue  # damaged: its photos are not known
    names = names_in(place)
    missing = next((name for name in names if name not in noted), None)
    if missing is not None:
        raise RunError(f"folder {text(place.name)!r} cannot be continued, since it does not say which photo "
                       f"{missing!r} was: it is damaged, or of an earlier version; give another")  # fmt: skip
    return {name: noted[name] for name in names}


def write_part(place: Storage, answers: Sequence[PhotoRecord], metrics: Sequence[str]) -> int:
    """Write photos with all their results into one file, and return how many rows it has.

    The file is named by the photos: when they are explained again, as the first machine was lost before it could tell,
    the file takes the place of the first one.
    """
    rows = [row for answer in answers for row in rows_of(answer)]
    if rows:
        key = key_of([answer.photo[0] for answer in answers])
        known = {answer.photo[0]: Known.of(answer.photo) for answer in answers}
        place.write(f"{KNOWN}{key}.json", json.dumps(known, ensure_ascii=False).encode())
        place.write(f"part-{key}{ENDING}", _packed(rows, metrics))
    return len(rows)


def rows_of(answer: PhotoRecord) -> Iterable[Row]:
    """The results of a photo, as they would be read from the file of a run."""
    photo = {name.strip('"'): value for name, value in zip(PHOTO, answer.photo, strict=True)}
    photo["prediction_probability"] = photo["probability"]
    for result in answer.results:
        columns = {
            "method": result.method, "target": result.target, "target_class": result.index, "score": result.score,
            "probability": result.probability, "layer": result.layer, "delta": result.delta, "runs": result.runs,
            "error": result.error, "shape": json.dumps(result.map.shape), "scale": result.map.scale,
            "map": result.map.content,
        }  # fmt: skip
        yield row_of(_without_nan({**photo, **columns}), _without_nan(result.metrics))


def _without_nan(columns: Mapping[str, Any]) -> dict[str, Any]:
    """None in place of what is no number, as SQLite stores it."""
    return {name: None if isinstance(each, float) and math.isnan(each) else each for name, each in columns.items()}


def _packed(rows: Sequence[Row], metrics: Sequence[str]) -> bytes:
    arrow, parquet = arrow_modules()
    schema = schema_of(arrow, metrics)
    buffer = io.BytesIO()
    parquet.write_table(
        arrow.Table.from_pylist([with_map(row, metrics) for row in rows], schema), buffer, compression="zstd"
    )
    return buffer.getvalue()


def _names_in(place: Storage, file: str) -> list[str]:
    """The photo of each row of a file."""
    arrow, parquet = arrow_modules()
    try:
        with place.opened(file) as opened:
            names: list[str] = parquet.read_table(opened, columns=["name"])["name"].to_pylist()
    except (OSError, KeyError, arrow.ArrowException) as error:
        raise RunError(f"file {text(file)!r} of run {text(place.name)!r} must be Parquet of a run, but cannot be read "
                       f"({error}); take it away, and its photos are explained again") from None  # fmt: skip
    return names
