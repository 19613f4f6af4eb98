"""Baselines: what takes the place of covered pixels, for methods and metrics alike.

    base          what a baseline is; ``@register``; blending; many masks of the same photos; a
                  picture of a baseline
    replacements  baselines that do not depend on the mask, and a blur that is the stronger, the
                  less is kept; baselines by name, number or tensor
    neighbours    a baseline from the pixels around what is covered

A baseline is called with photos and how much of each pixel to keep. One that does not depend on the
mask is a small class with a ``replacement``; ``covering`` computes it once for each photo, and a
thousand masks cost one blend each:

>>> import torch
>>> photos = torch.rand(2, 3, 8, 8)
>>> cover = Blur().covering(photos)
>>> cover(torch.tensor([1, 0, 1]), torch.rand(3, 1, 8, 8)).shape
torch.Size([3, 3, 8, 8])
"""

from explain.baselines.neighbours import Neighbours
from explain.baselines.replacements import Black, Blur, Defocus, Mean, Noise, OtherPhoto, Zero

__all__ = ["Black", "Blur", "Defocus", "Mean", "Neighbours", "Noise", "OtherPhoto", "Zero"]
