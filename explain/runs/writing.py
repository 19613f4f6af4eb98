"""One run at a time writes a file, and results are written in a thread of their own."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from explain._utils.errors import RunError, raised
from explain.runs.sources import text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_ours: set[str] = set()
_guard = threading.Lock()


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Keep other runs away from a file while the block lasts, those of this process and those of others.

    The lock ends with the process that holds it, however it ends. A file beside the run is locked, and not the run
    itself: SQLite has locks of its own on that.

    Raises:
        RunError: another run writes the file.
    """
    name = os.path.realpath(file)
    with _guard:
        if name in _ours:
            raise _taken(file)
        _ours.add(name)
    try:
        beside = Path(f"{name}-lock")
        descriptor = _locked(beside, file)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()  # while it is still locked: nobody else can have locked this very file
            os.close(descriptor)
    finally:
        with _guard:
            _ours.discard(name)


def _locked(beside: Path, file: Path) -> int:
    """Lock a file that has this name when it is locked: another run may have taken the name away meanwhile."""
    while True:
        try:
            descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(f"output {text(file)!r} cannot be written: {error.strerror}; choose another file") from None
        try:
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise _taken(file) from None
        except OSError:  # a network drive without locks
            return descriptor
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(beside), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _taken(file: Path) -> RunError:
    return RunError(
        f"output {text(file)!r} is being written by another run; wait until it ends, or choose another file"
    )


WAITING = 4  # batches that may wait: their maps have to fit into memory


class Writer:
    """Does what it is given in that order, in a thread of its own.

    What goes wrong is raised by the next `put`, or by `close`; nothing more is done after it.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._error: RunError | None = None
        self._thread = threading.Thread(target=self._serve, name="explain-writing", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Have something done; wait if too much is waiting already.

        Raises:
            RunError: something before could not be written.
        """
        self._check()
        self._queue.put(work)

    def close(self) -> None:
        """Wait until all is done.

        Raises:
            RunError: something could not be written.
        """
        if self._thread.is_alive():
            self._queue.put(None)
        self._thread.join()
        self._check()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            if self._error is None:  # afterwards nothing is written, but whoever puts something does not wait forever
                try:
                    work()
                except RunError as error:
                    self._error = error
                except Exception as error:
                    self._error = RunError(f"results must be written, but that {raised(error)}; report this")
                    self._error.__cause__ = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
