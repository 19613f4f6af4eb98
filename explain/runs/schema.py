"""The tables of a run, a map as it is stored, and the digests of rows. See docs/runs.md."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FORMAT = 2
"""The version of the tables. Those of version 1 have no digests: they are read without, and not continued."""
APPLICATION = 0x4578706C  # by which a file is known as a run: "Expl"

TABLES = """
CREATE TABLE manifest (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,              -- JSON
    digest INTEGER NOT NULL           -- of the other cells, as in all tables: see explain.runs.schema
) WITHOUT ROWID;

CREATE TABLE methods (
    name TEXT PRIMARY KEY,
    class TEXT,                       -- in explain.methods; NULL for one of the caller's own
    options TEXT NOT NULL,            -- JSON, as in the record of an explanation
    style TEXT NOT NULL,              -- how its maps are drawn
    paper TEXT,
    digest INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE photos (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,        -- from the folder on, as in the list, or the number of the item
    path TEXT,                        -- NULL where there is no file
    stamp TEXT,                       -- size and times of the file: while they are the same, it need not be read again
    sha256 TEXT NOT NULL,             -- of the upright RGB pixels, or of the tensor
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    label TEXT,                       -- the class that the source gives
    label_class INTEGER,              -- the class of the model; NULL where the label is none of the model's
    label_probability REAL,
    prediction TEXT,                  -- of the model; NULL where it gives no class scores
    prediction_class INTEGER,
    probability REAL,                 -- of the prediction
    "left" REAL NOT NULL, top REAL NOT NULL, "right" REAL NOT NULL, bottom REAL NOT NULL,  -- seen by the model
    input_height INTEGER NOT NULL,
    input_width INTEGER NOT NULL,
    boxes TEXT,                       -- JSON: [[x0, y0, x1, y1], ...] in pixels of the photo, ends exclusive
    digest INTEGER NOT NULL           -- of all cells but the id and the stamp
);

CREATE TABLE results (
    id INTEGER PRIMARY KEY,
    photo INTEGER NOT NULL REFERENCES photos (id) ON DELETE CASCADE,
    method TEXT NOT NULL REFERENCES methods (name),
    target TEXT NOT NULL,             -- the label, or the name of a target that is no class
    class INTEGER,                    -- NULL for a target that is no class
    score REAL NOT NULL,              -- the explained output
    probability REAL,                 -- of the class
    layer TEXT,                       -- JSON list where there are several
    delta REAL,                       -- the convergence delta of the method
    runs INTEGER,                     -- of methods that estimate: how many perturbed inputs
    error REAL,                       -- of methods that estimate: the largest error over the largest value
    content INTEGER NOT NULL,         -- digest of the map
    digest INTEGER NOT NULL,          -- of all other cells, with the digest of the photo and the metrics in their order
    shape TEXT NOT NULL,              -- JSON: of the map
    scale REAL NOT NULL,              -- the numbers of the map are multiplied by it
    map BLOB NOT NULL                 -- float16, little-endian, row after row
);
CREATE UNIQUE INDEX once ON results (photo, method, ifnull(class, target));

CREATE TABLE metrics (
    result INTEGER NOT NULL REFERENCES results (id) ON DELETE CASCADE,
    metric TEXT NOT NULL,
    value REAL,                       -- NULL where it is not defined
    PRIMARY KEY (result, metric)
) WITHOUT ROWID;

CREATE TABLE tally (                  -- how many rows there should be, and all their digests combined by exclusive or
    name TEXT PRIMARY KEY,
    count INTEGER NOT NULL,
    digests INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE failures (
    name TEXT PRIMARY KEY,
    path TEXT,
    reason TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE notes (
    note TEXT PRIMARY KEY             -- warnings, such as why a map is zero
) WITHOUT ROWID;

CREATE VIEW explained AS  -- all but the maps
    SELECT r.id, p.name, p.path, p.sha256, p.label, p.label_class, p.label_probability, p.prediction,
           p.prediction_class, p.probability AS prediction_probability, p.prediction_class = p.label_class AS correct,
           r.method, r.target, r.class, r.score, r.probability, r.layer, r.delta, r.runs, r.error, r.shape, r.scale
    FROM results r JOIN photos p ON p.id = r.photo;

CREATE VIEW classes AS  -- accuracy for each class
    SELECT label, label_class, count(*) AS photos, sum(prediction_class = label_class) AS correct,
           avg(prediction_class = label_class) AS accuracy, avg(label_probability) AS label_probability
    FROM photos WHERE label_class IS NOT NULL GROUP BY label_class;

CREATE VIEW confusions AS  -- wrong predictions, the most frequent first
    SELECT label, prediction, count(*) AS photos
    FROM photos WHERE prediction_class <> label_class GROUP BY label_class, prediction_class ORDER BY photos DESC;

CREATE VIEW duplicates AS  -- the same pixels under several names
    SELECT sha256, count(*) AS photos, json_group_array(name) AS names
    FROM photos GROUP BY sha256, width, height HAVING count(*) > 1;

CREATE VIEW judged AS  -- the mean of each metric for each method
    SELECT r.method, m.metric, avg(m.value) AS mean, count(m.value) AS photos
    FROM metrics m JOIN results r ON r.id = m.result GROUP BY r.method, m.metric;
"""

ROW = """
SELECT r.id, r.method, r.target, r.class AS target_class, r.score, r.probability, r.layer, r.delta, r.runs, r.error,
       r.shape, r.scale, r.map, {content} AS content, m.style, m.options, p.name, p.path, p.sha256, p.width, p.height,
       p.label, p.label_class, p.label_probability, p.prediction, p.prediction_class,
       p.probability AS prediction_probability,
       p."left", p.top, p."right", p.bottom, p.input_height, p.input_width, p.boxes
FROM results r JOIN photos p ON p.id = r.photo JOIN methods m ON m.name = r.method WHERE r.id = ?
"""
ORDERS = {
    "source": "p.id",
    "worst": "p.label_class IS NULL, p.label_probability, p.probability, p.id",
    "best": "p.label_class IS NULL, p.label_probability DESC, p.probability DESC, p.id",
}
"""Orders of photos: of the source; by the probability of the label where it is known, else of the prediction, the
lowest or the highest first."""

PHOTO = (
    "name", "path", "stamp", "sha256", "width", "height", "label", "label_class", "label_probability", "prediction",
    "prediction_class", "probability", '"left"', "top", '"right"', "bottom", "input_height", "input_width", "boxes",
)  # fmt: skip
RESULT = (
    "method", "target", "class", "score", "probability", "layer", "delta", "runs", "error", "shape", "scale", "content",
)  # fmt: skip
METHOD = ("name", "class", "options", "style", "paper")
"""Columns in the order in which their digests are made."""

COUNTED = ("photos", "results")
TRIGGERS = [
    statement
    for table in COUNTED
    for statement in (
        f"INSERT INTO tally VALUES ('{table}', 0, 0)",
        *(
            f"CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN UPDATE tally SET count = count {sign} 1, "
            f"digests = (digests | {row}.digest) & ~(digests & {row}.digest) WHERE name = '{table}'; END"
            for event, sign, row in (("INSERT", "+", "NEW"), ("DELETE", "-", "OLD"))
        ),
    )
]
"""What keeps the tally, also where rows go with their photo."""


@dataclass(frozen=True)
class Packed:
    """A map of any shape as float16, little-endian, row after row; its values are these numbers times ``scale``.

    The scale is the largest magnitude of the map, so that this value is kept to float32, and no other is off by more
    than ``2**-11`` of itself; those below ``2**-14`` of the largest, by no more than ``2**-25`` of the largest.
    """

    content: bytes
    shape: tuple[int, ...]
    scale: float


def pack(values: np.ndarray[Any, Any]) -> Packed:
    """Store the values of one image.

    >>> pack(np.array([[0.0, 3.0]], np.float32))
    Packed(content=b'\\x00\\x00\\x00<', shape=(1, 2), scale=3.0)
    """
    plain = np.asarray(values, np.float32)
    scale = float(np.abs(plain).max(initial=0.0))
    parts = plain / np.float32(scale) if scale > 0 else plain
    return Packed(parts.astype("<f2").tobytes(), tuple(plain.shape), scale)


def unpack(content: bytes, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Read what `pack` has stored: float32.

    >>> unpack(b"\\x00\\x00\\x00<", (1, 2), 3.0)
    tensor([[0., 3.]])
    """
    parts = np.frombuffer(content, "<f2").astype(np.float32).reshape(shape)
    return torch.from_numpy(parts * np.float32(scale))


def digest(*cells: Any) -> int:
    """Return a digest of some cells: the same before they are written and after they are read.

    SQLite keeps no NaN, no negative zero, and a whole number in a column of floats as a float.

    >>> digest("a", 1, -0.0, float("nan")) == digest("a", 1.0, 0.0, None), digest("a", 1) == digest("a1")
    (True, False)
    """
    return content_digest(repr([_cell(cell) for cell in cells]).encode("utf-8", "surrogatepass"))


def content_digest(content: bytes) -> int:
    """Return a digest of bytes as an integer of SQLite.

    >>> content_digest(b"a map")
    2074911400714055296
    """
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return content_digest(value)
    if isinstance(value, int):
        return int(value) if abs(value) > 2**53 else float(value)  # digests and the like, which no float holds
    return None if math.isnan(value) else float(value) + 0.0
