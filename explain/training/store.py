"""What is kept of a training: the file of a run, with tables of the steps beside its own; a log for TensorBoard."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import torch

from explain._utils.errors import RunError, optional, shown
from explain.attribution.pictures import Scene
from explain.attribution.result import Attribution
from explain.render.styles import get_style
from explain.runs.preparing import Failed, Prepared
from explain.runs.schema import unpack
from explain.runs.store import PhotoRecord, Store
from explain.training.gradients import Flow

TABLES = (resources.files("explain.training") / "tables.sql").read_text("utf-8").split(";\n")


@dataclass(frozen=True)
class Gradients:
    """The gradients before a step: flow and verdict of each parameter, number of units and dead ones of each layer."""

    flows: Mapping[str, tuple[Flow, str]] = field(default_factory=dict)
    units: Mapping[str, tuple[int, Sequence[int]]] = field(default_factory=dict)

    @property
    def dead(self) -> float:
        """The share of units that got no gradient; 0.0 where there are none.

        >>> Gradients(units={"conv": (4, [1])}).dead
        0.25
        """
        total = sum(units for units, _ in self.units.values())
        return sum(len(dead) for _, dead in self.units.values()) / total if total else 0.0


def stored_name(step: int, name: str) -> str:
    """Return what a photo is called in the table of photos, where each step has it once.

    >>> stored_name(500, "cat.jpg")
    'step 00000500/cat.jpg'
    """
    return f"step {step:08}/{name}"


class TrainingStore(Store):
    """The file of a watched training, opened for writing; as `Store`."""

    def _open(self, manifest: Mapping[str, Any], compare: bool) -> None:
        super()._open(manifest, compare)
        with self._transaction():
            for statement in TABLES:
                self._db.execute(statement)

    def last(self) -> int:
        """The last step that is there; 0 if there is none."""
        with self._translated():
            return int(self._db.execute("SELECT ifnull(max(step), 0) FROM steps").fetchone()[0])

    def go_back(self, step: int) -> None:
        """Forget what comes after a step: a training that begins there goes another way."""
        with self._transaction():
            later = "SELECT photo FROM steps WHERE step > ?"
            self._db.execute(f"DELETE FROM photos WHERE id IN ({later})", (step,))
            for table in ("figures", "gradients", "units"):
                self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def enter_step(
        self, step: int, found: Sequence[PhotoRecord | Failed], figures: Mapping[str, float], gradients: Gradients
    ) -> None:
        """Write all that belongs to a step at once; what was there of this step is replaced.

        Args:
            step: how many steps of training there were before.
            found: the photos, by the names that they have at this step, see `stored_name`.
            figures: such as the loss.
            gradients: what was seen of them before.
        """
        with self._transaction():
            self.write(found)
            start = len(stored_name(step, "")) + 1
            chosen = "SELECT id, ?, substr(name, ?) FROM photos WHERE name = ?"
            for each in found:
                if isinstance(each, PhotoRecord):
                    self._db.execute(f"INSERT OR REPLACE INTO steps {chosen}", (step, start, each.photo[0]))
            flows, units = gradients.flows.items(), gradients.units.items()
            tables: dict[str, list[tuple[Any, ...]]] = {
                "figures": [(step, name, value) for name, value in figures.items()],
                "gradients": [(step, name, f.rms, f.largest, f.zero, verdict) for name, (f, verdict) in flows],
                "units": [(step, name, count, len(dead), json.dumps(dead)) for name, (count, dead) in units],
            }
            for table, rows in tables.items():
                self._db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
                for row in rows:
                    self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


SIDE = 384  # pixels of the longer side of a picture


class TensorBoardLog:
    """Writes what is seen of photos at each step; maps are drawn on the ``scenes``, where a photo has one."""

    def __init__(self, writer: Any, photos: Sequence[Prepared], scenes: Sequence[Scene | None]) -> None:
        self._writer, self._photos, self._scenes = writer, photos, scenes

    def enter(
        self, step: int, found: Sequence[PhotoRecord | Failed], figures: Mapping[str, float], gradients: Gradients,
        styles: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Write the pictures and figures of a step; ``styles`` are those of the methods."""
        for photo, answer, scene in zip(self._photos, found, self._scenes, strict=True):
            for result in answer.results if isinstance(answer, PhotoRecord) else ():
                tag = f"{photo.entry.name}/{result.method}/{result.target}"
                self._writer.add_scalar(f"score/{tag}", result.score, step)
                if result.probability is not None:
                    self._writer.add_scalar(f"probability/{tag}", result.probability, step)
                if scene is not None:
                    values = unpack(result.map.content, result.map.shape, result.map.scale)[None]
                    size, score = (int(photo.x.shape[-2]), int(photo.x.shape[-1])), torch.tensor([result.score])
                    found_map = Attribution(result.method, values, result.target, score, result.layer, size)
                    picture = scene.overlay(found_map, get_style(styles[result.method]))
                    self._writer.add_image(f"maps/{tag}", np.asarray(picture), step, dataformats="HWC")
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        for name, (flow, _) in gradients.flows.items():
            self._writer.add_scalar(f"gradient/{name}", flow.rms, step)
        if gradients.units:
            self._writer.add_scalar("dead units", gradients.dead, step)


def writer_of(given: Any) -> tuple[Any, bool]:
    """Return what writes for TensorBoard, and whether it was made here and has to be closed.

    Args:
        given: a folder, or a writer such as ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        RunError: it is neither, or TensorBoard is not installed.

    >>> writer_of(3)
    Traceback (most recent call last):
    explain.RunError: board must be a folder or a SummaryWriter, got 3; name a folder
    """
    if isinstance(given, (str, os.PathLike)):
        optional("tensorboard", "to write a board", "tensorboard", RunError)
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(given)), True
    if callable(getattr(given, "add_scalar", None)) and callable(getattr(given, "add_image", None)):
        return given, False
    raise RunError(f"board must be a folder or a SummaryWriter, got {shown(given)}; name a folder")
