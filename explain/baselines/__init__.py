"""Baselines: what takes the place of covered pixels, for methods and metrics alike.

    base        what a baseline is; blending; many masks of the same photos
    look        a picture of a baseline
    replacing   baselines that do not look at the mask: zero, black, mean, blur, noise, another photo
    neighbours  a baseline that does: from the pixels around what is covered
    defocus     a baseline that blurs the more, the less is kept
    solving     its linear system, for many masks at once
    registry    baselines by name

A baseline is called with photos and how much of each pixel to keep. One that does not look at the mask is a small class
with a ``replacement``; `covering` computes that once for each photo, so that a thousand masks cost one blend each:

>>> import torch
>>> photos = torch.rand(2, 3, 8, 8)
>>> cover = covering(Blur(), photos)
>>> cover(torch.tensor([1, 0, 1]), torch.rand(3, 1, 8, 8)).shape
torch.Size([3, 3, 8, 8])
"""

from __future__ import annotations

from explain.baselines.base import Baseline, Cover, ImageBaseline, blend, covering, range_of
from explain.baselines.neighbours import Neighbours
from explain.baselines.registry import BaselineLike, get_baseline, list_baselines, register
from explain.baselines.replacements import Black, Blur, Defocus, Mean, Noise, OtherPhoto, Zero

__all__ = [
    "Baseline",
    "BaselineLike",
    "Black",
    "Blur",
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

for _baseline in (Zero(), Black(), Mean(), Blur(), Defocus(), Noise(), Neighbours()):
    register(_baseline)
