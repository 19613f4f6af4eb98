"""
Several inputs
==============

Some models take several images, or an image and other tensors. You choose which input
is explained.
"""

# %%
# This network compares two photos: it returns the similarity of their features.

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

default = explain.Explainer(crop="whole")


class Compare(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, *, scale: float = 1.0
    ) -> torch.Tensor:
        a, b = (self.encoder(x).mean((2, 3)) for x in (left, right))
        return scale * F.cosine_similarity(a, b)[:, None]


model = Compare(default.model.features).eval()
cat = default.as_input(assets / "chelsea.png")
mirrored = cat.flip(3)

# %%
# A tuple contains the positional arguments. The first image is explained. The encoder
# is called twice, once for each photo; ``encoder@0`` is its first call.

a = explain.attribute(model, (cat, mirrored), "hirescam", target=0)
print(a.input, a.layer, tuple(a.values.shape), f"similarity {float(a.score):.2f}")

# %%
# ``explain.Inputs`` takes keyword arguments too, and the index of the input to explain,
# or of several inputs.

inputs = explain.Inputs((cat, mirrored), {"scale": 10.0}, explained=[0, 1])
both = explain.attribute(model, inputs, "inputxgradient", target=0)
print({name: tuple(part.values.shape) for name, part in both.parts.items()})

# %%
# The similarity to another photo can be the target, too. It needs no second input: the
# features of the other photo are part of the target. What do the photos of the
# astronaut and of Grace Hopper have in common? There is a flag behind both of them.

from PIL import Image

from explain.render import overlay
from explain.targets import Similarity


class Encoder(nn.Sequential):
    """The features of a photo, as one vector."""


encoder = Encoder(default.model.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
other = encoder(default.as_input(assets / "grace_hopper.jpg")).detach()
astronaut = Image.open(assets / "astronaut.png").convert("RGB")
alike = explain.attribute(
    encoder, default.as_input(astronaut), "gradcam", target=Similarity(other)
)
overlay(astronaut, alike.heatmap[0], "contour")
