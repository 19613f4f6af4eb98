"""Worker processes that read and preprocess photos ahead."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from explain._utils.errors import either, quiet
from explain._utils.signals import signal_safe
from explain.data.opening import hushed, troubles
from explain.runs.preparing import Prepared, Preparer, Ready
from explain.store.sources import Entry, Failed

AHEAD = 4  # photos that wait for each worker, read or not
TICK = 0.5  # seconds between two checks whether the parent is alive
BEGIN = 60.0  # seconds that a worker may take until it is there
MOST = 8  # workers, unless the caller says how many


class CannotBeginError(Exception):
    """Worker processes cannot be started here."""


def default_workers() -> int:
    """Return half of the processors that this process may use, since the network needs the others."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # on Linux
    return max(1, min(MOST, count // 2))


class _Worker(NamedTuple):
    """A worker process, and our end of its pipe."""

    process: Any
    pipe: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join(TICK)  # one that waits for a disk that does not answer cannot even be killed
        self.pipe.close()


class Workers:
    """Prepares the photos of a run in processes of its own.

    A thread for each process gives it one photo at a time. Photos come out in the order of their entries, and no more
    than a few wait for each worker. A photo that takes longer than ``timeout`` seconds, or whose worker dies, is a
    `Failed`; another worker takes the place. When this process dies, however it does, the workers end within a second.

    Args:
        preparer: what each of them does; it must be picklable where processes are not forked.
        entries: the photos.
        count: how many workers.
        timeout: seconds that one photo may take.

    Raises:
        CannotBeginError: no process can be started, or what it needs cannot be sent to it.
    """

    def __init__(self, preparer: Preparer, entries: Iterator[Entry], count: int, timeout: float) -> None:
        self._preparer = preparer
        self._entries = entries
        self._timeout = timeout
        self._ahead = AHEAD * count
        self._workers: list[_Worker] = []
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = ThreadPoolExecutor(count, "explain-decoding")
        self._lister = ThreadPoolExecutor(1, "explain-listing")
        try:
            for _ in range(count):
                self._free.put(self._begin())
        except BaseException:  # an interrupt too must not leave workers behind
            self.close()
            raise

    def __iter__(self) -> Iterator[Ready]:
        waiting = deque(self._submit() for _ in range(self._ahead))
        while (photo := waiting.popleft().result()) is not None:
            waiting.append(self._submit())
            yield photo

    def close(self) -> None:
        """End the workers; photos that they are busy with are given up."""
        self._lister.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.end()

    def _submit(self) -> Future[Ready | None]:
        """Have the next photo prepared; None comes after the last. A single thread lists them, in their order."""
        return self._threads.submit(self._prepare, self._lister.submit(next, self._entries, None))

    def _prepare(self, listed: Future[Entry | None]) -> Ready | None:
        entry = listed.result()
        if entry is None:
            return None
        worker = self._free.get()
        try:
            worker.pipe.send(entry)
            if worker.pipe.poll(self._timeout):
                photo = pickle.loads(worker.pipe.recv_bytes())
                return replace(photo, entry=entry) if isinstance(photo, Prepared) else photo
            reason = f"took longer than {self._timeout:g} s to be read; mend it or allow more time"
            worker = self._replaced(worker)
        except (EOFError, OSError):
            reason = "ended its worker process while it was read (out of memory?); read it alone"
            worker = self._replaced(worker)
        except CannotBeginError:
            raise
        except Exception as error:  # an entry that holds something that cannot be pickled
            remedy = either("use workers=0", "use --workers 0")
            reason = f"cannot be sent to a worker process ({error}); {remedy}"
        finally:
            self._free.put(worker)
        return Failed(entry.name, f"image {entry.name!r} {reason}", entry.path, stamp=entry.stamp)

    def _replaced(self, worker: _Worker) -> _Worker:
        """Return another worker for one that is dead or too slow."""
        worker.end()
        self._workers.remove(worker)
        return self._begin()

    def _begin(self) -> _Worker:
        """Start a worker, and wait until it says that it is there."""
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        with self._lock:  # one at a time: a process that is forked meanwhile would hold the pipe of this one open
            if self._stopped:
                raise CannotBeginError("the run ends")
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(self._preparer, theirs), daemon=True)
            try:
                with quiet(), _started(process):  # Python warns of threads when it forks; the child needs no locks
                    pass
            except Exception as error:  # what it is given cannot be pickled, or there is no room for a process
                ours.close()
                raise CannotBeginError(str(error)) from error
            finally:
                theirs.close()
            worker = _Worker(process, ours)
            self._workers.append(worker)
        with contextlib.suppress(EOFError, OSError):
            if ours.poll(BEGIN) and ours.recv_bytes():
                return worker
        worker.end()
        self._workers.remove(worker)
        raise CannotBeginError("a worker process ended before it began")


@signal_safe
def _started(process: Any) -> Iterator[None]:
    """Start a process, and keep signals until it has begun.

    Python loses what a signal's handler raises while it forks, and leaves the lock of its logging locked.
    """
    process.start()
    yield


def _work(preparer: Preparer, pipe: Connection) -> None:
    """Prepare what comes through the pipe, until it is closed or the parent is gone: the life of a worker."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(TICK)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(1)  # the network needs the processors, and threads do not survive a fork
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(b"there")
        while True:
            entry = pipe.recv()
            with hushed() as printed:
                photo = preparer(entry)
            if isinstance(photo, Prepared):
                notes = [f"{entry.name}: {trouble}" for trouble in troubles(printed)]
                photo = replace(photo, entry=Entry(""), notes=(*photo.notes, *notes))
            pipe.send_bytes(pickle.dumps(photo))  # as plain bytes: `send` would share memory by an open file
    os._exit(0)  # and nothing that was inherited is closed or written
