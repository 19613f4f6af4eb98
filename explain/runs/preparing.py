"""From an entry of a source to what the model is given, with all that is stored of the photo itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from PIL import Image

from explain.errors import ExplainError, ImageError, overheard, raised
from explain.images import Box, Preprocess, load_image, locate
from explain.interrupts import came_by_signal
from explain.runs.sources import Corners, Entry, Label, Source

SIZES = 256  # sizes of photos for which it is remembered where the model looks


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
            size = int(x.shape[-1]), int(x.shape[-2])
            whole = Box(0.0, 0.0, float(size[0]), float(size[1]))
            return Prepared(entry, x, _digest(x), size, whole, label, boxes, tuple(notes))
        photo = load_image(found.image)
        x = as_input(self.preprocess(photo)).detach().cpu().contiguous()
        digest = hashlib.sha256(photo.tobytes()).hexdigest()
        return Prepared(entry, x, digest, photo.size, self._box(photo), label, boxes, tuple(notes))

    def _box(self, photo: Image.Image) -> Box:
        """Where the model looks, which takes some pictures to find out if the preprocessing does not say it."""
        if photo.size not in self._boxes:
            if len(self._boxes) >= SIZES:
                self._boxes.clear()
            self._boxes[photo.size] = locate(self.preprocess, photo.size)
        return self._boxes[photo.size]


def in_process(preparer: Preparer, entries: Iterator[Entry]) -> Iterator[Ready]:
    """Prepare photos one after the other, each when it is asked for."""
    return map(preparer, entries)


def failed(entry: Entry, error: Exception) -> Failed:
    """Return what is stored of a photo that could not be read or explained."""
    reason = str(error) if isinstance(error, ExplainError) else raised(error)
    return Failed(entry.name, reason, entry.path, stamp=entry.stamp)


def as_input(x: Any) -> torch.Tensor:
    """Check what the model is to be given for one photo.

    Raises:
        ImageError: it is no float tensor ``(C, H, W)``.
    """
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ImageError(f"preprocess must return a float tensor (C, H, W), got {got}; convert what it returns")
    return x


def _digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()
