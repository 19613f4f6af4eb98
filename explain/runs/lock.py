"""One run at a time writes a file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from explain.errors import RunError
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
