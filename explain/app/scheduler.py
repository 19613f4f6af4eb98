"""The scheduler of a model: one task at a time, quick ones between the parts of a slow one, and progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from explain._utils.errors import ExplainError

PATIENCE = 2.0
"""Seconds that a slow piece of work waits for quick ones, however many come."""


class BusyError(ExplainError):
    """Too many questions wait already."""


class Scheduler:
    """Lets one thread at a time work on a model.

    >>> scheduler = Scheduler()
    >>> with scheduler.quick():
    ...     scheduler.busy
    True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent = 0
        self.busy = False

    @contextmanager
    def quick(self) -> Iterator[None]:
        """Work that begins before the next piece of slow work, and does not pause."""
        with self._changed:
            self._urgent += 1
            self._changed.wait_for(lambda: not self.busy)
            self._urgent -= 1
            self.busy = True
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Work that calls `pause` between its pieces."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def pause(self) -> None:
        """Let quick work go first; called from within slow work."""
        with self._changed:
            if not self._urgent:
                return
        self._leave()
        self._enter()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.busy and not self._urgent, PATIENCE)
            self._changed.wait_for(lambda: not self.busy)
            self.busy = True

    def _leave(self) -> None:
        with self._changed:
            self.busy = False
            self._changed.notify_all()


class WorkerThread:
    """One thread that does one piece of work after the other; at most ``most`` wait.

    >>> worker = WorkerThread("quick", 1)
    >>> worker.do(lambda: None)
    >>> worker.close()
    """

    def __init__(self, name: str, most: int) -> None:
        self._most, self._waiting = most, 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"explain-{name}")

    @property
    def waiting(self) -> int:
        """How many wait, or are at work."""
        return self._waiting

    def do(self, work: Callable[[], None]) -> None:
        """Do this when all before it is done.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            if self._waiting > self._most:
                raise BusyError(f"{self._waiting} questions wait already; ask again in a moment")
            self._waiting += 1
        self._thread.submit(self._done, work)

    def _done(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._waiting -= 1

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


OFTEN = 0.2
"""Seconds between two pictures of a map that sharpens."""

SendStep = Callable[[Mapping[str, Any]], None]
"""Sends a step of an answer to the page, in plain values."""


class AbandonedError(Exception):
    """Nobody waits for the answer any more."""


class Job:
    """One request that is being answered, which can be stopped.

    ``stop`` ends what takes long with what it has by then, ``drop`` ends all without an answer.
    """

    def __init__(self, send: SendStep) -> None:
        self.send = send
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
        """Raise `AbandonedError` where nobody waits any more."""
        if self._dropped.is_set():
            raise AbandonedError


class JobProgress:
    """A progress callback: sends progress now and then, and pauses or ends the work."""

    def __init__(
        self, work: Job, scheduler: Scheduler, step: Callable[[int, int, Any], dict[str, Any]] | None = None
    ) -> None:
        self._work, self._scheduler, self._step = work, scheduler, step or _bare
        self._sent = float("-inf")

    def __call__(self, done: int, total: int, maps: Mapping[str, torch.Tensor] | None = None) -> None:
        self._work.still_wanted()
        if self._work.stopped:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - self._sent >= OFTEN or done >= total:
            self._sent = now
            self._work.send(self._step(done, total, maps or {}))
        self._scheduler.pause()


def _bare(done: int, total: int, maps: Any) -> dict[str, Any]:
    return {"progress": [done, total]}
