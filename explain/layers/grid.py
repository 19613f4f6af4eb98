"""Where the map of a tensor lies: channels first or last, or tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

Size = tuple[int, ...]
"""Height and width; of a video, frames before them."""
Layout = Literal["NCHW", "NHWC", "NTCHW", "tokens", "tokens first", "tokens last"]
_WORDS: dict[Layout, str] = {
    "NCHW": "channels first", "NHWC": "channels last", "NTCHW": "frames first",
    "tokens": "a row for each position", "tokens first": "a row for each position",
    "tokens last": "channels before positions",
}  # fmt: skip
MAPS: dict[Layout, int] = {"NCHW": 1, "NHWC": -1, "NTCHW": 2}
"""The layouts of maps, unlike tokens, and the dimension that their channels are in."""


@dataclass(frozen=True)
class Grid:
    """Where a tensor's spatial map is: its layout, height and width, how many leading tokens to skip, and its frames.

    ``tokens first`` is a sequence with the images in its second dimension, ``(tokens, N, C)``, and ``tokens last`` one
    with the channels before it, ``(N, C, tokens)``. Of a video, ``NCHW`` and ``NHWC`` have the frames right before the
    height, ``NTCHW`` before the channels. A map that is ``swapped`` has its width before its height.
    """

    layout: Layout
    height: int
    width: int
    skip: int = 0
    frames: int | None = None
    swapped: bool = False

    @property
    def size(self) -> Size:
        """Height and width; of a video, frames before them."""
        return (self.height, self.width) if self.frames is None else (self.frames, self.height, self.width)

    @property
    def of_images(self) -> int:
        """The dimension that the images are in."""
        return 1 if self.layout == "tokens first" else 0

    @property
    def of_channels(self) -> int:
        """The dimension that the channels are in.

        >>> Grid("NHWC", 7, 7).of_channels, Grid("tokens last", 7, 7).of_channels
        (-1, 1)
        """
        return MAPS.get(self.layout, 1 if self.layout == "tokens last" else -1)

    def __str__(self) -> str:
        return " x ".join(map(str, self.size))

    @property
    def described(self) -> str:
        """The layout in words."""
        turned = ", width before height" if self.swapped else ""
        return f"{self} with {_WORDS[self.layout]}{turned}"

    def exchanged(self) -> Grid:
        """Return the grid of the same tensor, if its height is its width."""
        return replace(self, height=self.width, width=self.height, swapped=not self.swapped)

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay a tensor out as ``(N, C, h, w)``, or ``(N, C, t, h, w)`` of a video.

        >>> Grid("NHWC", 3, 2, swapped=True).spread(torch.zeros(1, 2, 3, 8)).shape
        torch.Size([1, 8, 3, 2])
        """
        if self.layout == "NHWC":
            tensor = tensor.movedim(-1, 1)
        elif self.layout == "NTCHW":
            tensor = tensor.transpose(1, 2)
        elif self.layout == "tokens last":
            tensor = tensor.reshape(*tensor.shape[:2], *self._stored)
        elif self.layout != "NCHW":
            tensor = tensor.movedim(self.of_images, 0)[:, self.skip :]
            tensor = tensor.reshape(len(tensor), *self._stored, -1).movedim(-1, 1)
        return tensor.transpose(-1, -2) if self.swapped else tensor

    def fold(self, maps: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Undo `spread`: lay ``maps`` out as ``like``, whose class and register tokens stay.

        >>> tokens, grid = torch.rand(1, 5, 3), Grid("tokens", 2, 2, 1)
        >>> torch.equal(grid.fold(grid.spread(tokens), tokens), tokens)
        True
        """
        maps = maps.transpose(-1, -2) if self.swapped else maps
        if self.layout == "NCHW":
            return maps
        if self.layout == "NTCHW":
            return maps.transpose(1, 2)
        if self.layout == "tokens last":
            return maps.flatten(2)
        last = maps.movedim(1, -1)
        if self.layout == "NHWC":
            return last
        extra = like.movedim(self.of_images, 0)[:, : self.skip]
        return torch.cat([extra, last.flatten(1, -2)], dim=1).movedim(0, self.of_images)

    @property
    def _stored(self) -> Size:
        """The size in the order of the tensor's own dimensions."""
        return self.exchanged().size if self.swapped else self.size
