"""What is kept of a training: the file of a run, with tables of the steps beside its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from explain.runs.preparing import Failed
from explain.runs.store import PhotoRecord, Store
from explain.training.flow import Flow

TABLES = """
CREATE TABLE IF NOT EXISTS steps (
    photo INTEGER PRIMARY KEY REFERENCES photos (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,            -- how many steps of training there were before
    name TEXT NOT NULL,               -- of the photo; in photos, the step stands before it
    UNIQUE (name, step)
);

CREATE TABLE IF NOT EXISTS figures (
    step INTEGER NOT NULL,
    name TEXT NOT NULL,               -- such as loss
    value REAL,                       -- NULL where it is not finite
    PRIMARY KEY (step, name)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS gradients (
    step INTEGER NOT NULL,
    parameter TEXT NOT NULL,
    rms REAL,                         -- mean of the root mean squares of the steps that were watched
    largest REAL,                     -- magnitude
    zero REAL NOT NULL,               -- mean share of elements that were zero
    verdict TEXT NOT NULL,            -- ok, vanishing, exploding, dead or not finite
    PRIMARY KEY (step, parameter)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS units (
    step INTEGER NOT NULL,
    layer TEXT NOT NULL,
    units INTEGER NOT NULL,
    dead INTEGER NOT NULL,            -- how many got no gradient in the steps that were watched
    numbers TEXT NOT NULL,            -- JSON: which
    PRIMARY KEY (step, layer)
) WITHOUT ROWID;
"""


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

    def __init__(self, file: Path, manifest: Mapping[str, Any]) -> None:
        super().__init__(file, manifest)
        try:
            with self._transaction():
                for statement in TABLES.split(";\n"):
                    self._db.execute(statement)
        except BaseException:  # an interrupt too must not leave the file open
            self.close()
            raise

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
                    row = (step, start, each.photo[0])
                    self._db.execute(f"INSERT OR REPLACE INTO steps {chosen}", row)
            for table in ("figures", "gradients", "units"):
                self._db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
            rows: list[tuple[Any, ...]] = [(step, name, value) for name, value in figures.items()]
            self._db.executemany("INSERT INTO figures VALUES (?, ?, ?)", rows)
            rows = [(step, name, flow.rms, flow.largest, flow.zero, verdict)
                    for name, (flow, verdict) in gradients.flows.items()]  # fmt: skip
            self._db.executemany("INSERT INTO gradients VALUES (?, ?, ?, ?, ?, ?)", rows)
            rows = [(step, name, units, len(dead), json.dumps(dead)) for name, (units, dead) in gradients.units.items()]
            self._db.executemany("INSERT INTO units VALUES (?, ?, ?, ?, ?)", rows)
