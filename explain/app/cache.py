"""A cache of photos and answers under names that cannot be guessed; the least recently used go first."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from explain._utils.errors import ExplainError

T = TypeVar("T")


class ExpiredError(ExplainError):
    """No item of the cache has this name, or no longer."""


class Cache(Generic[T]):
    """At most ``most`` items of at most ``size`` together, each under a random name.

    Items that were not used for ``age`` seconds expire at the next use of the cache, or by `remove_expired`.

    >>> cache = Cache("photo", 2)
    >>> first, second = cache.add("a"), cache.add("b")
    >>> cache[first], cache[cache.add("c")], second in cache
    ('a', 'c', False)
    """

    def __init__(
        self,
        kind: str,
        most: int,
        size: float = float("inf"),
        size_of: Callable[[T], float] = lambda item: 0,
        age: float = float("inf"),
    ) -> None:
        self._kind, self._most, self._size, self._size_of, self._age = kind, most, size, size_of, age
        self._items: dict[str, tuple[T, float]] = {}  # with the time of the last use, in that order
        self._lock = threading.Lock()

    def add(self, item: T) -> str:
        """Add an item, remove the oldest where there are too many, and return its name."""
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._items[name] = item, time.monotonic()
            while len(self._items) > 1 and (len(self._items) > self._most or self._total() > self._size):
                del self._items[next(iter(self._items))]
            self._remove_expired()
        return name

    def __getitem__(self, name: str) -> T:
        with self._lock:
            self._remove_expired()
            if name not in self._items:
                raise ExpiredError(f"{self._kind} is unknown or has expired; send it again")
            item, _ = self._items.pop(name)
            self._items[name] = item, time.monotonic()
            return item

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)

    def pop(self, name: str) -> T | None:
        """Remove an item and return it; None where there is none."""
        with self._lock:
            return self._items.pop(name, (None,))[0]

    def remove_expired(self) -> None:
        """Remove the items that were not used for too long."""
        with self._lock:
            self._remove_expired()

    def _remove_expired(self) -> None:
        oldest = time.monotonic() - self._age
        for name in [name for name, (_, used) in self._items.items() if used < oldest]:
            del self._items[name]

    def _total(self) -> float:
        return sum(self._size_of(item) for item, _ in self._items.values())
