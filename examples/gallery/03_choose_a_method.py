"""
Choose a method
===============

Some methods differ in detail, and some answer different questions. Here is the same
photo, explained in several ways.
"""

# %%
# Start with the maps of a layer. Grad-CAM and its relatives are coarse, fast, and
# hard to misread. All of them together cost little more than one, since they look at
# the same evidence.

import sys
from pathlib import Path

import explain

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer, photo = explain.Explainer(), assets / "chelsea.png"
maps = explainer(photo, ["gradcam", "eigencam", "randomcam"])
maps

# %%
# ``eigencam`` was not asked for a class: it shows what stands out in the layer,
# whatever the answer is. ``randomcam`` weighs the layer's maps by chance. A method
# whose map looks like this one has told you nothing about the answer.
#
# Methods in the pixels are finer. ``saliency`` says how strongly the score would
# react to a change of each pixel. ``guidedbackprop`` draws edges sharply, but it
# draws nearly the same edges for every class.

pixels = explainer(photo, ["saliency", "inputxgradient", "guidedbackprop"])
pixels

# %%
# Integrated gradients make a promise that you can check: the values add up to the
# difference between the score of the photo and the score of a baseline, here a
# blurred photo. ``delta`` says by how much they miss it. More steps miss it by less.

from explain.methods import IntegratedGradients

for steps in (8, 24):
    path = explainer(photo, IntegratedGradients(steps=steps, baseline="blur"))
    attribution = path.results[0]["integratedgradients"]
    total, delta = float(attribution.values.sum()), float(attribution.delta)
    print(f"{steps:2} steps: the sum is {total:.2f}, and misses by {delta:.2f}")
path.overlay()

# %%
# Noise in a map can be averaged out. ``smooth`` runs any method on noisy copies of
# the photo.

from explain.methods import LayerCAM, Smooth

both = [LayerCAM(), Smooth(LayerCAM(), samples=6)]
explainer(photo, both, layer="features.4")

# %%
# :doc:`/which-method` helps to choose, and :doc:`/methods` lists all of them with
# their costs and papers.
