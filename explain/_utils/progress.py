"""How long something takes, and a line that says how far it is."""

import sys
import time
from collections.abc import Callable

WIDTH = 24  # letters of a bar
PAUSE = 0.1  # seconds between two drawings


def duration(seconds: float) -> str:
    """Return a time in seconds as text in the unit that people would choose: ``4.2 s``, ``3
    min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class StatusLine:
    """One line on standard error that is drawn in place of the last one."""

    _drawn = float("-inf")  # the time of the last drawing, by the clock
    _shown = False  # whether it is there to be removed
    hidden = False  # whether it is not drawn at all
    anywhere = False  # whether it is drawn outside of terminals too

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock

    def draw(self, share: float | None, text: str) -> None:
        """Draw the line again: a bar, if the ``share`` from 0 to 1 is known, and a text; not within
        `PAUSE` seconds, outside of terminals (unless ``anywhere``) or where hidden.
        """
        now = self.clock()
        seen = sys.stderr is not None and (self.anywhere or sys.stderr.isatty())
        if self.hidden or not seen or now - self._drawn < PAUSE:
            return
        bar = ""
        if share is not None:
            filled = round(WIDTH * min(1.0, share))
            bar = "█" * filled + "░" * (WIDTH - filled) + " "
        # back to the left end of the line, and erase it
        print(f"\r\x1b[2K{bar}{text}", end="", file=sys.stderr, flush=True)
        self._drawn = now
        self._shown = True

    def wipe(self) -> None:
        """Remove the status line from the terminal, so that other lines can be printed."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._shown = False
        self._drawn = float("-inf")


class ProgressLine(StatusLine):
    """What ``progress=True`` draws, in a terminal and in a notebook; called with what is done and
    the total."""

    anywhere = True
    _first = (0, 0.0)  # what was done at the first call for a piece of work, and the time
    _last = 0  # what was done at the last call

    def __call__(self, done: int, total: int | None) -> None:
        """Draw how much is done, with an estimate of the time left. A ``done`` that does not grow
        begins a new piece of work; the last call ends the line.
        """
        # something else has begun, or nothing was done so far
        if done <= self._last or not self._last:
            self._first = (done, self.clock())
            self._drawn = float("-inf")  # drawn at once
        first_done, first_time = self._first
        self._last = done
        if done == total:  # the end is drawn in any case
            self._drawn = float("-inf")
        elapsed = self.clock() - first_time
        rate = (done - first_done) / (elapsed or 1)  # 0 at the first call, when no time has passed
        time_left = ""
        if total and rate and done < total:
            time_left = f", about {duration((total - done) / rate)} left"
        self.draw(done / total if total else None, f"{done}/{total or '?'}{time_left}")
        if done == total and self._shown:
            print(file=sys.stderr)


show_progress = ProgressLine()
