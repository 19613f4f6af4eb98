"""What one item of a list or data set is: an image alone, with a label, or in a dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from explain.errors import ImageError, shown
from explain.runs.sources import Content, Corners, Label

IMAGES = ("image", "img", "photo", "picture", "pixel_values", "x")
LABELS = ("label", "labels", "class", "fine_label", "target", "y")


def content_of(item: Any, image: str | None = None, label: str | None = None) -> Content:
    """Return what an item holds: an image, a pair of an image and a label, or a dictionary with both.

    Args:
        item: what a data set or a list gives.
        image, label: the keys of a dictionary, where they are not the usual ones.

    Raises:
        ImageError: it has no image.

    >>> content_of((b"...", 3)).label
    3
    """
    if isinstance(item, Mapping):
        return _of_mapping(item, image, label)
    if isinstance(item, (tuple, list)) and item and not isinstance(item[0], (int, float)):
        return Content(as_image(item[0]), as_label(item[1] if len(item) > 1 else None))
    return Content(as_image(item))


def _of_mapping(item: Mapping[str, Any], image: str | None, label: str | None) -> Content:
    key = image or next((name for name in IMAGES if name in item), None)
    if key is None or item.get(key) is None:
        raise ImageError(f"item must have an image under one of {', '.join(IMAGES)}, got {', '.join(map(str, item))}")
    named = label or next((name for name in LABELS if name in item), None)
    return Content(as_image(item[key]), as_label(None if named is None else item[named]), as_boxes(item.get("boxes")))


def as_image(value: Any) -> Any:
    """Return an image as `explain.images.load_image` takes it, or a float tensor as it is.

    Tensors of bytes ``(C, H, W)`` become arrays, and what Hugging Face has of a file that is not decoded, its bytes.
    """
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return value.permute(1, 2, 0).contiguous().cpu().numpy() if value.ndim == 3 else value.cpu().numpy()
    if isinstance(value, Mapping):
        return value.get("bytes") or value.get("path")
    return value


def as_label(value: Any) -> Label:
    """Return a label as text or a whole number; None for anything else, such as several labels.

    >>> as_label(torch.tensor(3)), as_label("cat"), as_label([1, 2])
    (3, 'cat', None)
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.item() if value.size == 1 or getattr(value, "numel", lambda: 0)() == 1 else None
    if isinstance(value, str):
        return value
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def as_boxes(value: Any) -> tuple[Corners, ...]:
    """Return boxes: x0 y0 x1 y1 in pixels of the photo, ends exclusive; a single one too.

    Raises:
        ImageError: they are no such numbers.

    >>> as_boxes([1, 2, 3, 4])
    ((1.0, 2.0, 3.0, 4.0),)
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.tolist()
    if value is None or (isinstance(value, Sequence) and not value):
        return ()
    rows = value if isinstance(value, Sequence) and isinstance(value[0], (list, tuple)) else [value]
    try:
        found = [tuple(float(edge) for edge in row) for row in rows]
    except (TypeError, ValueError):
        found = [()]
    for row in found:
        if len(row) != 4 or not (np.isfinite(row).all() and row[0] < row[2] and row[1] < row[3]):
            raise ImageError(
                f"boxes must be x0 y0 x1 y1 with x0 < x1 and y0 < y1 in pixels, got {shown(value)}; mend it"
            )
    return tuple(found)  # type: ignore[arg-type]  # of four each, as was checked
