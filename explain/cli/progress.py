"""How far the work is: a bar on the terminal, with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from explain._utils.errors import printable

WIDTH = 24
MOMENT = 1.0  # seconds after which many runs for one photo are told
SURE = 3.0  # seconds after which the time left is told
PAUSE = 0.1  # seconds between two drawings


def duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> duration(4.24), duration(42), duration(200), duration(9000)
    ('4.2 s', '42 s', '3 min', '2.5 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class ProgressBar:
    """A bar on standard error, if that is a terminal, for photos one after the other and many runs for each."""

    total: int
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    name: str = ""
    _begun: float = 0.0
    _photo_begun: float = 0.0
    _drawn: float = field(default=float("-inf"))
    _shown: bool = False

    def __post_init__(self) -> None:
        self._begun = self._photo_begun = self.clock()

    def begin(self, name: str) -> None:
        """Begin with a photo."""
        self.name, self._photo_begun = name, self.clock()
        self._drawn = float("-inf")
        if self.total > 1:
            self._draw(0.0, "")

    def runs(self, done: int, total: int) -> None:
        """Tell how many of the runs for this photo are done; it shows once these take more than a moment."""
        if self.clock() - self._photo_begun >= MOMENT and done < total:
            self._draw(done / total, f" {done}/{total} runs")

    def end(self) -> None:
        """The photo is done with."""
        self.done += 1
        self.wipe()

    def wipe(self) -> None:
        """Take the bar away, so that lines can be printed."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._shown = False
        self._drawn = float("-inf")

    def _draw(self, part: float, runs: str) -> None:
        now = self.clock()
        if sys.stderr is None or not sys.stderr.isatty() or now - self._drawn < PAUSE:
            return
        share, elapsed = (self.done + part) / self.total, now - self._begun
        filled = round(WIDTH * share)
        photos = f" {self.done}/{self.total}" if self.total > 1 else ""
        left = f", about {duration(elapsed / share - elapsed)} left" if share > 0 and elapsed >= SURE else ""
        bar = "█" * filled + "░" * (WIDTH - filled)
        line = f"{bar}{photos} {printable(self.name)[:30]}{runs}{left}"
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        self._drawn, self._shown = now, True
