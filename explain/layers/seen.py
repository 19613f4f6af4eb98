"""What of an image a network reads: which moved copy of it, and which pixels."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from explain.layers.receptive_fields import Looks, centres
from explain.recording import Step, Value
from explain.recording.moves import is_move
from explain.relevance.steps import Readers


def copy_of(steps: Iterable[Step], photo: Value) -> Value:
    """The moved copy of an image, such as a crop, that all of these steps read; the image itself if
    there is none."""
    copy = value = photo
    readers = Readers(steps)
    while (step := readers.only(value)) is not None:
        keeps_pixels = is_move(step) or step.is_pointwise
        signals = [read for read in step.inputs if read.depends]
        if not keeps_pixels or signals != [value] or len(step.outputs) != 1:
            break
        value = step.output
        # on the way from one batch of images to the next, it may have another shape
        are_images = value.tensor.is_floating_point() and len(value.shape) == 4
        if are_images and value.shape[0] == photo.shape[0]:
            copy = value
    return copy


def seen_pixels(steps: Iterable[Step], photo: Value, looks: Looks) -> Tensor | None:
    """Which pixels ``(H, W)`` of an image these steps look at; None for all of them."""
    device = photo.tensor.device
    seen = torch.zeros(photo.shape[2:], dtype=torch.bool, device=device)
    # Values that were moved, or resized, are pixels still; whatever reads them otherwise looks at
    # them, and at those between.
    pixels = {photo}
    for step in steps:
        for value in pixels.intersection(step.inputs):
            signals = [other for other in step.inputs if other in looks.fields]
            is_shifted = is_move(step) or step.operation.has("resizes")
            # the sum of two copies of the image is no copy of it
            if is_shifted or (step.is_pointwise and len(signals) == 1):
                pixels.update(looks.fields.keys() & set(step.outputs))
                continue
            # in which pixels its values look; NaN is in none
            rows, columns = centres(looks.fields[value])
            is_row = (rows >= 0) & (rows < seen.shape[0])
            is_column = (columns >= 0) & (columns < seen.shape[1])
            is_read = is_row & is_column & _is_read(step, value)
            seen_here = torch.zeros_like(seen)
            read_rows, read_columns = (
                places.expand_as(is_read)[is_read] for places in (rows, columns)
            )
            seen_here[read_rows.long(), read_columns.long()] = True
            seen |= _grown(seen_here, rows, columns)
            if bool(seen.all()):
                return None
    # if nothing is known to be seen, all may be
    return seen if bool(seen.any()) else None


def _grown(seen: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels that are seen, with those between them where the image was made smaller, by where its
    values ``(..., h, w)`` came from then."""
    gaps = [places.diff(dim=dim).abs() for places in (rows, columns) for dim in (-2, -1)]
    gap = max(float(of_dim.nanmedian()) for of_dim in gaps if of_dim.numel())
    beside = math.floor(gap / 2)
    wide = F.max_pool2d(
        seen[None, None].float(), kernel_size=2 * beside + 1, stride=1, padding=beside
    )
    return wide[0, 0].bool()


def _is_read(step: Step, value: Value) -> Tensor:
    """What a step reads of a map ``(N, C, h, w)``, all that lies between included: truth values
    that broadcast to it."""
    device = value.tensor.device
    # a deformable convolution, which reads elsewhere, has no such option
    is_convolution = step.options.get("transposed") is False
    is_map = step.args[0] is value and len(value.shape) == 4
    if not is_map or not (is_convolution or step.operation.has("samples")):
        return torch.ones([1] * len(value.shape), dtype=torch.bool, device=device)
    is_read_along_axes: list[Tensor] = []
    for axis, length in enumerate(value.shape[2:]):
        numbers = torch.arange(length, device=device)
        if is_convolution:
            # each option has a number for each axis, or one for both
            stride, padding, dilation = ((option * 2)[axis] for option in step.args[3:6])
            window = dilation * (step.args[1].shape[axis + 2] - 1)
            last = (step.output.shape[axis + 2] - 1) * stride + window - padding
            is_read_along_axes.append(numbers <= last)  # a stride may leave some at the end
        else:
            # from -1 to 1, columns before rows
            sampled = (step.args[1].tensor[..., 1 - axis] + 1) * (length / 2) - 0.5
            is_after_first = numbers >= sampled.min().floor()
            is_read_along_axes.append(is_after_first & (numbers <= sampled.max().ceil()))
    rows, columns = is_read_along_axes
    return rows[:, None] & columns
