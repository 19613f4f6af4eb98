"""The scheduler of a model: one task at a time, quick ones between the parts of a slow one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from explain._utils.errors import ExplainError

PATIENCE = 2.0
"""Seconds that a slow task waits for quick ones, however many come."""


class BusyError(ExplainError):
    """Too many requests wait already."""


class Scheduler:
    """Lets one thread at a time use a model.

    >>> scheduler = Scheduler()
    >>> with scheduler.quick():
    ...     scheduler.busy
    True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._quick_waiting = 0
        self.busy = False

    @contextmanager
    def quick(self) -> Iterator[None]:
        """A task that begins before the next part of a slow one, and does not pause."""
        with self._changed:
            self._quick_waiting += 1
            self._changed.wait_for(lambda: not self.busy)
            self._quick_waiting -= 1
            self.busy = True
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """A task that calls `pause` between its parts."""
        self._enter_slow()
        try:
            yield
        finally:
            self._leave()

    def pause(self) -> None:
        """Let quick tasks run first; called from within a slow one."""
        with self._changed:
            if not self._quick_waiting:
                return
        self._leave()
        self._enter_slow()

    def _enter_slow(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.busy and not self._quick_waiting, PATIENCE)
            self._changed.wait_for(lambda: not self.busy)
            self.busy = True

    def _leave(self) -> None:
        with self._changed:
            self.busy = False
            self._changed.notify_all()


class WorkerThread:
    """One thread with a queue of at most ``most`` waiting tasks.

    >>> worker = WorkerThread("quick", 1)
    >>> worker.submit(lambda: None)
    >>> worker.close()
    """

    def __init__(self, name: str, most: int) -> None:
        self._most = most
        self.waiting = 0
        """How many tasks wait or run."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"explain-{name}")

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task when all before it are done.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            if self.waiting > self._most:
                raise BusyError(f"{self.waiting} requests wait already; try again in a moment")
            self.waiting += 1
        self._thread.submit(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        finally:
            with self._lock:
                self.waiting -= 1

    def close(self) -> None:
        """Begin no further task."""
        self._thread.shutdown(wait=False, cancel_futures=True)
