"""A fill from the pixels around what is covered: ROAD's noisy linear interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from explain.errors import FillError, shown
from explain.fills.base import Looked, blend, checked
from explain.fills.replacing import checked_seed, drawn
from explain.fills.solving import interpolated


@dataclass(frozen=True)
class Neighbours(Looked):
    """Each covered pixel is the weighted mean of its eight neighbours, covered ones included, and a little noise.

    Direct neighbours weigh 1/6 and diagonal ones 1/12; at the edges, the weights of those that there are. This is a
    linear system for all covered pixels together. What is left of the photo shows no border, so that the network does
    not recognise the mask's shape. A pixel that is kept in part counts as covered, and is blended.

    Where nothing is kept, there is nothing to interpolate from: the fill is then the photo's mean colour, and noise.

    Args:
        noise: the standard deviation of the noise, in the units of the images.
        seed: of the noise; every photo gets the same draw.

    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods", ICML 2022
    (arXiv:2202.00449).

    >>> keep = torch.tensor([[[[1.0, 0.0, 1.0]]]])
    >>> Neighbours(noise=0)(torch.tensor([[[[1.0, 9.0, 2.0]]]]), keep)
    tensor([[[[1.0000, 1.5000, 2.0000]]]])
    """

    noise: float = 0.01
    seed: int = 0

    name: ClassVar[str] = "neighbours"
    about: ClassVar[str] = "interpolated from the pixels around, with a little noise (ROAD)"
    depends_on_mask: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number = isinstance(self.noise, (int, float)) and not isinstance(self.noise, bool)
        if not number or not 0 <= self.noise < float("inf"):
            raise FillError(f"noise of neighbours must be a finite number from 0, got {shown(self.noise)}; use 0.01")
        object.__setattr__(self, "seed", checked_seed(self.seed, "neighbours"))

    def __call__(self, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        checked(images, keep)
        wide = images if images.dtype in (torch.float32, torch.float64) else images.float()
        frames, masks = _frames(wide), _frames(keep.expand(len(images), *keep.shape[1:]))
        found = interpolated(frames, masks < 1)
        found = found.reshape(len(images), -1, *found.shape[1:]).movedim(1, 2).reshape(images.shape)
        filled = found + self.noise * drawn(self.seed, images).to(found) if self.noise else found
        return blend(images, filled.to(images), keep)


def _frames(images: torch.Tensor) -> torch.Tensor:
    """Photos ``(N, C, H, W)`` as they are, and the frames of videos ``(N, C, T, H, W)`` one by one."""
    return images.movedim(1, -3).flatten(0, -4)
