"""Fills: what takes the place of covered pixels, for methods and metrics alike.

    base        what a fill is; blending; many masks of the same photos
    look        a picture of a fill
    replacing   fills that do not look at the mask: zero, black, mean, blur, noise, another photo
    neighbours  a fill that does: from the pixels around what is covered
    defocus     a fill that blurs the more, the less is kept
    solving     its linear system, for many masks at once
    registry    fills by name

A fill is called with photos and how much of each pixel to keep. One that does not look at the mask is a small class
with a ``replacement``; `covering` computes that once for each photo, so that a thousand masks cost one blend each:

>>> import torch
>>> photos = torch.rand(2, 3, 8, 8)
>>> cover = covering(Blur(), photos)
>>> cover(torch.tensor([1, 0, 1]), torch.rand(3, 1, 8, 8)).shape
torch.Size([3, 3, 8, 8])
"""

from explain.fills.base import Cover, Fill, Replacing, blend, covering
from explain.fills.defocus import Defocus
from explain.fills.look import range_of
from explain.fills.neighbours import Neighbours
from explain.fills.registry import FillLike, get_fill, list_fills, register
from explain.fills.replacing import Black, Blur, Mean, Noise, Photo, Zero

for _fill in (Zero(), Black(), Mean(), Blur(), Defocus(), Noise(), Neighbours()):
    register(_fill)

__all__ = [
    "Black",
    "Blur",
    "Cover",
    "Defocus",
    "Fill",
    "FillLike",
    "Mean",
    "Neighbours",
    "Noise",
    "Photo",
    "Replacing",
    "Zero",
    "blend",
    "covering",
    "get_fill",
    "list_fills",
    "range_of",
    "register",
]
