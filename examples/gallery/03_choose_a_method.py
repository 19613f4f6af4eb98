"""
Choose a method
===============

Some methods differ in detail, and some answer different questions. This tutorial
explains the same photo in several ways.
"""

# %%
# Start with CAM methods, which return a map of a layer. They are coarse, fast, and hard
# to misread. In one call, they cost little more than one of them, because they share
# their passes.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer()
photo = assets / "chelsea.png"
maps = explainer(photo, ["gradcam", "eigencam", "randomcam"])
maps

# %%
# ``eigencam`` does not depend on the class: it shows what stands out in the layer.
# ``randomcam`` has random weights. If the map of a method looks like this one, it says
# nothing about the prediction.
#
# Pixel methods are finer. ``saliency`` shows how strongly the score reacts to a change
# of each pixel. ``guidedbackprop`` draws sharp edges, but nearly the same edges for
# every class.

pixels = explainer(photo, ["saliency", "inputxgradient", "guidedbackprop"])
pixels

# %%
# The values of integrated gradients add up to the score of the photo minus the score
# of a baseline, here the blurred photo. ``delta`` is the remaining error. It falls with
# more steps.

from explain.methods import IntegratedGradients

for steps in (8, 24):
    path = explainer(photo, IntegratedGradients(steps=steps, baseline="blur"))
    attribution = path.results[0]["integratedgradients"]
    total = float(attribution.values.sum())
    delta = float(attribution.delta)
    print(f"{steps:2} steps: the sum is {total:.2f}, delta {delta:.2f}")
path.overlay()

# %%
# Averaging reduces noise: ``smooth`` runs any method on noisy copies of the photo.

from explain.methods import LayerCAM, Smooth

both = [LayerCAM(), Smooth(LayerCAM(), samples=6)]
explainer(photo, both, layer="features.4")

# %%
# :doc:`/which-method` helps to choose, and :doc:`/which-method` lists all methods with their
# costs and papers.
