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

from explain._utils.errors import python_or_command, quiet, warn
from explain.data.opening import hushed, troubles
from explain.runs.preparing import Prepared, Preparer, Ready
from explain.store.sources import Entry, Failed

AHEAD = 4  # photos that wait for each worker, read or not
TICK = 0.5  # seconds between two checks whether the other process is alive
MOST = 8  # worker processes by default


class CannotBeginError(Exception):
    """Worker processes cannot be started here."""


class EndedError(Exception):
    """A worker process died, or takes too long; the message completes "image NAME ...".
    ``is_next``: the next photo is at fault, else any that was sent may be."""

    def __init__(self, message: str, *, is_next: bool) -> None:
        """An error about a worker process that died or is too slow; `read_ahead` reads ``is_next``:
        whether the next photo is to blame, or any that was sent."""
        super().__init__(message)
        self.is_next = is_next


def default_workers() -> int:
    """Return the number of worker processes by default: half of the processors that this process
    may use, since the network needs the others, 1 at least and `MOST` at most."""
    # on Linux; elsewhere it may use all of them
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(MOST, count // 2))


def read_ahead(
    preparer: Preparer, entries: Iterator[Entry], count: int, timeout: float
) -> Iterator[Ready]:
    """Prepare photos in ``count`` processes (or here if none starts), in order, `AHEAD` a worker;
    one beyond ``timeout``, or that kills its worker (found one by one), is a `Failed`.
    """
    source_errors: list[Exception] = []  # one at most, of the source itself
    sent: deque[Entry] = deque()  # to workers, and not yet back
    suspects: deque[Entry] = deque()  # sent when a worker died: one of them is the reason
    entries = _until_broken(entries, source_errors)
    while True:
        one_by_one = bool(suspects)
        next_entries = _drained(suspects) if one_by_one else entries
        processes = 1 if one_by_one else count
        ahead = 1 if one_by_one else AHEAD
        try:
            with (
                _loading(preparer, _sending(next_entries, sent), processes, ahead) as loaded,
                _deaths_are_awaited(),
            ):
                for pickled in _in_time(loaded, timeout):
                    photo = pickle.loads(pickled)
                    entry = sent.popleft()  # photos come back in order, without their entries
                    yield replace(photo, entry=entry) if isinstance(photo, Prepared) else photo
        except CannotBeginError as error:
            warn(
                "photos are read one after the other, since no worker process can be started "
                f"({error})"
            )
            yield from map(preparer, next_entries)
        except EndedError as error:
            if one_by_one or error.is_next:  # it is known which photo is to blame
                entry = sent.popleft()
                reason = f"image {entry.name!r} {error}"
                yield Failed(entry.name, reason, entry.path, stamp=entry.stamp)
            suspects.extendleft(reversed(sent))  # in their order, before those not tried yet
            sent.clear()
            continue
        if not one_by_one:  # the source has no more entries, and no suspects are left
            break
    if source_errors:
        raise source_errors[0]


def _until_broken(entries: Iterator[Entry], source_errors: list[Exception]) -> Iterator[Entry]:
    """Pass on the entries of a source. An error of the source ends them, and is put into
    ``source_errors``: it is raised after the photos before it are explained."""
    try:
        yield from entries
    except Exception as error:  # of the caller's own source
        source_errors.append(error)


def _drained(entries: deque[Entry]) -> Iterator[Entry]:
    """Take entries out of a queue, first to last, until it is empty; the queue holds those that
    were not taken."""
    while entries:
        yield entries.popleft()


def _sending(entries: Iterable[Entry], sent: deque[Entry]) -> Iterator[bytes]:
    """Pickle entries for the workers, as the loader takes them. Each is put into ``sent``, in the
    order in which the photos come back: they come without their entry, which the caller adds again.
    """
    for entry in entries:
        sent.append(entry)
        try:
            yield pickle.dumps(entry)
        except Exception as error:  # it holds something that cannot be pickled
            remedy = python_or_command("use workers=0", "use --workers 0")
            problem = f"image {entry.name!r} cannot be sent to a worker process ({error}); {remedy}"
            yield pickle.dumps(Entry(entry.name, path=entry.path, problem=problem))


class _Reader(Dataset[bytes]):
    """The data set of the `DataLoader` in worker processes: prepares the photo of one pickled
    entry."""

    def __init__(self, preparer: Preparer) -> None:
        """Keep the preparer, which is copied into each worker process."""
        self._preparer = preparer

    def __getitem__(self, sent: bytes) -> bytes:
        """Return the pickled photo of a pickled entry: `Prepared` with an empty entry, since the
        parent process has it, or `Failed`. What decoders print becomes notes of the photo."""
        entry = pickle.loads(sent)
        with hushed() as printed:
            photo = self._preparer(entry)
        if isinstance(photo, Prepared):
            notes = [f"{entry.name}: {trouble}" for trouble in troubles(printed)]
            photo = replace(photo, entry=Entry(""), notes=(*photo.notes, *notes))
        # as bytes, since PyTorch would share each tensor through an open file, of which there may
        # be few
        return pickle.dumps(photo)


@contextmanager
def _loading(
    preparer: Preparer, sent: Iterable[bytes], count: int, ahead: int
) -> Iterator[Iterator[bytes]]:
    """Start ``count`` workers, killed at the block's end since one may hang, and give the iterator
    over pickled photos. In a thread: Python loses an interrupt during a fork.
    """
    loader: Any = DataLoader(
        _Reader(preparer),
        batch_size=None,
        sampler=sent,  # what it takes for indices are pickled entries, as `_Reader` expects
        num_workers=count,
        prefetch_factor=ahead,
        timeout=TICK,  # after which `_in_time` looks whether to wait on
        collate_fn=bytes,  # passed on as they are
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
    """Give the pickled photos from workers, looking every `TICK` seconds. Raises `EndedError` if a
    worker died, or the next photo takes longer than ``timeout`` seconds.
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
    """Ignore the signal of a dead worker while a block lasts: PyTorch's handler of SIGCHLD would
    raise an error wherever the main thread is. `_in_time` notices the death instead."""
    handler = None
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _begin(number: int) -> None:
    """Set up a worker process as it starts (``worker_init_fn`` of the loader): it ignores Ctrl-C,
    which the parent decides on, and ends when its parent is gone."""
    parent = os.getppid()

    def watch() -> None:
        """End this worker as soon as it has another parent, which means that its own has died."""
        while os.getppid() == parent:
            time.sleep(TICK)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too
    # it ends the worker at once: a forked process has the parent's handler, as of the command line
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=watch, daemon=True).start()
