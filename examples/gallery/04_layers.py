"""
Choose a layer
==============

A CAM is a map of one layer. The default is the last layer with a feature map. Earlier
layers have finer maps, with less information about classes.
"""

# %%
# ``explain.list_layers`` runs a model and lists its layers. On the command line, it is
# ``explain layers PHOTO``.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer()
x = explainer.as_input(assets / "coffee.png")
calls = explain.list_layers(explainer.model, x)
print(len(calls), "calls of modules; the last ones:")
for call in calls[-6:]:
    print(f"{call.name:15} {call.shape}")

# %%
# Three of them. LayerCAM weights each position by its own gradient, so it suits early
# layers.

from explain.render.sheets import Tile, table

chosen = ["features.3", "features.5", "features.8"]
photo = assets / "coffee.png"
overlays = [explainer(photo, "layercam", layer=name).overlay() for name in chosen]
table([[Tile(overlay) for overlay in overlays]], chosen)

# %%
# Several layers can be fused into one map. Each is divided by its maximum first.

explainer(photo, "layercam", layer=chosen, fuse="product").overlay()

# %%
# A pattern selects all layers that it matches, and a class of modules selects all
# modules of that class.

fused = explain.attribute(explainer.model, x, "layercam", layer="features.[678]")
for name, values in fused.maps.items():
    print(name, tuple(values.shape))

# %%
# What else does a layer represent? ``concepts`` factorises its feature maps into a few
# parts, and shows for each where it is and which classes it contributes to.

explainer.concepts(assets / "chelsea.png", 4)
