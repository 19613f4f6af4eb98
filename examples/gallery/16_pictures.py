"""
Pictures
========

A map can be drawn in several styles. This tutorial shows them, and how to arrange
pictures.
"""

# %%
# ``heat`` is the default. ``contour`` keeps the photo's colours and draws lines around
# the evidence. ``mask`` shows only the part of the photo with most of the evidence, and
# ``spotlight`` darkens the rest.

import sys
from pathlib import Path

import explain
from explain.render.sheets import Tile, table

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer(crop="whole")
explanation = explainer(assets / "coffee.png")
styles = ["heat", "contour", "mask", "spotlight"]
overlays = [explanation.overlay(style=style) for style in styles]
table([[Tile(overlay) for overlay in overlays]], styles)

# %%
# A style with options is an object. This contour has one line, around half of the
# evidence.

from explain.render import Contour

explanation.overlay(style=Contour(shares=(0.5,)))

# %%
# ``caption=True`` adds the class, its probability, the method and a colour scale.

explanation.overlay(caption=True)

# %%
# A sheet has all maps of an explanation. Notebooks show it, and ``save`` writes it.

methods = ["gradcam", "layercam", "saliency", "guidedbackprop"]
explainer(assets / "rocket.jpg", methods)

# %%
# ``figure`` returns the same as a Matplotlib figure, and ``explain.render.overlay``
# draws any map on any photo.

import torch

from explain.render import overlay

gradient = torch.linspace(0, 1, 8)[None].expand(6, 8)
overlay(assets / "chelsea.png", gradient)
