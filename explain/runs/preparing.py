"""Photos as inputs of a model, and in batches of one shape."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from explain._utils.errors import ExplainError, ImageError, collect_warnings, raised
from explain._utils.signals import came_by_signal
from explain.data.bands import Bands
from explain.data.boxes import (
    Box,
    Preprocess,
    as_input,
    boxes_of_slices,
    input_of_slices,
    locate,
)
from explain.data.greys import NO_CONTRAST, Window, has_contrast
from explain.data.images import load_image
from explain.store.sources import Entry, Failed, Label, ObjectBox, Source, digest_of_photo


@dataclass(frozen=True, eq=False)
class Prepared:
    """A photo that is ready for the model: its input ``(C, H, W)`` on the CPU, of a volume ``(C, D,
    H, W)``, and what is stored of it."""

    entry: Entry
    x: torch.Tensor
    sha256: str
    # width and height
    size: tuple[int, int]
    # the part that the model sees
    box: Box
    label: Label
    boxes: tuple[ObjectBox, ...]
    # warnings about the photo
    notes: tuple[str, ...]
    # the methods that are added to what is stored of it
    lacking: frozenset[str] | None = None
    # where the slices of a volume are seen in their picture
    crops: tuple[Box, ...] = ()


Ready: TypeAlias = Prepared | Failed


@dataclass(frozen=True, eq=False)
class Preparer:
    """Reads entries of one source, and preprocesses them for one model."""

    source: Source
    preprocess: Preprocess
    window: Window | Bands | None
    stack: bool = False
    """Whether a file of several slices, pages or frames is one volume."""
    boxes: dict[tuple[int, int], Box] = field(default_factory=dict, init=False)
    """The part that the model sees of photos of each size (width, height), once it is known."""

    def __call__(self, entry: Entry) -> Ready:
        """Return a photo ready for the model, or why it cannot be read; raises only for a signal,
        such as an interrupt.
        """
        if entry.problem is not None:
            return Failed(entry.name, entry.problem, entry.path)
        notes: list[str] = []
        try:
            with collect_warnings(notes):
                return self._prepared(entry, notes)
        except Exception as error:  # of a decoder or of the caller's own preprocessing: anything
            if came_by_signal(error):
                raise
            return failed(entry, error)

    def _prepared(self, entry: Entry, notes: list[str]) -> Prepared:
        """Read and preprocess a photo, and find the part that the model sees. The digest, by which
        a continued run compares, is of the upright pixels or of the tensor.
        """
        content = self.source.read(entry)
        crops: tuple[Box, ...] = ()
        if isinstance(content.image, torch.Tensor):
            x = _as_float(content.image).cpu().contiguous()
            size = (x.shape[-1], x.shape[-2])
            box = Box.whole(size)
            digest = digest_of_photo(x)
        else:
            photo = load_image(content.image, self.window, stack=self.stack)
            if not has_contrast(photo):
                raise ImageError(NO_CONTRAST)
            size = photo.size
            if hasattr(photo, "cells"):  # a volume, as a picture with its slices side by side
                if entry.boxes or content.boxes:
                    raise ImageError(
                        "boxes must be of photos, got some of a volume; leave them out"
                    )
                x = input_of_slices(lambda image: _as_float(self.preprocess(image)), photo)
                crops = boxes_of_slices(self.preprocess, photo)
                box = Box.whole(size)
            else:
                x = _as_float(self.preprocess(photo))
                # finding out where the model looks may take several runs of the preprocessing
                if size not in self.boxes:
                    self.boxes[size] = locate(self.preprocess, size)
                box = self.boxes[size]
            x = x.detach().cpu().contiguous()
            digest = digest_of_photo(photo)
        return Prepared(
            entry,
            x,
            sha256=digest,
            size=size,
            box=box,
            label=entry.label if content.label is None else content.label,
            boxes=entry.boxes or content.boxes,
            notes=tuple(notes),
            crops=crops,
        )


def failed(entry: Entry, error: Exception) -> Failed:
    """Return the failure of a photo that could not be read or explained, with the reason in one
    line, as the table ``failures`` keeps it."""
    reason = str(error) if isinstance(error, ExplainError) else raised(error)
    return Failed(entry.name, reason, entry.path, stamp=entry.stamp)


def _as_float(x: Any) -> torch.Tensor:
    """Check what a preprocessing, or a source of tensors, returns: it must be one float tensor
    ``(C, H, W)``, as it is stored and compared without conversion. Return it unchanged."""
    if as_input(x).ndim == 4:
        raise ImageError(
            f"preprocess must return a tensor (C, H, W) in a run, got shape {tuple(x.shape)}; "
            "explain photos of tiles with explainer.each, and tensors with explain.attribute"
        )
    if not x.is_floating_point():
        raise ImageError(
            f"preprocess must return a float tensor (C, H, W), got {x.dtype}; convert what it "
            "returns"
        )
    return x  # type: ignore[no-any-return]


IMAGE = 224 * 224  # pixels of a usual input


def at_once(x: torch.Tensor, device: torch.device) -> int:
    """Return how many inputs like ``x`` ``(C, H, W)`` or ``(C, D, H, W)`` make a batch of a run
    without ``batch_size``: fewer of large inputs, more on a GPU."""
    # larger batches are no faster on a CPU, and their activations have to fit
    most, of_usual_size = (16, 8) if device.type == "cpu" else (128, 64)
    return max(1, min(most, of_usual_size * IMAGE // max(1, math.prod(x.shape[1:]))))


def answer_of(photo: Ready, result: Any) -> Any:
    """The photo's record or failure, as the run stores it. An error that need not be the photo's
    fault is kept in ``general``, to be raised if all photos fail.
    """
    if not isinstance(photo, Prepared):
        return photo
    if not isinstance(result, Exception):
        return result
    general = None if isinstance(result, (ImageError, MemoryError)) else result
    return replace(failed(photo.entry, result), general=general)
