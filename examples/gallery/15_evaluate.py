"""
How good is a map?
==================

A map looks convincing, or it does not. Metrics ask for more: does the score fall when
what the map marks is covered?
"""

# %%
# ``explain.evaluate`` runs methods and metrics on a batch, and gives a table.
# ``deletion`` covers the marked pixels first and should fall fast; ``insertion``
# brings them back first and should rise fast. ``pointinggame`` asks whether the
# strongest place lies in a box: here, the box is drawn around the cup and around the
# cat's face.

import sys
from pathlib import Path

import torch

import explain
from explain.metrics import Deletion, Insertion

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny")
photos = [assets / "coffee.png", assets / "chelsea.png"]
x = torch.cat([explainer.as_input(photo) for photo in photos])
found = explain.evaluate(
    explainer.model,
    x,
    ["gradcam", "saliency", "randomcam"],
    [Deletion(steps=10), Insertion(steps=10), "pointinggame"],
    boxes=torch.tensor([[15, 5, 65, 75], [10, 5, 75, 75]]),
)
print(found)

# %%
# ``randomcam`` has random weights. A method that is no better than it has not found
# the evidence.
#
# Every figure is there for each photo, too.

print(found["gradcam"]["deletion"])

# %%
# What "covered" means is part of the question. A baseline says what takes the place of
# covered pixels, and shows itself.

from explain.baselines import Blur, Mean, Neighbours
from explain.data.images import load_image
from explain.render.sheets import Tile, table

photo = load_image(photos[0])
baselines = [Mean(), Blur(), Neighbours()]
shown = [Tile(baseline.picture(photo)) for baseline in baselines]
table([shown], [baseline.name for baseline in baselines])

# %%
# With another baseline, the same metric may say something else. Report which one you
# used.

mean, blurred = Deletion(steps=10, baseline=Mean()), Deletion(steps=10, baseline=Blur())
for metric in (mean, blurred):
    judged = explain.evaluate(explainer.model, x, ["gradcam", "randomcam"], [metric])
    print("covered by", metric.baseline.name)
    print(judged)
