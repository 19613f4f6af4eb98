"""Where a watched training is written: the file of a run, with tables of its steps, and a log for
TensorBoard."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from explain._utils.errors import RunError, optional, shown
from explain._utils.resources import packaged_text
from explain.attribution.pictures import Scene
from explain.attribution.result import Attribution
from explain.render.styles import get_style
from explain.runs.preparing import Prepared
from explain.store.sources import Failed
from explain.store.writing import PhotoRecord, Store, shape_and_placement, unpacked

TABLES = packaged_text("explain.training", "tables.sql").split(";\n")


@dataclass(frozen=True)
class TrainingSnapshot:
    """What is seen at a step of a training."""

    step: int
    photos: Sequence[PhotoRecord | Failed]
    """Their names are those of `stored_name`."""
    figures: Mapping[str, float]
    """Numbers such as the loss."""
    gradients: Sequence[tuple[str, float, float, float, str]] = ()
    """Of the steps before, for each parameter: its name, the root mean square, the largest
    magnitude, the share that is zero, and the verdict."""
    units: Sequence[tuple[str, int, Sequence[int]]] = ()
    """Of the steps before, for each layer: its name, how many units it has, and which are dead."""

    @property
    def dead(self) -> float:
        """The share of units that got no gradient; 0.0 where there are none."""
        total = sum(count for _, count, _ in self.units)
        return sum(len(dead) for _, _, dead in self.units) / total if total else 0.0


def stored_name(step: int, name: str) -> str:
    """Return what a photo is called in the table of photos, where each step has it once: "step
    00000500/cat.jpg"."""
    return f"step {step:08}/{name}"


class TrainingStore(Store):
    """The file of a watched training, opened for writing; as `Store`."""

    def __init__(self, file: Path, manifest: Mapping[str, Any]) -> None:
        """Open the file, or make it, with the tables of a run and those of ``tables.sql`` for a
        training; ``manifest`` is the description that the run keeps."""
        super().__init__(file, manifest)
        with self.transaction():
            for statement in TABLES:
                self.db.execute(statement)

    def last(self) -> int:
        """The last training step of which the file has a snapshot; 0 if there is none."""
        with self.translated():
            return int(self.db.execute("SELECT ifnull(max(step), 0) FROM steps").fetchone()[0])

    def go_back(self, step: int) -> None:
        """Delete all snapshots after a training step: a training that is continued from there takes
        another way. Maps go with their photos (by the foreign keys of the tables)."""
        with self.transaction():
            self.db.execute(
                "DELETE FROM photos WHERE id IN (SELECT photo FROM steps WHERE step > ?)", (step,)
            )
            for table in ("figures", "gradients", "units"):
                self.db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def enter(self, snapshot: TrainingSnapshot) -> None:
        """Write a snapshot in one transaction, in place of an earlier one of the step; photos as in
        any run, under `stored_name`, with their step and photo in the table ``steps``.
        """
        # where in a stored name the photo's own begins; SQL counts from 1
        name_start = len(stored_name(snapshot.step, "")) + 1
        insert_step = (
            "INSERT OR REPLACE INTO steps SELECT id, ?, substr(name, ?) FROM photos WHERE name = ?"
        )
        unit_rows = [
            (layer, count, len(dead), json.dumps(dead)) for layer, count, dead in snapshot.units
        ]
        with self.transaction():
            self.write(snapshot.photos)
            for record in snapshot.photos:
                if isinstance(record, PhotoRecord):
                    self.db.execute(insert_step, (snapshot.step, name_start, record.name))
            self._enter_rows("figures", snapshot.step, list(snapshot.figures.items()))
            self._enter_rows("gradients", snapshot.step, snapshot.gradients)
            self._enter_rows("units", snapshot.step, unit_rows)

    def _enter_rows(self, table: str, step: int, rows: Sequence[tuple[Any, ...]]) -> None:
        """Replace the rows that a table has of a training step; ``rows`` have the columns after
        ``step``, in the order of ``tables.sql``. ``table`` is a name of ours, never of a user."""
        self.db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
        for row in rows:
            marks = ", ?" * len(row)
            self.db.execute(f"INSERT INTO {table} VALUES (?{marks})", (step, *row))


class TensorBoardLog:
    """Writes what is seen of photos at each step; maps are drawn on the ``scenes``, where a photo
    has one."""

    def __init__(
        self, writer: Any, photos: Sequence[Prepared], scenes: Sequence[Scene | None]
    ) -> None:
        """Write by a TensorBoard ``writer``, which stays the caller's to close. ``scenes`` has the
        drawn photo of each of ``photos``, in their order; None where maps are not drawn.
        """
        self._writer = writer
        self._photos = photos
        self._scenes = scenes

    def enter(self, snapshot: TrainingSnapshot, styles: Mapping[str, str]) -> None:
        """Write a snapshot's maps, figures and gradients, without failed photos, under tags that
        people find on the board; ``styles`` are the drawing styles by method.
        """
        for photo, record, scene in zip(self._photos, snapshot.photos, self._scenes, strict=True):
            if isinstance(record, PhotoRecord):
                for result in record.results:
                    self._enter_map(snapshot.step, photo, result, scene, styles[result["method"]])
        for name, value in snapshot.figures.items():
            self._writer.add_scalar(name, value, snapshot.step)
        for parameter, rms, *_ in snapshot.gradients:
            self._writer.add_scalar(f"gradient/{parameter}", rms, snapshot.step)
        if snapshot.units:
            self._writer.add_scalar("dead units", snapshot.dead, snapshot.step)

    def _enter_map(
        self, step: int, photo: Prepared, result: Mapping[str, Any], scene: Scene | None, style: str
    ) -> None:
        """Write the score, the probability and, where the photo has a scene, the picture of one
        map; ``result`` is its row in the store, ``style`` the name of its style.
        """
        tag = f"{photo.entry.name}/{result['method']}/{result['target']}"
        self._writer.add_scalar(f"score/{tag}", result["score"], step)
        if result["probability"] is not None:
            self._writer.add_scalar(f"probability/{tag}", result["probability"], step)
        if scene is None:
            return
        _, placement = shape_and_placement(result)
        attribution = Attribution(
            method=result["method"],
            values=unpacked(result)[None],
            target=result["target"],
            score=torch.tensor([result["score"]]),
            layer=result["layer"],
            size=tuple(photo.x.shape[-2:]),
            placement=placement,
        )
        picture = scene.overlay(attribution, get_style(style))
        self._writer.add_image(f"maps/{tag}", np.asarray(picture), step, dataformats="HWC")


def writer_of(board: Any) -> AbstractContextManager[Any]:
    """A context that gives the TensorBoard writer of a ``board``, a folder or a writer; its end
    closes that of a folder alone."""
    if isinstance(board, (str, os.PathLike)):
        optional("tensorboard", "to write a board", "tensorboard", RunError)
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        return closing(tensorboard.SummaryWriter(os.fspath(board)))
    if callable(getattr(board, "add_scalar", None)) and callable(getattr(board, "add_image", None)):
        return nullcontext(board)
    raise RunError(f"board must be a folder or a SummaryWriter, got {shown(board)}; name a folder")
