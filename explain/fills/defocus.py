"""A fill that blurs the more, the less of a pixel is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from explain.errors import FillError, shown
from explain.fills.base import Cover, Looked, checked
from explain.fills.replacing import Blur

USUAL = 20 / 224
"""The strongest blur's standard deviation, as a share of the photo's shorter side."""
INF = float("inf")
REACH = 4.0  # standard deviations from which on a Gaussian counts as nothing


@dataclass(frozen=True)
class Defocus(Looked):
    """The photo behind a Gaussian blur that is the stronger, the less of a pixel is kept.

    There are so many blurs from ``sigma`` down to the photo itself, at even steps; in between, the two nearest ones are
    blended. Where half of a pixel is kept, it thus shows a weaker blur, and not half of the photo.

    Args:
        sigma: the standard deviation of the strongest blur in pixels; None takes 20 in 224 of the shorter side.
        levels: how many blurs, the photo itself among them.

    Fong, Patrick and Vedaldi, "Understanding Deep Networks via Extremal Perturbations and Smooth Masks", ICCV 2019.

    >>> x = torch.tensor([[[[0.0, 0.0, 4.0, 0.0, 0.0]]]])
    >>> Defocus(sigma=1.0, levels=2)(x, torch.ones(1, 1, 1, 5)).flatten().tolist()
    [0.0, 0.0, 4.0, 0.0, 0.0]
    >>> half = Defocus(sigma=1.0, levels=3)(x, torch.full((1, 1, 1, 5), 0.5))
    >>> torch.equal(half, Blur(kernel=5, sigma=0.5).replacement(x))
    True
    """

    sigma: float | None = None
    levels: int = 8

    name: ClassVar[str] = "defocus"
    about: ClassVar[str] = "the photo behind a blur that is the stronger, the less is kept"
    depends_on_mask: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sigma, levels = self.sigma, self.levels
        if sigma is not None and (
            isinstance(sigma, bool) or not isinstance(sigma, (int, float)) or not 0 < sigma < INF
        ):
            raise FillError(f"sigma of defocus must be a finite number above 0, got {shown(sigma)}; leave it out")
        if isinstance(levels, bool) or not isinstance(levels, int) or levels < 2:
            raise FillError(f"levels of defocus must be a whole number from 2, got {shown(levels)}; use 8")

    def __call__(self, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        checked(images, keep)
        keep = keep.expand(len(images), *keep.shape[1:])
        return self.covering(images)(torch.arange(len(images), device=images.device), keep)

    def covering(self, images: torch.Tensor) -> Cover:
        """Cover the same photos by many masks; each is blurred once."""
        blurs = self._blurs(images).flatten(3)  # (levels, N, C, places)
        channels = torch.arange(images.shape[1], device=images.device)[None, :, None]
        places = torch.arange(blurs.shape[-1], device=images.device)

        def cover(owners: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            level = keep.to(images).flatten(2) * (self.levels - 1)
            below = level.detach().floor().clamp(max=self.levels - 2).long()
            one, other = (blurs[which, owners[:, None, None], channels, places] for which in (below, below + 1))
            return torch.lerp(one, other, level - below).reshape(len(owners), *images.shape[1:])

        return cover

    def _blurs(self, images: torch.Tensor) -> torch.Tensor:
        """The photos at each level, the most blurred first."""
        strongest = USUAL * min(images.shape[-2:]) if self.sigma is None else self.sigma
        found = []
        for level in range(self.levels):
            sigma = strongest * (1 - level / (self.levels - 1))
            kernel = 2 * math.ceil(REACH * sigma) + 1
            found.append(Blur(kernel, sigma).replacement(images) if sigma else images)
        return torch.stack(found)
