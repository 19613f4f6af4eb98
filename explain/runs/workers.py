"""Worker processes of `torch.utils.data.DataLoader` that read and preprocess photos ahead."""

import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from explain._utils.errors import either, quiet, warn
from explain.data.opening import hushed, troubles
from explain.runs.preparing import Prepared, Preparer, Ready
from explain.store.sources import Entry, Failed

AHEAD = 4  # photos that wait for each worker, read or not
TICK = 0.5  # seconds between two checks whether the other process is alive
MOST = 8  # workers, unless the caller says how many


class CannotBeginError(Exception):
    """Worker processes cannot be started here."""


class EndedError(Exception):
    """A worker died, or takes too long for the next photo; the message says which.

    ``is_next`` says that it is the fault of the next photo; else any that was sent may be it.
    """

    def __init__(self, message: str, *, is_next: bool) -> None:
        super().__init__(message)
        self.is_next = is_next


def default_workers() -> int:
    """Return half of the processors that this process may use, since the network needs the
    others."""
    # on Linux
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(MOST, count // 2))


def read_ahead(
    preparer: Preparer, entries: Iterator[Entry], count: int, timeout: float
) -> Iterator[Ready]:
    """Prepare photos in ``count`` processes; they come out in the order of their entries.

    No more than a few wait for each worker. A photo that takes longer than ``timeout`` seconds, or
    whose worker dies, is a `Failed`. When this process dies, however it does, the workers end
    within a second.

    Which photo a worker died of is not known: those that were sent go once more, one at a time.
    """
    broken: list[Exception] = []
    sent: deque[Entry] = deque()
    suspects: deque[Entry] = deque()
    entries = _until_broken(entries, broken)
    while True:
        alone = bool(suspects)
        source = _drained(suspects) if alone else entries
        processes = 1 if alone else count
        ahead = 1 if alone else AHEAD
        try:
            with (
                _loading(preparer, _sending(source, sent), processes, ahead) as loaded,
                _deaths_are_awaited(),
            ):
                for content in _in_time(loaded, timeout):
                    photo = pickle.loads(content)
                    entry = sent.popleft()
                    yield replace(photo, entry=entry) if isinstance(photo, Prepared) else photo
        except CannotBeginError as error:
            warn(
                "photos are read one after the other, since no worker process can be started "
                f"({error})"
            )
            yield from map(preparer, source)
        except EndedError as error:
            if alone or error.is_next:
                entry = sent.popleft()
                reason = f"image {entry.name!r} {error}"
                yield Failed(entry.name, reason, entry.path, stamp=entry.stamp)
            suspects.extendleft(reversed(sent))
            sent.clear()
            continue
        if not alone:
            break
    if broken:
        raise broken[0]


def _until_broken(entries: Iterator[Entry], broken: list[Exception]) -> Iterator[Entry]:
    """The entries of a source. An error of the source ends them, and is noted in ``broken`` to be
    raised later."""
    try:
        yield from entries
    except Exception as error:  # of the caller's own source
        broken.append(error)


def _drained(entries: deque[Entry]) -> Iterator[Entry]:
    """Entries as they are taken out of a queue, until it is empty."""
    while entries:
        yield entries.popleft()


def _sending(entries: Iterable[Entry], sent: deque[Entry]) -> Iterator[bytes]:
    """Entries, pickled for a worker. Each is noted in ``sent``, since photos come back in this
    order without it."""
    for entry in entries:
        sent.append(entry)
        try:
            yield pickle.dumps(entry)
        except Exception as error:  # it holds something that cannot be pickled
            remedy = either("use workers=0", "use --workers 0")
            problem = f"image {entry.name!r} cannot be sent to a worker process ({error}); {remedy}"
            yield pickle.dumps(Entry(entry.name, path=entry.path, problem=problem))


class _Reader(Dataset[bytes]):
    """Prepares photos in a worker. They go as bytes, since each tensor would share memory by an
    open file."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def __getitem__(self, sent: bytes) -> bytes:
        entry = pickle.loads(sent)
        with hushed() as printed:
            photo = self._preparer(entry)
        if isinstance(photo, Prepared):
            notes = [f"{entry.name}: {trouble}" for trouble in troubles(printed)]
            photo = replace(photo, entry=Entry(""), notes=(*photo.notes, *notes))
        return pickle.dumps(photo)


@contextmanager
def _loading(
    preparer: Preparer, sent: Iterable[bytes], count: int, ahead: int
) -> Iterator[Iterator[bytes]]:
    """Start workers; they are killed at the end, since one that hangs would never finish.

    They start in a thread: Python loses an interrupt that comes while its main thread forks.

    Raises:
        CannotBeginError: no process can be started, or what it needs cannot be sent to it.
    """
    loader: Any = DataLoader(
        _Reader(preparer),
        batch_size=None,
        sampler=sent,
        num_workers=count,
        prefetch_factor=ahead,
        timeout=TICK,
        collate_fn=bytes,
        multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
        worker_init_fn=_begin,
        generator=torch.Generator(),  # or it would draw from the caller's random numbers
    )
    try:
        with quiet(), ThreadPoolExecutor(1, "explain-starting") as thread:
            loaded = thread.submit(iter, loader).result()
    except Exception as error:  # whatever processes run into
        raise CannotBeginError(str(error)) from error
    try:
        yield loaded
    finally:
        for worker in loaded._workers:
            worker.kill()


def _in_time(loaded: Iterator[bytes], timeout: float) -> Iterator[bytes]:
    """The pickled photos that come from workers.

    Raises:
        EndedError: a worker died, or takes too long.
    """
    begun = time.monotonic()
    while True:
        try:
            content = next(loaded, None)
        except RuntimeError as error:  # of torch, which has no other kind for either
            if "timed out" not in str(error):
                died = "ended its worker process while it was read (out of memory?); read it alone"
                raise EndedError(died, is_next=False) from error
            if time.monotonic() - begun > timeout:
                slow = f"took longer than {timeout:g} s to be read; mend it or allow more time"
                raise EndedError(slow, is_next=True) from error
            continue
        if content is None:
            return
        yield content
        begun = time.monotonic()


@contextmanager
def _deaths_are_awaited() -> Iterator[None]:
    """Keep PyTorch from raising an error for a dead worker wherever the main thread is: once a
    loader was used, its handler of SIGCHLD would do so."""
    handler = None
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _begin(number: int) -> None:
    """Prepare a worker, as it starts: it ends with its parent, which alone decides on
    interrupts."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(TICK)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=watch, daemon=True).start()
