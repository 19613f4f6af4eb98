"""
Pictures
========

One map can be drawn in several ways. This tutorial shows the styles, and how to put
pictures together.
"""

# %%
# ``heat`` is the default. ``contour`` keeps the photo's colours and draws lines
# around the evidence. ``mask`` shows only the part of the photo that carries most of
# it, and ``spotlight`` darkens the rest.

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
# A style with options is an object. This contour has one line, around the places that
# carry half of the evidence.

from explain.render import Contour

explanation.overlay(style=Contour(shares=(0.5,)))

# %%
# ``caption=True`` adds a strip with the answer, its probability, the method and a
# scale.

explanation.overlay(caption=True)

# %%
# A sheet holds everything that was asked for. An explanation shows it in a notebook,
# and ``save`` writes it.

methods = ["gradcam", "layercam", "saliency", "guidedbackprop"]
explainer(assets / "rocket.jpg", methods)

# %%
# ``figure`` gives the same as a Matplotlib figure, and ``explain.render.overlay``
# draws any map on any photo.

import torch

from explain.render import overlay

gradient = torch.linspace(0, 1, 8)[None].expand(6, 8)
overlay(assets / "chelsea.png", gradient)
