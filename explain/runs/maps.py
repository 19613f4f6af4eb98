"""A map as it is stored: numbers of two bytes, and what to multiply them with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


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
