"""Whose turn it is on a model: one at a time, with quick questions between the pieces of a slow one.

What a call sets on a model (hooks, modes, random states) it sets back at its end. Calls may therefore stand inside one
another, but must not overlap in any other way: quick work never pauses, and one slow work at a time does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from explain.errors import ExplainError

PATIENCE = 2.0
"""Seconds that a slow piece of work waits for quick ones, however many come."""


class BusyError(ExplainError):
    """Too many questions wait already."""


class Turns:
    """Lets one thread at a time work on a model.

    >>> turns = Turns()
    >>> with turns.quick():
    ...     turns.busy
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


class Lane:
    """One thread that does one piece of work after the other; at most ``most`` wait.

    >>> lane = Lane("quick", 1)
    >>> lane.do(lambda: None)
    >>> lane.close()
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
