"""Work that somebody waits for: it tells how far it is, lets others go first, and ends when it is to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from explain.app.turns import Turns

OFTEN = 0.2
"""Seconds between two pictures of a map that sharpens."""

Tell = Callable[[Mapping[str, Any]], None]
"""Takes what there is to say: one step of an answer, in plain values."""


class DroppedError(Exception):
    """Nobody waits for the answer any more."""


class Work:
    """One question on its way, and what it may be told meanwhile.

    ``stop`` ends what takes long with what it has by then, ``drop`` ends all without an answer.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self._stopped, self._dropped = threading.Event(), threading.Event()

    def stop(self) -> None:
        """End with what there is."""
        self._stopped.set()

    def drop(self) -> None:
        """End without an answer."""
        self._dropped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def still_wanted(self) -> None:
        """Raise `DroppedError` where nobody waits any more."""
        if self._dropped.is_set():
            raise DroppedError


class Watch:
    """Told of progress by the engine: passes it on now and then, and pauses or ends the work."""

    def __init__(self, work: Work, turns: Turns, step: Callable[[int, int, Any], dict[str, Any]] | None = None) -> None:
        self._work, self._turns, self._step = work, turns, step or _bare
        self._told = float("-inf")

    def __call__(self, done: int, total: int, maps: Mapping[str, torch.Tensor] | None = None) -> None:
        self._work.still_wanted()
        if self._work.stopped:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - self._told >= OFTEN or done >= total:
            self._told = now
            self._work.tell(self._step(done, total, maps or {}))
        self._turns.pause()


def _bare(done: int, total: int, maps: Any) -> dict[str, Any]:
    return {"progress": [done, total]}
