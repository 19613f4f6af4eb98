"""Photos prepared ahead in worker processes, given in their order; one that hangs or dies costs its photo only."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from explain._utils.errors import either, quiet
from explain.runs.preparing import Failed, Preparer, Ready
from explain.runs.sources import Entry

AHEAD = 4  # photos that wait for each worker, read or not
TICK = 0.5  # seconds between two looks at the clock
BEGIN = 60.0  # seconds that a worker may take until it is there
MOST = 8  # workers, unless more are asked for


class CannotBeginError(Exception):
    """Worker processes cannot be started here."""


def default_workers() -> int:
    """Return half of the processors that this process may use, since the network needs the others."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        count = os.cpu_count() or 1
    return max(1, min(MOST, count // 2))


@dataclass
class _Worker:
    """A worker process, and the photo that it is busy with, since when."""

    process: Any
    pipe: Connection
    task: tuple[int, Entry] | None = None
    since: float = 0.0


class Workers:
    """Prepares the photos of a run in processes of its own.

    Photos come out in the order of their entries, and no more than a few wait for each worker. A photo that takes
    longer than ``timeout`` seconds, or whose worker dies, is a `Failed`; another worker takes the place. When this
    process dies, however it does, the workers end within a second.

    Args:
        preparer: what each of them does; it must be picklable where processes are not forked.
        entries: the photos.
        count: how many workers.
        timeout: seconds that one photo may take.

    Raises:
        CannotBeginError: no process can be started, or what it needs cannot be sent to it.
    """

    def __init__(self, preparer: Preparer, entries: Iterator[Entry], count: int, timeout: float) -> None:
        self._preparer, self._timeout = preparer, timeout
        self._entries = enumerate(entries)
        self._ahead = AHEAD * count
        self._ready: dict[int, Ready] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._next, self._given, self._end = 0, 0, False
        self._stopped = threading.Event()
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._workers.append(self._begin())
        except BaseException:  # an interrupt too must not leave workers behind
            self.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="explain-decoding", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Ready]:
        while True:
            with self._changed:
                while self._next not in self._ready:
                    if self._error is not None:
                        raise self._error
                    if self._end and self._next >= self._given:
                        return
                    self._changed.wait(TICK)
                found = self._ready.pop(self._next)
                self._next += 1
                self._changed.notify_all()
            yield found

    def close(self) -> None:
        """End the workers; photos that they are busy with are given up."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        for worker in self._workers:
            worker.process.kill()
        if hasattr(self, "_thread"):
            self._thread.join()
        for worker in self._workers:
            _end(worker)

    def _begin(self) -> _Worker:
        """Start a worker, and wait until it says that it is there."""
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        ours, theirs = context.Pipe()
        inherited = [ours, *(worker.pipe for worker in self._workers)] if sys.platform == "linux" else []
        process = context.Process(target=_work, args=(self._preparer, theirs, inherited), daemon=True)
        try:
            with quiet():  # Python warns of threads when it forks; what the child does needs none of their locks
                process.start()
        except Exception as error:  # what it is given cannot be pickled, or there is no room for a process
            ours.close()
            raise CannotBeginError(str(error)) from error
        finally:
            theirs.close()
        try:
            there = ours.poll(BEGIN) and ours.recv() == "there"
        except (EOFError, OSError):
            there = False
        if not there:
            process.kill()
            process.join()
            ours.close()
            raise CannotBeginError("a worker process ended before it began")
        return _Worker(process, ours)

    def _serve(self) -> None:
        """Give the workers their tasks and take their results, until all is done; for a thread."""
        try:
            while not self._stopped.is_set():
                self._hand_out()
                busy = [worker for worker in self._workers if worker.task is not None]
                if not busy:
                    with self._changed:
                        if self._end:
                            return
                        self._changed.wait(TICK)
                    continue
                for pipe in wait([worker.pipe for worker in busy], TICK):
                    self._take(next(worker for worker in busy if worker.pipe is pipe))
                self._give_up_late_ones(busy)
        except Exception as error:  # of the source, as its entries are listed: the reader of photos is told
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _hand_out(self) -> None:
        for worker in self._workers:
            with self._changed:
                if worker.task is not None or self._end or self._given - self._next >= self._ahead:
                    continue
            task = next(self._entries, None)
            if task is None:
                with self._changed:
                    self._end = True
                    self._changed.notify_all()
                return
            self._given = task[0] + 1
            worker.task, worker.since = task, time.monotonic()
            try:
                worker.pipe.send(task[1])
            except (OSError, ValueError):
                self._replace(worker, "found no worker process to read it; try once more")
            except Exception as error:  # an entry that holds something that cannot be pickled
                remedy = either("use workers=0", "use --workers 0")
                reason = f"image {task[1].name!r} cannot be sent to a worker process ({error}); {remedy}"
                self._put(task[0], Failed(task[1].name, reason, task[1].path, stamp=task[1].stamp))
                worker.task = None

    def _take(self, worker: _Worker) -> None:
        assert worker.task is not None
        place, entry = worker.task
        try:
            found = _received(worker.pipe)
        except (EOFError, OSError):
            self._replace(worker, "ended its worker process while it was read (out of memory?); read it alone")
            return
        worker.task = None
        self._put(place, replace(found, entry=entry) if not isinstance(found, Failed) else found)

    def _give_up_late_ones(self, busy: list[_Worker]) -> None:
        now = time.monotonic()
        for worker in busy:
            if worker.task is not None and now - worker.since > self._timeout:
                self._replace(worker, f"took longer than {self._timeout:g} s to be read; mend it or allow more time")

    def _replace(self, worker: _Worker, reason: str) -> None:
        """Put another worker in the place of one that is dead or too slow, and give its photo up."""
        assert worker.task is not None
        place, entry = worker.task
        _end(worker)
        self._workers.remove(worker)
        self._put(place, Failed(entry.name, f"image {entry.name!r} {reason}", entry.path, stamp=entry.stamp))
        if not self._stopped.is_set():
            self._workers.append(self._begin())

    def _put(self, place: int, found: Ready) -> None:
        with self._changed:
            self._ready[place] = found
            self._changed.notify_all()


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join(TICK)  # one that waits for a disk that does not answer cannot even be killed
    worker.pipe.close()


def _work(preparer: Preparer, pipe: Connection, inherited: list[Connection]) -> None:
    """Prepare what comes through the pipe, until it is closed or the parent is gone: the life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()  # or they would stay open after the parent's end
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)  # the network needs the processors, and threads do not survive a fork
    with contextlib.suppress(EOFError, OSError):
        pipe.send("there")
        while True:
            _send(pipe, preparer(pipe.recv()))
    os._exit(0)  # and nothing that was inherited is closed or written


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(TICK)
    os._exit(1)


def _send(pipe: Connection, found: Ready) -> None:
    """Send a result, the input as plain bytes, which are not copied again and again."""
    if isinstance(found, Failed):
        pipe.send(found)
        return
    x = found.x
    pipe.send((replace(found, x=torch.empty(0), entry=_NO_ENTRY), tuple(x.shape), x.dtype))
    pipe.send_bytes(x.view(torch.uint8).numpy().reshape(-1).data)


def _received(pipe: Connection) -> Ready:
    found = pipe.recv()
    if isinstance(found, Failed):
        return found
    prepared, shape, dtype = found
    x = torch.empty(shape, dtype=dtype)
    pipe.recv_bytes_into(x.view(torch.uint8).numpy().reshape(-1).data)
    ready: Ready = replace(prepared, x=x)
    return ready


_NO_ENTRY = Entry("")
