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
    replaced = {number: old for number, old in defaults.items() if signal.getsignal(number) is old}
    # Python lets only the main thread set handlers; and a caller with a handler of Ctrl-C decides
    # about interrupts itself
    if not is_main or signal.SIGINT not in replaced:
        yield
        return
    waiting_since: float | None = None
    timer: threading.Timer | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or send the signal again a little later."""
        nonlocal waiting_since, timer
        if waiting_since is None:
            waiting_since = time.monotonic()
        if not _is_importing(frame) or time.monotonic() - waiting_since > LONGEST:
            waiting_since = None  # another interrupt has its own time to wait
            raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
        timer = threading.Timer(POLL, _thread.interrupt_main, [number])
        timer.daemon = True
        timer.start()

    for number in replaced:
        signal.signal(number, handle)
    try:
        yield
    finally:
        if timer is not None:  # the block has ended: nothing is left to be interrupted
            timer.cancel()
        for number, old in replaced.items():
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
