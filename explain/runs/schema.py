"""The tables of a run, a map as it is stored, and the digests of rows. See docs/runs.md."""

import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

from explain._utils.errors import RunError
from explain.runs.sources import text

FORMAT = 2
"""The version of the tables."""
APPLICATION = 0x4578706C  # by which a file is known as a run: "Expl"

TABLES = (resources.files("explain.runs") / "tables.sql").read_text("utf-8").split(";\n")
"""The statements that make them."""

ORDERS = {
    "source": "p.id",
    "worst": "p.label_class IS NULL, p.label_probability, p.probability, p.id",
    "best": "p.label_class IS NULL, p.label_probability DESC, p.probability DESC, p.id",
}
"""Orders of photos: of the source; by the probability of the label where it is known, else of the prediction, the
lowest or the highest first."""

PHOTO = (
    "name", "path", "stamp", "sha256", "width", "height", "label", "label_class", "label_probability", "prediction",
    "prediction_class", "probability", "left", "top", "right", "bottom", "input_height", "input_width", "boxes",
)  # fmt: skip
RESULT = (
    "method", "target", "class", "score", "probability", "layer", "delta", "runs", "error", "shape", "scale", "content",
)  # fmt: skip
METHOD = ("name", "class", "options", "style", "paper")
"""Columns in the order in which their digests are made."""


def check_format(version: int, file: str | os.PathLike[str]) -> None:
    """Refuse a run whose tables are those of another version.

    Raises:
        RunError: they are.
    """
    if version != FORMAT:
        remedy = "update this package" if version > FORMAT else "explain its photos again into another file"
        raise RunError(f"run {text(file)!r} must have format {FORMAT}, got {version}; {remedy}")


def quoted(columns: Iterable[str]) -> str:
    """Return columns as SQL has them; some of their names are words of SQL.

    >>> quoted(["left", "top"])
    '"left", "top"'
    """
    return ", ".join(f'"{name}"' for name in columns)


COUNTED = ("photos", "results")
"""Tables whose rows are counted in the tally."""


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
    return torch.from_numpy(np.frombuffer(content, "<f2").astype(np.float32).reshape(shape) * np.float32(scale))


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
