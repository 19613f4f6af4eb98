"""Photos in batches: those whose inputs have one shape go together, and one cannot spoil the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from explain.errors import ImageError
from explain.interrupts import came_by_signal
from explain.runs.preparing import Failed, Prepared, Ready, failed

PIXELS = 8 * 224 * 224  # of inputs that run together on a CPU: more are no faster, and their activations have to fit
DEVICE_PIXELS = 64 * 224 * 224  # the same on an accelerator
MOST = 128
HELD = 2  # batches that may be waiting for photos of their shape

Result = TypeVar("Result")


def at_once(x: torch.Tensor, device: torch.device) -> int:
    """Return how many inputs like ``x`` ``(C, H, W)`` are best run together.

    >>> at_once(torch.empty(3, 224, 224), torch.device("cpu")), at_once(torch.empty(3, 64, 64), torch.device("cpu"))
    (8, 98)
    """
    pixels = PIXELS if device.type == "cpu" else DEVICE_PIXELS
    return max(1, min(MOST, pixels // max(1, int(x.shape[-1]) * int(x.shape[-2]))))


def in_batches(ready: Iterable[Ready], size: Callable[[Prepared], int]) -> Iterator[list[Prepared] | Failed]:
    """Group photos by the shape of their inputs, as they come; those that failed are passed on at once.

    Args:
        ready: the photos.
        size: how many photos like this one make a batch.

    >>> list(in_batches([Failed("a.jpg", "is empty")], lambda photo: 8))
    [Failed(name='a.jpg', reason='is empty', path=None)]
    """
    waiting: dict[object, list[Prepared]] = {}
    for photo in ready:
        if isinstance(photo, Failed):
            yield photo
            continue
        key = (photo.x.shape, photo.x.dtype)
        group = waiting.setdefault(key, [])
        group.append(photo)
        full = size(photo)
        if len(group) >= full:
            yield waiting.pop(key)
        elif sum(map(len, waiting.values())) >= HELD * full:
            yield waiting.pop(next(iter(waiting)))
    yield from waiting.values()


def each_explained(photos: list[Prepared], work: Callable[[list[Prepared]], Sequence[Result]]) -> list[Result | Failed]:
    """Do the work on a batch; if it fails, on each photo alone."""
    try:
        return list(work(photos))
    except Exception as error:
        if came_by_signal(error):
            raise
        if len(photos) == 1:
            return [_blamed(photos[0], error)]
    return [result for photo in photos for result in each_explained([photo], work)]


def _blamed(photo: Prepared, error: Exception) -> Failed:
    found = failed(photo.entry, error)
    own = isinstance(error, (ImageError, MemoryError))
    return found if own else replace(found, general=error)
