"""Progress on the terminal: a bar with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from explain._utils.errors import printable

if TYPE_CHECKING:
    from explain.runs import State

WIDTH = 24
MOMENT = 1.0  # seconds after which the passes of one photo are shown
SURE = 3.0  # seconds after which the time left is shown
PAUSE = 0.1  # seconds between two drawings


def duration(seconds: float) -> str:
    """Return a time in readable units.

    >>> duration(4.24), duration(42), duration(200), duration(9000)
    ('4.2 s', '42 s', '3 min', '2.5 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class StatusLine:
    """One line on standard error, if that is a terminal, which is drawn in place of the last one."""

    clock: Callable[[], float] = time.monotonic
    _drawn: float = field(default=float("-inf"), init=False)
    _shown: bool = field(default=False, init=False)

    def draw(self, share: float | None, text: str) -> None:
        """Draw a bar, if the share that is done is known, and a text; not more often than the eye follows."""
        now = self.clock()
        if sys.stderr is None or not sys.stderr.isatty() or now - self._drawn < PAUSE:
            return
        filled = round(WIDTH * min(1.0, share or 0.0))
        bar = "" if share is None else "█" * filled + "░" * (WIDTH - filled) + " "
        print(f"\r\x1b[2K{bar}{text}", end="", file=sys.stderr, flush=True)
        self._drawn, self._shown = now, True

    def wipe(self) -> None:
        """Remove the line, so that others can be printed."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._shown, self._drawn = False, float("-inf")


class RunProgress(StatusLine):
    """The progress of a run over a data set; ``state`` is the last one."""

    state: State | None = None

    def __call__(self, state: State) -> None:
        self.state = state
        done = state.there + state.done + state.failed
        parts = [f"{done}/{state.total} photos" if state.total else f"{done} photos", f"{state.rate:.3g} a second"]
        if state.left is not None and state.seconds >= SURE:
            parts.append(f"about {duration(state.left)} left")
        if state.failed:
            parts.append(f"{state.failed} failed")
        self.draw(done / state.total if state.total else None, ", ".join(parts))


class ProgressBar(StatusLine):
    """The progress of photos one after the other, and of many passes for each.

    Args:
        total: how many photos there are.
        clock: gives the time in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.total, self.done, self.name = total, 0, ""
        self._begun = self._photo_begun = clock()

    def begin(self, name: str) -> None:
        """Begin with a photo."""
        self.name, self._photo_begun, self._drawn = name, self.clock(), float("-inf")
        if self.total > 1:
            self._draw(0.0, "")

    def runs(self, done: int, total: int) -> None:
        """Show how many of the passes for this photo are done, once these take more than a moment."""
        if self.clock() - self._photo_begun >= MOMENT and done < total:
            self._draw(done / total, f" {done}/{total} runs")

    def end(self) -> None:
        """End with a photo."""
        self.done += 1
        self.wipe()

    def _draw(self, part: float, passes: str) -> None:
        share, elapsed = (self.done + part) / self.total, self.clock() - self._begun
        photos = f"{self.done}/{self.total} " if self.total > 1 else ""
        left = f", about {duration(elapsed / share - elapsed)} left" if share > 0 and elapsed >= SURE else ""
        self.draw(share, f"{photos}{printable(self.name)[:30]}{passes}{left}")
