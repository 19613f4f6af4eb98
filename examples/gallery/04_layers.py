"""
Layers, and what they see
=========================

A CAM is a map of one layer. By default, ``explain`` takes the last layer that still
has a map. Earlier layers have finer maps, and know less about classes.
"""

# %%
# ``explain.list_layers`` runs a model and names its layers. The command line does it
# with ``--list-layers``.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer()
x = explainer.as_input(assets / "coffee.png")
calls = explain.list_layers(explainer.model, x)
print(len(calls), "calls of modules, such as")
for call in calls[-6:]:
    print(f"{call.name:15} {call.shape}")

# %%
# Here are three of them. LayerCAM weighs each place by its own gradient, so it suits
# early layers.

from explain.render.sheets import Tile, table

chosen = ["features.3", "features.5", "features.8"]
photo = assets / "coffee.png"
overlays = [explainer(photo, "layercam", layer=name).overlay() for name in chosen]
table([[Tile(overlay) for overlay in overlays]], chosen)

# %%
# Several layers can be fused into one map. Each is divided by its maximum first.

explainer(photo, "layercam", layer=chosen, fuse="product").overlay()

# %%
# A pattern stands for all layers that it fits, and a class of modules for all modules
# of that class.

fused = explain.attribute(explainer.model, x, "layercam", layer="features.[678]")
for name, values in fused.maps.items():
    print(name, tuple(values.shape))

# %%
# What is in a layer, beside the part that speaks for the answer? ``concepts`` splits
# the layer's maps into a few parts that add up to them, and says for each where it
# lies and which classes it speaks for.

explainer.concepts(assets / "chelsea.png", 4)
