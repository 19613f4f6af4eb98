"""Preparing photos: from an entry of a source to the model's input; batches in which one photo cannot spoil others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch
from PIL import Image

from explain._utils.errors import ExplainError, ImageError, overheard, raised
from explain._utils.signals import came_by_signal
from explain.data.images import Box, Preprocess, load_image, locate
from explain.runs.sources import Corners, Entry, Label, Source

MAX_SIZES = 256  # sizes of photos whose part that the model sees is remembered


@dataclass(frozen=True, eq=False)
class Prepared:
    """A photo that is ready for the model: its input ``(C, H, W)`` on the CPU, and what is stored of it.

    ``size`` is width and height, ``box`` the part that the model sees; ``notes`` are warnings about it.
    """

    entry: Entry
    x: torch.Tensor = field(repr=False)
    sha256: str
    size: tuple[int, int]
    box: Box
    label: Label = None
    boxes: tuple[Corners, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A photo that could not be explained, and why; ``general`` holds an error that need not be this photo's fault.

    ``stamp`` is that of its entry: results of the same file are kept, since it may be read again another time.
    """

    name: str
    reason: str
    path: str | None = None
    general: Exception | None = field(default=None, repr=False, compare=False)
    stamp: str | None = field(default=None, repr=False, compare=False)


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
        label = entry.label if found.label is None else found.label
        boxes = entry.boxes or found.boxes
        if isinstance(found.image, torch.Tensor):
            x = as_input(found.image).cpu().contiguous()
            height, width = x.shape[-2:]
            digest = hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()
            box = Box(0.0, 0.0, float(width), float(height))
            return Prepared(entry, x, digest, (width, height), box, label, boxes, tuple(notes))
        photo = load_image(found.image)
        x = as_input(self.preprocess(photo)).detach().cpu().contiguous()
        digest = hashlib.sha256(photo.tobytes()).hexdigest()
        return Prepared(entry, x, digest, photo.size, self._box(photo), label, boxes, tuple(notes))

    def _box(self, photo: Image.Image) -> Box:
        """Where the model looks, which takes some pictures to find out if the preprocessing does not say it."""
        if photo.size not in self._boxes:
            if len(self._boxes) >= MAX_SIZES:
                self._boxes.clear()
            self._boxes[photo.size] = locate(self.preprocess, photo.size)
        return self._boxes[photo.size]


def failed(entry: Entry, error: Exception) -> Failed:
    """Return what is stored of a photo that could not be read or explained."""
    reason = str(error) if isinstance(error, ExplainError) else raised(error)
    return Failed(entry.name, reason, entry.path, stamp=entry.stamp)


def as_input(x: Any) -> torch.Tensor:
    """Check the model's input for one photo.

    Raises:
        ImageError: it is no float tensor ``(C, H, W)``.
    """
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ImageError(f"preprocess must return a float tensor (C, H, W), got {got}; convert what it returns")
    return x


PIXELS = 8 * 224 * 224  # of a batch on a CPU: more are no faster, and their activations have to fit
DEVICE_PIXELS = 64 * 224 * 224  # of a batch on an accelerator
MAX_BATCH = 128
MAX_WAITING = 2  # batches that may be waiting for photos of their shape

Result = TypeVar("Result")


def at_once(x: torch.Tensor, device: torch.device) -> int:
    """Return how many inputs like ``x`` ``(C, H, W)`` are best run together.

    >>> at_once(torch.empty(3, 224, 224), torch.device("cpu")), at_once(torch.empty(3, 64, 64), torch.device("cpu"))
    (8, 98)
    """
    pixels = PIXELS if device.type == "cpu" else DEVICE_PIXELS
    return max(1, min(MAX_BATCH, pixels // max(1, int(x.shape[-1]) * int(x.shape[-2]))))


def in_batches(ready: Iterable[Ready], size: Callable[[Prepared], int]) -> Iterator[list[Prepared] | Failed]:
    """Group photos by the shape of their inputs, as they come; those that failed are passed on at once.

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
        key = (photo.x.shape, photo.x.dtype)
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
    try:
        return list(work(photos))
    except Exception as error:
        if came_by_signal(error):
            raise
        if len(photos) == 1:
            general = None if isinstance(error, (ImageError, MemoryError)) else error
            return [replace(failed(photos[0].entry, error), general=general)]
    return [result for photo in photos for result in each_explained([photo], work)]
