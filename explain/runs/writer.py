"""Results are written behind, by a thread, so that the network does not wait for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from explain.errors import RunError, raised

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
