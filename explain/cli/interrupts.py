"""Ctrl-C on the command line: it waits while a library is being imported."""

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

POLL = 0.05
"""Seconds until an interrupt that came during an import comes again."""
LONGEST = 20.0
"""Seconds for which an interrupt waits at most: a model's own module may do anything."""


@contextmanager
def after_imports() -> Iterator[None]:
    """Within this block, an interrupt waits until the running import has ended: libraries in C++
    abort where a `KeyboardInterrupt` is raised while they load. Other handlers stay.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    first = 0.0
    timers: list[threading.Timer] = []

    def handle(number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or send the signal again a little later."""
        nonlocal first
        first = first or time.monotonic()
        if not _is_importing(frame) or time.monotonic() - first > LONGEST:
            first = 0.0
            signal.default_int_handler(number, frame)
        timers[:] = [threading.Timer(POLL, _thread.interrupt_main, [number])]
        timers[0].daemon = True
        timers[0].start()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an interrupted frame runs inside an import that the command line has begun."""
    while frame is not None and frame.f_globals.get("__name__") != "explain.cli.program":
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
