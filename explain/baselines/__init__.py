"""Baselines: what takes the place of covered pixels, for methods and metrics alike.

    base          what a baseline is; blending; many masks of the same photos; a picture of a baseline; ``@register``
    replacements  baselines that do not look at the mask, and a blur that is the stronger, the less is kept
    neighbours    a baseline from the pixels around what is covered
    registry      baselines by name, number or tensor

A baseline is called with photos and how much of each pixel to keep. One that does not look at the mask is a small class
with a ``replacement``; `covering` computes that once for each photo, so that a thousand masks cost one blend each:

>>> import torch
>>> photos = torch.rand(2, 3, 8, 8)
>>> cover = covering(Blur(), photos)
>>> cover(torch.tensor([1, 0, 1]), torch.rand(3, 1, 8, 8)).shape
torch.Size([3, 3, 8, 8])
"""

from __future__ import annotations

from explain.baselines.base import Baseline, Cover, ImageBaseline, blend, covering, range_of, register
from explain.baselines.neighbours import Neighbours
from explain.baselines.registry import BaselineLike, get_baseline, list_baselines
from explain.baselines.replacements import Black, Blur, Constant, Defocus, Mean, Noise, OtherPhoto, Zero

__all__ = [
    "Baseline",
    "BaselineLike",
    "Black",
    "Blur",
    "Constant",
    "Cover",
    "Defocus",
    "ImageBaseline",
    "Mean",
    "Neighbours",
    "Noise",
    "OtherPhoto",
    "Zero",
    "blend",
    "covering",
    "get_baseline",
    "list_baselines",
    "range_of",
    "register",
]
