"""A digest for each row of a run's file, so that damage is noticed when the row is read."""

from __future__ import annotations

import hashlib
import math
from typing import Any


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
