"""A region of a photo, covered: what the model says without it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from explain.errors import ExplainError, shown
from explain.fills import Fill, get_fill
from explain.images import Box

SIDE = 320
"""The longer side in pixels at which a fill is computed: about what networks see, which blurs are meant for."""

FILLS = {"mean": "Mean colour", "zero": "Black", "blur": "Blur", "noise": "Noise", "neighbours": "From around it"}
"""The fills that the page offers, and what it calls them."""


@dataclass(frozen=True)
class Cover:
    """A rectangle ``region`` (x0, y0, x1, y1), as shares of what the model sees, and the name of what covers it.

    The fill works on the photo's own colours, from 0 (black) to 1: "zero" is black for every model.

    >>> grey = Image.new("RGB", (60, 40), (100, 100, 100))
    >>> covered = Cover((0.0, 0.0, 0.5, 1.0), "zero").of(grey, Box(10, 0, 50, 40))
    >>> [covered.getpixel(place)[0] for place in ((5, 20), (15, 20), (45, 20))]
    [100, 0, 100]
    """

    region: tuple[float, float, float, float]
    fill: str = "mean"

    def __post_init__(self) -> None:
        left, top, right, bottom = self.region
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise ExplainError(
                f"region must be x0, y0, x1, y1 from 0 to 1 with x0 < x1 and y0 < y1, got {shown(self.region)}; "
                "draw it on the part of the photo that the model sees"
            )
        if self.fill not in FILLS:
            raise ExplainError(f"fill must be one of {', '.join(FILLS)}, got {shown(self.fill)}; choose one of them")

    def of(self, photo: Image.Image, box: Box) -> Image.Image:
        """Return a copy of a photo with the region covered; ``box`` is the part of the photo that the model sees."""
        edges = self._edges(photo, box)
        if edges is None:
            return photo.copy()
        share = min(1.0, SIDE / max(photo.size))
        small = photo.resize(
            (max(1, round(photo.width * share)), max(1, round(photo.height * share))), Image.Resampling.BOX
        )
        filled = _filled(small, [edge * share for edge in edges], get_fill(self.fill))
        whole = filled.resize(photo.size, Image.Resampling.BICUBIC)
        covered = photo.copy()
        covered.paste(whole.crop(edges), edges[:2])
        return covered  # it has no file: no record must claim that it is the photo

    def _edges(self, photo: Image.Image, box: Box) -> tuple[int, int, int, int] | None:
        """The region in the photo's pixels; None where there are none."""
        wide, high = box.right - box.left, box.bottom - box.top
        left, right = (min(max(round(box.left + share * wide), 0), photo.width) for share in self.region[::2])
        top, bottom = (min(max(round(box.top + share * high), 0), photo.height) for share in self.region[1::2])
        return (left, top, right, bottom) if left < right and top < bottom else None


def _filled(photo: Image.Image, edges: list[float], fill: Fill) -> Image.Image:
    x = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None].float() / 255
    keep = torch.ones(1, 1, *x.shape[2:])
    left, top, right, bottom = edges
    rows = slice(int(top), max(int(top) + 1, -int(-bottom // 1)))
    columns = slice(int(left), max(int(left) + 1, -int(-right // 1)))
    keep[:, :, rows, columns] = 0
    levels = (fill(x, keep)[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    return Image.fromarray(levels.numpy())
