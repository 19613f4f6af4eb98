"""Ctrl-C and SIGTERM on the command line: they wait while a library is being imported."""

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143
POLL = 0.05
"""Seconds until an interrupt that came during an import comes again."""
LONGEST = 20.0
"""Seconds for which an interrupt waits at most: a model's own module may do anything."""


class TerminatedError(KeyboardInterrupt):
    """An interrupt by SIGTERM."""


@contextmanager
def after_imports() -> Iterator[None]:
    """Within this block, an interrupt waits until the running import has ended: libraries in C++
    abort where a `KeyboardInterrupt` is raised while they load. SIGTERM is one too, as what a run
    has locked is to be released. Other handlers stay.
    """
    is_main = threading.current_thread() is threading.main_thread()
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = {number: old for number, old in defaults.items() if signal.getsignal(number) is old}
    if not is_main or signal.SIGINT not in ours:
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
            raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
        timers[:] = [threading.Timer(POLL, _thread.interrupt_main, [number])]
        timers[0].daemon = True
        timers[0].start()

    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, old in ours.items():
            signal.signal(number, old)


def code_of(interrupt: KeyboardInterrupt) -> int:
    """The exit code of an interrupted command, by the signal."""
    return TERMINATED if isinstance(interrupt, TerminatedError) else INTERRUPTED


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an interrupted frame runs inside an import that the command line has begun."""
    while frame is not None and frame.f_globals.get("__name__") != "explain.cli.program":
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
