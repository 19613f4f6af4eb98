"""Where the object is: boxes and masks, as they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from explain._utils.errors import MetricError, image_name, shown
from explain.metrics.maps import as_tensor

Boxes: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]"


def as_boxes(given: Boxes, count: int, size: tuple[int, int]) -> list[torch.Tensor]:
    """Take boxes ``(N, 4)``, or a list with ``(k, 4)`` for each photo: x0 y0 x1 y1, x1 and y1 exclusive.

    What lies outside the photo is cut off.

    Raises:
        MetricError: they are no such numbers, empty, or outside the photo.

    >>> as_boxes([[-2, 0, 4, 3]], 1, (8, 8))
    [tensor([[0, 0, 4, 3]])]
    """
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__") or isinstance(given, (str, dict)):
        raise MetricError(f"boxes must be numbers (N, 4): x0 y0 x1 y1 in pixels, got {shown(given)}; see evaluate")
    if len(given) != count:
        raise MetricError(f"boxes must have one for each of the {count} images, got {len(given)}; give (N, 4)")
    return [_of_image(given[image], image, size) for image in range(count)]


def _of_image(given: Any, image: int, size: tuple[int, int]) -> torch.Tensor:
    try:
        found = given if isinstance(given, torch.Tensor) else torch.from_numpy(np.array(given, dtype=np.float64))
        boxes = found.double().reshape(-1, 4)
    except (TypeError, ValueError, RuntimeError):
        raise MetricError(
            f"boxes must be numbers (N, 4): x0 y0 x1 y1 in pixels, got {shown(given)}; see evaluate"
        ) from None
    if not len(boxes) or not bool(torch.isfinite(boxes).all()):
        raise MetricError(
            f"boxes must hold a finite box for image {image_name(image)}, got {shown(given)}; leave it out"
        )
    ends = boxes.new_tensor([size[1], size[0], size[1], size[0]])
    whole = torch.minimum(boxes.round().clamp(min=0), ends).long()
    for box, given_box in zip(whole.tolist(), boxes.tolist(), strict=True):
        if box[0] >= box[2] or box[1] >= box[3]:
            raise MetricError(
                f"boxes must have pixels within the photo of {size[1]} x {size[0]}, got {given_box} for image "
                f"{image_name(image)}; give x0 y0 x1 y1 with x1 and y1 exclusive"
            )
    return whole


def as_regions(
    given: torch.Tensor | np.ndarray[Any, Any] | None,
    boxes: Sequence[torch.Tensor] | None,
    count: int,
    size: tuple[int, int],
) -> torch.Tensor | None:
    """Take masks ``(N, H, W)``, or draw the boxes: truth values; None where nothing is known.

    Raises:
        MetricError: the masks have another shape, or say nothing of an image.
    """
    if given is None:
        return None if boxes is None else drawn(boxes, size)
    try:
        masks = as_tensor(given if isinstance(given, torch.Tensor) else np.asarray(given))
    except (TypeError, ValueError, RuntimeError):  # a list of lists of other lengths
        masks = None
    if masks is None:
        raise MetricError(f"masks must be truth values (N, H, W), got {shown(given)}; see evaluate")
    if tuple(masks.shape) != (count, *size):
        raise MetricError(f"masks must have the shape {(count, *size)} of the images, got {shown(given)}; resize them")
    if masks.is_floating_point() and not bool(((masks == 0) | (masks == 1)).all()):
        raise MetricError(
            f"masks must be truth values, or 0 and 1, got numbers from {float(masks.min()):.3g} to "
            f"{float(masks.max()):.3g}; say from where on they are the object, as in masks > 0.5"
        )
    masks = masks.bool() if masks.dtype == torch.bool else masks > 0
    empty = ~masks.flatten(1).any(1)
    if empty.any():
        raise MetricError(
            "masks must have a pixel of the object in every image, but image "
            f"{image_name(int(empty.nonzero()[0]))} has none; leave it out"
        )
    return masks


def drawn(boxes: Sequence[torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """The pixels in any of each photo's boxes ``(N, H, W)``."""
    found = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for image, of_image in enumerate(boxes):
        for x0, y0, x1, y1 in of_image.tolist():
            found[image, y0:y1, x0:x1] = True
    return found
