"""Where most of a map's evidence lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from explain.render.placing import Array

FINE = 100  # cells along the longer side
SPREAD = 0.03  # of the longer side
ROUNDED = 0.45  # of a cell


def thresholds(values: Array, shares: Sequence[float]) -> list[float]:
    """Return for each share the largest threshold such that values from it on add up to that share of the total.

    A map of zeros has no evidence: all thresholds are infinite.

    >>> thresholds(np.array([[4.0, 3.0], [2.0, 1.0]]), [0.4, 0.75])
    [4.0, 2.0]
    """
    falling = np.sort(values, axis=None)[::-1].astype(np.float64)
    total = np.cumsum(falling)
    if not total[-1] > 0:
        return [np.inf] * len(shares)
    reached = np.searchsorted(total, np.asarray(shares) * total[-1] * (1 - 1e-12))
    return [float(falling[place]) for place in np.minimum(reached, len(falling) - 1)]


def fine(values: Array) -> Array:
    """Return a coarse map enlarged, linearly between its cells and without edges there, so that its areas are round.

    >>> fine(np.ones((7, 7))).shape
    (105, 105)
    """
    import cv2

    times = -(-FINE // max(values.shape))
    if times == 1:
        return values
    large = cv2.resize(values.astype(np.float32), None, fx=times, fy=times)
    rounded: Array = cv2.GaussianBlur(large, (0, 0), ROUNDED * times, borderType=cv2.BORDER_REPLICATE)
    return rounded


def smoothed(values: Array) -> Array:
    """Blur a map ``(H, W)`` of single pixels by 3 % of its longer side, so that it has areas; its largest becomes 1.

    >>> float(smoothed(np.eye(50)).max())
    1.0
    """
    import cv2

    width = SPREAD * max(values.shape)
    blurred: Array = cv2.GaussianBlur(values.astype(np.float32), (0, 0), max(width, 0.3), borderType=cv2.BORDER_REFLECT)
    peak = np.abs(blurred).max()
    return blurred / peak if peak > 0 else blurred
