"""Preparing photos, here or ahead in worker processes: model inputs in batches, classes of labels, and which photos a
run has already."""

import contextlib
import hashlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from explain._utils.errors import ExplainError, ImageError, either, overheard, quiet, raised
from explain._utils.signals import came_by_signal, signal_safe
from explain.data.boxes import Box, Preprocess, as_input, locate
from explain.data.images import load_image
from explain.data.opening import hushed, troubles
from explain.explanation.photos import each_tried
from explain.store.sources import Corners, Entry, Failed, Label, Source, each_label
from explain.targets.labels import class_label


@dataclass(frozen=True, eq=False)
class Prepared:
    """A photo that is ready for the model: its input ``(C, H, W)`` on the CPU, and what is stored of it.

    ``size`` is width and height, ``box`` the part that the model sees; ``notes`` are warnings about it. ``lacking`` are
    the methods that are added to what is stored of it.
    """

    entry: Entry
    x: torch.Tensor = field(repr=False)
    sha256: str
    size: tuple[int, int]
    box: Box
    label: Label = None
    boxes: tuple[Corners, ...] = ()
    notes: tuple[str, ...] = ()
    lacking: frozenset[str] | None = None


Ready: TypeAlias = Prepared | Failed


class Preparer:
    """Reads entries of one source, and preprocesses them for one model."""

    def __init__(self, source: Source, preprocess: Preprocess) -> None:
        self.source, self.preprocess = source, preprocess
        self._boxes: dict[tuple[int, int], Box] = {}

    def __call__(self, entry: Entry) -> Ready:
        if entry.problem is not None:
            return Failed(entry.name, entry.problem, entry.path)
        notes: list[str] = []
        try:
            with overheard(notes):
                return self._prepared(entry, notes)
        except Exception as error:  # of a decoder or of the caller's own preprocessing: anything
            if came_by_signal(error):
                raise
            return failed(entry, error)

    def _prepared(self, entry: Entry, notes: list[str]) -> Prepared:
        found = self.source.read(entry)
        if isinstance(found.image, torch.Tensor):
            x = _as_float(found.image).cpu().contiguous()
            size = (x.shape[-1], x.shape[-2])
            digest, box = hashlib.sha256(x.view(torch.uint8).numpy().tobytes()), Box(0.0, 0.0, *map(float, size))
        else:
            photo = load_image(found.image)
            x = _as_float(self.preprocess(photo)).detach().cpu().contiguous()
            size, digest = photo.size, hashlib.sha256(photo.tobytes())
            if size not in self._boxes:  # it may take some pictures to find out where the model looks
                self._boxes[size] = locate(self.preprocess, size)
            box = self._boxes[size]
        label = entry.label if found.label is None else found.label
        return Prepared(entry, x, digest.hexdigest(), size, box, label, entry.boxes or found.boxes, tuple(notes))


def failed(entry: Entry, error: Exception) -> Failed:
    """Return what is stored of a photo that could not be read or explained."""
    reason = str(error) if isinstance(error, ExplainError) else raised(error)
    return Failed(entry.name, reason, entry.path, stamp=entry.stamp)


def _as_float(x: Any) -> torch.Tensor:
    """The model's input, which is stored and compared as it is, so that integers are refused."""
    if as_input(x).ndim == 4:
        remedy = "explain photos of tiles with explainer.each, and tensors with explain.attribute"
        raise ImageError(f"preprocess must return a tensor (C, H, W) in a run, got shape {tuple(x.shape)}; {remedy}")
    if not x.is_floating_point():
        raise ImageError(f"preprocess must return a float tensor (C, H, W), got {x.dtype}; convert what it returns")
    return x  # type: ignore[no-any-return]


IMAGE = 224 * 224  # pixels
MAX_WAITING = 2  # batches that may be waiting for photos of their shape

Result = TypeVar("Result")


def at_once(x: torch.Tensor, device: torch.device) -> int:
    """Return how many inputs like ``x`` ``(C, H, W)`` are best run together.

    >>> at_once(torch.empty(3, 224, 224), torch.device("cpu")), at_once(torch.empty(3, 64, 64), torch.device("cpu"))
    (8, 16)
    """
    most, large = (16, 8) if device.type == "cpu" else (128, 64)  # more are no faster on a CPU, and have to fit
    return max(1, min(most, large * IMAGE // max(1, int(x.shape[-1]) * int(x.shape[-2]))))


def in_batches(ready: Iterable[Ready], size: Callable[[Prepared], int]) -> Iterator[list[Prepared] | Failed]:
    """Group photos by the shape of their inputs and by what they lack, as they come; failures are passed on at once.

    Args:
        ready: the photos.
        size: how many photos like this one make a batch.

    >>> list(in_batches([Failed("a.jpg", "is empty")], lambda photo: 8))
    [Failed(name='a.jpg', reason='is empty', path=None)]
    """
    waiting: dict[object, list[Prepared]] = {}
    for photo in ready:
        if isinstance(photo, Failed):
            yield photo
            continue
        key = (photo.x.shape, photo.x.dtype, photo.lacking)
        group = waiting.setdefault(key, [])
        group.append(photo)
        full = size(photo)
        if len(group) >= full:
            yield waiting.pop(key)
        elif sum(map(len, waiting.values())) >= MAX_WAITING * full:
            yield waiting.pop(next(iter(waiting)))
    yield from waiting.values()


def each_explained(photos: list[Prepared], work: Callable[[list[Prepared]], Sequence[Result]]) -> list[Result | Failed]:
    """Do the work on a batch; if it fails, on each photo alone."""
    found: list[Result | Failed] = []
    for photo, each in zip(photos, each_tried(photos, work), strict=True):
        if isinstance(each, Exception):
            general = None if isinstance(each, (ImageError, MemoryError)) else each
            found.append(replace(failed(photo.entry, each), general=general))
        else:
            found.append(each)
    return found


@dataclass(eq=False)
class Labels:
    """Finds the class of the model for a label of the source.

    A number is the class of the model with this number, unless the source has names for its classes that are labels of
    the model: then the name decides. A text is a label of the model if it is written the same, apart from capitals,
    dashes and underlines, or is one of the words of a label that are separated by commas. Anything else stays as it
    is, without a class: nothing is guessed.

    >>> labels = Labels(["tench, Tinca tinca", "goldfish"], classes=["goldfish", "tench"])
    >>> labels.of(0), labels.of("tinca_tinca"), labels.of("shark")
    ([(1, 'goldfish')], [(0, 'tench, Tinca tinca')], [(None, 'shark')])
    """

    categories: Sequence[str] | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._known: dict[str, int | None] = {}
        for exact in (False, True):  # a complete label counts more than a part of one
            own: dict[str, int | None] = {}
            for index, category in enumerate(self.categories or ()):
                for word in [category] if exact else category.split(","):
                    own[_plain(word)] = None if _plain(word) in own else index
            self._known.update(own)
        self._by_name = any(self._known.get(_plain(name)) is not None for name in self.classes or ())

    def of(self, label: Label) -> list[tuple[int | None, str]]:
        """Return the class of the model and the text of each label that is true of a photo; none where none is known.

        A list with as many zeros and ones as there are classes says of each class whether it is true.
        """
        labels = each_label(label)
        names = self.categories if self.classes is None else self.classes
        if len(labels) > 1 and names is not None and len(labels) == len(names) and set(labels) <= {0, 1}:
            labels = tuple(number for number, is_true in enumerate(labels) if is_true)
        return [self._of_one(one) for one in dict.fromkeys(labels)]

    def first_class(self, label: Label) -> int | None:
        """Return the first class of the model that a photo with this label has."""
        return next((index for index, _ in self.of(label) if index is not None), None)

    def _of_one(self, label: str | int) -> tuple[int | None, str]:
        if isinstance(label, str):
            index = self._known.get(_plain(label))
            return index, label if index is None else class_label(self.categories, index)
        if self._by_name and self.classes is not None and 0 <= label < len(self.classes):
            return self._of_one(self.classes[label])
        if label < 0 or (self.categories is not None and label >= len(self.categories)):
            return None, str(label)
        return label, class_label(self.categories, label)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()


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
        self._preparer, self._entries, self._timeout = preparer, entries, timeout
        self._ahead = AHEAD * count
        self._workers: list[_Worker] = []
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._lock, self._stopped = threading.Lock(), False
        self._threads, self._lister = ThreadPoolExecutor(count, "explain-decoding"), ThreadPoolExecutor(1)
        try:
            for _ in range(count):
                self._free.put(self._begin())
        except BaseException:  # an interrupt too must not leave workers behind
            self.close()
            raise

    def __iter__(self) -> Iterator[Ready]:
        waiting = deque(self._submit() for _ in range(self._ahead))
        while (found := waiting.popleft().result()) is not None:
            waiting.append(self._submit())
            yield found

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
            reason = f"took longer than {self._timeout:g} s to be read; mend it or allow more time"
            if worker.pipe.poll(self._timeout):
                found = _received(worker.pipe)
                return found if isinstance(found, Failed) else replace(found, entry=entry)
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
            if ours.poll(BEGIN) and ours.recv() == "there":
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
        pipe.send("there")
        while True:
            entry = pipe.recv()
            with hushed() as printed:
                sent: Any = preparer(entry)
            if isinstance(sent, Prepared):  # the input as plain bytes: torch would share its memory by an open file
                notes = (*sent.notes, *(f"{entry.name}: {trouble}" for trouble in troubles(printed)))
                plain = replace(sent, x=torch.empty(0), entry=Entry(""), notes=notes)
                sent = plain, sent.x.view(torch.uint8).numpy(), sent.x.dtype
            pipe.send(sent)
    os._exit(0)  # and nothing that was inherited is closed or written


def _received(pipe: Connection) -> Ready:
    found = pipe.recv()
    if isinstance(found, Failed):
        return found
    prepared, values, dtype = found
    return replace(prepared, x=torch.from_numpy(values).view(dtype))  # type: ignore[no-any-return]
