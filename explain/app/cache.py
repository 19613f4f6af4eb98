"""Photos and explanations, kept in memory under names that cannot be guessed; the oldest are forgotten."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from explain._utils.errors import ExplainError

T = TypeVar("T")


class ExpiredError(ExplainError):
    """Something that was kept for a while is no longer there, or never was."""


class Cache(Generic[T]):
    """At most ``most`` things, of at most ``size`` together, each under a random name; what was used last stays.

    What was not used for ``age`` seconds is forgotten, when this is used the next time or `remove_expired` is called.

    >>> kept = Cache("photo", 2)
    >>> first, second = kept.add("a"), kept.add("b")
    >>> kept[first], kept[kept.add("c")], second in kept
    ('a', 'c', False)
    """

    def __init__(
        self,
        what: str,
        most: int,
        size: float = float("inf"),
        size_of: Callable[[T], float] = lambda thing: 0,
        age: float = float("inf"),
    ) -> None:
        self._what, self._most, self._size, self._size_of, self._age = what, most, size, size_of, age
        self._things: OrderedDict[str, T] = OrderedDict()  # what was used last is at the end
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, thing: T) -> str:
        """Keep a thing, forget the oldest where there are too many, and return its name."""
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._things[name] = thing
            self._used[name] = time.monotonic()
            while len(self._things) > 1 and (len(self._things) > self._most or self._total() > self._size):
                self._drop(next(iter(self._things)))
            self._remove_expired()
        return name

    def __getitem__(self, name: str) -> T:
        with self._lock:
            self._remove_expired()
            if name not in self._things:
                raise ExpiredError(f"{self._what} is unknown or has expired; send it again")
            self._things.move_to_end(name)
            self._used[name] = time.monotonic()
            return self._things[name]

    def get(self, name: str) -> T | None:
        """A thing, or None where it is unknown or has expired."""
        try:
            return self[name]
        except ExpiredError:
            return None

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __len__(self) -> int:
        return len(self._things)

    def forget(self, name: str) -> None:
        """Forget a thing, if it is there."""
        with self._lock:
            if name in self._things:
                self._drop(name)

    def remove_expired(self) -> None:
        """Forget what was not used for too long."""
        with self._lock:
            self._remove_expired()

    def _remove_expired(self) -> None:
        oldest = time.monotonic() - self._age
        for name in [name for name, used in self._used.items() if used < oldest]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._things[name], self._used[name]

    def _total(self) -> float:
        return sum(map(self._size_of, self._things.values()))


class CleanupThread:
    """A thread that calls something now and then, until it is closed."""

    def __init__(self, work: Callable[[], None], every: float) -> None:
        self._work, self._every = work, every
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="explain-cleanup", daemon=True).start()

    def close(self) -> None:
        """Call it no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            self._work()
