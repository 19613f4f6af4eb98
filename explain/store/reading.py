"""Reading the SQLite file of a run: its rows, checked against their digests."""

import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import (
    ExplainError,
    RunError,
    did_you_mean,
    printable,
    python_or_command,
    reason_of,
)
from explain._utils.html import table_html
from explain.attribution.encoding import decode
from explain.attribution.pictures import LARGEST_SIDE, Scene
from explain.attribution.result import Attribution
from explain.data.bands import Bands, as_read
from explain.data.boxes import Box, Corners
from explain.data.greys import Window
from explain.data.images import load_image
from explain.explanation.detected import detection_names
from explain.methods.base import title_of
from explain.render.styles import Style
from explain.store.lists import source_of
from explain.store.sources import (
    Entry,
    boxes_of_class,
    digest_of_photo,
    entries_of,
    path_of,
    path_text,
    stamp_of,
    true_label_names,
)
from explain.store.writing import (
    APPLICATION,
    DIGESTED,
    ORDERS,
    check_format,
    content_digest,
    digest_of_cells,
    quoted,
    shape_and_placement,
    unpacked,
)
from explain.targets.labels import class_label
from explain.targets.outputs import Prediction

Threshold: TypeAlias = float | np.ndarray[Any, Any]
"""From which probability on a label is predicted: one for all, or one for each ``(K,)``."""
_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_RESULT = ", ".join(f"r.{column}" for column in DIGESTED["results"])
_CHECKED = {
    table: f"SELECT {quoted(columns)}, digest FROM {table} NOT INDEXED"
    for table, columns in DIGESTED.items()
}
_CHECKED["results"] = (
    f"SELECT p.name, {_RESULT}, r.digest FROM results r NOT INDEXED LEFT JOIN photos p ON p.id = "
    "r.photo"
)
"""The statement for the rows of each table: the columns that its digest is made of, and the
digest."""
_ROW = """
SELECT r.*, r.class AS target_class, p.probability AS prediction_probability, p.*
FROM results r JOIN photos p ON p.id = r.photo WHERE r.id = ?
"""


@dataclass(frozen=True, eq=False)
class Row:
    """The result of one method for one target of one photo: ``label`` is the source's class of the
    photo, ``prediction`` the model's and ``target`` the explained one."""

    name: str
    method: str
    target: str
    # fields that end in ``_class`` are numbers of classes
    target_class: int | None
    score: float
    probability: float | None
    # of several labels, the one that the model finds most probable
    label: str | None
    label_class: int | None
    label_probability: float | None
    prediction: str | None
    prediction_class: int | None
    prediction_probability: float | None
    layer: str | tuple[str, ...] | None
    path: str | None
    sha256: str
    size: tuple[int, int]
    # the part of the photo that the model saw, in pixels of the photo, as ``boxes`` are
    box: Box
    input_size: tuple[int, int]
    # of the object; where they have labels, those of the target
    boxes: tuple[Corners, ...]
    # all that are true of the photo
    labels: tuple[str, ...]
    delta: float | None
    runs: int | None
    error: float | None
    # None where a metric is not defined
    metrics: Mapping[str, float | None]
    style: Any
    # a pixel without influence is not zero, as in RISE; pictures take the mean for it
    uncentred: bool
    # those of the tables
    columns: Mapping[str, Any] = field(repr=False)
    # the range of grey values that photos were read in
    window: Window | Bands | None = field(default=None, repr=False)
    # files of several slices, pages or frames are volumes; the map lies on all slices
    stack: bool = field(default=False, repr=False)

    @cached_property
    def values(self) -> torch.Tensor:
        """The raw attribution, float32: ``(h, w)`` at the layer's resolution, or ``(C, H, W)``.
        Stored in half precision, to within ``2**-11`` of each value, apart from very small ones."""
        return unpacked(self.columns)

    @property
    def correct(self) -> bool | None:
        """Whether the predicted class is the label; None unless both are classes of the model."""
        if self.label_class is None or self.prediction_class is None:
            return None
        return self.label_class == self.prediction_class

    def is_right(self, threshold: Threshold) -> bool | None:
        """Whether the prediction is right, as `correct`; with a single label, right if it is true
        and its probability at least ``threshold``, or neither. None where that is not known."""
        photo = None if self.correct is not None else LabelledPhoto.of(self.columns)
        if photo is None or len(photo.probabilities) > 1 or photo.uncertain:
            return self.correct
        return photo.mistakes(threshold) == ([], [])

    @cached_property
    def attribution(self) -> Attribution:
        """The map with its metadata, as a batch of one, for the functions that draw and measure
        attributions."""
        _, placement = shape_and_placement(self.columns)
        return Attribution(
            method=self.method,
            values=self.values[None],
            score=torch.tensor([self.score]),
            layer=self.layer,
            target=self.target if self.target_class is None else torch.tensor([self.target_class]),
            size=self.input_size,
            style=self.style,
            delta=None if self.delta is None else torch.tensor([self.delta]),
            neutral=self.values.mean()[None] if self.uncentred else None,
            placement=placement,
        )

    @cached_property
    def detections(self) -> tuple[Prediction, ...]:
        """What a detector found on the photo, best first, with the names that targets have; empty
        for other models."""
        stored = json.loads(self.columns["detections"] or "[]")
        names = detection_names([label for label, *_ in stored])
        return tuple(
            Prediction(name, score, category, (x0, y0, x1, y1))
            for name, (_, score, x0, y0, x1, y1, category) in zip(names, stored, strict=True)
        )

    @property
    def detection(self) -> Prediction | None:
        """The one that is explained; None for what is not one of them."""
        return next((one for one in self.detections if one.label == self.target), None)

    @property
    def heatmap(self) -> torch.Tensor:
        """The map ``(H, W)``, float32 in [0, 1], at the resolution of the model's input."""
        return self.attribution.heatmap[0]

    def overlay(self, style: Style, photo: Any = None) -> Image.Image:
        """Draw the map on the photo, at most 2,000 pixels a side, in a style of `explain.render`.
        ``photo`` is needed where its file has moved; it must be the one that was explained."""
        picture = self.picture(photo)
        # the picture of a volume is a sheet, which says where on it each slice lies
        slices = getattr(picture, "cells", {})
        seen = tuple(Box(*cell) for cell in slices.values()) or (self.box,)
        explained_boxes = () if self.detection is None else (self.detection.box,)
        detected = {one.label: one.box for one in self.detections if one.box}
        scene = Scene(
            picture,
            box=self.box,
            seen=seen,
            boxes=explained_boxes,
            detected=detected,
            slices=slices,
        ).fitted(LARGEST_SIDE)
        return scene.overlay(self.attribution, style)

    def picture(self, photo: Any = None, remedy: str = "give the photo") -> Image.Image:
        """Return the photo that was explained as an upright RGB picture, to be drawn; arguments and
        errors as of `checked_photo`."""
        image = self.checked_photo(photo, remedy)
        if isinstance(image, torch.Tensor):
            raise RunError(
                f"photo {self.name!r} must be an image to be drawn, but its source has a tensor; "
                "give images"
            )
        return image

    def checked_photo(
        self, photo: Any = None, remedy: str = "give the photo"
    ) -> Image.Image | torch.Tensor:
        """The photo that was explained, upright, or its tensor ``(C, H, W)``: ``photo``, or None
        for its file, if unchanged. Other pixels are refused."""
        # Only a file with the stored stamp is read: a run that somebody has forged may name others'
        # files, but does not know their sizes and times.
        candidate = self._file(remedy) if photo is None else photo
        image: Image.Image | torch.Tensor
        if isinstance(candidate, torch.Tensor):
            image = candidate
            size = (image.shape[-1], image.shape[-2])
        else:
            image = load_image(candidate, self.window, stack=self.stack)
            size = image.size
        if size != self.size or digest_of_photo(image) != self.sha256:
            raise RunError(
                f"photo {self.name!r} must have the pixels that were explained, but has changed "
                "since; run it again"
            )
        return image

    def _file(self, remedy: str) -> str:
        """The path of the photo's file, which has not changed since the run."""
        stamp = self.columns.get("stamp")
        if self.path is None or stamp is None:
            raise RunError(
                f"photo must be given for {self.name!r}, which had no file that was noted; {remedy}"
            )
        path = path_of(self.path)
        if stamp_of(path) not in (None, stamp):  # None: reading it says why
            raise RunError(
                f"photo {self.name!r} must have a file that has not changed since the run, but "
                f"{self.path!r} has; {remedy} to compare its pixels"
            )
        return path


class StoredPhoto(NamedTuple):
    """The columns of ``photos`` that identify a photo; ``labels`` and ``boxes`` as JSON."""

    stamp: str | None
    sha256: str
    width: int
    height: int
    labels: str | None
    boxes: str | None


class LabelledPhoto(NamedTuple):
    """A photo of which several labels may be true: the probability of each label of the model
    ``(K,)``, the classes that are true, and those of which that is not known."""

    name: str
    probabilities: np.ndarray[Any, Any]
    true: frozenset[int]
    uncertain: frozenset[int]

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> "LabelledPhoto | None":
        """Make it from a row of the table ``photos``; None where only one class can be true, or no
        label is known. Labels that are none of the model's are left out."""
        if columns["labels"] is None:
            return None
        probabilities = json.loads(columns["probabilities"] or "{}").get("labels")
        if probabilities is None:
            return None
        true: set[int] = set()
        uncertain: set[int] = set()
        # each is a class and its text, which the mark may follow
        for number, _, *uncertain_mark in json.loads(columns["labels"]):
            if number is not None and number < len(probabilities):
                (uncertain if uncertain_mark else true).add(number)
        return cls(columns["name"], np.array(probabilities), frozenset(true), frozenset(uncertain))

    def predicted(self, threshold: Threshold) -> list[int]:
        """The classes that are predicted, in ascending order."""
        chosen: list[int] = np.flatnonzero(self.probabilities >= threshold).tolist()
        return chosen

    def mistakes(self, threshold: Threshold) -> tuple[list[int], list[int]]:
        """The classes missed (true, not predicted) and the false alarms (predicted, neither true
        nor uncertain), in ascending order; predicted from ``threshold`` on."""
        predicted = self.predicted(threshold)
        missed = self.true.difference(predicted)
        false_alarms = set(predicted) - self.true - self.uncertain
        return sorted(missed), sorted(false_alarms)


class StoredRun:
    """The rows and tables of a run's SQLite file; also while it is being written."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Check that the file is a run in this format; its digests are checked when rows are
        read."""
        self.path = Path(file)
        if not self.path.is_file():
            raise RunError(
                f"run {path_text(file)!r} must be a file, but there is none; check the path"
            )
        # the names of all tables are read as well, which may be damaged
        with self._reading(remedy="give a file that explain.run wrote") as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise RunError(
                f"run {path_text(file)!r} must be the file of a run, got another database; check "
                "the path"
            )
        check_format(version, file)
        self._checked: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        """The number of rows: one for each photo, method and target."""
        return self._count("results")

    def __repr__(self) -> str:
        """One line: the file, how many photos, methods and failures it has, and whether it is
        finished."""
        failures = f", {len(self.failures)} failed" if self.failures else ""
        unfinished = "" if self.ended else ", not finished"
        methods = ", ".join(self.methods)
        return printable(
            f"{type(self).__name__}({path_text(self.path)!r}: {self.photos} photos, "
            f"{methods}{failures}{unfinished})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: a table of the methods with their numbers of maps and photos, and
        the failures."""
        counts = (
            "SELECT method, count(*), count(DISTINCT photo) FROM results GROUP BY method "
            "ORDER BY min(id)"
        )
        rows = [[title_of(name), *map(str, figures)] for name, *figures in self.query(counts)]
        failed = (
            table_html(["not explained", "reason"], [*self.failures.items()])
            if self.failures
            else ""
        )
        return table_html(["method", "maps", "photos"], rows, repr(self)) + failed

    @property
    def photos(self) -> int:
        """The number of photos that have been explained, without failures."""
        return self._count("photos")

    @property
    def methods(self) -> list[str]:
        """The names of the methods of which there are maps, in the order in which they were asked
        for; an insight, and the page of a repair, take the first by default."""
        statement = "SELECT method FROM results NOT INDEXED GROUP BY method ORDER BY min(id)"
        return [name for (name,) in self.query(statement)]

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, in alphabetical order."""
        return [
            name for (name,) in self.query("SELECT DISTINCT metric FROM metrics ORDER BY metric")
        ]

    @property
    def failures(self) -> dict[str, str]:
        """The reasons why photos could not be explained, by the names of the photos."""
        return dict(self.query("SELECT name, reason FROM failures ORDER BY name"))

    @property
    def notes(self) -> list[str]:
        """The warnings about single photos that the run stored, such as why a map is zero."""
        return [note for (note,) in self.query("SELECT note FROM notes")]

    @property
    def manifest(self) -> dict[str, Any]:
        """What fixes the run: its source, model, weights, methods, targets, options and versions;
        each value is checked against its digest."""
        with self._reading() as db:
            return {key: json.loads(value) for key, value in self._verified(db, "manifest")}

    @property
    def ended(self) -> bool:
        """Whether the last call of the run went through all photos of its source."""
        return any(self.query("SELECT 1 FROM manifest WHERE key = 'ended'"))

    @property
    def identified(self) -> dict[str, StoredPhoto]:
        """The columns that tell whether a photo is still the same, by the names of photos; a
        continued run compares them with its source."""
        rows = self.query(f"SELECT name, {', '.join(StoredPhoto._fields)} FROM photos")
        return {name: StoredPhoto._make(rest) for name, *rest in rows}

    def lacking(
        self, methods: Collection[str], metrics: Collection[str]
    ) -> dict[str, frozenset[str]]:
        """By the names of photos, the methods to run again: those without a map, or whose maps lack
        some of these metrics. Photos that lack nothing are left out.
        """
        complete: dict[str, set[str]] = {
            name: set() for (name,) in self.query("SELECT name FROM photos")
        }
        rows = "SELECT p.name, r.method, r.metrics FROM photos p JOIN results r ON r.photo = p.id"
        for name, method, figures in self.query(rows):
            if json.loads(figures).keys() >= set(metrics):
                complete[name].add(method)
        missing = {
            name: frozenset(methods) - complete_methods
            for name, complete_methods in complete.items()
        }
        return {name: names for name, names in missing.items() if names}

    def rows(
        self,
        method: str | None = None,
        *,
        label: str | None = None,
        prediction: str | None = None,
        correct: bool | None = None,
        order: str = "source",
    ) -> Iterator[Row]:
        """Give the result for each photo, method and target, one after the other, when all rows of
        the run are checked against their digests.

        Args:
            method: of this method only.
            label, prediction: of photos with this label, or prediction, only.
            correct: of photos that are classified right, or wrong, only.
            order: "source", "worst" (the lowest probability of the label first) or "best".

        Raises:
            RunError: there is no such method or order, or the file is damaged.
        """
        self._check_digests()
        if method is not None and method not in self.methods:
            raise RunError(
                f"method {method!r} is not in this run; {did_you_mean(method, self.methods)}"
            )
        if order not in ORDERS:
            raise RunError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        columns = {"r.method": method, "p.label": label, "p.prediction": prediction}
        equal_columns = {column: value for column, value in columns.items() if value is not None}
        terms = [f"{column} = ?" for column in equal_columns]
        if correct is not None:
            terms.append(f"p.label_class {'=' if correct else '<>'} p.prediction_class")
        where = f" WHERE {' AND '.join(terms)}" if terms else ""
        return self.rows_where(
            f"{where} ORDER BY {ORDERS[order]}, r.id", list(equal_columns.values())
        )

    def photo_columns(self) -> Iterator[dict[str, Any]]:
        """Give the row of each photo in the table ``photos``, by the names of its columns, in the
        order of the source; columns of JSON stay text. Raises `RunError` if the file is damaged.
        """
        self._check_digests()
        names = DIGESTED["photos"]
        for cells in self.query(f"SELECT {quoted(names)} FROM photos ORDER BY id"):
            yield dict(zip(names, cells, strict=True))

    def labelled_photos(self) -> Iterator[LabelledPhoto]:
        """Give the photos of which several labels may be true, and some label is known.
        Raises `RunError` if the file is damaged.
        """
        yield from filter(None, map(LabelledPhoto.of, self.photo_columns()))

    def label_of(self, number: int) -> str:
        """The label of class number ``number`` of the model; the number as text where the model has
        no labels."""
        return class_label(self.categories, number)

    @cached_property
    def categories(self) -> list[str] | None:
        """The labels of the model; None where it has only numbers."""
        categories: list[str] | None = self.manifest["categories"]
        return categories

    @cached_property
    def _window(self) -> Window | Bands | None:
        """The range of values that photos were read in, or the bands that they have."""
        arguments = self.manifest["explainer"]["arguments"]
        names = ("window", "channels", "bands")
        window, channels, bands = (decode(arguments.get(name)) for name in names)
        return as_read(window, channels, bands or ())

    def query(self, statement: str, values: Any = ()) -> Iterator[tuple[Any, ...]]:
        """Run a query in SQL; the documentation lists the tables. Only SELECT is allowed, which
        changes nothing.
        """
        with self._reading(
            f"query {statement.strip()!r:.60} of run", "only SELECT is allowed"
        ) as db:
            db.set_authorizer(
                lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
            )
            yield from db.execute(statement, values)

    def _count(self, table: str) -> int:
        """The number of rows of a table; it is counted without an index, which a damaged file may
        have wrong."""
        (row,) = self.query(f"SELECT count(*) FROM {table} NOT INDEXED")
        return int(row[0])

    def _check_digests(self) -> None:
        """Compare all rows but the maps with their digests, and their numbers with those noted at
        the run's end; again only when the database's files have changed.
        """
        file_stamps = tuple(stamp_of(f"{self.path}{ending}") for ending in ("", "-wal"))
        if file_stamps == self._checked:
            return
        with self._reading() as db:
            db.execute("BEGIN")  # so that all is read in one state
            counts = {
                table: sum(1 for _ in self._verified(db, table))
                for table in ("methods", "photos", "results")
            }
            manifest = {key: json.loads(value) for key, value in self._verified(db, "manifest")}
        written = manifest.get("ended", counts)  # while a run goes on, any number of rows is right
        for table in ("photos", "results"):
            if counts[table] != written[table]:
                raise self._damaged(
                    f"it has {counts[table]} {table}, but {written[table]} were written"
                )
        self._checked = file_stamps

    def _verified(self, db: sqlite3.Connection, table: str) -> Iterator[list[Any]]:
        """The cells of all rows of a table, without their digest, which each row is compared
        with."""
        for *cells, expected in db.execute(_CHECKED[table]):
            if digest_of_cells(cells) != expected:
                raise self._damaged(f"a row of the {table} has changed since it was written")
            yield cells

    def rows_where(self, clause: str, values: Sequence[str]) -> Iterator[Row]:
        """Rows that match ``clause``, SQL of WHERE and ORDER BY with placeholders for ``values``;
        numbers first, then one row at a time, for the memory. Maps are checked by digest.
        """
        with self._reading() as db:
            db.execute("BEGIN")  # rows that are written meanwhile are for the next reader
            db.row_factory = sqlite3.Row
            methods = {
                method["name"]: method for method in db.execute("SELECT * FROM methods NOT INDEXED")
            }
            # without an index, which may be damaged; the results are gone through first
            chosen = "SELECT r.id FROM results r NOT INDEXED CROSS JOIN photos p ON p.id = r.photo"
            for (number,) in db.execute(chosen + clause, values).fetchall():
                columns = db.execute(_ROW, (number,)).fetchone()
                if columns is None or content_digest(columns["map"]) != columns["content"]:
                    raise self._damaged(f"the map of row {number} has changed since it was written")
                method = methods[columns["method"]]
                uncentred = json.loads(method["options"]).get("centred") is False
                row = row_of(
                    dict(columns), style=method["style"], uncentred=uncentred, window=self._window
                )
                yield replace(row, stack=self.manifest.get("stack", False))

    def _damaged(self, reason: str) -> RunError:
        """The error to raise about a file that is damaged, with the reason, and what to do."""
        return RunError(
            f"run {path_text(self.path)!r} is damaged: {reason}; take another copy of it, or run "
            "it again"
        )

    @contextmanager
    def _reading(
        self, what: str = "run", remedy: str = "take another copy of it"
    ) -> Iterator[sqlite3.Connection]:
        """Open the file for reading in a block, in which errors of SQLite and of cells become a
        `RunError`, whose message begins with ``what`` and ends with ``remedy``.
        """
        try:
            with closing(self._connect()) as db:
                yield db
        except (sqlite3.Error, UnicodeError) as error:
            raise RunError(
                f"{what} {path_text(self.path)!r} cannot be read: {error}; {remedy}"
            ) from None
        except ExplainError:  # which is a ValueError too
            raise
        except (TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
            raise self._damaged(f"a cell cannot be read ({reason_of(error)})") from None

    def _connect(self) -> sqlite3.Connection:
        """Open the file for reading, as immutable where nothing can be written beside it. Writable
        if possible: only then does SQLite remove its files beside the database.
        """
        address = self.path.absolute().as_uri()
        # in both cases, the caller may take the rows in another thread than this one
        try:
            db = sqlite3.connect(f"{address}?mode=rw", uri=True, check_same_thread=False)
            db.execute("PRAGMA query_only = ON")
            db.execute("SELECT count(*) FROM sqlite_master")  # SQLite reads nothing before
        except sqlite3.OperationalError as error:
            rest = self.path.with_name(f"{self.path.name}-wal")
            if rest.is_file() and rest.stat().st_size:  # an immutable database is read without it
                raise RunError(
                    f"run {path_text(self.path)!r} must lie in a folder that can be written, since "
                    f"it was interrupted and {path_text(rest.name)!r} has a part of it ({error}); "
                    "copy both files to another"
                ) from None
            db = sqlite3.connect(
                f"{address}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
        return db


def columns_of_row(photo: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a photo and of one result as the query of a row names them: the result's class
    is ``target_class``, the photo's probability ``prediction_probability``.
    """
    renamed = {"target_class": result["class"], "prediction_probability": photo["probability"]}
    return {**photo, **result, **renamed}


def row_of(
    columns: Mapping[str, Any],
    style: str | None = None,
    uncentred: bool = False,
    window: Window | Bands | None = None,
) -> Row:
    """Make a `Row` of the joined columns of a photo and a result. ``style`` and ``uncentred`` are
    those of the method, ``window`` that of the run, and needed for drawing only."""
    layer = columns["layer"]
    if layer is not None and layer.startswith("["):  # several, as JSON
        layer = tuple(json.loads(layer))
    values: dict[str, Any] = {
        name: columns[name] for name in Row.__dataclass_fields__ if name in columns
    }
    values |= {
        "layer": layer,
        # of a picture, as Pillow has it; that of a tensor is (height, width), as PyTorch has it
        "size": (columns["width"], columns["height"]),
        "input_size": (columns["input_height"], columns["input_width"]),
        "box": Box(columns["left"], columns["top"], columns["right"], columns["bottom"]),
        "boxes": tuple(boxes_of_class(json.loads(columns["boxes"] or "[]"), columns["target"])),
        "labels": tuple(true_label_names(columns["labels"])),
        "metrics": json.loads(columns["metrics"]),
        "style": style,
        "uncentred": uncentred,
        "columns": columns,
        "window": window,
    }
    return Row(**values)


class PhotoReader:
    """Reads the photos of a run once more: from ``source``, or else from their files."""

    def __init__(self, run: "StoredRun", source: Any = None) -> None:
        """Keep a run and, for photos that had no file, their source."""
        self.run = run
        self.source = None if source is None else source_of(source)

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        """The entries of the source by their names, listed once; those that cannot be read are left
        out."""
        entries = () if self.source is None else entries_of(self.source)
        return {entry.name: entry for entry in entries if entry.problem is None}

    def read(self, row: Row) -> Image.Image | torch.Tensor:
        """Read the photo of a row again, from its source or else its file: an upright image, or a
        float tensor ``(C, H, W)``.
        """
        return row.checked_photo(self._image(row), self._remedy)

    def picture(self, row: Row) -> Image.Image:
        """Read the photo of a row again as an upright RGB picture, to be drawn.
        Raises `ExplainError` if it cannot be read or has changed, or its source has a tensor.
        """
        return row.picture(self._image(row), self._remedy)

    def _image(self, row: Row) -> Any:
        """What the source has of a row's photo; None where there is no source, or it lacks it."""
        entry = self._entries.get(row.name)
        return None if self.source is None or entry is None else self.source.read(entry).image

    @property
    def _remedy(self) -> str:
        return python_or_command("pass source=", "give --source")
